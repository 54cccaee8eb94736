"""Raw ids to dense ids: the dense id of a raw id is its rank, numeric for integers and lexicographic for strings."""

import hashlib

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recml_sasrec.data.events import DataError

_TABLE_LIMIT = 1 << 26  # entries of a direct lookup table: 256 MiB
_TABLE_SPARSITY = 64  # or this many entries per id
_COUNTED = 1 << 24  # smaller integers are counted in a table, whose pages take memory only where they are used


class Collector:
    """The distinct ids of a stream with their counts, in memory proportional to their number, whatever the rows."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._type: pa.DataType | None = None
        self._counts = np.zeros(_COUNTED, np.int64)
        self._counted = 0  # of the table's entries, those that may be in use
        self._merged: tuple[pa.Array, np.ndarray] | None = None
        self._pending: list[tuple[pa.Array, np.ndarray]] = []
        self._pending_size = 0

    def add(self, ids: pa.Array) -> None:
        """Counts a batch of ids; DataError when integers and strings are mixed."""
        if self._type not in (None, ids.type):
            raise DataError(
                f"the {self._name} ids are {self._type} in one place and {ids.type} in another; "
                "convert them to one type"
            )
        self._type = ids.type
        if pa.types.is_integer(ids.type):
            numbers = ids.to_numpy(zero_copy_only=False)
            small = numbers < _COUNTED
            few = numbers if small.all() else numbers[small]
            np.add.at(self._counts, few, 1)
            self._counted = max(self._counted, int(few.max(initial=-1)) + 1)
            if small.all():
                return
            ids = pa.array(numbers[~small])
            self._pending.append((ids, np.zeros(0, np.int64)))  # sorting counts them
        else:
            counted = pc.value_counts(ids)
            ids = counted.field(0)
            self._pending.append((ids, counted.field(1).to_numpy(zero_copy_only=False)))
        self._pending_size += len(ids)
        # Merging only when as much is pending as is merged keeps the total work within a constant of one merge.
        if self._pending_size > max(1 << 20, 0 if self._merged is None else len(self._merged[0])):
            self._merge()

    def finish(self) -> tuple[pa.Array, np.ndarray]:
        """(distinct ids in the order of their rank, int64 counts)."""
        self._merge()
        small = np.flatnonzero(self._counts[: self._counted])
        if self._merged is None:
            return pa.array(small), self._counts[small]
        ids, counts = self._merged
        if not len(small):
            return ids, counts
        return pa.array(np.concatenate([small, ids.to_numpy()])), np.concatenate([self._counts[small], counts])

    def _merge(self) -> None:
        if not self._pending:
            return
        if pa.types.is_integer(self._pending[0][0].type):
            self._merged = self._with_integers(np.concatenate([ids.to_numpy() for ids, _ in self._pending]))
        else:
            parts = ([self._merged] if self._merged else []) + self._pending
            encoded = pa.chunked_array([part[0] for part in parts]).combine_chunks().dictionary_encode()
            order = pc.sort_indices(encoded.dictionary).to_numpy()
            rank = np.empty(len(order), np.int64)
            rank[order] = np.arange(len(order))
            inverse = rank[encoded.indices.to_numpy(zero_copy_only=False)]
            # float64 weights are exact below 2**53 events of one id
            sums = np.bincount(inverse, weights=np.concatenate([part[1] for part in parts]), minlength=len(order))
            self._merged = (encoded.dictionary.take(pa.array(order)), sums.astype(np.int64))
        self._pending, self._pending_size = [], 0

    def _with_integers(self, numbers: np.ndarray) -> tuple[pa.Array, np.ndarray]:
        """The merged ids and their counts with some occurrences more."""
        numbers.sort()
        starts = np.flatnonzero(np.r_[True, numbers[1:] != numbers[:-1]])
        unique, counts = numbers[starts], np.diff(np.r_[starts, len(numbers)])
        if self._merged is None:
            return pa.array(unique), counts
        known, sums = self._merged[0].to_numpy(), self._merged[1]
        place = np.searchsorted(known, unique)
        old = known[np.minimum(place, len(known) - 1)] == unique
        sums[place[old]] += counts[old]
        return pa.array(np.insert(known, place[~old], unique[~old])), np.insert(sums, place[~old], counts[~old])


class Encoder:
    """Raw ids -> int32 dense ids."""

    def __init__(self, ids: pa.Array) -> None:
        self._ids = ids
        self._table: np.ndarray | None = None
        self._sorted: np.ndarray | None = None
        if pa.types.is_integer(ids.type):
            self._sorted = ids.to_numpy(zero_copy_only=False)
            self._low, high = (int(self._sorted[0]), int(self._sorted[-1])) if len(ids) else (0, -1)
            span = high - self._low + 1
            if span <= min(_TABLE_LIMIT, max(_TABLE_SPARSITY * len(ids), 1 << 16)):
                self._table = np.full(max(span, 1), -1, np.int32)
                self._table[self._sorted - self._low] = np.arange(len(ids), dtype=np.int32)

    def __call__(self, ids: pa.Array) -> np.ndarray:
        """int32 [n] dense ids; -1 for an unknown one (or one of the other type)."""
        if ids.type != self._ids.type:
            return np.full(len(ids), -1, np.int32)
        if self._sorted is None:
            encoded = ids.dictionary_encode()
            known = pc.fill_null(pc.index_in(encoded.dictionary, value_set=self._ids), -1).to_numpy()
            return known.astype(np.int32)[encoded.indices.to_numpy(zero_copy_only=False)]
        numbers = ids.to_numpy(zero_copy_only=False)
        if self._table is not None:
            index = numbers - self._low
            inside = (index >= 0) & (index < len(self._table))
            if inside.all():
                return self._table[index]
            return np.where(inside, self._table[np.where(inside, index, 0)], np.int32(-1))
        if not len(self._sorted):
            return np.full(len(ids), -1, np.int32)
        order = np.argsort(numbers)  # in order the bisection of millions of ids finds them in the cache
        asked = numbers[order]
        rank = np.minimum(np.searchsorted(self._sorted, asked), len(self._sorted) - 1)
        result = np.empty(len(numbers), np.int32)
        result[order] = np.where(self._sorted[rank] == asked, rank, -1)
        return result


def check_same_type(base: pa.Array, ids: pa.Array, run: str) -> None:
    """Raises:
    DataError: the raw item ids of another run and those of the data are of different types.
    """
    if base.type != ids.type:
        theirs, ours = ("integers" if pa.types.is_integer(x.type) else "text" for x in (base, ids))
        raise DataError(
            f"the item ids of config.init.from_run={run} are {theirs} but those of the data are {ours}, so that no "
            f"item is the same; convert the data's to {theirs}"
        )


def fingerprint(ids: pa.Array) -> str:
    """A hash of the ids in order: equal for equal vocabularies, whatever file they came from."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"{'int64' if pa.types.is_integer(ids.type) else 'string'} {len(ids)}\n".encode())
    for start in range(0, len(ids), 1 << 20):
        part = ids.slice(start, 1 << 20)
        if pa.types.is_integer(ids.type):
            digest.update(part.to_numpy(zero_copy_only=False).astype("<i8").tobytes())
        else:
            digest.update(pc.binary_length(part).to_numpy(zero_copy_only=False).astype("<i8").tobytes())
            digest.update("".join(part.to_pylist()).encode())
    return digest.hexdigest()
