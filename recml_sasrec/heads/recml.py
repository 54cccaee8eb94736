"""RecML's call, so that its users can switch by changing an import: ``cut_binary_cross_entropy``."""

from typing import Any

import jax
import jax.numpy as jnp

from recml_sasrec.heads import arguments, cut
from recml_sasrec.heads import counts as counting

_EPSILON = 1e-8  # RecML's, in the denominator


def cut_binary_cross_entropy(
    activations: jax.Array,
    embeddings: jax.Array,
    targets: jax.Array,
    weights: jax.Array | None = None,
    *,
    return_per_target_losses: bool = False,
    return_metrics: bool = False,
    block_v: int | None = None,
    use_pallas: bool = True,
    block_n: int | None = None,
    mesh: Any = None,
    act_spec: Any = None,
    emb_spec: Any = None,
) -> jax.Array | tuple[jax.Array, ...]:
    """Multi-label BCE with the signature and the numbers of RecML's operator, computed by ``cut_bce``.

    Unlike there: any float dtype, leading axes of any number, one sweep for loss and gradients (the per-position losses
    have a backward that recomputes the logits), and a target counts as above 0 by the logit of its own dot product.

    Args:
      activations: [..., N, D] hidden states.
      embeddings: [V, D] item table.
      targets: int [..., N, L], or without the leading axes it shares. Ids outside [0, V) are padding, repeats count
        once.
      weights: [..., N], one a position; all 1 if None.
      return_per_target_losses: also return float32 [..., N]: each position's mean over V, times its weight.
      return_metrics: also return tp, fp, fn, tn at logit > 0: float32 sums over positions times their weights. With
        weights of 0 and 1 they are exact integers, rounded once where they exceed 2^24.
      block_v: items of a tile; chosen if None.
      use_pallas: False keeps to XLA on TPU too.
      block_n, mesh, act_spec, emb_spec: taken, and not needed: the tiles of tokens are chosen for the chip, and the
        program is partitioned as its arguments are.

    Returns:
      The loss, a float32 scalar: the per-position losses, weighted, over the sum of the weights. With either option a
      tuple (loss[, losses][, tp, fp, fn, tn]).

    Raises:
      ValueError: shapes that do not fit each other.
    """
    del block_n, mesh, act_spec, emb_spec
    activations, embeddings, targets, weights = arguments.as_arrays(activations, embeddings, targets, weights)
    positions, items = activations.shape[:-1], embeddings.shape[0]
    targets = jnp.broadcast_to(targets, (*positions, targets.shape[-1]))
    reduction: arguments.Reduction = "none" if return_per_target_losses else "sum"
    arguments.check_shapes(activations, embeddings, targets, None, weights, reduction)
    h_TD, targets_TL, weight_T = arguments.flatten(activations, targets, weights, 1.0)
    options = cut.Options(
        positive_weight=1.0,
        threshold=0.0 if return_metrics else None,
        tile=None if block_v is None else min(block_v, items),
        implementation="auto" if use_pallas else "xla",
        loss=True,
        ranks=False,
    )
    op = cut.token_losses if return_per_target_losses else cut.weighted_sum
    loss, stats, _ = op(h_TD, embeddings, None, targets_TL, weight_T, options)
    results = [loss.sum() / items / (weight_T.sum() + _EPSILON)]
    if return_per_target_losses:
        results.append(loss.reshape(positions) / items)
    if return_metrics:
        results += _weighted_counts(stats, weight_T, items)
    return tuple(results) if len(results) > 1 else results[0]


def _weighted_counts(stats, weight_T, items) -> list[jax.Array]:
    """tp, fp, fn, tn: sums of each token's count times its weight, by exact integers where weights are 0 and 1."""
    binary = ((weight_T == 0) | (weight_T == 1)).all()
    exact = counting.from_tokens(stats, weight_T, items)
    limbs = [count.high.astype(jnp.float32) * 2.0**count.bits + count.low.astype(jnp.float32) for count in exact]
    weighted = [(weight_T * column_T).sum() for column_T in counting.by_token(stats, items)]
    return [jnp.where(binary, a, b) for a, b in zip(limbs, weighted, strict=True)]
