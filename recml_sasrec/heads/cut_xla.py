"""CutBCE's dense background for CPU and GPU: a ``lax.scan`` over tiles of the catalogue.

The contract is in ``cut.py``.
"""

import jax
import jax.numpy as jnp


def sweep(h_TD, table_VD, bias_V, weight_T, *, threshold, tile):
    """Loss, counts and gradients of the background from one pass over the logits."""
    tile = min(tile or _TILE, table_VD.shape[0])
    weighted_TD = (weight_T[:, None] * h_TD.astype(jnp.float32)).astype(h_TD.dtype)

    def step(carry, start, size):
        loss_T, above_T, dh_TD = carry
        rows_KD, bias_K, z_TK = _logits(h_TD, table_VD, bias_V, start, size)
        u_TK = jnp.exp(-jnp.abs(z_TK))
        s_TK = jnp.where(z_TK >= 0, 1.0, u_TK) / (1 + u_TK)
        loss_T = loss_T + (jnp.maximum(z_TK, 0) + jnp.log1p(u_TK)).sum(1)
        if threshold is not None:
            above_T = above_T + (z_TK > threshold).sum(1, dtype=jnp.int32)
        dbias_K = None if bias_V is None else jnp.einsum("tk,t->k", s_TK, weight_T)
        s_TK = s_TK.astype(h_TD.dtype)
        dh_TD = dh_TD + jnp.einsum("tk,kd->td", s_TK, rows_KD, preferred_element_type=jnp.float32)
        drows_KD = jnp.einsum("tk,td->kd", s_TK, weighted_TD, preferred_element_type=jnp.float32)
        return (loss_T, above_T, dh_TD), (drows_KD, dbias_K)

    carry = (*_empty(h_TD, threshold), jnp.zeros(h_TD.shape, jnp.float32))
    (loss_T, above_T, dh_TD), (dtable_VD, dbias_V) = _over_tiles(step, carry, table_VD.shape[0], tile)
    return loss_T, above_T, dh_TD * weight_T[:, None], dtable_VD, dbias_V


def forward_sweep(h_TD, table_VD, bias_V, *, threshold, tile):
    """Loss and counts of the background."""
    tile = min(tile or _TILE, table_VD.shape[0])

    def step(carry, start, size):
        loss_T, above_T = carry
        _, _, z_TK = _logits(h_TD, table_VD, bias_V, start, size)
        loss_T = loss_T + jax.nn.softplus(z_TK).sum(1)
        if threshold is not None:
            above_T = above_T + (z_TK > threshold).sum(1, dtype=jnp.int32)
        return (loss_T, above_T), None

    return _over_tiles(step, _empty(h_TD, threshold), table_VD.shape[0], tile)[0]


_TILE = 1024


def _empty(h_TD, threshold):
    zeros_T = jnp.zeros(h_TD.shape[0], jnp.float32)
    return zeros_T, None if threshold is None else zeros_T.astype(jnp.int32)


def _logits(h_TD, table_VD, bias_V, start, size):
    rows_KD = jax.lax.dynamic_slice_in_dim(table_VD, start, size)
    z_TK = jnp.einsum("td,kd->tk", h_TD, rows_KD, preferred_element_type=jnp.float32)
    bias_K = None if bias_V is None else jax.lax.dynamic_slice_in_dim(bias_V, start, size)
    return rows_KD, bias_K, z_TK if bias_K is None else z_TK + bias_K


def _over_tiles(step, carry, items, tile):
    """Scans ``step(carry, start, size)`` over the full tiles and runs the ragged last one, if any, after them."""
    full = items // tile
    starts = jnp.arange(full, dtype=jnp.int32) * tile
    carry, rows = jax.lax.scan(lambda carry, start: step(carry, start, tile), carry, starts)
    rows = jax.tree.map(lambda x: x.reshape(full * tile, *x.shape[2:]), rows)
    if items % tile:
        carry, rest = step(carry, full * tile, items % tile)
        rows = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), rows, rest)
    return carry, rows
