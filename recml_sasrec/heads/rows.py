"""Rows of an item table by id: read, or added to, without a second table in memory.

On TPU XLA lays out a [V, D] array by columns where D is no multiple of 128 lanes, and copies all of it to rows, padded
to 128, before a gather or a scatter; after a scatter it copies it back. Here such a table is copied a chunk of items at
a time, and each chunk meets its part of the sorted ids.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

_LANES = 128
_CHUNK = 1 << 14  # items whose rows lie in memory at a time, 512 bytes each
_PIECE = 1 << 10  # ids of a gather or scatter: a chunk takes as many pieces as it has ids


def take(table_VD: jax.Array, ids: jax.Array) -> jax.Array:
    """[..., D] rows of int32 ids [...] in [0, V]; zeros for V, which is padding."""

    def plainly(table_VD, ids):
        return table_VD.at[ids].get(mode="fill", fill_value=0)

    return _by_platform(plainly, _take_chunks, table_VD, ids)


def add(table_VD: jax.Array, ids: jax.Array, updates: jax.Array) -> jax.Array:
    """The float32 table with updates [..., D] of the rows ids [...], int32 in [0, V]; V is padding."""
    return _by_platform(_add_plainly, _add_chunks, table_VD, ids, updates)


def add_positives(dtable_VD: jax.Array, weighted_TD: jax.Array, ids_TL: jax.Array, slope_TL: jax.Array) -> jax.Array:
    """The background's float32 gradient with slope_tl (w h)_t added at the rows ids_TL; rounded if h is bfloat16."""
    dtable_VD = add(dtable_VD, ids_TL, slope_TL[..., None] * weighted_TD[:, None].astype(jnp.float32))
    return dtable_VD.astype(jnp.bfloat16) if weighted_TD.dtype == jnp.bfloat16 else dtable_VD


def rounded(x: jax.Array, dtype) -> jax.Array:
    """x with the digits of a dtype, but still float32: XLA would take a pair of casts for nothing."""
    info = jnp.finfo(dtype)
    return lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant)


def weighted(h_TD: jax.Array, weight_T: jax.Array) -> jax.Array:
    """w_t h_t in h's dtype."""
    return (weight_T[:, None] * h_TD.astype(jnp.float32)).astype(h_TD.dtype)


def _by_platform(plainly: Callable, chunked: Callable, table_VD, *arguments):
    items, width = table_VD.shape
    if width % _LANES == 0 or items <= 2 * _CHUNK:
        return plainly(table_VD, *arguments)
    return lax.platform_dependent(table_VD, *arguments, tpu=chunked, default=plainly)


def _add_plainly(table_VD, ids, updates):
    return table_VD.at[ids].add(updates, mode="drop")


def _take_chunks(table_VD, ids):
    items, width = table_VD.shape
    sorted_R, order_R = _sorted(ids, items)
    table_DV = table_VD.T

    def chunk(c, rows_RD):
        chunk_CD, start = _chunk(table_DV, c)

        def piece(at, local_P, rows_RD):
            found_PD = chunk_CD.at[local_P].get(mode="fill", fill_value=0)
            old_PD = lax.dynamic_slice(rows_RD, (at, 0), (_PIECE, width))
            return lax.dynamic_update_slice(rows_RD, old_PD + found_PD, (at, 0))

        return _over_pieces(sorted_R, c, start, piece, rows_RD)

    rows_RD = lax.fori_loop(0, -(-items // _CHUNK), chunk, jnp.zeros((len(sorted_R), width), table_VD.dtype))
    place_R = jnp.zeros_like(order_R).at[order_R].set(jnp.arange(len(order_R), dtype=order_R.dtype))
    return rows_RD[place_R[: ids.size]].reshape(*ids.shape, width)


def _add_chunks(table_VD, ids, updates):
    items, width = table_VD.shape
    sorted_R, order_R = _sorted(ids, items)
    updates_RD = updates.reshape(-1, width).at[order_R].get(mode="fill", fill_value=0)

    def chunk(c, table_DV):
        chunk_CD, start = _chunk(table_DV, c)

        def piece(at, local_P, chunk_CD):
            return chunk_CD.at[local_P].add(lax.dynamic_slice(updates_RD, (at, 0), (_PIECE, width)), mode="drop")

        chunk_CD = _over_pieces(sorted_R, c, start, piece, chunk_CD)
        return lax.dynamic_update_slice(table_DV, lax.optimization_barrier(chunk_CD).T, (0, start))

    return lax.fori_loop(0, -(-items // _CHUNK), chunk, table_VD.T).T


def _sorted(ids, items):
    """(ids ascending, where each came from), both padded to whole pieces: with V, and with an index past the end."""
    ids = jnp.pad(ids.reshape(-1), (0, -ids.size % _PIECE), constant_values=items)
    order = jnp.argsort(ids).astype(jnp.int32)
    return ids[order], order


def _chunk(table_DV, c):
    """(chunk c by rows, its first item); the last one begins earlier, to be as long as the others."""
    width, items = table_DV.shape
    start = jnp.minimum(c * _CHUNK, items - _CHUNK)
    columns_DC = lax.dynamic_slice(table_DV, (0, start), (width, _CHUNK))
    # Layout and barrier keep XLA from transposing the whole table instead.
    columns_DC = with_layout_constraint(columns_DC, Layout(major_to_minor=(0, 1)))
    return lax.optimization_barrier(columns_DC.T), start


def _over_pieces(sorted_R, c, start, piece: Callable, carry):
    """Folds ``piece(first, rows of the chunk or _CHUNK, carry)`` over the pieces that hold ids of chunk c."""
    first, last = jnp.searchsorted(sorted_R, jnp.stack([c, c + 1]) * _CHUNK)

    def body(i, carry):
        ids_P = lax.dynamic_slice(sorted_R, (i * _PIECE,), (_PIECE,))
        inside_P = (ids_P >= c * _CHUNK) & (ids_P < (c + 1) * _CHUNK) & (ids_P < start + _CHUNK)
        return piece(i * _PIECE, jnp.where(inside_P, ids_P - start, _CHUNK), carry)

    return lax.fori_loop(first // _PIECE, (last + _PIECE - 1) // _PIECE, body, carry)
