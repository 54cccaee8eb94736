"""The training step: pure functions from (state, batch) to state.

Nothing is read back to the host: loss sums and confusion counts accumulate on the device inside the state, and the
trainer takes them when it logs.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.typing import ArrayLike

from recml_sasrec import heads
from recml_sasrec.config import Config, HeadConfig
from recml_sasrec.data.batch import Batch, QueryBatch
from recml_sasrec.heads.arguments import NO_ITEM
from recml_sasrec.model import SASRec, abstract, item_vectors, split_given, take_rows
from recml_sasrec.sharding import Layout

Params = dict[str, Any]


class Metrics(NamedTuple):
    """Sums since the last log."""

    steps: jax.Array  # int32
    loss: jax.Array  # float32, sum of the steps' losses
    grad_norm: jax.Array  # float32, sum of the steps' global gradient norms
    tokens: jax.Array  # int32, real (not padding) input positions
    counts: heads.Counts  # of (position, item) pairs
    ranks: heads.RankSums  # of each position's best target
    bad_step: jax.Array  # int32, the first step whose loss or gradient was not finite, -1: none

    @classmethod
    def zeros(cls) -> "Metrics":
        return cls(
            steps=jnp.zeros((), jnp.int32),
            loss=jnp.zeros((), jnp.float32),
            grad_norm=jnp.zeros((), jnp.float32),
            tokens=jnp.zeros((), jnp.int32),
            counts=heads.Counts.zeros(),
            ranks=heads.RankSums.zeros(),
            bad_step=jnp.full((), -1, jnp.int32),
        )


class TrainState(NamedTuple):
    step: jax.Array  # int32, steps done
    params: Params
    opt_state: optax.OptState
    metrics: Metrics


def make_model(
    config: Config, num_items: int, mean_positives: float, table_rows: int = 0, content_width: int = 0
) -> tuple[nnx.GraphDef, Callable[[], SASRec]]:
    """The model's graph definition and the function that initialises it from the run's seed."""

    def init() -> SASRec:
        rngs = nnx.Rngs(config.train.seed)
        return SASRec(num_items, config.data.length, config.model, mean_positives, rngs, table_rows, content_width)

    return abstract(init)[0], init


def init_state(init_model: Callable[[], SASRec], optimizer: optax.GradientTransformation) -> TrainState:
    """A fresh state; trace it with ``jax.eval_shape`` for the shapes alone."""
    model = init_model()
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(split_given(params, model.config.content)[0]),
        metrics=Metrics.zeros(),
    )


def head_loss(
    config: HeadConfig,
    hidden: jax.Array,
    params: Params,
    targets: ArrayLike,
    weights: ArrayLike,
    key: jax.Array,
    layout: Layout | None = None,
) -> tuple[jax.Array, tuple[heads.Counts, heads.RankSums]]:
    """The configured head's loss, and its counts and ranks; zeros where it has no ranks."""
    table = item_vectors(params).astype(hidden.dtype)
    options: dict[str, Any] = {
        "positive_weight": config.positive_weight,
        "threshold": config.threshold,
        "reduction": config.reduction,
    }
    if layout is not None:
        options |= {"num_items": layout.num_items, "placement": layout.placement}
    if config.name == "cut_bce":
        options |= {"tile": config.tile or None}
    if config.name == "sampled_bce":
        options |= {"negatives": config.negatives, "key": key}
    elif config.ranks:
        options |= {"with_ranks": True}
    functions: dict[str, Callable[..., tuple[Any, ...]]] = {
        "cut_bce": heads.cut_bce,
        "dense_bce": heads.dense_bce,
        "sampled_bce": heads.sampled_bce,
    }
    head = functions[config.name]
    loss, counts, *ranks = head(hidden, table, targets, training_bias(params), weights, **options)
    return loss, (counts, heads.RankSums.of(ranks[0]) if ranks else heads.RankSums.zeros())


def training_bias(params: Params) -> jax.Array | None:
    """float32 [rows] item bias in the loss, None without one: no logit of a cold item survives it.

    An item without a training event would be a negative of every position, and its content would be taught to be
    nobody's taste. Its terms of the loss, and all their derivatives, are exactly 0.
    """
    bias = params.get("item_bias")
    if "item_warm" not in params:
        return bias
    return jnp.where(params["item_warm"] > 0, 0.0 if bias is None else bias, NO_ITEM)


def make_train_step(
    config: Config, graphdef: nnx.GraphDef, optimizer: optax.GradientTransformation, layout: Layout | None = None
) -> Callable[[TrainState, Batch], TrainState]:
    """The step to compile, for one device or a layout; donate its state."""
    parts = config.train.accumulate
    lookup = take_rows if layout is None else layout.lookup

    def micro_loss(params: Params, batch: Batch, key: jax.Array, share: jax.Array | float):
        dropout_key, head_key = jax.random.split(key)
        model = nnx.merge(graphdef, params)
        hidden = model(batch.items, batch.positions, batch.segment_ids, dropout_key, lookup)
        loss, stats = head_loss(config.head, hidden, params, batch.targets, batch.weights, head_key, layout)
        return loss * share, stats

    def train_step(state: TrainState, batch: Batch) -> TrainState:
        # the key depends on nothing but seed and step, so a resumed run draws what the uninterrupted one would have
        key = jax.random.fold_in(jax.random.key(config.train.seed), state.step)
        params, given = split_given(state.params, config.model.content)
        gradient = jax.value_and_grad(lambda params, *rest: micro_loss(params | given, *rest), has_aux=True)
        if parts == 1:
            (loss, (counts, ranks)), grads = gradient(params, batch, key, 1.0)
        else:
            (loss, (counts, ranks)), grads = accumulate(gradient, params, batch, key, parts)
        updates, opt_state = optimizer.update(grads, state.opt_state, params)
        grad_norm = optax.tree.norm(grads)
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        step = state.step + 1
        metrics = Metrics(
            steps=state.metrics.steps + 1,
            loss=state.metrics.loss + loss,
            grad_norm=state.metrics.grad_norm + grad_norm,
            tokens=state.metrics.tokens + jnp.sum(batch.segment_ids > 0, dtype=jnp.int32),
            counts=state.metrics.counts + counts,
            ranks=state.metrics.ranks + ranks,
            bad_step=jnp.where((state.metrics.bad_step < 0) & ~finite, step, state.metrics.bad_step),
        )
        return TrainState(step, optax.apply_updates(params, updates) | given, opt_state, metrics)

    return train_step


def accumulate(gradient, params: Params, batch: Batch, key: jax.Array, parts: int):
    """Loss, counts with ranks, and gradients summed over ``parts`` micro-batches of consecutive rows.

    Each counts with its share of the batch's weight, so the result equals a single pass over it but for rounding.
    """
    total_weight = jnp.sum(batch.weights)
    micro_batches = jax.tree.map(lambda x: x.reshape(parts, x.shape[0] // parts, *x.shape[1:]), batch)

    def body(carry, xs):
        micro_batch, micro_key = xs
        share = jnp.sum(micro_batch.weights) / jnp.where(total_weight > 0, total_weight, 1)
        (loss, (counts, ranks)), grads = gradient(params, micro_batch, micro_key, share)
        stats = (carry[1][0] + counts, carry[1][1] + ranks)
        return (carry[0] + loss, stats, jax.tree.map(jnp.add, carry[2], grads)), None

    stats = (heads.Counts.zeros(), heads.RankSums.zeros())
    zeros = (jnp.zeros(()), stats, jax.tree.map(jnp.zeros_like, params))
    (loss, stats, grads), _ = jax.lax.scan(body, zeros, (micro_batches, jax.random.split(key, parts)))
    return (loss, stats), grads


def make_encoder(graphdef: nnx.GraphDef, layout: Layout | None = None) -> Callable[[Params, QueryBatch], jax.Array]:
    """(params, query batch) -> float32 hidden [Q, D] of each query's last event, without dropout."""

    on_one_cpu = jax.default_backend() == "cpu" and (layout is None or layout.placement is None)

    def encode(params: Params, queries: QueryBatch) -> jax.Array:
        model = nnx.merge(graphdef, params)
        lookup = take_rows if layout is None else layout.of_rows(queries.items.shape[0]).lookup
        wanted = jnp.asarray(queries.rows), jnp.asarray(queries.columns)
        batch = queries.items, queries.positions, queries.segment_ids
        hidden = model(*batch, lookup=lookup, queries=wanted, cached=on_one_cpu)
        return hidden.astype(jnp.float32)

    return encode
