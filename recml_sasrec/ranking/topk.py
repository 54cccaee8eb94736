"""Exact top-k of the whole catalogue, streamed over tiles of it: never a [queries, items] array.

The order is total: a higher score first and, between equal scores, the smaller item id.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

TILE = 4_096  # items of a tile: [TILE, 512] float32 scores are 8 MiB, which a CPU's caches hold
GROUP = 32  # consecutive items whose maximum stands for them in the selection
SWEEP = 256  # tiles between two selections
EXCLUDED = 8  # items a query drops from a tile in one scatter
RESCORED = 16  # queries rescored at a time


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
        tile: items scored at a time; static. Memory is about ``Q * tile * (1 + SWEEP / group)`` floats.
        group: items of a group (see below); static.

    Returns:
        scores float32 [Q, k] and ids int32 [Q, k], by score descending, then id ascending. Where a query has fewer than
        ``k`` candidates the rest is score -inf and id -1. Items whose score is NaN or -inf are never recommended.

    Raises:
        ValueError: ``k``, ``tile`` or ``group`` is below 1, or the shapes disagree.

    A catalogue of one tile, or of no more than k groups, is scored and sorted at once. Of a larger one, a tile's scores
    are reduced to the maxima of groups of consecutive items; the k best groups by (maximum descending, position
    ascending) are kept, and at the end only their items are scored again and sorted. Nothing is lost: suppose item x is
    among the k first and its group g was dropped. Then k groups precede g. The best item of each of them scores more
    than max(g) >= score(x), or as much as max(g) and lies in an earlier group, hence has a smaller id than x. Either
    way it precedes x, so k items precede x, which contradicts that x is among the k first. (The two scorings of an item
    may differ in the last bit, so "exactly" holds up to that bit at the edge of the list.)
    """
    _check(hidden_QD, table_VD, k, bias, exclude, candidates, tile, group)
    items = table_VD.shape[0]
    addend = None
    if bias is not None or candidates is not None:
        addend = jnp.zeros(items, jnp.float32) if bias is None else bias.astype(jnp.float32)
        addend = addend if candidates is None else jnp.where(candidates, addend, -jnp.inf)
    if items <= max(tile, k * group):
        return _sort_all(hidden_QD, table_VD, k, addend, exclude)
    tiles = -(-items // tile)
    groups = -(-items // (tiles * group))  # of a tile; tiles are as equal as can be, so that little is scored twice
    tile = groups * group
    if exclude is not None:
        exclude = jnp.sort(exclude, 1)
    keys_Qk = _best_groups(hidden_QD, table_VD, k, addend, exclude, tile, group)

    def rescore(query):
        """A query's top k among the items of its groups, in order of id so that top_k resolves ties by it."""
        hidden_D, keys_k, excluded_S = query
        number, place = jnp.divmod(keys_k, groups)
        start_k = jnp.minimum(number * tile, items - tile)
        ids = start_k[:, None] + place[:, None] * group + jnp.arange(group, dtype=jnp.int32)
        scores = jnp.einsum("kgd,d->kg", table_VD[ids], hidden_D, **EXACT)
        scores = _clean(scores if addend is None else scores + addend[ids])
        scores = jnp.where(ids >= (number * tile)[:, None], scores, -jnp.inf)  # those in the tile before are its own
        if excluded_S is not None:
            at, number = jnp.maximum(excluded_S, 0), jnp.maximum(excluded_S, 0) // tile
            local = at - jnp.minimum(number * tile, items - tile)
            key = number * groups + local // group
            row = jnp.minimum(jnp.searchsorted(keys_k, key), k - 1)
            row = jnp.where((excluded_S >= 0) & (excluded_S < items) & (keys_k[row] == key), row, k)
            scores = scores.at[row, local % group].set(-jnp.inf, mode="drop")
        best, pick = lax.top_k(scores.reshape(-1), k)
        return best, jnp.where(best > -jnp.inf, ids.reshape(-1)[pick], -1)

    return lax.map(rescore, (hidden_QD, keys_Qk, exclude), batch_size=RESCORED)


def top_k_listed(
    hidden_QD: Array, table_VD: Array, listed: Array, k: int, *, bias: Array | None = None
) -> tuple[Array, Array]:
    """The ``k`` best of a list of items for each query, in ``top_k``'s order; memory is that of ``listed``.

    Args:
        listed: int32 [Q, A], the items a query may get, ascending, padded with -1 at the end.
        hidden_QD, table_VD, k, bias: as for ``top_k``.

    Returns:
        scores float32 [Q, k] and ids int32 [Q, k], where the list ends -inf and -1.
    """
    most = min(k, listed.shape[1])
    missing = (0, k - most)

    def rank(query):
        hidden_D, listed_A = query

        def score(item):
            product = jnp.einsum("d,d->", table_VD[item], hidden_D, **EXACT)
            return product if bias is None else product + bias[item].astype(jnp.float32)

        scores_A = lax.map(score, jnp.maximum(listed_A, 0), batch_size=TILE)
        best, pick = lax.top_k(jnp.where(listed_A >= 0, _clean(scores_A), -jnp.inf), most)
        ids = jnp.where(best > -jnp.inf, listed_A[pick], -1)
        return jnp.pad(best, missing, constant_values=-jnp.inf), jnp.pad(ids, missing, constant_values=-1)

    return lax.map(rank, (hidden_QD, listed))


# The default rounds float32 to bfloat16 on TPU: ties that are none.
EXACT = {"precision": lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}


def _clean(scores: Array) -> Array:
    """NaN becomes -inf; and -0.0, which sorts below 0.0, the 0.0 it ties with."""
    return jnp.where(scores > -jnp.inf, jnp.where(scores == 0, 0.0, scores), -jnp.inf)


def _sort_all(hidden_QD, table_VD, k: int, addend, exclude) -> tuple[Array, Array]:
    """``top_k`` by way of all scores, [Q, V]."""
    queries, items = hidden_QD.shape[0], table_VD.shape[0]
    scores = jnp.einsum("qd,vd->qv", hidden_QD, table_VD, **EXACT)
    scores = _clean(scores if addend is None else scores + addend)
    if exclude is not None:
        at = jnp.where(exclude >= 0, exclude, items)  # out of bounds: dropped
        scores = scores.at[jnp.arange(queries)[:, None], at].set(-jnp.inf, mode="drop")
    best, ids = lax.top_k(scores, min(k, items))
    missing = ((0, 0), (0, k - best.shape[1]))
    best = jnp.pad(best, missing, constant_values=-jnp.inf)
    return best, jnp.where(best > -jnp.inf, jnp.pad(ids, missing), -1)


def _best_groups(hidden_QD, table_VD, k: int, addend, exclude, tile: int, group: int) -> Array:
    """int32 [Q, k], ascending: the groups with the highest maxima; group g of tile t is number t * tile / group + g.

    The last tile reaches back instead of past the table's end, and so do further ones that fill the last sweep; items
    that an earlier tile has are left to it.
    """
    queries, items = hidden_QD.shape[0], table_VD.shape[0]
    groups, tiles = tile // group, -(-items // tile)
    sweeps = -(-tiles // SWEEP)
    tiles = -(-tiles // sweeps)  # of a sweep
    hidden_DQ = hidden_QD.T  # items-major scores: a transposed wide operand halves XLA's matmul rate on CPU

    def maxima(number: Array) -> Array:
        """[groups, Q] of a tile."""
        start = jnp.minimum(number * tile, items - tile)
        rows_VD = lax.dynamic_slice_in_dim(table_VD, start, tile)
        scores = jnp.matmul(rows_VD, hidden_DQ, **EXACT)
        fresh = start + jnp.arange(tile, dtype=jnp.int32) >= number * tile
        offset = jnp.where(fresh, 0 if addend is None else lax.dynamic_slice_in_dim(addend, start, tile), -jnp.inf)
        scores = scores + offset[:, None]
        if exclude is not None:
            scores = _drop(scores, exclude, start, number * tile)
        return jnp.where(scores > -jnp.inf, scores, -jnp.inf).reshape(groups, group, queries).max(1)

    def sweep(carry, first):
        best_Qk, keys_Qk = carry
        maxima_Q = lax.map(maxima, first + jnp.arange(tiles, dtype=jnp.int32)).reshape(-1, queries).T
        maxima_Q = jnp.where(maxima_Q == 0, 0.0, maxima_Q)
        # Equal maxima: lax.top_k takes the lower index, that is, the carried (earlier) group and then the smaller key.
        best_Qk, pick = lax.top_k(jnp.concatenate([best_Qk, maxima_Q], 1), k)
        old_Qk = jnp.take_along_axis(keys_Qk, jnp.minimum(pick, k - 1), 1)
        return (best_Qk, jnp.where(pick < k, old_Qk, first * groups + pick - k)), None

    none = jnp.full((queries, k), sweeps * tiles * groups, jnp.int32)  # a group past the end: all its items are others'
    empty = jnp.full((queries, k), -jnp.inf), none
    (_, keys_Qk), _ = lax.scan(sweep, empty, jnp.arange(sweeps, dtype=jnp.int32) * tiles)
    return jnp.sort(keys_Qk, 1)


def _drop(scores: Array, exclude: Array, start: Array, first: Array) -> Array:
    """A tile's scores [tile, Q] with -inf at the items that ``exclude`` [Q, S], ascending, has from ``first`` on."""
    tile, queries = scores.shape
    low, high = (jax.vmap(lambda row, at=at: jnp.searchsorted(row, at))(exclude) for at in (first, start + tile))

    def drop(state):
        done, scores = state
        place = (low + done)[:, None] + jnp.arange(EXCLUDED)
        item = jnp.take_along_axis(exclude, jnp.minimum(place, exclude.shape[1] - 1), 1)
        row = jnp.where(place < high[:, None], item - start, tile)  # tile: out of bounds, dropped
        return done + EXCLUDED, scores.at[row, jnp.arange(queries)[:, None]].set(-jnp.inf, mode="drop")

    return lax.while_loop(lambda state: jnp.any(low + state[0] < high), drop, (jnp.int32(0), scores))[1]


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
top_k_listed_jit = jax.jit(top_k_listed, static_argnames="k")
