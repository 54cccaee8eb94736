"""Queries: the histories of the users to rank for, their targets and the items they have seen."""

from collections.abc import Iterator

import numpy as np

from recml_sasrec.config import DataConfig
from recml_sasrec.data.batch import QueryBatch
from recml_sasrec.data.packing import make_pattern, place
from recml_sasrec.data.split import Split
from recml_sasrec.data.store import Store
from recml_sasrec.data.windows import lay_out, ranges


def target_ranges(split: Split, which: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(first target, end of targets, end of history) of every user, int64 [U] event indices."""
    if which == "validation":
        return split.validation_start, split.validation_end, split.validation_history_end
    if which == "test":
        return split.test_start, split.test_end, split.test_history_end
    raise ValueError(f"which must be 'validation' or 'test', not {which!r}")


def evaluated_users(split: Split, which: str) -> np.ndarray:
    """int64 [Q]: the users with at least one target, in order."""
    start, end, _ = target_ranges(split, which)
    return np.flatnonzero(end > start)


def targets_of(store: Store, split: Split, which: str, users: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(values int32, offsets int64 [len(users)+1]): the targets of each user with repeats, in time order."""
    start, end, _ = (bound[users] for bound in target_ranges(split, which))
    return store.items[ranges(start, end - start)], _offsets(end - start)


def seen_of(store: Store, split: Split, which: str, users: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(values int32, offsets int64 [len(users)+1]): the different items of each user's history, ascending."""
    end = target_ranges(split, which)[2][users]
    sizes = end - split.train_start[users]
    owner = np.repeat(np.arange(len(users)), sizes)
    pairs = np.sort(owner * store.num_items + store.items[ranges(split.train_start[users], sizes)])
    pairs = pairs[np.diff(pairs, prepend=-1) > 0]  # np.unique hashes, which takes several times as long
    owner, items = np.divmod(pairs, store.num_items)
    return items.astype(np.int32), _offsets(np.bincount(owner, minlength=len(users)))


def query_batches(store: Store, split: Split, which: str, data: DataConfig, batch_users: int) -> Iterator[QueryBatch]:
    """The last N events of the history of every evaluated user, several to a row where ``data.pack``.

    All batches have the same shape and every user comes once, in an order of its own: rows are mixed so that batches
    hold about as many queries as rows times the mean, at most ``batch_users`` (or one row's).
    """
    users = evaluated_users(split, which)
    if not users.size:
        return
    end = target_ranges(split, which)[2][users]
    lengths = np.minimum(end - split.train_start[users], data.length)
    order = np.argsort(lengths, kind="stable")  # users by rank of length
    pattern = make_pattern(lengths, data.length, data.pack)
    row_order = np.random.default_rng(0).permutation(pattern.num_rows)
    sizes = np.diff(pattern.row_offsets)[row_order]
    queries = max(batch_users, int(sizes.max()))
    rows = max(1, min(pattern.num_rows, int(queries / sizes.mean())))
    if rows > 8:  # whole sublanes, and divisible among the usual numbers of devices
        rows = -(-rows // 8) * 8
    first = 0
    while first < len(sizes):
        # As many rows as fit both limits, the shape is padded to them.
        fit = int(np.searchsorted(np.cumsum(sizes[first : first + rows]), queries, side="right"))
        part = place(pattern, row_order[first : first + fit])
        first += fit
        index = order[part.rank]
        layout = lay_out(lengths[index], part, rows, data)
        items = np.zeros(rows * data.length, np.int32)
        items[layout.segment_ids.ravel() > 0] = store.items[ranges(end[index] - lengths[index], lengths[index])]
        query_rows, columns = np.zeros((2, queries), np.int32)
        query_users = np.full(queries, -1, np.int64)
        n = len(index)
        query_rows[:n], columns[:n] = np.divmod(layout.last, data.length)
        query_users[:n] = users[index]
        yield QueryBatch(
            items.reshape(rows, -1), layout.positions, layout.segment_ids, query_rows, columns, query_users
        )


def _offsets(sizes: np.ndarray) -> np.ndarray:
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets
