"""CutBCE's dense background for CPU and GPU: one ``lax.scan`` over tiles of the catalogue; contract in ``cut.py``.

What makes a tile cheap on a CPU (measured, see scripts/bench_head.py):

* Logits lie items-major, z_KT = E_K h^T. Then all three products contract or produce the long axis in the order XLA's
  fast path wants (a transposed wide operand halves the matmul rate), and sums over items are vertical vector sums.
* One exponential a logit, one division, and one logarithm in 64: see ``_loss_and_counts``.
* The weight multiplies h and dh, never the tile.
"""

import functools

import jax
import jax.numpy as jnp

from recml_sasrec.heads import rows

_GROUP = 8  # logits reduced by one unrolled inner loop: from 16 on, XLA's CPU backend no longer vectorises it
_CHUNK = _GROUP * _GROUP  # logits that share a logarithm; 2**-64 is still a normal float32


def sweep(h_TD, table_VD, bias_V, weight_T, reference_T=None, positives=None, *, threshold, tile, with_loss=True):
    """Loss, counts and gradients of the background from one pass over the logits."""
    tokens, items = h_TD.shape[0], table_VD.shape[0]
    tile = min(tile or default_tile(tokens), items)
    weighted_TD = rows.weighted(h_TD, weight_T)
    h_DT, limits = h_TD.T, _limits(threshold, reference_T)

    def step(carry, start, size):
        sums, dh_DT = carry
        rows_KD, z_KT = _logits(h_DT, table_VD, bias_V, start, size)
        # The barrier makes the sigmoids an array that is computed once, not once for each of its readers.
        s_KT = jax.lax.optimization_barrier(jax.lax.logistic(z_KT))
        sums = jax.tree.map(jnp.add, sums, _loss_and_counts(z_KT, s_KT, with_loss, limits))
        dbias_K = None if bias_V is None else s_KT @ weight_T
        s_KT = s_KT.astype(h_DT.dtype)
        dtable_KD = jnp.matmul(s_KT, weighted_TD, preferred_element_type=jnp.float32)
        dh_DT = dh_DT + jnp.einsum("kd,kt->dt", rows_KD, s_KT, preferred_element_type=jnp.float32)
        return (sums, dh_DT), (dtable_KD, dbias_K)

    carry = (_zeros(tokens, with_loss, limits), jnp.zeros(h_DT.shape, jnp.float32))
    ((loss_T, above_T, *better), dh_DT), (dtable_VD, dbias_V) = _over_tiles(step, carry, items, tile)
    if positives is not None:
        dtable_VD = rows.add_positives(dtable_VD, weighted_TD, *positives)
    return loss_T, above_T, dh_DT.T * weight_T[:, None], dtable_VD, dbias_V, *better


def forward_sweep(h_TD, table_VD, bias_V, reference_T=None, *, threshold, tile, with_loss=True):
    """Loss and counts of the background."""
    tokens, items = h_TD.shape[0], table_VD.shape[0]
    tile = min(tile or default_tile(tokens), items)
    h_DT, limits = h_TD.T, _limits(threshold, reference_T)

    def step(carry, start, size):
        _, z_KT = _logits(h_DT, table_VD, bias_V, start, size)
        sums = _loss_and_counts(z_KT, jax.lax.logistic(z_KT), with_loss, limits)
        return jax.tree.map(jnp.add, carry, sums), None

    return _over_tiles(step, _zeros(tokens, with_loss, limits), items, tile)[0]


CPU_LOGITS = 2**20  # of a tile: they stay in the cache between their uses
GPU_LOGITS = 2**25  # enough for a product to fill the device


def default_tile(tokens: int, logits: int = CPU_LOGITS) -> int:
    """Items of a tile of about so many logits."""
    return min(max(logits // max(tokens, 1) // _CHUNK, 1) * _CHUNK, logits // 256)


def _limits(threshold, reference_T) -> tuple:
    """What logits are compared with: always a threshold or None, then the reference if there is one."""
    return (threshold,) if reference_T is None else (threshold, reference_T)


def _zeros(tokens, with_loss, limits):
    zeros_T = jnp.zeros(tokens, jnp.float32)
    counts = (None if limit is None else zeros_T.astype(jnp.int32) for limit in limits)
    return zeros_T if with_loss else None, *counts


def _logits(h_DT, table_VD, bias_V, start, size):
    rows_KD = jax.lax.dynamic_slice_in_dim(table_VD, start, size)
    z_KT = jnp.matmul(rows_KD, h_DT, preferred_element_type=jnp.float32)
    return rows_KD, z_KT if bias_V is None else z_KT + jax.lax.dynamic_slice_in_dim(bias_V, start, size)[:, None]


def _loss_and_counts(z_KT, s_KT, with_loss, limits):
    """(sum_k softplus(z), #(z > limit) of each limit) [T] of a tile, from its logits and their sigmoids, or None.

    softplus(z) = max(z, 0) - log(1 - r) with r = sigmoid(-|z|). The product of the 1 - r of 64 logits takes one
    logarithm. Background logits lie near -12, where 1 - r has lost r's digits, so q = 1 - product is kept beside it by
    q <- q + r * product, a sum of non-negative terms, and -log1p(-q) used where q is small.
    """
    if not with_loss:
        return None, *(None if limit is None else (z_KT > limit).sum(0, dtype=jnp.int32) for limit in limits)
    pad = -z_KT.shape[0] % _CHUNK
    if pad:  # only in a ragged last tile; exp(-inf) = 0 adds nothing
        z_KT = jnp.pad(z_KT, [(0, pad), (0, 0)], constant_values=-jnp.inf)
        s_KT = jnp.pad(s_KT, [(0, pad), (0, 0)])
    r_KT = jnp.minimum(s_KT, 1 - s_KT)
    states: tuple[jax.Array, ...] = (r_KT, 1 - r_KT, jnp.maximum(z_KT, 0))
    states += tuple((z_KT > limit).astype(jnp.int32) for limit in limits if limit is not None)
    q_CT, product_CT, linear_CT, *above = _merge_groups(_merge_groups(states))
    log_CT = jnp.where(q_CT < 0.5, jnp.log1p(-q_CT), jnp.log(product_CT))
    loss_CT = jax.lax.optimization_barrier(linear_CT - log_CT)
    counts = iter(above)
    return loss_CT.sum(0), *(None if limit is None else next(counts).sum(0) for limit in limits)


def _merge_groups(states):
    """Reduces [K, T] states to [K / 8, T]. Barriers keep each level one loop over the tile instead of many."""

    def merge(a, b):
        return (a[0] + b[0] * a[1], a[1] * b[1], *(x + y for x, y in zip(a[2:], b[2:], strict=True)))

    grouped = tuple(x.reshape(x.shape[0] // _GROUP, _GROUP, x.shape[1]) for x in states)
    units = tuple(jnp.asarray(i == 1, x.dtype) for i, x in enumerate(states))
    return jax.lax.optimization_barrier(jax.lax.reduce(grouped, units, merge, (1,)))


def _over_tiles(step, carry, items, tile):
    """Runs ``carry, rows = step(carry, start, size)`` over the full tiles, then the ragged last one if there is any.

    ``rows`` (arrays [size, ...], None or nothing) are written where they belong in arrays [V, ...], in place: stacking
    a scan's outputs and appending the last tile would copy the whole gradient of the table once more.
    """
    shapes = jax.eval_shape(lambda carry: step(carry, 0, tile)[1], carry)
    buffers = jax.tree.map(lambda x: jnp.zeros((items, *x.shape[1:]), x.dtype), shapes)

    def write(state, start, size):
        carry, rows = step(state[0], start, size)
        update = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=start, axis=0)
        return carry, jax.tree.map(update, state[1], rows)

    full = items // tile
    starts = jnp.arange(full, dtype=jnp.int32) * tile
    state, _ = jax.lax.scan(lambda state, start: (write(state, start, tile), None), (carry, buffers), starts)
    return write(state, full * tile, items % tile) if items % tile else state
