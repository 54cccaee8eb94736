"""Listens at the published sizes of Yambda: exact numbers of users, items and listens, and its skew.

For what only size can show. On top of ``synthetic``: histories follow the published quantiles, the top 1 % of items
take 49.2 % of the listens, 35.7 % of the items are heard once. Written in row groups of about a million events, so
memory is bounded whatever the size.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from recml_sasrec.data import synthetic
from recml_sasrec.data.events import DataError
from recml_sasrec.data.store import user_chunks


class Size(NamedTuple):
    """What a published file of listens holds."""

    users: int
    items: int
    listens: int


# users and items of 500m and 5b are those of all events, their listens alone are not published
SIZES = {
    "50m": Size(9_238, 877_168, 46_467_212),
    "500m": Size(100_000, 3_004_578, 466_512_103),
    "5b": Size(1_000_000, 9_390_623, 4_649_567_411),
}
TOP_SHARE = 0.492  # of the listens, of the top 1 % of items
ONCE = 0.357  # share of the items that are heard once
EXPONENT = 1.2  # of an album's weight; its offset follows from TOP_SHARE
RETURNS = 0.57  # share of runs of an album the user knows: 66 % of the listens of 50m are repeats
# Quantiles of listens per user; median, p90 and p99 are published, the others are chosen for the published mean.
QUANTILES = (0, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1)
LISTENS = (1, 5, 250, 1_000, 3_024, 6_900, 13_044, 23_765, 35_000)


def scaled(size: str, scale: float = 1.0) -> Size:
    """A published size, or a part of its users, of its items and of its listens.

    Raises:
        DataError: an unknown size, or a scale that makes no data.
    """
    if size not in SIZES:
        raise DataError(f"Yambda has no size {size!r}; choose one of {', '.join(SIZES)}")
    goal = Size(*(round(number * scale) for number in SIZES[size]))
    if not 0 < scale <= 1 or goal.users < 1 or goal.items < 1_000:
        raise DataError(
            f"--scale {scale} of {size} makes {goal.users} users and {goal.items} items; "
            "choose one of at most 1 that leaves at least 1 user and 1,000 items"
        )
    return goal


def write(goal: Size, path: str, sequential: bool = False, seed: int = 0, density: float = 0.1) -> None:
    """Writes a file of listens.

    Args:
        goal: what it holds; at least 3 listens an item.
        path: the parquet file; it's there whole or not at all.
        sequential: a row for each user, its events as lists, instead of a row for each event.
        seed: of the generator; the two forms of a seed hold the same events.
        density: share of the numbers in the range of the item ids that are ids; about 0.1 in 50m, 1 in 5b.

    Raises:
        DataError: a folder that can't be written.
    """
    groups = _groups(goal, _catalogue(goal, seed, density), seed)
    if sequential:
        synthetic.write_groups(path, _SEQUENTIAL, map(_as_lists, groups))
    else:
        synthetic.write_groups(path, synthetic.SCHEMA, groups)


def _catalogue(goal: Size, seed: int, density: float) -> synthetic.Catalogue:
    once = round(ONCE * goal.items)
    tracks = goal.items - once
    # What the tail leaves must hold the whole share of the top.
    share = TOP_SHARE / (1 - (once + 2 * tracks) / goal.listens)
    rank = np.arange(-(-tracks // synthetic.ALBUM))
    top = goal.items // 100 // synthetic.ALBUM
    low, high = 0.0, 16.0  # log of the offset
    for _ in range(40):
        middle = (low + high) / 2
        weights = (rank + np.exp(middle)) ** -EXPONENT
        low, high = (middle, high) if weights[:top].sum() > share * weights.sum() else (low, middle)
    return synthetic.Catalogue(seed, tracks, (EXPONENT, float(np.exp(low))), once, density)


def _counts(goal: Size, rng: np.random.Generator) -> np.ndarray:
    """int64 [U], listens of each user, with the sum asked for."""
    levels = (np.arange(goal.users) + 0.5) / goal.users
    shape = np.exp(np.interp(rng.permutation(levels), QUANTILES, np.log(LISTENS)))
    ends = np.round(np.cumsum(shape) * ((goal.listens - goal.users) / shape.sum())).astype(np.int64)
    return 1 + np.diff(ends, prepend=0)


def _groups(goal: Size, catalogue: synthetic.Catalogue, seed: int) -> Iterator[pa.Table]:
    rng = np.random.default_rng([seed, 2])
    counts = _counts(goal, rng)
    ends = np.concatenate([[0], np.cumsum(counts)])
    # Every item is heard: the lonely ones once, the tracks at least twice; spread evenly over the users.
    tracks = np.arange(catalogue.items, dtype=np.int32)
    tail = np.concatenate([np.arange(catalogue.items, goal.items, dtype=np.int32), tracks, tracks])
    rng.shuffle(tail)
    for first, last in user_chunks(ends, synthetic.GROUP_EVENTS):
        rng = np.random.default_rng([seed, 1, first])
        some = counts[first:last]
        user = np.repeat(np.arange(last - first), some)
        item, noise = synthetic.draw_items(rng, catalogue, some, user, RETURNS)
        own = tail[len(tail) * int(ends[first]) // goal.listens : len(tail) * int(ends[last]) // goal.listens]
        place = rng.permutation(len(user))[: len(own)]
        item[place], noise[place] = own, True
        yield synthetic.listens(rng, catalogue, some, user, item, noise, first)


_SEQUENTIAL = pa.schema(
    [synthetic.SCHEMA.field("uid")]
    + [pa.field(field.name, pa.list_(pa.field("element", field.type))) for field in list(synthetic.SCHEMA)[1:]]
)


def _as_lists(events: pa.Table) -> pa.Table:
    uid = events["uid"].to_numpy()
    starts = np.flatnonzero(np.concatenate([[True], uid[1:] != uid[:-1]]))
    offsets = pa.array(np.append(starts, len(uid)), pa.int32())
    columns = [pa.array(uid[starts])]
    for field in list(_SEQUENTIAL)[1:]:
        values = events[field.name].combine_chunks()
        columns.append(pa.ListArray.from_arrays(offsets, values, type=field.type))
    return pa.table(columns, schema=_SEQUENTIAL)
