"""The Yambda data set (arXiv 2505.22238): what its files hold, and its benchmark's clock; ``hub.py`` finds them."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recml_sasrec.data.events import (
    DataError,
    EventBatch,
    as_ids,
    as_seconds,
    check_file,
    find_column,
    open_parquet,
    parquet_batches,
)

# The benchmark's global temporal split, in seconds of the data set's clock (half-open intervals).
HOUR, DAY = 3_600, 86_400
LAST_SECOND = 26_000_000
GAP = 1_800
TEST_START = 25_913_600  # test = [TEST_START, end)
VALIDATION_START = 25_825_400  # validation = [VALIDATION_START, VALIDATION_END)
VALIDATION_END = TEST_START - GAP
LISTEN_PLUS = 50  # percent of the track

_FLAT_ROWS = 1 << 19
_SEQUENTIAL_ROWS = 64  # a row is a user's whole history, up to tens of thousands of events


def read_yambda(path: str, min_played_ratio: int = 0) -> Iterator[EventBatch]:
    """Streams a flat or sequential file of Yambda; which of the two is seen from the types of its columns.

    ``min_played_ratio`` in whole percent keeps the events played at least that far, before anything else is done with
    them; an event without a ratio is dropped. 0 keeps all.

    Raises:
        DataError: a missing or broken file, a missing column, or a bad value.
    """
    check_file(path)
    file = open_parquet(path)
    schema = file.schema_arrow
    wanted = ["uid", "item_id", "timestamp"] + (["played_ratio_pct"] if min_played_ratio > 0 else [])
    columns = [_column(path, schema.names, name) for name in wanted]
    sequential = _is_list(schema.field(columns[1]).type)
    row = 0
    for batch in parquet_batches(path, file, columns, _SEQUENTIAL_ROWS if sequential else _FLAT_ROWS):
        arrays = _flatten(batch, path) if sequential else batch.columns
        if min_played_ratio > 0:
            keep = pc.fill_null(pc.greater_equal(arrays[3], min_played_ratio), False)
            arrays = [array.filter(keep) for array in arrays[:3]]
        user, item = (as_ids(arrays[i], columns[i], path, row) for i in (0, 1))
        time = as_seconds(arrays[2], columns[2], path, row)
        row += batch.num_rows
        if len(user):
            yield EventBatch(user, item, time)


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _column(path: str, names: list[str], name: str) -> str:
    # The data set's card prints plural names of the lists, its files have singular ones: both are read.
    plural = f"{name}s"
    if name not in names and plural in names:
        return plural
    return find_column(path, names, name)


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
