"""The optimizer: AdamW, warm-up and cosine, clipping by the global norm."""

import jax
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
    """AdamW under the schedule; biases and norms are not decayed."""

    def decayed(params):
        return jax.tree.map(lambda p: p.ndim > 1, params)

    adamw = optax.adamw(
        make_schedule(config, steps),
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=decayed,
    )
    if not config.clip_norm:
        return adamw
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw)
