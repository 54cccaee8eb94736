"""The optimizer: AdamW, warm-up and cosine, clipping by the global norm; on the item table, less memory if wanted."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from recml_sasrec.config import OptimizerConfig
from recml_sasrec.sharding import BY_ITEM


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Learning rate by step: linear warm-up, then a cosine down to ``final_fraction`` of it, or constant."""
    peak, warmup = config.learning_rate, min(config.warmup_steps, max(steps - 1, 0))
    if config.schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, max(steps - warmup, 1), alpha=config.final_fraction)
    else:
        after = optax.constant_schedule(peak)
    if not warmup:
        return after
    return optax.join_schedules([optax.linear_schedule(peak / warmup, peak, warmup - 1 or 1), after], [warmup])


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """AdamW under the schedule, or ``config.table`` on the item table; biases, norms and content are not decayed.

    Groups of parameters may have rates of their own, see ``with_rates``; where all are 1 its state is not there.
    """

    def decayed(params):
        # content vectors are data: decay would fade those of items that have no gradient
        return {name: jax.tree.map(lambda p: p.ndim > 1 and name != "item_content", p) for name, p in params.items()}  # noqa: B023

    parts = [
        _scaling(config),
        optax.add_decayed_weights(config.weight_decay, decayed),
        optax.scale_by_learning_rate(make_schedule(config, steps)),
    ]
    optimizer = optax.chain(*parts)
    if config.clip_norm:
        optimizer = optax.chain(optax.clip_by_global_norm(config.clip_norm), optimizer)
    rates = (config.backbone_rate, config.table_rate, config.old_rows_rate)
    return optimizer if rates == (1, 1, 1) else with_rates(optimizer, *rates)


def _scaling(config: OptimizerConfig) -> optax.GradientTransformation:
    """Gradients to updates, before decay and learning rate."""
    adam = optax.scale_by_adam(config.b1, config.b2, config.eps)
    if config.table == "adam":
        return adam
    of_table = {
        "adam_bf16": optax.scale_by_adam(config.b1, config.b2, config.eps, mu_dtype=jnp.bfloat16),
        "adagrad": scale_by_row_adagrad(config.eps),
        # Without Adafactor's clipping by the update's RMS: rows that pad the table to its shards would count in it.
        "adafactor": optax.scale_by_factored_rms(min_dim_size_to_factor=1),
    }[config.table]

    def labels(params):
        return {name: "table" if name == "item_table" else "others" for name in params}

    return optax.partition({"table": of_table, "others": adam}, labels)


class RatesState(NamedTuple):
    old_rows: Any  # {"item_table": bool [V]}, rows that another run gave; {} where these have the others' rate
    inner: Any


def with_rates(
    inner: optax.GradientTransformation, backbone: float, table: float, old_rows: float
) -> optax.GradientTransformation:
    """Updates times the rate of their group: ``table`` of what has a row an item, ``backbone`` of all else.

    Rows marked in the state have ``table * old_rows``; a fresh state marks none. What has rate 0 is frozen: its
    gradient counts in no norm, it is not decayed, and it and its moments stay as they are, bit for bit.
    """

    def init(params):
        marks = {} if old_rows == 1 else {"item_table": jnp.zeros(params["item_table"].shape[:1], bool)}
        return RatesState(marks, inner.init(params))

    def rate(parameter, x, state):
        """A number, or one for each row of an array that has a row an item."""
        if parameter not in BY_ITEM:
            return backbone
        old_V = state.old_rows.get("item_table")
        if old_V is None or x.shape[:1] != old_V.shape:
            return table
        return jnp.where(old_V, table * old_rows, table).reshape(-1, *[1] * (x.ndim - 1))

    def update(updates, state, params=None):
        def scaled(path, x):
            by = rate(path[0].key, x, state)
            return jnp.where(by == 0, 0, x * by)

        def seen(path, x):
            return jnp.where(rate(path[0].key, x, state) == 0, 0, x)

        def moved(path, before, after):
            _, parameter = moment_of(path)
            if not parameter:  # a count
                return after
            return jnp.where(rate(parameter[0], after, state) == 0, before, after)

        over = jax.tree_util.tree_map_with_path
        updates, after = inner.update(over(seen, updates), state.inner, params)
        return over(scaled, updates), RatesState(state.old_rows, over(moved, state.inner, after))

    return optax.GradientTransformation(init, update)


def moment_of(path: tuple) -> tuple[str, tuple]:
    """(field, parameter) of a leaf of an optimizer state, ``("mu", ("item_table",))``, ``("count", ())``."""
    last = max(index for index, key in enumerate(path) if hasattr(key, "name"))
    return path[last].name, tuple(key.key for key in path[last + 1 :])


class RowAdagradState(NamedTuple):
    sums: Any  # float32 [V] for each [V, D]: mean squares of a row's gradients, summed over the steps


def scale_by_row_adagrad(eps: float) -> optax.GradientTransformation:
    """Adagrad with one sum a row: g / (sqrt(sum over steps of mean_d g^2) + eps) (FBGEMM's EXACT_ROWWISE_ADAGRAD)."""

    def init(params):
        return RowAdagradState(jax.tree.map(lambda p: jnp.zeros(p.shape[:1], jnp.float32), params))

    def update(updates, state, params=None):
        del params
        sums = jax.tree.map(lambda s_V, g_VD: s_V + jnp.square(g_VD).mean(1), state.sums, updates)
        scaled = jax.tree.map(lambda s_V, g_VD: g_VD / (jnp.sqrt(s_V) + eps)[:, None], sums, updates)
        return scaled, RowAdagradState(sums)

    return optax.GradientTransformation(init, update)
