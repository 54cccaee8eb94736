"""A look at a log from its first row to its last: rows, empty values, kinds of ids, unit and range of the times."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from recml_sasrec.data.columns import LINES, Layout
from recml_sasrec.data.events import (
    EventBatch,
    Table,
    are_integers,
    canonical_integers,
    has_values,
    line_blocks,
    open_table,
    read_lines,
    read_table,
    value_type,
)
from recml_sasrec.data.progress import watched
from recml_sasrec.data.times import NAMES, TICKS, date_of, is_text, mixed, natural, recognise_unit


@dataclass
class Ids:
    """What the ids of a column are."""

    text: bool = False  # their type in the file
    strange: int = 0  # of text: values that are no int64 in its canonical form
    example: str = ""  # the first of them
    row: int = 0  # its row, from 1

    @property
    def integers(self) -> bool:
        return not self.strange


@dataclass
class Scan:
    """What a pass over a log has found."""

    rows: int = 0
    complete: int = 0  # rows with a value in every column
    nulls: list[int] = field(default_factory=lambda: [0, 0, 0])
    ids: tuple[Ids, Ids] = field(default_factory=lambda: (Ids(), Ids()))
    low: float = 0  # times: numbers as they are, datetimes in seconds
    high: float = 0
    number: object = None  # the first time that is a number, and the first that is a datetime
    datetime: object = None
    whole: bool = True  # all times are whole numbers
    unit: str = ""  # of numbers: a key of TICKS; "": they can be no dates


def scan(path: str, layout: Layout, unit: str = "", usual: str = "") -> Scan:
    """Reads a whole log once; memory is that of a block.

    Args:
        unit: of times that are numbers; empty: recognised.
        usual: see ``recognise_unit``.

    Raises:
        DataError: whatever is wrong with the file or its times.
    """
    result = Scan()
    table = None if layout.kind == LINES else open_table(path, layout.columns)
    for _ in watched(_scanned(path, layout, result, table), "looking at the file"):
        pass
    if result.number is not None:
        result.unit = unit or recognise_unit(result.low, result.high, layout.columns[2], path, usual)
    return result


def _scanned(path: str, layout: Layout, result: Scan, table: Table | None) -> Iterator[EventBatch]:
    """Adds the file's blocks to the result, telling how far it is."""
    blocks: Iterator[pa.RecordBatch]
    if table is None:
        blocks = (pa.RecordBatch.from_arrays(list(block), ["user", "item"]) for block in line_blocks(path))
    else:
        blocks = table.batches()
    for block in blocks:
        for i, column in enumerate(block.columns[:2]):
            _add_ids(result.ids[i], column, result.rows)
        complete = has_values(block)
        lacking = block.num_rows - pc.sum(complete, min_count=0).as_py()
        if lacking:
            for i, column in enumerate(block.columns):
                alone = pa.RecordBatch.from_arrays([column], ["column"])
                result.nulls[i] += block.num_rows - pc.sum(has_values(alone), min_count=0).as_py()
        if len(layout.columns) > 2 and lacking < block.num_rows:
            _add_times(result, block.column(2).filter(complete) if lacking else block.column(2), layout, path)
        result.rows += block.num_rows
        result.complete += block.num_rows - lacking
        yield EventBatch(
            block.column(0), block.column(1), None, result.rows / table.rows if table and table.rows else 0
        )


def _add_ids(ids: Ids, column: pa.Array, first_row: int) -> None:
    if not is_text(value_type(column)):
        return
    ids.text = True
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    column = column.cast(pa.large_string())
    if not are_integers(column):
        strange = pc.fill_null(pc.invert(canonical_integers(column)), False)
        ids.strange += pc.sum(strange, min_count=0).as_py()
        if not ids.example:
            place = pc.index(strange, True).as_py()
            ids.example, ids.row = column[place].as_py(), first_row + place + 1


def _add_times(result: Scan, column: pa.Array, layout: Layout, path: str) -> None:
    name = layout.columns[2]
    times = natural(column, name, path)
    if pa.types.is_timestamp(times.type):
        result.datetime = result.datetime if result.datetime is not None else column[0].as_py()
        ticks = TICKS[times.type.unit]
        low, high = (value // ticks for value in pc.min_max(times.cast(pa.int64())).as_py().values())
    else:
        result.number = result.number if result.number is not None else column[0].as_py()
        result.whole &= pa.types.is_integer(times.type)
        low, high = pc.min_max(times).as_py().values()
    if result.number is not None and result.datetime is not None:
        raise mixed(name, path, result.number, result.datetime)
    first = not result.complete
    result.low, result.high = (low, high) if first else (min(result.low, low), max(result.high, high))


def ids_line(ids: Ids, name: str, rows: int, integers: bool) -> str:
    """What a column's ids are read as, for people; ``integers``: as integers where they are in text."""
    if not ids.text or integers:
        return f"{name} ids are integers"
    if ids.strange in (0, rows):
        return f"{name} ids are text"
    verb = "is not a plain number" if ids.strange == 1 else "are not plain numbers, the first"
    return f"{name} ids are text: {ids.strange:,} of {rows:,} {verb}: {ids.example!r} in row {ids.row:,}"


def clock_line(result: Scan, unit: str) -> str:
    """The range of the times and their unit, for people."""
    if result.datetime is not None:
        return f"time: {date_of(int(result.low))} .. {date_of(int(result.high))} UTC, dates or datetimes"
    low, high = (int(time // TICKS[unit or "s"]) for time in (result.low, result.high))
    if not unit:
        return f"time: {low:,} .. {high:,}, no dates: taken as seconds (--time-unit names another unit)"
    return f"time: {date_of(low)} .. {date_of(high)} UTC, {NAMES[unit]}"


def read(path: str, layout: Layout, found: Scan, unit: str, integers: Sequence[bool]) -> Iterator[EventBatch]:
    """Streams the events of a scanned log, rows with empty values left out.

    Args:
        integers: whether ids in text are read as integers.
    """
    if layout.kind == LINES:
        yield from read_lines(path, integers)
        return
    user, item, *time = layout.columns
    kinds = (*integers, found.whole)
    drop = found.complete < found.rows
    yield from read_table(path, user, item, "".join(time), unit or "s", kinds, drop)
