"""Exact top-k of the whole catalogue, streamed over tiles of it: never a [queries, items] array.

The order is total: a higher score first and, between equal scores, the smaller item id.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

TILE = 16_384  # items of a tile: [512, TILE] float32 scores are 32 MiB
GROUP = 32  # consecutive items whose maximum stands for them in the first selection


def top_k(
    hidden_QD: Array,
    table_VD: Array,
    k: int,
    *,
    bias: Array | None = None,
    exclude: Array | None = None,
    candidates: Array | None = None,
    tile: int = TILE,
    group: int = GROUP,
) -> tuple[Array, Array]:
    """The ``k`` items with the highest ``hidden · item + bias`` of each query, exactly.

    Args:
        hidden_QD: float32 or bfloat16 [Q, D].
        table_VD: float32 or bfloat16 [V, D]. Products are accumulated in float32 whatever the inputs are.
        k: length of a list; static under ``jit``. More than there are items is allowed.
        bias: float [V], added to the scores.
        exclude: int32 [Q, S], items a query must not get, in any order, repeats allowed, padded with -1.
        candidates: bool [V], the items that may be recommended; None allows all.
        tile: items scored at a time; static. Memory is about ``Q * (tile + k * group)`` floats.
        group: items of a group (see below); static.

    Returns:
        scores float32 [Q, k] and ids int32 [Q, k], by score descending, then id ascending. Where a query has fewer than
        ``k`` candidates the rest is score -inf and id -1. Items whose score is NaN or -inf are never recommended.

    Raises:
        ValueError: ``k``, ``tile`` or ``group`` is below 1, or the shapes disagree.

    A catalogue of one tile is scored and sorted at once. Of a larger one, a tile's scores are first reduced to the
    maxima of groups of consecutive items; only the k best groups are kept, by (maximum descending, position
    ascending), and carried across tiles with the scores of their items; the items are sorted once, at the end.
    Nothing is lost: suppose item x is among the k first and its group g was dropped. Then k groups precede g. The best
    item of each of them scores more than max(g) >= score(x), or as much as max(g) and lies in an earlier group, hence
    has a smaller id than x. Either way it precedes x, so k items precede x, which contradicts that x is among the k
    first. Dropping is final: what precedes g in a merge precedes it forever.
    """
    _check(hidden_QD, table_VD, k, bias, exclude, candidates, tile, group)
    queries, items = hidden_QD.shape[0], table_VD.shape[0]
    direct = items <= tile
    group = 1 if direct else min(group, items)
    tiles = -(-items // tile)
    groups = -(-items // (tiles * group))  # of a tile; tiles are as equal as can be, so that little is scored twice
    tile = groups * group
    tiles = -(-items // tile)
    last_start = items - tile  # the last tile reaches back instead of past the end: no padded copy of the table
    addend = jnp.zeros(items, jnp.float32) if bias is None else bias.astype(jnp.float32)
    allowed = jnp.ones(items, bool) if candidates is None else candidates

    def tile_scores(start: Array, first: Array) -> Array:
        """[Q, group, groups] scores of the items from ``start``; those before ``first`` were in the tile before."""
        # Row a, column m is item start + m * group + a: maxima over a are then elementwise over contiguous columns.
        rows_VD = lax.dynamic_slice_in_dim(table_VD, start, tile)
        if group > 1:
            rows_VD = rows_VD.reshape(groups, group, -1).swapaxes(0, 1).reshape(tile, -1)
        scores = jnp.einsum(
            "qd,vd->qv",
            hidden_QD,
            rows_VD,
            precision=lax.Precision.HIGHEST,  # the default rounds float32 to bfloat16 on TPU: ties that are none
            preferred_element_type=jnp.float32,
        )
        fresh = start + jnp.arange(tile, dtype=jnp.int32) >= first
        keep = lax.dynamic_slice_in_dim(allowed, start, tile) & fresh
        offset = jnp.where(keep, lax.dynamic_slice_in_dim(addend, start, tile), -jnp.inf)
        offset = offset.reshape(groups, group).T.reshape(tile)
        scores += lax.optimization_barrier(offset)  # or XLA computes it again for each query
        # The comparison also turns NaN into -inf; and -0.0, which sorts below 0.0, into the 0.0 it ties with.
        scores = jnp.where(scores > -jnp.inf, jnp.where(scores == 0, 0.0, scores), -jnp.inf)
        scores = scores.reshape(queries, group, groups)  # not before: XLA would not vectorise the lines above
        if exclude is None:
            return scores
        local = exclude - start
        local = jnp.where((exclude >= 0) & (local >= 0) & (local < tile), local, tile)  # tile: out of bounds, dropped
        row = jnp.where(local < tile, local % group, group)
        return scores.at[jnp.arange(queries)[:, None], row, local // group].set(-jnp.inf, mode="drop")

    if direct:
        scores_Qk, ids = lax.top_k(tile_scores(jnp.int32(0), jnp.int32(0))[:, 0], min(k, items))
        missing = ((0, 0), (0, k - scores_Qk.shape[1]))
        scores_Qk = jnp.pad(scores_Qk, missing, constant_values=-jnp.inf)
        return scores_Qk, jnp.where(scores_Qk > -jnp.inf, jnp.pad(ids, missing), -1)

    def step(carry, index):
        best_Qk, keys_Qk, kept_QGk = carry
        scores = tile_scores(jnp.minimum(index * tile, last_start), index * tile)
        keys = jnp.broadcast_to(index * groups + jnp.arange(groups, dtype=jnp.int32), (queries, groups))
        # Equal maxima: lax.top_k takes the lower index, that is, the carried (earlier) group and then the smaller key.
        best_Qk, pick = lax.top_k(jnp.concatenate([best_Qk, scores.max(1)], 1), k)
        keys_Qk = jnp.take_along_axis(jnp.concatenate([keys_Qk, keys], 1), pick, 1)
        old = jnp.take_along_axis(kept_QGk, jnp.minimum(pick, k - 1)[:, None], 2)
        new = jnp.take_along_axis(scores, jnp.maximum(pick - k, 0)[:, None], 2)
        return (best_Qk, keys_Qk, jnp.where((pick < k)[:, None], old, new)), None

    empty = (
        jnp.full((queries, k), -jnp.inf),
        jnp.zeros((queries, k), jnp.int32),
        jnp.full((queries, group, k), -jnp.inf),
    )
    (_, keys_Qk, kept_QGk), _ = lax.scan(step, empty, jnp.arange(tiles, dtype=jnp.int32))

    order = jnp.argsort(keys_Qk, 1)  # back to ascending ids, so that the last top_k resolves ties by id
    keys_Qk = jnp.take_along_axis(keys_Qk, order, 1)
    kept_QkG = jnp.take_along_axis(kept_QGk, order[:, None], 2).swapaxes(1, 2)
    scores_Qk, pick = lax.top_k(kept_QkG.reshape(queries, k * group), k)
    ids = jnp.take_along_axis(keys_Qk, pick // group, 1) * group + pick % group
    ids = jnp.where(ids < (tiles - 1) * tile, ids, ids - (tiles - 1) * tile + last_start)
    return scores_Qk, jnp.where(scores_Qk > -jnp.inf, ids, -1)


def _check(hidden, table, k, bias, exclude, candidates, tile, group) -> None:
    for name, value in (("k", k), ("tile", tile), ("group", group)):
        if value < 1:
            raise ValueError(f"{name} is {value}: it must be at least 1")
    if hidden.ndim != 2 or table.ndim != 2 or hidden.shape[1] != table.shape[1] or not table.shape[0]:
        raise ValueError(f"hidden {hidden.shape} and table {table.shape} must be [Q, D] and [V, D] with V >= 1")
    for name, array in (("bias", bias), ("candidates", candidates)):
        if array is not None and array.shape != table.shape[:1]:
            raise ValueError(f"{name} is {array.shape}: it must be [V] = {table.shape[:1]}")
    if exclude is not None and (exclude.ndim != 2 or exclude.shape[0] != hidden.shape[0]):
        raise ValueError(f"exclude is {exclude.shape}: it must be [Q, S] with Q = {hidden.shape[0]}")


top_k_jit = jax.jit(top_k, static_argnames=("k", "tile", "group"))
