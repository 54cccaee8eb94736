"""Windows: which events are inputs, and at each position the set of the next L events as targets."""

import functools
from dataclasses import dataclass

import numpy as np

from recml_sasrec.config import DataConfig
from recml_sasrec.data.batch import Batch
from recml_sasrec.data.events import DataError
from recml_sasrec.data.packing import Placement
from recml_sasrec.data.split import Split
from recml_sasrec.data.store import Store


@dataclass(frozen=True)
class Windows:
    """W windows in order of length (then of user and time); inputs are events start : start + length."""

    starts: np.ndarray  # int64 [W], event index
    lengths: np.ndarray  # int32 [W], 1..N
    tails: np.ndarray  # int32 [W], 1..L: events after the inputs that may be targets


def make_windows(store: Store, split: Split, data: DataConfig) -> Windows:
    """The training windows of every user.

    A user with n train events has inputs 0..n-2, each with at least one later event. The last window ends at n-2,
    earlier ones end ``stride`` events sooner (0: N), until one starts at the first event or none is left;
    ``windows="last"`` keeps the last.

    Raises:
        DataError: no user has two train events, or a horizon is asked of a source without times.
    """
    if data.horizon > 0 and not store.has_time:
        raise DataError(
            f"config.data.horizon {data.horizon} needs times but the source has none; "
            "name its column of times or set config.data.horizon=0"
        )
    n = split.train_end - split.train_start
    users = np.flatnonzero(n >= 2)
    if not users.size:
        raise DataError(
            f"no user has 2 training events (the longest training history has {int(n.max(initial=0))}); "
            "give more events or move the split"
        )
    inputs = n[users] - 1
    stride = data.stride or data.length
    if data.windows == "last":
        counts = np.ones(len(users), np.int64)
    else:
        more = -((data.length - inputs) // stride)  # ceil((inputs - N) / stride)
        # With a stride over N the one before the last may end before the history begins.
        counts = 1 + np.clip(more, 0, (inputs - 1) // stride)
    owner = np.repeat(users, counts)
    back = np.repeat(np.cumsum(counts), counts) - 1 - np.arange(len(owner))  # 0 is a user's last window
    last = split.train_end[owner]
    ends = last - 1 - back * stride
    starts = np.maximum(ends - data.length, split.train_start[owner])
    lengths = (ends - starts).astype(np.int32)
    tails = np.minimum(last - ends, data.targets).astype(np.int32)
    order = np.argsort(lengths, kind="stable")
    return Windows(starts[order], lengths[order], tails[order])


def build_batch(store: Store, windows: Windows, placement: Placement, rows: int, data: DataConfig) -> Batch:
    """Fills ``rows`` rows with the windows that the placement's ranks name; no Python loop over rows or windows.

    Args:
        placement: segments in order of row and column; its ``rank`` indexes ``windows``.
    """
    lengths = windows.lengths[placement.rank].astype(np.int64)
    layout = lay_out(lengths, placement, rows, data)
    starts = np.zeros(len(layout.sizes), np.int64)
    starts[layout.real] = windows.starts[placement.rank]
    tails = np.full(len(layout.sizes), -1, np.int64)
    tails[layout.real] = windows.tails[placement.rank]
    # A slab is a window's inputs and the L events after them, -1 where the train range has ended. Padding has one too,
    # of -1 alone: then all that follows is the same for every position.
    slab_sizes = layout.sizes + data.targets
    slab_starts = np.cumsum(slab_sizes) - slab_sizes
    event = ranges(starts, slab_sizes)
    if (starts + slab_sizes).max() > store.num_events:
        np.minimum(event, store.num_events - 1, out=event)
    slab = store.items.take(event)
    known = np.where(tails < 0, 0, layout.sizes + tails)
    slab[ranges(slab_starts + known, slab_sizes - known)] = -1
    # targets_SL[s] are the entries s+1 .. s+L of the slabs; the last L rows of a slab belong to no position.
    targets_SL = _next_entries(slab, data.targets)
    _drop_repeats(slab, targets_SL)
    if data.horizon > 0:
        _drop_late(store.timestamps.take(event), targets_SL, data.horizon)

    source = ranges(slab_starts, layout.sizes)
    items = slab.take(source).reshape(rows, data.length)
    np.maximum(items, 0, out=items)
    targets = targets_SL.take(source, axis=0).reshape(rows, data.length, data.targets)
    if data.horizon > 0:  # the next event may be too late, and then so are all after it
        weights = (targets[:, :, 0] >= 0).astype(np.float32)
    else:
        weights = (layout.segment_ids > 0).astype(np.float32)
    return Batch(items, layout.positions, layout.segment_ids, targets, weights)


@dataclass(frozen=True)
class Layout:
    """Segments laid one after the other in rows, each row ended by a padding segment (which may be empty)."""

    sizes: np.ndarray  # int64 [n+B], of the segments and the paddings in order; their sum is B * N
    real: np.ndarray  # int64 [n], which of these are segments
    last: np.ndarray  # int64 [n], row * N + column of each segment's last position
    positions: np.ndarray  # int32 [B, N]
    segment_ids: np.ndarray  # int32 [B, N]


def lay_out(lengths: np.ndarray, placement: Placement, rows: int, data: DataConfig) -> Layout:
    """Places segments of ``lengths`` (int64 [n]) one after the other in the rows of the placement."""
    n = len(lengths)
    used = np.bincount(placement.row, weights=lengths, minlength=rows).astype(np.int64)
    real = np.arange(n) + placement.row  # each row before has added a padding
    sizes = np.empty(n + rows, np.int64)
    sizes[real] = lengths
    sizes[np.cumsum(np.bincount(placement.row, minlength=rows)) + np.arange(rows)] = data.length - used
    numbers = np.zeros(n + rows, np.int32)
    numbers[real] = placement.number + 1
    segment_ids = np.repeat(numbers, sizes)
    ends = np.cumsum(sizes)
    if data.position_order == "newest_first":
        positions = np.repeat(ends - 1, sizes) - _count(rows * data.length)
    else:
        positions = _count(rows * data.length) - np.repeat(ends - sizes, sizes)
    positions = positions.astype(np.int32)
    if n * data.length and used.min() < data.length:
        positions *= segment_ids > 0
    shape = (rows, data.length)
    return Layout(sizes, real, ends[real] - 1, positions.reshape(shape), segment_ids.reshape(shape))


def ranges(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """int64: starts[0], starts[0]+1, ... (sizes[0] of them), then those of starts[1], and so on."""
    ends = np.cumsum(sizes)
    result = np.repeat(starts - (ends - sizes), sizes)
    result += _count(len(result))
    return result


def _next_entries(slab: np.ndarray, n_targets: int) -> np.ndarray:
    """int32 [S, L]: the L entries after each entry of the slab (int32 [S]); -1 after the last L."""
    entries = np.empty((len(slab), n_targets), np.int32)
    entries[-n_targets:] = -1
    # Overlapping records of L entries, one at each entry: copying records takes half the time of copying numbers.
    record = np.dtype((np.void, slab.itemsize * n_targets))
    records = np.ndarray((len(slab) - n_targets,), record, slab, slab.itemsize, (slab.itemsize,))
    entries.view(record)[:-n_targets, 0] = records
    return entries


def _count(size: int) -> np.ndarray:
    """int64 0 .. size-1, not to be written to."""
    return _numbers(1 << max(size - 1, 0).bit_length())[:size]


@functools.lru_cache(maxsize=4)
def _numbers(size: int) -> np.ndarray:
    return np.arange(size)


def _drop_repeats(slab: np.ndarray, targets_SL: np.ndarray) -> None:
    """Keeps an item's first occurrence in each row of targets."""
    n_targets = targets_SL.shape[1]
    distance: np.ndarray = np.full(
        len(slab), n_targets, np.uint8 if n_targets < 256 else np.int32
    )  # to the previous equal entry
    for d in range(n_targets - 1, 0, -1):
        equal = np.flatnonzero(slab[d:] == slab[:-d])
        distance[equal + d] = d
    entry = np.flatnonzero(distance < n_targets)
    entry = entry[slab[entry] >= 0]
    distance = distance[entry]
    flat = targets_SL.reshape(-1)
    for slot in range(1, n_targets):
        # Entry j is in slot l of row j-1-l, and so is the equal one before it if that is at most l away. Where that row
        # is not of the entry's own slab, it is one of the last L of the slab before, which belong to no position.
        repeated = entry[distance <= slot]
        flat[(repeated - 1 - slot) * n_targets + slot] = -1


def _drop_late(times: np.ndarray, targets_SL: np.ndarray, horizon: int) -> None:
    """Removes targets more than ``horizon`` seconds after their position."""
    for slot in range(targets_SL.shape[1]):
        late = times[1 + slot :] - times[: -1 - slot] > horizon
        targets_SL[: len(late), slot][late] = -1
