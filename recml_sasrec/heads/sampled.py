"""BCE against a few uniform negatives a position: the loss of the published Yambda baseline with one of them."""

import jax
import jax.numpy as jnp

from recml_sasrec.heads import counts as counting
from recml_sasrec.heads.arguments import Reduction, as_arrays, check_shapes, flatten, normaliser, positive_set
from recml_sasrec.heads.counts import Counts
from recml_sasrec.heads.placement import Placement, lookup


def sampled_bce(
    hidden: jax.Array,
    table: jax.Array,
    targets: jax.Array,
    bias: jax.Array | None = None,
    weights: jax.Array | None = None,
    *,
    key: jax.Array,
    negatives: int = 1,
    positive_weight: float = 1.0,
    temperature: float | jax.Array = 1.0,
    reduction: Reduction = "token_mean",
    threshold: float = 0.0,
    with_counts: bool = True,
    num_items: int | None = None,
    placement: Placement | None = None,
) -> tuple[jax.Array, Counts | None]:
    """BCE over each token's targets and ``negatives`` items drawn uniformly from the others.

    loss_t = positive_weight * sum_{v in pos(t)} softplus(-z_tv) + sum_{v in neg(t)} softplus(z_tv), where neg(t) are
    independent draws from the catalogue without pos(t) (SASRec, arXiv 1808.09781, section III.D, has one of each).

    Arguments, results and errors are those of ``cut_bce``, except: ``key`` seeds the draws; "mean" divides by V, as for
    the other heads; ``counts`` are over the scored pairs only, so they sum to targets plus negatives. A token whose
    targets are the whole catalogue has no negatives.
    """
    hidden, table, targets, bias, weights = as_arrays(hidden, table, targets, bias, weights)
    shape = check_shapes(hidden, table, targets, bias, weights, reduction)
    if negatives < 1:
        raise ValueError(f"negatives must be at least 1, got {negatives}")
    items = num_items or table.shape[0]
    h_TD, targets_TL, weight_T = flatten(hidden, targets, weights, temperature)
    positive_TL, mask_TL = positive_set(targets_TL, items)
    negative_TK, drawn_T1 = draw_negatives(key, positive_TL, mask_TL, items, negatives)

    ids_TS = jnp.concatenate([positive_TL, negative_TK], axis=1)
    dtype = jnp.promote_types(h_TD.dtype, table.dtype)
    rows_TSD = _rows(table.astype(dtype), ids_TS, placement)
    logits_TS = jnp.einsum("td,tsd->ts", h_TD.astype(dtype), rows_TSD, preferred_element_type=jnp.float32)
    if bias is not None:
        logits_TS += _rows(bias.astype(jnp.float32)[:, None], ids_TS, placement)[..., 0]

    slots = positive_TL.shape[1]
    positive_loss_TL = jnp.where(mask_TL, jax.nn.softplus(-logits_TS[:, :slots]), 0)
    negative_loss_TK = jnp.where(drawn_T1, jax.nn.softplus(logits_TS[:, slots:]), 0)
    loss_T = positive_weight * positive_loss_TL.sum(1) + negative_loss_TK.sum(1)
    loss_T = jnp.where(weight_T != 0, weight_T * loss_T, 0)
    loss = loss_T.reshape(shape) if reduction == "none" else loss_T.sum() * normaliser(weight_T, reduction, items)
    if not with_counts:
        return loss, None
    true_T = (mask_TL & (logits_TS[:, :slots] > threshold)).sum(1, dtype=jnp.int32)
    false_T = (drawn_T1 & (logits_TS[:, slots:] > threshold)).sum(1, dtype=jnp.int32)
    positives_T = mask_TL.sum(1, dtype=jnp.int32)
    scored_T = positives_T + negatives * drawn_T1[:, 0]
    return loss, counting.from_tokens((true_T, true_T + false_T, positives_T), weight_T, scored_T)


def _rows(table_VD, ids_TS, placement: Placement | None):
    if placement is None:
        return table_VD.at[ids_TS].get(mode="fill", fill_value=0)
    return lookup(table_VD, ids_TS, placement)


def draw_negatives(
    key: jax.Array, positive_TL: jax.Array, mask_TL: jax.Array, items: int, negatives: int
) -> tuple[jax.Array, jax.Array]:
    """(ids_TK, drawn_T1): ``negatives`` independent uniform draws a token from the items that are not its positives.

    A draw below V - |pos| is a rank among the other items; stepping over the positives in ascending order turns it into
    an id. Nothing is rejected, so the draws are exactly uniform and the shapes static.
    """
    free_T1 = items - mask_TL.sum(1, keepdims=True, dtype=jnp.int32)
    draw_TK = jax.random.randint(key, (positive_TL.shape[0], negatives), 0, jnp.maximum(free_T1, 1), jnp.int32)
    ascending_LT = jnp.sort(positive_TL, axis=1).T  # padding is V, above every id

    def step_over(id_TK, positive_T):
        return id_TK + (id_TK >= positive_T[:, None]), None

    ids_TK, _ = jax.lax.scan(step_over, draw_TK, ascending_LT)
    return jnp.where(free_T1 > 0, ids_TK, items), free_T1 > 0
