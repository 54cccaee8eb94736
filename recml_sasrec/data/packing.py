"""Packing: how segments of known lengths share rows of N positions. The pattern depends on the lengths only."""

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True)
class Pattern:
    """Rows of slots; a slot takes any segment of its length."""

    row_offsets: np.ndarray  # int64 [R+1], row r owns slots row_offsets[r]:row_offsets[r+1]
    slot_ranks: np.ndarray  # int [S], rank of the slot among all slots in order of their length

    @property
    def num_rows(self) -> int:
        return len(self.row_offsets) - 1


def best_fit(counts: np.ndarray, capacity: int) -> list[tuple[tuple[int, ...], int]]:
    """Best-fit decreasing on a histogram: ``counts[length]`` segments into rows of ``capacity`` positions.

    Works on groups of equal rows, so its time depends on the number of different lengths, not of segments.

    Returns:
        (lengths of a row's slots, number of such rows) pairs.
    """
    groups: dict[int, list[tuple[tuple[int, ...], int]]] = defaultdict(list)  # free positions -> groups of rows
    for length in range(capacity, 0, -1):
        left = int(counts[length]) if length < len(counts) else 0
        for free in range(length, capacity + 1):
            if left == 0:
                break
            # Rows without a segment are the last resort, and there is no end of them.
            waiting: list[tuple[tuple[int, ...], int]]
            waiting = groups.pop(free, []) if free < capacity else [((), left)]
            while waiting and left:
                pattern, rows = waiting.pop()
                fit = free // length  # a row stays the best fit until it can take no more of this length
                full = min(rows, left // fit)
                part = left % fit if full < rows else 0
                left -= full * fit + part
                for slots, number in ((fit, full), (part, min(part, 1)), (0, rows - full - min(part, 1))):
                    if number and (pattern or slots):
                        groups[free - slots * length].append((pattern + (length,) * slots, number))
            if waiting and free < capacity:
                groups[free].extend(waiting)
    return [group for free in sorted(groups) for group in groups[free]]


def make_pattern(lengths: np.ndarray, capacity: int, pack: bool) -> Pattern:
    """The rows that hold one slot for each of ``lengths`` (each in 1..capacity); without packing one slot a row."""
    counts = np.bincount(lengths, minlength=capacity + 1)
    groups: list[tuple[tuple[int, ...], int]]
    if pack:
        groups = best_fit(counts, capacity)
    else:
        groups = [((int(length),), int(counts[length])) for length in np.flatnonzero(counts)]
    total = int(counts.sum())
    kind = np.int32 if total < 2**31 else np.int64
    slot_lengths = np.concatenate(
        [np.tile(np.array(pattern, np.int32), rows) for pattern, rows in groups] or [np.zeros(0, np.int32)]
    )
    row_sizes = np.repeat([len(pattern) for pattern, _ in groups], [rows for _, rows in groups])
    row_offsets = np.zeros(len(row_sizes) + 1, np.int64)
    np.cumsum(row_sizes, out=row_offsets[1:])
    ranks = np.empty(total, kind)
    ranks[np.argsort(slot_lengths, kind="stable")] = np.arange(total, dtype=kind)
    return Pattern(row_offsets, ranks)


class Placement(NamedTuple):
    """Segments of some rows, in order of row and column."""

    rank: np.ndarray  # int64 [n], rank of the segment in order of length
    row: np.ndarray  # int64 [n], index among the rows asked for
    number: np.ndarray  # int64 [n], 0, 1, ... inside its row


def place(pattern: Pattern, rows: np.ndarray) -> Placement:
    """The slots of ``rows`` (int64 [b], any order)."""
    first = pattern.row_offsets[rows]
    sizes = pattern.row_offsets[rows + 1] - first
    row = np.repeat(np.arange(len(rows)), sizes)
    number = np.arange(len(row)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return Placement(pattern.slot_ranks[np.repeat(first, sizes) + number].astype(np.int64), row, number)
