"""Times of any kind as int64 ticks, with the unit of plain numbers recognised by their size."""

import datetime

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recml_sasrec.data.errors import DataError

INT64_MAX = 2**63 - 1
TICKS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}  # a second
NAMES = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
# 1980 to 2100 in seconds: the four units' ranges of such numbers are far apart
YEAR_1980, YEAR_2100 = 315_532_800, 4_102_444_800


def is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def natural(column: pa.Array, name: str, path: str) -> pa.Array:
    """Times as the numbers (int64, uint64 or float) or timestamps that they are; text is parsed, dates are midnights.

    Raises:
        DataError: a type or a text that is no time, or numbers and datetimes in one block of text.
    """
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if is_text(column.type):
        column = _parse_times(column.cast(pa.large_string()), name, path)  # Arrow's text functions know no views
    kind = column.type
    if pa.types.is_float16(kind):  # of which Arrow finds no least and greatest
        return column.cast(pa.float32())
    if pa.types.is_date(kind):
        return column.cast(pa.timestamp("s"))
    if pa.types.is_timestamp(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return column
    raise DataError(
        f"column {name!r} of {path!r} holds {kind} values but times must be numbers or datetimes; convert it"
    )


def as_ticks(column: pa.Array, name: str, path: str, unit: str = "s", least: int = 1) -> tuple[pa.Array, int]:
    """Times as int64 ticks, and how many of them a second has: those of the type (of a float microseconds or finer).

    Args:
        column: without nulls; integers, floats, dates, datetimes, or text of any of these.
        unit: of plain numbers, a key of ``TICKS``.
        least: ticks a second that are given at least; makes those of all blocks of a text column equal.

    Raises:
        DataError: a value that is no time, is negative, or overflows.
    """
    column = natural(column, name, path)
    kind = column.type
    if pa.types.is_floating(kind):
        return _float_ticks(column, name, path, unit, least)
    ticks = TICKS[kind.unit if pa.types.is_timestamp(kind) else unit]
    scale, ticks = max(least // ticks, 1), max(least, ticks)
    if pa.types.is_timestamp(kind):
        column = column.cast(pa.int64())
    if len(column):
        low, high = pc.min_max(column).as_py().values()
        if high > INT64_MAX // scale:
            _overflow(high, name, path)
        if low < 0:
            what = f"date {date_of(low // TICKS[kind.unit])}" if pa.types.is_timestamp(kind) else f"negative time {low}"
            raise DataError(
                f"column {name!r} of {path!r} holds the {what}; times must be 0 or more (none before 1970): shift them"
            )
    column = column.cast(pa.int64())
    return (pc.multiply(column, scale) if scale > 1 else column), ticks


def as_seconds(column: pa.Array, name: str, path: str) -> pa.Array:
    """Times as int64 seconds, fractions dropped; see ``as_ticks``."""
    times, ticks = as_ticks(column, name, path)
    return times if ticks == 1 else pa.array(times.to_numpy() // ticks)


def _float_ticks(column: pa.Array, name: str, path: str, unit: str, least: int) -> tuple[pa.Array, int]:
    ticks = max(10**6, TICKS[unit], least)
    scale = ticks // TICKS[unit]
    values = column.to_numpy(zero_copy_only=False).astype(np.float64)
    bad = ~(np.abs(values) < 2.0**63 / scale)  # also true for NaN
    if bad.any():
        _overflow(float(values[bad][0]), name, path)
    if (values < 0).any():
        raise DataError(
            f"column {name!r} of {path!r} holds the negative time {float(values.min())}; times must be 0 or more: "
            "shift them"
        )
    whole = np.floor(values)  # apart, so that a product's rounding can't reach the next second
    result = whole.astype(np.int64) * scale + np.floor((values - whole) * scale).astype(np.int64)
    return pa.array(result), ticks


def recognise_unit(low: float, high: float, name: str, path: str, usual: str = "") -> str:
    """The unit of plain numbers in [low, high], which are all of a log's times; "" if they can be no dates.

    Args:
        usual: the unit that was named for the files before it; taken where the numbers don't tell theirs.

    Raises:
        DataError: they may be of several units, or of none.
    """
    for bound in (low, high):
        if not abs(bound) <= INT64_MAX:  # infinite too
            _overflow(bound, name, path)
    for unit, ticks in TICKS.items():
        if YEAR_1980 * ticks <= low and high < YEAR_2100 * ticks:
            if usual and usual != unit:
                raise DataError(
                    f"column {name!r} of {path!r} holds {NAMES[unit]} ({low:,} to {high:,}) but --time-unit {usual} "
                    f"was given for the files before it; say --time-unit {unit} or --time-unit {usual}"
                )
            return unit
    if usual:
        return usual
    if _is_day(low) and _is_day(high):
        raise DataError(
            f"column {name!r} of {path!r} holds numbers like {int(low)}, which look like days written YYYYMMDD; "
            "convert them to dates, or give --time-unit s if they are seconds"
        )
    if low >= 0 and high < YEAR_1980:
        return ""
    raise DataError(
        f"column {name!r} of {path!r} holds times from {low:,} to {high:,}, which are dates in no one unit (as "
        f"seconds the years {_year(low, 1)} to {_year(high, 1)}, as milliseconds {_year(low, 1000)} to "
        f"{_year(high, 1000)}); "
        "give --time-unit s, ms, us or ns, or remove the rows with wrong times"
    )


def _is_day(number: float) -> bool:
    year, month, day = int(number) // 10_000, int(number) // 100 % 100, int(number) % 100
    return 1970 <= year <= 2100 and 1 <= month <= 12 and 1 <= day <= 31


def _year(number: float, ticks: int) -> int:
    return 1970 + int(number / ticks // 31_556_952)


def date_of(seconds: int) -> str:
    """YYYY-MM-DD in UTC, or the plain number where the calendar does not reach."""
    try:
        return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d")
    except (ValueError, OverflowError, OSError):
        return f"second {seconds:,}"


def _overflow(value: float, name: str, path: str) -> None:
    raise DataError(
        f"column {name!r} of {path!r} holds the time {value}, outside 0..{INT64_MAX} (int64); "
        "correct or remove that row"
    )


def _parse_times(column: pa.Array, name: str, path: str) -> pa.Array:
    column = pc.utf8_trim_whitespace(column)
    for kind in (pa.int64(), pa.float64(), pa.timestamp("us"), pa.timestamp("us", "UTC"), pa.timestamp("ns")):
        try:
            parsed = column.cast(kind)
        except pa.ArrowInvalid:
            continue
        # An integer over int64 parses as a float that has lost digits; as_ticks refuses it by its size.
        return parsed.cast(pa.timestamp("us"), safe=False) if kind == pa.timestamp("ns") else parsed
    numbers, datetimes = "", ""
    for value in column.drop_null():  # the block has a bad value, or several kinds: find them for the message
        text = value.as_py()
        if _is_number(text):
            numbers = numbers or text
        elif _is_datetime(value):
            datetimes = datetimes or text
        else:
            raise DataError(
                f"column {name!r} of {path!r} holds {text!r}, which is neither a number nor a datetime; "
                "correct or remove that row"
            )
        if numbers and datetimes:
            raise mixed(name, path, numbers, datetimes)
    raise DataError(f"column {name!r} of {path!r} has datetimes with and without a zone; convert it to one of them")


def mixed(name: str, path: str, number: object, other: object) -> DataError:
    return DataError(
        f"column {name!r} of {path!r} mixes numbers ({number}) and datetimes ({other}); convert it to one of them"
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _is_datetime(value: pa.Scalar) -> bool:
    for kind in (pa.timestamp("us"), pa.timestamp("us", "UTC")):
        try:
            value.cast(kind)
        except pa.ArrowInvalid:
            continue
        return True
    return False
