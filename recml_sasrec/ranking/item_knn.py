"""ItemKNN as the Yambda benchmark has it (arXiv 2505.22238): cosines in the space of users, never item by item."""

import numpy as np
import scipy.sparse as sp

from recml_sasrec.data.store import user_chunks
from recml_sasrec.data.windows import ranges

# Hours to choose from on validation, by what the data set's users did: the benchmark's own grids.
HOURS = {
    "listens": (0.0, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.5, 1.0, 2.0),
    "likes": (0.0, 0.001, 0.25, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0),
}
NEGLIGIBLE = 1e-9  # an item's weight in a profile, from which on the benchmark drops it
BLOCK = 1 << 22  # events counted at a time
SCORES = 1 << 26  # scores held at a time (float32)
TILE = 1 << 13  # items scored at a time, so that their scores are still in the cache when they are transposed


class ItemKNN:
    """Items as vectors of the users' training counts, [V, U]; a user as the decayed sum of its history's item vectors.

    With F [U, V] the counts and w [V] the decayed weights of a user's history, its profile is p = F w, and an item's
    score is the cosine of its column of F with p, but for p's length, which ranks nothing. Memory is that of F's
    nonzeros (12 bytes for each user and item that met) and of ``SCORES``.
    """

    def __init__(self, store, split) -> None:
        counts = _counts(store, split).T.tocsr()  # [V, U]
        length = np.sqrt(np.asarray(counts.multiply(counts).sum(1)).ravel())
        self.length = np.where(length > 0, length, 1.0)  # items without a training event: a zero vector, score 0
        counts.data /= np.repeat(self.length, np.diff(counts.indptr))
        self.items = counts
        self.tiles = [_rows(counts, first, first + TILE) for first in range(0, store.num_items, TILE)]
        self.store, self.split = store, split

    def lists(
        self,
        users: np.ndarray,
        history_end: np.ndarray,
        hours: float,
        k: int,
        candidates: np.ndarray | None = None,
        seen: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> np.ndarray:
        """int32 [Q, k]: each user's items by float32 score descending, then id ascending; -1 where there are fewer.

        Args:
            users: int64 [Q].
            history_end: int64 [U], the end of every user's history, which begins with its training events.
            hours: an event weighs ``0.9 ** (age / hours)``, its age in hours at the user's last one; 0: only events of
                that very second count. Where the store has no times every event weighs 1.
            k: length of a list.
            candidates: bool [V], the items that may be recommended; None allows all.
            seen: (values int [R], offsets int [Q + 1]), items to leave out per user.
        """
        lists = np.full((len(users), k), -1, np.int32)
        step = max(1, SCORES // self.store.num_items)
        for first in range(0, len(users), step):
            some = users[first : first + step]
            weights = self._weights(self.split.train_start[some], history_end[some], hours)
            profiles = (weights.multiply(self.length[None]).tocsr() @ self.items).toarray()
            profiles = np.ascontiguousarray(profiles.T)
            # In float32 items with parallel vectors tie, which the order of float64 sums would tell apart.
            scores_QV = np.empty((len(some), self.store.num_items), np.float32)
            for number, tile in enumerate(self.tiles):
                scores_QV[:, number * TILE : (number + 1) * TILE] = (tile @ profiles).T
            for number, scores in enumerate(scores_QV):
                if candidates is not None:
                    scores[~candidates] = -np.inf
                if seen is not None:
                    values, offsets = seen
                    scores[values[offsets[first + number] : offsets[first + number + 1]]] = -np.inf
                best = _best(scores, k)
                lists[first + number, : len(best)] = best
        return lists

    def _weights(self, start: np.ndarray, end: np.ndarray, hours: float) -> sp.csr_matrix:
        """[Q, V]: the decayed events of each history, summed by item."""
        sizes = end - start
        events = ranges(start, sizes)
        owner = np.repeat(np.arange(len(start)), sizes)
        weight = np.ones(len(events))
        if self.store.has_time:
            last = self.store.timestamps[np.maximum(end, 1) - 1]  # histories are in order of time
            age = (last[owner] - self.store.timestamps[events]) / 3600.0
            weight = 0.9 ** (age / hours) if hours else (age == 0).astype(np.float64)
        shape = (len(start), self.store.num_items)
        weights = sp.csr_matrix((weight, (owner, self.store.items[events])), shape)  # sums repeats
        weights.data[weights.data <= NEGLIGIBLE] = 0
        weights.eliminate_zeros()
        return weights


def _counts(store, split) -> sp.csr_matrix:
    """float64 [U, V]: training events of each user and item, counted in chunks of users."""
    pairs: list[np.ndarray] = []
    counts: list[np.ndarray] = []
    sizes = np.zeros(store.num_users + 1, np.int64)
    for first, last in user_chunks(store.offsets, BLOCK):
        start, length = split.train_start[first:last], split.train_end[first:last] - split.train_start[first:last]
        owner = np.repeat(np.arange(last - first), length)
        keys = owner * store.num_items + store.items[ranges(start, length)]
        distinct, count = np.unique(keys, return_counts=True)
        owner, item = np.divmod(distinct, store.num_items)
        pairs.append(item.astype(np.int32))
        counts.append(count.astype(np.float64))
        sizes[first + 1 : last + 1] = np.bincount(owner, minlength=last - first)
    arrays = (np.concatenate(counts), np.concatenate(pairs), np.cumsum(sizes))
    return sp.csr_matrix(arrays, (store.num_users, store.num_items))


def _rows(matrix: sp.csr_matrix, first: int, last: int) -> sp.csr_matrix:
    """Some rows of a matrix, sharing its memory."""
    pointers = matrix.indptr[first : last + 1]
    part = slice(pointers[0], pointers[-1])
    arrays = (matrix.data[part], matrix.indices[part], pointers - pointers[0])
    return sp.csr_matrix(arrays, (len(pointers) - 1, matrix.shape[1]), copy=False)


def _best(scores: np.ndarray, k: int) -> np.ndarray:
    """The k highest of ``scores`` [V] above -inf, in order; ties by the smaller index."""
    k = min(k, len(scores))
    edge = np.partition(scores, len(scores) - k)[len(scores) - k]
    above = np.flatnonzero(scores > edge)
    level = np.flatnonzero(scores == edge)[: k - len(above)] if edge > -np.inf else above[:0]
    ids = np.concatenate([above, level])
    return ids[np.lexsort((ids, -scores[ids]))]
