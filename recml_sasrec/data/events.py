"""Readers: an event log as a stream of record batches (user, item, timestamp), memory bounded whatever the file's size.

Ids are integers (int64, not negative) or strings; timestamps are int64 ticks of a second. Everything a file can have
wrong is a ``DataError`` of one sentence, raised while the stream is consumed.
"""

import contextlib
import csv
import difflib
import functools
import gzip
import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from recml_sasrec.data.errors import DataError as DataError
from recml_sasrec.data.times import TICKS, as_ticks, is_text

INT64_MAX = 2**63 - 1
_BATCH_ROWS = 1 << 19
_BLOCK_BYTES = 16 << 20
# Canonical integers only: "007" and "7" are two ids, as are "-0" and "0": a column that has one is a column of strings.
_INTEGER = r"^(0|-?[1-9][0-9]{0,18})$"


class EventBatch(NamedTuple):
    """Some consecutive rows of an event log, in file order."""

    user: pa.Array  # int64 or string, no nulls
    item: pa.Array  # int64 or string, no nulls
    timestamp: pa.Array | None  # int64 ticks, no nulls; None: the source has no time
    share: float = 0.0  # of the source read so far, 0..1; 0: unknown
    ticks: int = 1  # a second; the same for all batches of a source


class Table(NamedTuple):
    """An interaction table that can be streamed: its columns of interest, in the order asked for."""

    columns: list[str]
    text: bool  # all values are text
    rows: int  # 0: unknown
    batches: Callable[[], Iterator[pa.RecordBatch]]


def open_table(path: str, wanted: Sequence[str], batch_rows: int = _BATCH_ROWS) -> Table:
    """Opens parquet, or delimited text (CSV, TSV, RecBole ``.inter``), also gzipped.

    Args:
        wanted: names of columns, with or without RecBole's ``:type`` suffix.

    Raises:
        DataError: a missing file or column, or a broken file.
    """
    check_file(path)
    if is_parquet(path):
        file = open_parquet(path)
        columns = [find_column(path, file.schema_arrow.names, name) for name in wanted]
        batches = lambda: parquet_batches(path, open_parquet(path), columns, batch_rows)  # noqa: E731
        return Table(columns, False, file.metadata.num_rows, batches)
    delimiter, names = read_header(path, wanted[:2])
    columns = [find_column(path, names, name) for name in wanted]
    return Table(columns, True, 0, lambda: _csv_batches(path, delimiter, names, columns))


def read_table(
    path: str,
    user_column: str,
    item_column: str,
    time_column: str,
    time_unit: str = "s",
    integers: Sequence[bool] | None = None,
    drop_nulls: bool = False,
) -> Iterator[EventBatch]:
    """Streams an interaction table.

    Columns may be named with or without RecBole's ``:type`` suffix. An empty ``time_column`` means that the rows of
    each user are already in time order. Dates and datetimes count from 1970. Ids in text are integers where the whole
    column is, else strings.

    Args:
        time_unit: of times that are plain numbers: s, ms, us or ns.
        integers: of a file of text: whether each column holds integers alone; None: found by a pass over the file.
        drop_nulls: leave out rows with an empty value.

    Raises:
        DataError: a missing file or column, a broken file, or a null, negative or overflowing value.
    """
    table = open_table(path, list(filter(None, (user_column, item_column, time_column))))
    if table.text and integers is None:
        integers = integer_columns(path, table.columns)
    kinds: Sequence[bool | None] = integers if table.text and integers is not None else (None,) * 3
    row = 0
    for batch in table.batches():
        if drop_nulls:
            batch = batch.filter(has_values(batch))
        user, item = (as_ids(batch.column(i), table.columns[i], path, row, kinds[i]) for i in (0, 1))
        time, ticks = None, 1
        if time_column:
            column = batch.column(2)
            no_nulls(column, table.columns[2], path, row)
            # one block of text may hold whole numbers and the next one fractions
            least = 1 if kinds[2] or not is_text(value_type(column)) else max(10**6, TICKS[time_unit])
            time, ticks = as_ticks(column, table.columns[2], path, time_unit, least)
        row += batch.num_rows
        yield EventBatch(user, item, time, row / table.rows if table.rows else 0.0, ticks)


def value_type(column: pa.Array) -> pa.DataType:
    """The type of the values, of which a column may hold each once."""
    return column.type.value_type if pa.types.is_dictionary(column.type) else column.type


def has_values(batch: pa.RecordBatch) -> pa.Array:
    """bool [rows]: every column has a value (NaN is none)."""
    keep = np.ones(batch.num_rows, bool)
    for column in batch.columns:
        if column.null_count or pa.types.is_floating(column.type):
            keep &= column.is_valid().to_numpy(zero_copy_only=False)
        if pa.types.is_floating(column.type):
            column = column.cast(pa.float64())  # Arrow knows no NaN of 16 bits
            keep &= ~pc.fill_null(pc.is_nan(column), True).to_numpy(zero_copy_only=False)
    return pa.array(keep)


def read_lines(path: str, integers: Sequence[bool] | None = None) -> Iterator[EventBatch]:
    """Streams ``user item item ...`` lines (also gzipped), items in time order; there are no timestamps.

    Args:
        integers: whether users and items are integers alone; None: found by a pass over the file.

    Raises:
        DataError: a missing or broken file, or a negative id.
    """
    check_file(path)
    if integers is None:
        stat = os.stat(path)
        integers = _lines_integers(path, stat.st_size, stat.st_mtime_ns)
    row = 0
    for users, items in line_blocks(path):
        user = as_ids(users, "user", path, row, integers[0])
        item = as_ids(items, "item", path, row, integers[1])
        row += len(user)
        yield EventBatch(user, item, None)


def check_file(path: str, setting: str = "config.data.path") -> None:
    """Raises DataError unless ``path``, which the setting names, is a non-empty file."""
    if not os.path.exists(path):
        raise DataError(f"data file {path!r} does not exist; check {setting}")
    if not os.path.isfile(path):
        raise DataError(f"data file {path!r} is not a file; give {setting} one parquet, CSV, TSV or text file")
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
    no_nulls(column, name, path, first_row)
    kind = column.type
    if is_text(kind):
        if integers is not None:
            column = pc.utf8_trim_whitespace(column)
        try:
            column = column.cast(pa.int64() if integers else pa.large_string())
        except pa.ArrowInvalid as error:  # all were integers a pass before
            raise changed(path) from error
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


def no_nulls(column: pa.Array, name: str, path: str, first_row: int) -> None:
    """Raises DataError with the first row, counted from 1, that has no value."""
    if column.null_count:
        row = first_row + int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        raise DataError(
            f"column {name!r} of {path!r} has no value in row {row + 1}; every row needs one: fill or remove it"
        )


def changed(path: str) -> DataError:
    """What to say of a file that is another one than it was a pass before."""
    return DataError(f"{path!r} changed while it was read; wait until it is complete and start again")


def is_parquet(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(4) == b"PAR1" or path.endswith((".parquet", ".pq"))


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:200].rstrip(".") if str(error).strip() else type(error).__name__


def broken_text(path: str, error: BaseException) -> DataError:
    """What to say of a file of text that can't be read."""
    return DataError(f"{path!r} can't be read ({_first_line(error)}); correct the file")


def read_header(path: str, wanted: Sequence[str]) -> tuple[str, list[str]]:
    """The delimiter that separates the header into the wanted columns (else into most columns), and its names."""
    opener = gzip.open if path.endswith(".gz") else open
    try:
        with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
            line = file.readline(1 << 20)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise broken_text(path, error) from error
    line = line.rstrip("\r\n")
    if not line.strip():
        raise DataError(f"{path!r} has an empty first line; it must name the columns")
    best = ("", [""])
    for delimiter in ("\t", ",", ";", "|"):
        names = split_line(line, delimiter, path)
        plain = {name.split(":")[0].strip() for name in names} | set(names)
        if wanted and plain.issuperset(wanted):
            return delimiter, names
        if len(names) > len(best[1]) or not best[0]:
            best = (delimiter, names)
    return best


def split_line(line: str, delimiter: str, path: str) -> list[str]:
    """The values of a line of delimited text."""
    try:
        with contextlib.suppress(StopIteration):
            next(csv.reader([line], delimiter=delimiter, strict=True))
    except csv.Error as error:
        if "unexpected end" in str(error):  # a quote is open at the line's end
            raise DataError(
                f"the first line of {path!r} ends inside a quoted name ({line[-30:]!r}); write each name on one line"
            ) from error
    try:
        return next(csv.reader([line], delimiter=delimiter), [""])
    except csv.Error as error:
        raise broken_text(path, error) from error


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
                yield pa.RecordBatch.from_arrays([_no_blanks(batch.column(name)) for name in columns], columns)
    except pa.ArrowInvalid as error:
        if "Empty CSV" in str(error):  # a header and nothing else: the store says that there are no events
            return
        raise broken_text(path, error) from error
    except (pa.ArrowException, OSError) as error:
        raise broken_text(path, error) from error


def _no_blanks(column: pa.Array) -> pa.Array:
    """Text of nothing but blanks is no value, as it is with none."""
    blank = pc.utf8_is_space(column)
    if not pc.any(blank, min_count=0).as_py():
        return column
    return pc.if_else(pc.fill_null(blank, False), pa.scalar(None, column.type), column)


def integer_columns(path: str, columns: Sequence[str]) -> tuple[bool, ...]:
    """Of a file of text: whether each column holds integers from its first row to its last."""
    stat = os.stat(path)
    return _csv_integers(path, stat.st_size, stat.st_mtime_ns, tuple(columns))


@functools.lru_cache(maxsize=16)
def _csv_integers(path: str, size: int, mtime_ns: int, columns: tuple[str, ...]) -> tuple[bool, ...]:
    """Whether each column holds integers from its first row to its last: a pass of its own, remembered for the file."""
    return _all_integers((batch.columns for batch in open_table(path, columns).batches()), len(columns))


@functools.lru_cache(maxsize=16)
def _lines_integers(path: str, size: int, mtime_ns: int) -> tuple[bool, ...]:
    return _all_integers(line_blocks(path), 2)


def _all_integers(blocks, count: int) -> tuple[bool, ...]:
    integers = [True] * count
    for block in blocks:
        for i, column in enumerate(block):
            integers[i] = integers[i] and are_integers(column)
        if not any(integers):
            break
    return tuple(integers)


def are_integers(column: pa.Array) -> bool:
    """Whether every value of a column of text is an int64 in its one canonical form."""
    return pc.all(canonical_integers(column), min_count=0).as_py()


def canonical_integers(column: pa.Array) -> pa.Array:
    """bool [n]: which values of a column of text are int64 in canonical form; a null stays one."""
    text = pc.utf8_trim_whitespace(column)
    matches = pc.match_substring_regex(text, _INTEGER)
    try:
        text.filter(matches).cast(pa.int64())
    except pa.ArrowInvalid:  # 19 digits over int64
        fits = [
            matched and abs(int(value)) <= INT64_MAX
            for matched, value in zip(*map(pa.Array.to_pylist, (matches, text)), strict=True)
        ]
        return pa.array(fits, pa.bool_())
    return matches


def line_blocks(path: str) -> Iterator[tuple[pa.Array, pa.Array]]:
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
        raise broken_text(path, error) from error
