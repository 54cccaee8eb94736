"""Readers: an event log as a stream of record batches (user, item, timestamp), memory bounded whatever the file's size.

Ids are integers (int64, not negative) or strings; timestamps are int64 seconds. Everything a file can have wrong is a
``DataError`` of one sentence, raised while the stream is consumed.
"""

import csv
import difflib
import functools
import gzip
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

INT64_MAX = 2**63 - 1
_BATCH_ROWS = 1 << 19
_BLOCK_BYTES = 16 << 20
# Canonical integers only: "007" and "7" are two ids, so a column with leading zeros stays a column of strings.
_INTEGER = r"^-?(0|[1-9][0-9]{0,18})$"


class DataError(ValueError):
    """The user's data can't be used; the message is one sentence with the value, the limit and the remedy."""


class EventBatch(NamedTuple):
    """Some consecutive rows of an event log, in file order."""

    user: pa.Array  # int64 or string, no nulls
    item: pa.Array  # int64 or string, no nulls
    timestamp: pa.Array | None  # int64 seconds, no nulls; None: the source has no time
    share: float = 0.0  # of the source read so far, 0..1; 0: unknown


def read_table(path: str, user_column: str, item_column: str, time_column: str) -> Iterator[EventBatch]:
    """Streams an interaction table: parquet, or delimited text (CSV, TSV, RecBole ``.inter``), also gzipped.

    Columns may be named with or without RecBole's ``:type`` suffix. An empty ``time_column`` means that the rows of
    each user are already in time order. Fractions of a second are dropped (floor); dates and datetimes become seconds
    since 1970. Ids in text are integers where the whole column is, else strings.

    Raises:
        DataError: a missing file or column, a broken file, or a null, negative or overflowing value.
    """
    table = open_table(path, [name for name in (user_column, item_column, time_column) if name], ids=2)
    columns, integers = table.columns, table.integers
    row = 0
    for batch in table.batches:
        user, item = (as_ids(batch.column(i), columns[i], path, row, integers[i]) for i in (0, 1))
        time = as_seconds(batch.column(2), columns[2], path, row) if time_column else None
        row += batch.num_rows
        yield EventBatch(user, item, time, row / table.rows if table.rows else 0.0)


class Table(NamedTuple):
    """Columns of an opened parquet or text file."""

    columns: list[str]  # as the file names them
    integers: tuple[bool | None, ...]  # of the columns of ids: whether text holds integers, None for parquet's types
    rows: int  # 0: unknown
    batches: Iterator[pa.RecordBatch]  # of the columns, those of a text file as text


def open_table(path: str, wanted: Sequence[str], ids: int, batch_rows: int = _BATCH_ROWS) -> Table:
    """Opens a table to stream the wanted columns, of which the first ``ids`` hold ids.

    Raises:
        DataError: a broken file, or one without these columns.
    """
    check_file(path)
    if _is_parquet(path):
        file = open_parquet(path)
        columns = [find_column(path, file.schema_arrow.names, name) for name in wanted]
        batches = parquet_batches(path, file, columns, batch_rows)
        return Table(columns, (None,) * ids, file.metadata.num_rows, batches)
    delimiter, names = _header(path, wanted[:2])
    columns = [find_column(path, names, name) for name in wanted]
    stat = os.stat(path)
    integers = _csv_integers(path, stat.st_size, stat.st_mtime_ns, delimiter, tuple(names), tuple(columns[:ids]))
    return Table(columns, integers, 0, _csv_batches(path, delimiter, names, columns))


def read_lines(path: str) -> Iterator[EventBatch]:
    """Streams ``user item item ...`` lines (also gzipped), items in time order; there are no timestamps.

    Raises:
        DataError: a missing or broken file, or a negative id.
    """
    check_file(path)
    stat = os.stat(path)
    integers = _lines_integers(path, stat.st_size, stat.st_mtime_ns)
    row = 0
    for users, items in _line_blocks(path):
        user = as_ids(users, "user", path, row, integers[0])
        item = as_ids(items, "item", path, row, integers[1])
        row += len(user)
        yield EventBatch(user, item, None)


def check_file(path: str, name: str = "config.data.path") -> None:
    """Raises DataError unless ``path``, given as the field ``name``, is a non-empty file."""
    if not os.path.exists(path):
        raise DataError(f"data file {path!r} does not exist; check {name}")
    if not os.path.isfile(path):
        raise DataError(f"data file {path!r} is not a file; give {name} one parquet, CSV, TSV or text file")
    if os.path.getsize(path) == 0:
        raise DataError(f"data file {path!r} is empty (0 bytes); give a file with at least one row")


def find_column(path: str, names: Sequence[str], name: str) -> str:
    """The column called ``name``, with or without a ``:type`` suffix; DataError names the nearest one."""
    if list(names).count(name) > 1:
        raise DataError(f"{path!r} has {list(names).count(name)} columns {name!r}; rename all but one")
    if name in names:
        return name
    plain = {column.split(":")[0].strip(): column for column in reversed(names)}
    if name.split(":")[0].strip() in plain:
        return plain[name.split(":")[0].strip()]
    nearest = difflib.get_close_matches(name, list(plain), 1, 0.0)
    hint = f"the nearest of its {len(names)} columns is {nearest[0]!r}" if nearest else "it has no columns"
    raise DataError(f"{path!r} has no column {name!r}; {hint}")


def open_parquet(path: str) -> pq.ParquetFile:
    """Opens a parquet file so that reading it streams pages instead of whole column chunks."""
    try:
        return pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False)
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{path!r} is not a complete parquet file ({_first_line(error)}); download or write it again"
        ) from error


def parquet_batches(
    path: str, file: pq.ParquetFile, columns: list[str], rows: int, row_groups: list[int] | None = None
) -> Iterator[pa.RecordBatch]:
    """Record batches of at most ``rows`` rows with ``columns`` in the order given, of all or of some row groups."""
    try:
        for batch in file.iter_batches(batch_size=rows, columns=list(dict.fromkeys(columns)), row_groups=row_groups):
            yield pa.RecordBatch.from_arrays([batch.column(name) for name in columns], columns)
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{path!r} can't be read to its end ({_first_line(error)}); download or write it again"
        ) from error


def as_ids(column: pa.Array, name: str, path: str, first_row: int, integers: bool | None = None) -> pa.Array:
    """Ids as int64 or string, checked. ``integers`` says what a column of text holds (None: leave it text)."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    _no_nulls(column, name, path, first_row)
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        if integers is not None:
            column = pc.utf8_trim_whitespace(column)
        column = column.cast(pa.int64() if integers else pa.large_string())
    elif not pa.types.is_integer(kind):
        raise DataError(
            f"column {name!r} of {path!r} holds {kind} values but ids must be integers or strings; convert it"
        )
    if pa.types.is_integer(column.type) and len(column):
        low, high = pc.min_max(column).as_py().values()
        if low < 0:
            raise DataError(
                f"column {name!r} of {path!r} holds the negative id {low}; ids must be 0 or more, or strings: "
                "renumber them or store them as text"
            )
        if high > INT64_MAX:
            raise DataError(
                f"column {name!r} of {path!r} holds the id {high}, over the limit {INT64_MAX} (int64); "
                "renumber the ids or store them as text"
            )
        column = column.cast(pa.int64())
    return column


def as_seconds(column: pa.Array, name: str, path: str, first_row: int) -> pa.Array:
    """Times as int64 seconds: integers, floats (floor), dates, datetimes, or text of any of these; checked."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    _no_nulls(column, name, path, first_row)
    if pa.types.is_string_view(column.type):  # Arrow's text functions don't know it
        column = column.cast(pa.large_string())
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        column = _parse_times(column, name, path)
        kind = column.type
    if pa.types.is_date(kind):
        column, kind = column.cast(pa.timestamp("s")), pa.timestamp("s")
    if pa.types.is_timestamp(kind):
        units = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[kind.unit]
        column = pa.array(np.floor_divide(column.cast(pa.int64()).to_numpy(zero_copy_only=False), units))
    elif pa.types.is_floating(kind):
        values = np.floor(column.to_numpy(zero_copy_only=False).astype(np.float64))
        bad = ~(np.abs(values) < 2.0**63)  # also true for NaN
        if bad.any():
            _overflow(float(values[bad][0]), name, path)
        column = pa.array(values.astype(np.int64))
    elif not pa.types.is_integer(kind):
        raise DataError(
            f"column {name!r} of {path!r} holds {kind} values but times must be numbers or datetimes; convert it"
        )
    if len(column):
        low, high = pc.min_max(column).as_py().values()
        if high > INT64_MAX:
            _overflow(high, name, path)
        if low < 0:
            raise DataError(
                f"column {name!r} of {path!r} holds the negative time {low}; times must be 0 or more seconds: "
                "shift them"
            )
    return column.cast(pa.int64())


def _overflow(value: float, name: str, path: str) -> None:
    raise DataError(
        f"column {name!r} of {path!r} holds the time {value}, outside 0..{INT64_MAX} (int64 seconds); "
        "correct or remove that row"
    )


def _no_nulls(column: pa.Array, name: str, path: str, first_row: int) -> None:
    if column.null_count:
        row = first_row + int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        raise DataError(
            f"column {name!r} of {path!r} has no value in row {row + 1}; every row needs one: fill or remove it"
        )


def _parse_times(column: pa.Array, name: str, path: str) -> pa.Array:
    column = pc.utf8_trim_whitespace(column)
    for kind in (pa.int64(), pa.float64(), pa.timestamp("us"), pa.timestamp("us", "UTC")):
        try:
            parsed = column.cast(kind)
        except pa.ArrowInvalid:
            continue
        # An integer over int64 parses as a float that has lost digits; as_seconds refuses it by its size.
        return parsed
    for value in column:  # the block has a bad value: find it for the message
        try:
            float(value.as_py())
        except ValueError:
            raise DataError(
                f"column {name!r} of {path!r} holds {value.as_py()!r}, which is neither a number nor a datetime; "
                "correct or remove that row"
            ) from None
    raise DataError(f"column {name!r} of {path!r} mixes numbers and datetimes; convert it to seconds")


def _is_parquet(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(4) == b"PAR1" or path.endswith((".parquet", ".pq"))


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:200].rstrip(".") if str(error).strip() else type(error).__name__


def _broken_text(path: str, error: BaseException) -> DataError:
    return DataError(f"{path!r} can't be read ({_first_line(error)}); correct the file")


def _header(path: str, wanted: Sequence[str]) -> tuple[str, list[str]]:
    """The delimiter that separates the header into the wanted columns (else into most columns), and its names."""
    opener = gzip.open if path.endswith(".gz") else open
    try:
        with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
            line = file.readline(1 << 20)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise _broken_text(path, error) from error
    line = line.rstrip("\r\n")
    if not line.strip():
        raise DataError(f"{path!r} has an empty first line; it must name the columns")
    best = ("", [""])
    for delimiter in ("\t", ",", ";", "|"):
        names = next(csv.reader([line], delimiter=delimiter))
        plain = {name.split(":")[0].strip() for name in names} | set(names)
        if plain.issuperset(wanted):
            return delimiter, names
        if len(names) > len(best[1]) or not best[0]:
            best = (delimiter, names)
    return best


def _csv_batches(path: str, delimiter: str, names: list[str], columns: list[str]) -> Iterator[pa.RecordBatch]:
    """Text columns only: types inferred from a first block would fail on a later one."""
    try:
        with pa.input_stream(path, compression="gzip" if path.endswith(".gz") else None) as stream:
            reader = pacsv.open_csv(
                stream,
                read_options=pacsv.ReadOptions(
                    column_names=names, skip_rows=1, block_size=_BLOCK_BYTES, use_threads=False
                ),
                parse_options=pacsv.ParseOptions(delimiter=delimiter),
                convert_options=pacsv.ConvertOptions(
                    include_columns=list(dict.fromkeys(columns)),
                    column_types={name: pa.large_string() for name in columns},
                    null_values=[""],
                    strings_can_be_null=True,
                    quoted_strings_can_be_null=True,
                ),
            )
            for batch in reader:
                yield pa.RecordBatch.from_arrays([batch.column(name) for name in columns], columns)
    except pa.ArrowInvalid as error:
        if "Empty CSV" in str(error):  # a header and nothing else: the store says that there are no events
            return
        raise _broken_text(path, error) from error
    except (pa.ArrowException, OSError) as error:
        raise _broken_text(path, error) from error


@functools.lru_cache(maxsize=16)
def _csv_integers(
    path: str, size: int, mtime_ns: int, delimiter: str, names: tuple[str, ...], columns: tuple[str, ...]
) -> tuple[bool, ...]:
    """Whether each column holds integers from its first row to its last: a pass of its own, remembered for the file."""
    batches = _csv_batches(path, delimiter, list(names), list(columns))
    return _all_integers([batch.column(i) for i in range(len(columns))] for batch in batches)


@functools.lru_cache(maxsize=16)
def _lines_integers(path: str, size: int, mtime_ns: int) -> tuple[bool, ...]:
    return _all_integers(_line_blocks(path))


def _all_integers(blocks) -> tuple[bool, ...]:
    integers = [True, True]
    for block in blocks:
        for i, column in enumerate(block):
            integers[i] = integers[i] and _is_integer(column)
        if not any(integers):
            break
    return tuple(integers)


def _is_integer(column: pa.Array) -> bool:
    text = pc.utf8_trim_whitespace(column)
    if not pc.all(pc.match_substring_regex(text, _INTEGER), min_count=0).as_py():
        return False
    try:
        text.cast(pa.int64())
    except pa.ArrowInvalid:  # 19 digits over int64
        return False
    return True


def _line_blocks(path: str) -> Iterator[tuple[pa.Array, pa.Array]]:
    """(user, item) text arrays of about a block of lines each."""
    opener = gzip.open if path.endswith(".gz") else open
    try:
        with opener(path, "rt", encoding="utf-8-sig") as file:
            while lines := file.readlines(_BLOCK_BYTES // 4):
                users: list[str] = []
                counts: list[int] = []
                items: list[str] = []
                for line in lines:
                    tokens = line.split()
                    if len(tokens) > 1:
                        users.append(tokens[0])
                        counts.append(len(tokens) - 1)
                        items.extend(tokens[1:])
                index = np.repeat(np.arange(len(users)), counts)
                yield pa.array(users, pa.large_string()).take(pa.array(index)), pa.array(items, pa.large_string())
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise _broken_text(path, error) from error
