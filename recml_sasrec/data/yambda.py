"""The Yambda data set (arXiv 2505.22238): what its files hold, and its benchmark's clock; ``hub.py`` finds them."""

import itertools
from collections.abc import Collection, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recml_sasrec.data.events import (
    DataError,
    EventBatch,
    as_ids,
    check_file,
    find_column,
    no_nulls,
    open_parquet,
    parquet_batches,
)
from recml_sasrec.data.times import as_seconds

# The benchmark's global temporal split, in seconds of the data set's clock (half-open intervals).
HOUR, DAY = 3_600, 86_400
LAST_SECOND = 26_000_000
GAP = 1_800
TEST_START = 25_913_600  # test = [TEST_START, end)
VALIDATION_START = 25_825_400  # validation = [VALIDATION_START, VALIDATION_END)
VALIDATION_END = TEST_START - GAP
LISTEN_PLUS = 50  # percent of the track
EVENT_TYPES = ("listen", "dislike", "like", "undislike", "unlike")  # of the events of a multi_event file

_FLAT_ROWS = 1 << 18
_SEQUENTIAL_ROWS = 64  # a row is a user's whole history, up to tens of thousands of events


def read_yambda(
    path: str,
    min_played_ratio: int = 0,
    organic_only: bool = False,
    event_types: Collection[str] = (),
    drop_undone: bool = False,
) -> Iterator[EventBatch]:
    """Streams a flat or sequential file of Yambda; which of the two is seen from the types of its columns.

    The filters apply before anything else is done with the events:

    Args:
        path: the parquet file.
        min_played_ratio: whole percent; keeps the listens played at least that far, and drops those without a ratio.
            Events of other types are kept. 0 keeps all.
        organic_only: keeps what the user found without a recommendation.
        event_types: of a multi_event file, the types to keep; empty keeps all.
        drop_undone: of a multi_event file, drops each like that the user followed with an unlike of the same item at
            any later time, and each dislike followed with an undislike; in a tie of times the order of the file
            decides. What undid them stays, unless ``event_types`` leaves it out; a like after the unlike stays too.

    Raises:
        DataError: a missing or broken file, a missing column, or a bad value.
    """
    check_file(path)
    file = open_parquet(path)
    names = file.schema_arrow.names
    typed = min_played_ratio > 0 and ("event_type" in names or "event_types" in names)
    needed = dict.fromkeys(("uid", "item_id", "timestamp"), "every file of Yambda has")
    if min_played_ratio > 0:
        needed["played_ratio_pct"] = "config.data.min_played_ratio reads"
    if organic_only:
        needed["is_organic"] = "config.data.organic_only reads"
    if event_types or drop_undone or typed:
        filters = "event_types" if event_types else "drop_undone"
        needed["event_type"] = f"config.data.{filters} reads; only multi_event files have it"
    columns = {name: _column(path, names, name, why) for name, why in needed.items()}
    batches = _checked(path, file, columns)
    for events in _whole_users(path, batches) if drop_undone else batches:
        keep = _kept(events, min_played_ratio, organic_only, event_types, drop_undone)
        user, item, time = (events.column(i) if keep is None else events.column(i).filter(keep) for i in range(3))
        if len(user):
            yield EventBatch(user, item, time, events.column("share")[-1].as_py())


def _checked(path: str, file: pq.ParquetFile, columns: dict[str, str]) -> Iterator[pa.RecordBatch]:
    """Batches of events with our names and checked values; the last column is the share of the file read so far."""
    sequential = _is_list(file.schema_arrow.field(columns["item_id"]).type)
    names = list(columns.values())
    size = _SEQUENTIAL_ROWS if sequential else _FLAT_ROWS
    # Arrow can't read lists of dictionary values across the border of two row groups.
    groups = (parquet_batches(path, file, names, size, [group]) for group in range(file.num_row_groups))
    rows = 0
    for batch in itertools.chain.from_iterable(groups):
        arrays = _flatten(batch, path) if sequential else batch.columns
        arrays[:2] = (as_ids(arrays[i], names[i], path, rows) for i in (0, 1))
        no_nulls(arrays[2], names[2], path, rows)
        arrays[2] = as_seconds(arrays[2], names[2], path)
        for i, (own, name) in enumerate(columns.items()):
            if own in ("played_ratio_pct", "is_organic"):
                arrays[i] = _numbers(arrays[i], name, path)
            elif own == "event_type":
                arrays[i] = _type_numbers(arrays[i], name, path)
        rows += batch.num_rows
        share = pa.array(np.full(len(arrays[0]), rows / file.metadata.num_rows, np.float32))
        yield pa.RecordBatch.from_arrays([*arrays, share], [*columns, "share"])


def _whole_users(path: str, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same events, in batches that hold all events of their users: memory is bounded by the longest history."""
    seen: set = set()
    held: list[pa.RecordBatch] = []  # of one user, the last so far
    for batch in batches:
        if not batch.num_rows:
            continue
        user = batch.column("uid").to_numpy(zero_copy_only=False)
        starts = np.flatnonzero(np.concatenate([[True], user[1:] != user[:-1]]))
        goes_on = bool(held and held[0].column("uid")[0].as_py() == user[0])
        if held and not goes_on:
            yield pa.concat_batches(held)
            held = []
        for one in user[starts[goes_on:]].tolist():
            if one in seen:
                raise DataError(
                    f"{path!r} has events of user {one} in two places but config.data.drop_undone needs them together; "
                    "sort the file by uid"
                )
            seen.add(one)
        if starts[-1] > 0:
            yield pa.concat_batches([*held, batch.slice(0, starts[-1])])
            held = []
        held.append(batch.slice(starts[-1]))
    if held:
        yield pa.concat_batches(held)


def _kept(
    events: pa.RecordBatch, min_played_ratio: int, organic_only: bool, event_types: Collection[str], drop_undone: bool
) -> pa.Array | None:
    """bool [n]: the events that pass the filters; None where there are none."""
    tests = []
    if "event_type" in events.schema.names:
        kinds = events.column("event_type").to_numpy()
    if min_played_ratio > 0:
        far = pc.fill_null(pc.greater_equal(events.column("played_ratio_pct"), float(min_played_ratio)), False)
        tests.append(far.to_numpy(zero_copy_only=False))
        if "event_type" in events.schema.names:
            tests[-1] = tests[-1] | (kinds != EVENT_TYPES.index("listen"))
    if organic_only:
        organic = pc.fill_null(pc.equal(events.column("is_organic"), 1.0), False)
        tests.append(organic.to_numpy(zero_copy_only=False))
    if event_types:
        tests.append(np.isin(kinds, [EVENT_TYPES.index(name) for name in event_types]))
    if drop_undone:
        user, item, time = (events.column(i).to_numpy(zero_copy_only=False) for i in range(3))
        tests.append(~_undone(user, item, time, kinds))
    return pa.array(np.logical_and.reduce(tests)) if tests else None


def _undone(user: np.ndarray, item: np.ndarray, time: np.ndarray, kinds: np.ndarray) -> np.ndarray:
    """bool [n]: likes with a later unlike of the same (user, item), and dislikes with a later undislike."""
    rows = np.flatnonzero(kinds != EVENT_TYPES.index("listen"))
    rows = rows[np.argsort(time[rows], kind="stable")]
    undo = np.isin(kinds[rows], [EVENT_TYPES.index("undislike"), EVENT_TYPES.index("unlike")])
    likes = np.isin(kinds[rows], [EVENT_TYPES.index("like"), EVENT_TYPES.index("unlike")])
    users, items = (np.unique(ids[rows], return_inverse=True)[1] for ids in (user, item))
    group = np.unique((users * (items.max(initial=0) + 1) + items) * 2 + likes, return_inverse=True)[1]
    order = np.arange(len(rows))
    last_undo = np.full(len(rows), -1)
    np.maximum.at(last_undo, group[undo], order[undo])
    result = np.zeros(len(user), bool)
    result[rows[~undo & (order < last_undo[group])]] = True
    return result


def _numbers(column: pa.Array, name: str, path: str) -> pa.Array:
    """float64 [n] of numbers or truth values; nulls stay."""
    kind = column.type
    if pa.types.is_boolean(kind):
        return column.cast(pa.int8()).cast(pa.float64())
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise DataError(f"column {name!r} of {path!r} holds {kind} values but must hold numbers; convert it")
    return column.cast(pa.float64(), safe=False)


def _type_numbers(column: pa.Array, name: str, path: str) -> pa.Array:
    """int8 [n]: the place of each event's type in EVENT_TYPES; a dictionary of texts or plain texts."""
    texts = column.dictionary if pa.types.is_dictionary(column.type) else column
    kind = texts.type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        raise DataError(f"column {name!r} of {path!r} holds {kind} values but event types must be texts; convert it")
    numbers = pc.index_in(texts.cast(pa.large_string()), value_set=pa.array(EVENT_TYPES, pa.large_string()))
    if pa.types.is_dictionary(column.type):
        numbers = numbers.take(column.indices)
    if numbers.null_count:
        strange = column.filter(numbers.is_null())[0].as_py()
        raise DataError(
            f"column {name!r} of {path!r} holds {strange!r}; the types of Yambda's events are {', '.join(EVENT_TYPES)}"
        )
    return numbers.cast(pa.int8())


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _column(path: str, names: list[str], name: str, why: str) -> str:
    # The data set's card prints plural names of the lists, its files have singular ones: both are read.
    for own in (name, f"{name}s"):
        if own in names:
            return find_column(path, names, own)
    found = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
    raise DataError(f"{path!r} has no column {name!r}, which {why}; it has {found or 'no columns'}")


def _flatten(batch: pa.RecordBatch, path: str) -> list[pa.Array]:
    """Rows of lists -> rows of events; every list column of a row must be as long as its items."""
    items = batch.column(1)
    lengths = pc.fill_null(pc.list_value_length(items), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    users = batch.column(0).take(pa.array(np.repeat(np.arange(batch.num_rows), lengths)))
    arrays = [users]
    for name, column in zip(batch.schema.names[1:], batch.columns[1:], strict=True):
        if not _is_list(column.type):
            raise DataError(
                f"column {name!r} of {path!r} holds {column.type} values beside lists of items; "
                "a sequential file has a list in every column but uid"
            )
        own = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
        if (bad := np.flatnonzero(own != lengths)).size:
            raise DataError(
                f"{path!r} has a row with {lengths[bad[0]]} items but {own[bad[0]]} values of {name!r}; "
                "download or write it again"
            )
        arrays.append(pc.list_flatten(column))
    return arrays
