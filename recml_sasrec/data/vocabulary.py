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
        counted = pc.value_counts(ids)
        values, counts = counted.field(0), counted.field(1).to_numpy(zero_copy_only=False)
        self._pending.append((values, counts))
        self._pending_size += len(values)
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
        parts = ([self._merged] if self._merged else []) + self._pending
        if not parts:
            return
        values = pa.chunked_array([part[0] for part in parts]).combine_chunks()
        counts = np.concatenate([part[1] for part in parts])
        if pa.types.is_integer(values.type):
            numbers = values.to_numpy(zero_copy_only=False)
            unique, inverse = np.unique(numbers, return_inverse=True)
            merged = pa.array(unique)
        else:
            encoded = values.dictionary_encode()
            order = pc.sort_indices(encoded.dictionary).to_numpy()
            rank = np.empty(len(order), np.int64)
            rank[order] = np.arange(len(order))
            inverse = rank[encoded.indices.to_numpy(zero_copy_only=False)]
            merged = encoded.dictionary.take(pa.array(order))
        # float64 weights are exact below 2**53 events of one id
        sums = np.bincount(inverse, weights=counts, minlength=len(merged)).astype(np.int64)
        self._merged, self._pending, self._pending_size = (merged, sums), [], 0


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
        rank = np.minimum(np.searchsorted(self._sorted, numbers), len(self._sorted) - 1)
        return np.where(self._sorted[rank] == numbers, rank, -1).astype(np.int32)


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
