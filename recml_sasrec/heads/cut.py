"""CutBCE: exact multi-label binary cross-entropy over the whole catalogue, without logits in memory.

The multi-label loss splits exactly (CutBCE, arXiv 2610.05559):

    loss = sum_t w_t (sum_v softplus(z_tv)  -  sum_{v in pos(t)} z_tv),     z = h E^T + b
                      dense background         sparse correction

The background's gradient, sigmoid(z) w_t, is elementwise and needs no normaliser over V, so loss, gradients and counts
come out of **one** sweep over tiles of logits (6*T*V*D matmul FLOPs; recomputing them in the backward takes 8). When
the cotangent is a scalar the forward rule runs that sweep and the backward rule scales what it kept.

Implementations (``cut_xla``, ``cut_tpu``) only do the dense background; targets, reductions, temperature and
dtypes of the cotangents are this module's. An implementation is a module with these functions:

    sweep(h_TD, table_VD, bias_V, weight_T, reference_T=None, positives=None, *, threshold, tile, with_loss=True)
        -> (loss_T, above_T, dh_TD, dtable_VD, dbias_V), and better_T if there is a reference
    forward_sweep(h_TD, table_VD, bias_V, reference_T=None, *, threshold, tile, with_loss=True)
        -> (loss_T, above_T), and better_T if there is a reference
    supports(h_TD, table_VD) -> bool        (cut_tpu only; may look at shapes and dtypes, not at values)

    h_TD       [T, D]  bfloat16, float16 or float32; already divided by the temperature
    table_VD   [V, D]  of h_TD's dtype
    bias_V     [V]     float32, or None
    weight_T   [T]     float32: any sign, 0 for masked tokens. For reduction="none" it is weight times cotangent.
    reference_T [T]    float32, or None: no ranks wanted
    positives  (ids_TL int32 in [0, V], slope_TL float32), or None; V is padding
    threshold  float, or None: no counts wanted
    tile       int, or None: chosen by the implementation
    loss_T     [T]     float32: sum_v softplus(z_tv), **not** weighted; None without with_loss
    above_T    [T]     int32: number of v with z_tv > threshold; None if threshold is None
    better_T   [T]     int32: number of v with z_tv > reference_t
    dh_TD      [T, D]  float32: w_t sum_v sigmoid(z_tv) E_v
    dtable_VD  [V, D]  float32: sum_t w_t sigmoid(z_tv) h_t, and where positives are given slope_tl w_t h_t at the rows
                       ids_tl; of bfloat16 arguments it is then rounded to bfloat16, once. Both sums take the same
                       w_t h_t, rounded to h's dtype: they may nearly cancel
    dbias_V    [V]     float32: sum_t w_t sigmoid(z_tv); None if bias_V is None

Any T, V, D >= 1. Logits are float32 (``preferred_element_type``) with the matmul precision of
``jax.default_matmul_precision``; sigmoids may be cast to h_TD's dtype for the two gradient products. h_TD is finite
even where the weight is 0. The functions are traced under jit, vmap (of everything but the table) and inside
``custom_vjp``: they need no derivatives of their own.
"""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

from recml_sasrec.heads import counts as counting
from recml_sasrec.heads import cut_tpu, cut_xla, ranks, rows
from recml_sasrec.heads.arguments import (
    Reduction,
    as_arrays,
    check_shapes,
    flatten,
    normaliser,
    positive_set,
    without_padding,
)
from recml_sasrec.heads.placement import Placement, over_shards

Implementation = Literal["auto", "xla", "pallas_tpu"]


class Options(NamedTuple):
    """What is fixed at trace time; hashable, as custom_vjp's static arguments have to be."""

    positive_weight: float
    threshold: float | None
    tile: int | None
    implementation: str
    loss: bool
    ranks: bool
    placement: Placement | None = None


def cut_bce(
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
    with_loss: bool = True,
    tile: int | None = None,
    implementation: Implementation = "auto",
    num_items: int | None = None,
    placement: Placement | None = None,
) -> tuple[Any, ...]:
    """Multi-label BCE of every token against the whole catalogue, in one sweep (CutBCE, arXiv 2610.05559).

    Args:
      hidden: [..., D] hidden states, any float dtype. Their logits are ``hidden @ table.T / temperature + bias``.
      table: [V, D] item table.
      targets: int [..., L], each token's set of positive items. Ids outside [0, V) are padding, repeats count once.
      bias: [V] item bias.
      weights: [...] token weights, 1 everywhere if None. Differentiable; 0 masks a token, and its gradient is 0.
      positive_weight: factor of the positives' terms, softplus(-z).
      temperature: divides hidden; may be a traced scalar.
      reduction: "token_mean", sum over items, weighted mean over tokens (0 if all weights are 0); "mean", that divided
        by V (RecML, Keras); "sum", weighted sum; "none", weighted per-token losses, whose backward recomputes logits.
      threshold: a logit above it is a predicted positive.
      with_counts: False spares the comparison; counts is then None.
      with_ranks: True adds a third result, for one more comparison a logit; see ``ranks.py``.
      with_loss: False spares the logarithms of a step that only needs gradients. The loss is then 0; its derivatives
        are those of the loss, but for that by ``weights``, which is 0 as well.
      tile: items of a tile; None: chosen for the device. The result does not depend on it, up to rounding.
      implementation: "auto" takes the Pallas kernel where the program is lowered for a TPU, XLA elsewhere.
      num_items: V, where the table is padded by rows that are no items; None: it is not.
      placement: where the arguments lie on a mesh; None: on one device. The numbers are the same.

    Returns:
      (loss, counts): float32 scalar, or [...] for "none"; counts over the tokens of positive weight. With ranks
      (loss, counts, ranks): int32 [...], 1 + the number of items that score above the token's best target, ties and
      what rounding can't tell from a tie not counted; 0 for tokens without targets or positive weight.

    Raises:
      ValueError: shapes that do not fit each other, an unknown reduction or implementation.
    """
    hidden, table, targets, bias, weights = as_arrays(hidden, table, targets, bias, weights)
    shape = check_shapes(hidden, table, targets, bias, weights, reduction)
    if implementation not in ("auto", "xla", "pallas_tpu"):
        raise ValueError(f"implementation must be 'auto', 'xla' or 'pallas_tpu', got {implementation!r}")
    if tile is not None and tile < 1:
        raise ValueError(f"tile must be at least 1 item, got {tile}; None lets it be chosen")
    targets, bias, items = without_padding(targets, bias, table.shape[0], num_items)
    h_TD, targets_TL, weight_T = flatten(hidden, targets, weights, temperature)
    limit = float(threshold) if with_counts else None
    options = Options(float(positive_weight), limit, tile, implementation, with_loss, with_ranks, placement)
    op = token_losses if reduction == "none" else weighted_sum
    scale = normaliser(weight_T, reduction, items)
    # Within the weights the scale costs nothing; after the sweep it is a pass over the table's gradient and a second
    # one in memory. But float16 has no digits left for hidden states divided by thousands of tokens.
    before, after = (1.0, scale) if h_TD.dtype == jnp.float16 else (scale, 1.0)
    loss, stats, rank_T = op(h_TD, table, bias, targets_TL, weight_T * before, options)
    loss = (loss * after).reshape(shape if reduction == "none" else ())
    counts = counting.from_tokens(stats, weight_T, items) if with_counts else None
    return (loss, counts, rank_T.reshape(shape)) if with_ranks else (loss, counts)


def _common(h_TD, table_VD, bias_V):
    dtype = jnp.promote_types(h_TD.dtype, table_VD.dtype)
    return h_TD.astype(dtype), table_VD.astype(dtype), None if bias_V is None else bias_V.astype(jnp.float32)


class _Sparse(NamedTuple):
    """The positives: ids and mask, their rows, logits, and what they add to the background's loss and its slope."""

    ids_TL: jax.Array
    mask_TL: jax.Array
    rows_TLD: jax.Array
    logits_TL: jax.Array
    loss_T: jax.Array
    slope_TL: jax.Array


def _sparse(h_TD, table_VD, bias_V, targets_TL, positive_weight) -> _Sparse:
    """Replaces softplus(z) by positive_weight * softplus(-z) at the positives; -z exactly when the weight is 1."""
    ids_TL, mask_TL = positive_set(targets_TL, table_VD.shape[0])
    rows_TLD = rows.take(table_VD, ids_TL)
    z_TL = jnp.einsum("td,tld->tl", h_TD, rows_TLD, preferred_element_type=jnp.float32)
    if bias_V is not None:
        z_TL += bias_V.at[ids_TL].get(mode="fill", fill_value=0)
    if positive_weight == 1:
        change_TL, slope_TL = -z_TL, jnp.full_like(z_TL, -1)
    else:
        change_TL = positive_weight * jax.nn.softplus(-z_TL) - jax.nn.softplus(z_TL)
        slope_TL = -positive_weight * jax.nn.sigmoid(-z_TL) - jax.nn.sigmoid(z_TL)
    loss_T = jnp.where(mask_TL, change_TL, 0).sum(1)
    return _Sparse(ids_TL, mask_TL, rows_TLD, z_TL, loss_T, jnp.where(mask_TL, slope_TL, 0))


def _reference(sparse: _Sparse, h_TD, bias_V, options: Options):
    if not options.ranks:
        return None
    bias_TL = None if bias_V is None else bias_V.at[sparse.ids_TL].get(mode="fill", fill_value=0)
    reference_T = ranks.reference(h_TD, sparse.rows_TLD, bias_TL, sparse.mask_TL)
    return reference_T if options.placement is None else options.placement.best(reference_T)


def _forward(h_TD, table_VD, bias_V, targets_TL, weight_T, options: Options):
    """(loss_T, stats, rank_T) by the forward-only sweep."""
    local = functools.partial(_forward_shard, options=options)
    h_TD, table_VD, bias_V = _common(h_TD, table_VD, bias_V)
    sums, _ = over_shards(local, options.placement, h_TD, table_VD, bias_V, targets_TL, weight_T)
    return _outputs(sums, weight_T, options)


def _single_sweep(h_TD, table_VD, bias_V, targets_TL, weight_T, options: Options):
    """(loss_T, stats, rank_T), (dh, dtable, dbias): gradients of sum_t w_t loss_t, in the dtypes of the sweep's."""
    local = functools.partial(_sweep_shard, options=options)
    h_TD, table_VD, bias_V = _common(h_TD, table_VD, bias_V)
    sums, gradients = over_shards(local, options.placement, h_TD, table_VD, bias_V, targets_TL, weight_T)
    return _outputs(sums, weight_T, options), gradients


class _Sums(NamedTuple):
    """Per token [T], what adds up over the shards of a table; None where it was not asked for."""

    loss_T: jax.Array | None
    true_T: jax.Array  # int32, positives above the threshold, 0 without one
    above_T: jax.Array | None
    positives_T: jax.Array  # int32
    better_T: jax.Array | None


def _forward_shard(h_TD, table_VD, bias_V, targets_TL, weight_T, options: Options):
    """(_Sums, None) of a shard of the table, by the forward-only sweep, or none at all if it has nothing to give."""
    sparse = _sparse(h_TD, table_VD, bias_V, targets_TL, options.positive_weight)
    reference_T = _reference(sparse, h_TD, bias_V, options)
    loss_T = above_T = None
    better = ()
    if options.loss or options.threshold is not None or options.ranks:
        loss_T, above_T, *better = _dispatch("forward_sweep", options, h_TD, table_VD, bias_V, reference_T)
    return _sums(sparse, loss_T, above_T, better, options), None


def _sweep_shard(h_TD, table_VD, bias_V, targets_TL, weight_T, options: Options):
    """(_Sums, (dh, dtable, dbias)) of a shard of the table."""
    sparse = _sparse(h_TD, table_VD, bias_V, targets_TL, options.positive_weight)
    reference_T = _reference(sparse, h_TD, bias_V, options)
    slope_TL = sparse.slope_TL
    if h_TD.dtype != jnp.float32:
        # The products take sigmoids of few bits. What those lack would be all there is where a target's is near 1.
        s_TL = jax.nn.sigmoid(sparse.logits_TL)
        slope_TL += jnp.where(sparse.mask_TL, s_TL - rows.rounded(s_TL, h_TD.dtype), 0)
    positives = sparse.ids_TL, slope_TL
    results = _dispatch("sweep", options, h_TD, table_VD, bias_V, weight_T, reference_T, positives)
    loss_T, above_T, dh_TD, dtable_VD, dbias_V, *better = results
    dh_TD += weight_T[:, None] * (slope_TL[..., None] * sparse.rows_TLD.astype(jnp.float32)).sum(1)
    if bias_V is not None:
        dbias_V = dbias_V.at[sparse.ids_TL].add(sparse.slope_TL * weight_T[:, None], mode="drop")
    return _sums(sparse, loss_T, above_T, better, options), (dh_TD, dtable_VD, dbias_V)


def _sums(sparse: _Sparse, loss_T, above_T, better, options: Options) -> _Sums:
    above_TL = False if options.threshold is None else sparse.logits_TL > options.threshold
    return _Sums(
        loss_T=loss_T + sparse.loss_T if options.loss else None,
        true_T=(sparse.mask_TL & above_TL).sum(1, dtype=jnp.int32),
        above_T=above_T,
        positives_T=sparse.mask_TL.sum(1, dtype=jnp.int32),
        better_T=better[0] if options.ranks else None,
    )


def _outputs(sums: _Sums, weight_T, options: Options):
    """(loss_T, stats, rank_T): loss 0, stats None or ranks None if not asked for; stats as for ``counts.by_token``."""
    loss_T = sums.loss_T if options.loss else jnp.zeros(weight_T.shape)
    stats = None if options.threshold is None else (sums.true_T, sums.above_T, sums.positives_T)
    better_T = sums.better_T
    rank_T = None if better_T is None else ranks.from_better(better_T, sums.positives_T > 0, weight_T)
    return loss_T, stats, rank_T


def _cotangents(gradients, scale, h_TD, table_VD, bias_V):
    """float32 gradients times the scalar cotangent, in the dtypes of the primals."""
    primals = (h_TD, table_VD, bias_V)
    return [None if x is None else (g * scale).astype(x.dtype) for g, x in zip(gradients, primals, strict=True)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def weighted_sum(h_TD, table_VD, bias_V, targets_TL, weight_T, options):
    """(sum_t w_t loss_t, stats, rank_T) of flat arguments; see ``_outputs`` and ``Options``."""
    loss_T, stats, rank_T = _forward(h_TD, table_VD, bias_V, targets_TL, weight_T, options)
    return _dot_weights(weight_T, loss_T), stats, rank_T


def _weighted_sum_fwd(h_TD, table_VD, bias_V, targets_TL, weight_T, options):
    (loss_T, *others), gradients = _single_sweep(h_TD, table_VD, bias_V, targets_TL, weight_T, options)
    # Zero-row stand-ins carry the primals' dtypes: keeping the primals themselves would pin them until the backward.
    dtypes = [None if x is None else x[:0] for x in (h_TD, table_VD, bias_V)]
    return (_dot_weights(weight_T, loss_T), *others), (gradients, loss_T, weight_T, dtypes)


def _weighted_sum_bwd(options, residuals, cotangents):
    gradients, loss_T, weight_T, dtypes = residuals
    dh, dtable, dbias = _cotangents(gradients, cotangents[0], *dtypes)
    return dh, dtable, dbias, None, jnp.where(weight_T != 0, loss_T, 0) * cotangents[0]


weighted_sum.defvjp(_weighted_sum_fwd, _weighted_sum_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def token_losses(h_TD, table_VD, bias_V, targets_TL, weight_T, options):
    """(w_t loss_t [T], stats, rank_T) of flat arguments; the backward recomputes the logits."""
    loss_T, stats, rank_T = _forward(h_TD, table_VD, bias_V, targets_TL, weight_T, options)
    return jnp.where(weight_T != 0, weight_T * loss_T, 0), stats, rank_T


def _token_losses_fwd(h_TD, table_VD, bias_V, targets_TL, weight_T, options):
    primals = (h_TD, table_VD, bias_V, targets_TL, weight_T)
    return token_losses(*primals, options), primals


def _token_losses_bwd(options, primals, cotangents):
    h_TD, table_VD, bias_V, targets_TL, weight_T = primals
    scaled_T = weight_T * cotangents[0]
    options = options._replace(threshold=None, ranks=False)
    (loss_T, *_), gradients = _single_sweep(h_TD, table_VD, bias_V, targets_TL, scaled_T, options)
    dh, dtable, dbias = _cotangents(gradients, 1.0, h_TD, table_VD, bias_V)
    return dh, dtable, dbias, None, jnp.where(weight_T != 0, loss_T, 0) * cotangents[0]


token_losses.defvjp(_token_losses_fwd, _token_losses_bwd)


def _dot_weights(weight_T, loss_T):
    # A masked token must not spoil the sum even where its own loss overflows.
    return jnp.where(weight_T != 0, weight_T * loss_T, 0).sum()


def _dispatch(name: str, options: Options, h_TD, table_VD, *others):
    """Runs ``sweep`` or ``forward_sweep`` of the implementation for the platform being lowered for."""
    keywords = {"threshold": options.threshold, "tile": options.tile, "with_loss": options.loss}
    arguments = (h_TD, table_VD, *others)
    # One batch after the other under vmap, as the kernel does: XLA's CPU backend has no batched bfloat16 product.
    sweep = functools.partial(getattr(cut_xla, name), **keywords)
    xla, wide = sequential_vmap(sweep), cut_xla.default_tile(h_TD.shape[0], cut_xla.GPU_LOGITS)
    gpu = xla if options.tile else sequential_vmap(functools.partial(sweep, tile=wide))
    # jax.devices() would mislead a compilation for another platform than the host's.
    platforms = {"cuda": gpu, "rocm": gpu, "default": xla}
    if options.implementation == "xla":
        return jax.lax.platform_dependent(*arguments, **platforms)
    supported = cut_tpu.supports(h_TD, table_VD)
    if options.implementation == "pallas_tpu" and not supported:
        shapes = f"hidden {h_TD.dtype}{list(h_TD.shape)} and table {list(table_VD.shape)}"
        raise ValueError(f"the Pallas TPU kernel does not support {shapes}; implementation='xla' does")
    tpu = functools.partial(getattr(cut_tpu, name), **keywords)
    if options.implementation == "pallas_tpu":
        return tpu(*arguments)
    if supported:
        platforms["tpu"] = tpu
    return jax.lax.platform_dependent(*arguments, **platforms)
