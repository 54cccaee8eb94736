"""Popularity: what a model has to beat. Counted on training events only."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

BLOCK = 1 << 24  # events read at a time
DECAY_HOURS = (0.0, 0.5, 1.0, 2.0, 3.0, 6.0, 12.0, 24.0)  # the Yambda benchmark's grid, to be chosen from on validation


def most_pop(store, split) -> np.ndarray:
    """int64 [V]: training events of each item."""
    counts = np.zeros(store.num_items, np.int64)
    for events in _training_events(split):
        counts += np.bincount(store.items[events.start : events.stop][events.mask], minlength=store.num_items)
    return counts


def decay_pop(store, split, hours: float) -> np.ndarray:
    """float64 [V]: sum over an item's training events of ``0.9 ** (age / hours)``, age in hours at the last of all.

    DecayPop of the Yambda benchmark (arXiv 2505.22238). ``hours = 0`` is MostPop, as there.

    Raises:
        ValueError: ``hours`` is negative, or the store has no times.
    """
    if hours < 0:
        raise ValueError(f"decay_hours is {hours}: it must be positive, or 0 for plain popularity")
    if hours == 0:
        return most_pop(store, split).astype(np.float64)
    if not store.has_time:
        raise ValueError("decay_pop needs timestamps, and this store's source has none")
    now = max((store.timestamps[e.start : e.stop][e.mask].max() for e in _training_events(split)), default=0)
    scores = np.zeros(store.num_items)
    for events in _training_events(split):
        age = (now - store.timestamps[events.start : events.stop][events.mask]) / 3600.0
        items = store.items[events.start : events.stop][events.mask]
        scores += np.bincount(items, 0.9 ** (age / hours), store.num_items)
    return scores


class _Events(NamedTuple):
    """A block of events."""

    start: int
    stop: int
    mask: np.ndarray  # bool [stop - start], those to train on


def _training_events(split, block: int = 0) -> Iterator[_Events]:
    """Blocks that cover the training ranges: memory is bounded by ``block``, not by the number of events."""
    block = block or BLOCK
    some = split.train_end > split.train_start
    starts, ends = np.asarray(split.train_start)[some], np.asarray(split.train_end)[some]
    if not len(starts):
        return
    for start in range(int(starts[0]), int(ends[-1]), block):
        stop = min(start + block, int(ends[-1]))
        # Ranges are disjoint and in order, so those that touch the block are consecutive.
        first, last = np.searchsorted(ends, start, "right"), np.searchsorted(starts, stop, "left")
        edges = np.zeros(stop - start + 1, np.int8)
        np.add.at(edges, np.maximum(starts[first:last], start) - start, np.int8(1))
        np.add.at(edges, np.minimum(ends[first:last], stop) - start, np.int8(-1))
        mask = np.cumsum(edges[:-1], dtype=np.int8).astype(bool)
        if mask.any():
            yield _Events(start, stop, mask)


def order_items(scores: np.ndarray, candidates: np.ndarray | None = None) -> np.ndarray:
    """int32 [C]: the candidates by score descending, then id ascending.

    In the scores' own dtype: counts and decayed sums are not exact in float32, where items would tie that do not.
    """
    order = np.argsort(-scores, kind="stable").astype(np.int32)
    return order if candidates is None else order[candidates[order]]


def top_of_order(
    order: np.ndarray,
    k: int,
    queries: int,
    num_items: int,
    seen: tuple[np.ndarray, np.ndarray] | None = None,
) -> np.ndarray:
    """int32 [queries, k]: for each query the first k of ``order`` it has not seen, -1 where there are fewer.

    Args:
        order: int32 [C], candidates best first (``order_items``).
        k: length of a list.
        queries: number of lists.
        num_items: V.
        seen: (values int [R], offsets int [queries + 1]), items to leave out per query; each at most once per query.
    """
    lists = np.full((queries, k), -1, np.int32)
    if seen is None:
        lists[:, : len(order)] = order[:k]
        return lists
    values, offsets = seen
    lengths = np.diff(offsets)
    depth = min(len(order), k + int(lengths.max(initial=0)))  # k items remain in the first k + seen
    rank_of = np.full(num_items, depth, np.int64)
    rank_of[order[:depth]] = np.arange(depth)
    free = np.ones((queries, depth + 1), bool)
    free[np.repeat(np.arange(queries), lengths), rank_of[values]] = False
    free = free[:, :depth]
    place = np.cumsum(free, 1, dtype=np.int32) - 1
    query, rank = np.nonzero(free & (place < k))
    lists[query, place[query, rank]] = order[rank]
    return lists


def random_lists(
    seed: int,
    users: np.ndarray,
    k: int,
    num_items: int,
    candidates: np.ndarray | None = None,
    seen: tuple[np.ndarray, np.ndarray] | None = None,
) -> np.ndarray:
    """int32 [Q, k]: for each user k candidates it has not seen, uniformly; -1 where there are fewer.

    A user's list depends on the seed and the user alone. ``candidates`` is int [C], the items that may be recommended
    (None allows all); ``seen`` is as in ``top_of_order``.
    """
    lists = np.full((len(users), k), -1, np.int32)
    total = num_items if candidates is None else len(candidates)
    for number, user in enumerate(users):
        left_out = () if seen is None else seen[0][seen[1][number] : seen[1][number + 1]]
        size = min(total, k + len(left_out))  # k items remain when the seen ones are dropped
        drawn = np.random.default_rng([seed, int(user)]).choice(total, size, replace=False)
        drawn = drawn if candidates is None else candidates[drawn]
        if len(left_out):
            drawn = drawn[~np.isin(drawn, left_out)]
        lists[number, : len(drawn[:k])] = drawn[:k]
    return lists
