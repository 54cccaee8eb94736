"""The optimizer: AdamW, warm-up and cosine, clipping by the global norm; on the item table, less memory if wanted."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from recml_sasrec.config import OptimizerConfig


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
    """AdamW under the schedule, or ``config.table`` on the item table; biases, norms and content are not decayed."""

    def decayed(params):
        # content vectors are data: decay would fade those of items that have no gradient
        return {name: jax.tree.map(lambda p: p.ndim > 1 and name != "item_content", p) for name, p in params.items()}  # noqa: B023

    parts = [
        _scaling(config),
        optax.add_decayed_weights(config.weight_decay, decayed),
        optax.scale_by_learning_rate(make_schedule(config, steps)),
    ]
    if not config.clip_norm:
        return optax.chain(*parts)
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), optax.chain(*parts))


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
