"""Multi-label BCE with materialised logits and labels: the honest baseline, and the head to check the others by."""

from typing import Any

import jax
import jax.numpy as jnp

from recml_sasrec.heads import counts as counting
from recml_sasrec.heads import ranks
from recml_sasrec.heads.arguments import (
    Reduction,
    as_arrays,
    check_shapes,
    flatten,
    normaliser,
    positive_set,
    without_padding,
)
from recml_sasrec.heads.placement import Placement


def dense_bce(
    hidden: jax.Array,
    table: jax.Array,
    targets: jax.Array,
    bias: jax.Array | None = None,
    weights: jax.Array | None = None,
    *,
    positive_weight: float = 1.0,
    temperature: float | jax.Array = 1.0,
    reduction: Reduction = "token_mean",
    threshold: float = 0.0,
    with_counts: bool = True,
    with_ranks: bool = False,
    num_items: int | None = None,
    placement: Placement | None = None,
) -> tuple[Any, ...]:
    """The numbers of :func:`recml_sasrec.heads.cut_bce`, from logits and multi-hot labels of [T, V] in memory.

    Arguments, results and errors are those of ``cut_bce``; derivatives are JAX's own. Per logit, with y in {0, 1}:
    positive_weight * y * softplus(-z) + (1 - y) * softplus(z).
    """
    hidden, table, targets, bias, weights = as_arrays(hidden, table, targets, bias, weights)
    shape = check_shapes(hidden, table, targets, bias, weights, reduction)
    rows = table.shape[0]
    targets, bias, items = without_padding(targets, bias, rows, num_items)
    del placement  # the compiler splits what is written here
    h_TD, targets_TL, weight_T = flatten(hidden, targets, weights, temperature)
    dtype = jnp.promote_types(h_TD.dtype, table.dtype)
    logits_TV = jnp.einsum("td,vd->tv", h_TD.astype(dtype), table.astype(dtype), preferred_element_type=jnp.float32)
    if bias is not None:
        logits_TV += bias.astype(jnp.float32)
    labels_TV = multi_hot(targets_TL, rows)

    background_TV = jnp.maximum(logits_TV, 0) + jnp.log1p(jnp.exp(-jnp.abs(logits_TV)))
    if positive_weight == 1:
        losses_TV = background_TV - labels_TV * logits_TV
    else:
        losses_TV = background_TV + labels_TV * (
            positive_weight * jax.nn.softplus(-logits_TV) - jax.nn.softplus(logits_TV)
        )
    loss_T = jnp.where(weight_T != 0, weight_T * losses_TV.sum(1), 0)
    loss = loss_T.reshape(shape) if reduction == "none" else loss_T.sum() * normaliser(weight_T, reduction, items)
    counts, positive_TV = None, labels_TV > 0
    if with_counts:
        above_TV = logits_TV > threshold
        columns = (above_TV & positive_TV, above_TV, positive_TV)
        true_T, above_T, positives_T = (x.sum(1, dtype=jnp.int32) for x in columns)
        counts = counting.from_tokens((true_T, above_T, positives_T), weight_T, items)
    if not with_ranks:
        return loss, counts
    best_T1 = jnp.where(positive_TV, logits_TV, -jnp.inf).max(1, keepdims=True)
    better_T = (logits_TV > best_T1).sum(1, dtype=jnp.int32)
    return loss, counts, ranks.from_better(better_T, positive_TV.any(1), weight_T).reshape(shape)


def multi_hot(targets_TL: jax.Array, items: int) -> jax.Array:
    """float32 [T, V]: 1 at each token's targets. Ids outside [0, V) are padding."""
    ids_TL, _ = positive_set(targets_TL, items)
    rows_T1 = jnp.arange(targets_TL.shape[0])[:, None]
    return jnp.zeros((targets_TL.shape[0], items)).at[rows_T1, ids_TL].set(1.0, mode="drop")
