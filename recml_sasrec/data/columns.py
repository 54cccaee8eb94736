"""Which columns of a log are the user, the item and the time, or that it has none but lines: told by its content."""

import gzip
import itertools
from typing import NamedTuple

from recml_sasrec.data.errors import DataError
from recml_sasrec.data.events import broken_text, find_column, is_parquet, open_parquet, read_header, split_line

# as they are written without case, separators and a :type suffix
USER = (
    "user userid uid visitor visitorid customer customerid client clientid member memberid account accountid profileid "
    "reviewer reviewerid player playerid session sessionid"
).split()
ITEM = (
    "item itemid iid product productid movie movieid track trackid song songid artist artistid asin sku article "
    "articleid news newsid book bookid isbn video videoid business businessid listing listingid game gameid good goodid"
).split()
TIME = (
    "timestamp ts time date datetime eventtime eventtimestamp eventdate createdat createdtime occurredat timems "
    "timestampms checkintime tdat unixtime unixtimestamp unixreviewtime reviewtime"
).split()
LINES = "user item item ... lines"
_FIRST_LINES = 50


class Layout(NamedTuple):
    """Where the events of a file are."""

    kind: str  # parquet, table of text, or LINES
    columns: tuple[str, ...]  # user, item and, if there is one, time; of lines just names


def recognise(path: str, user: str = "", item: str = "", time: str = "") -> Layout:
    """The layout of a log; columns that are named are taken, the others found by their names.

    Args:
        time: "none": there is no time, the rows of a user are in order.

    Raises:
        DataError: a column is missing or more than one could be meant.
    """
    if is_parquet(path):
        kind = "parquet"
        names = open_parquet(path).schema_arrow.names
    else:
        if not (user or item) and _is_lines(path):
            if time not in ("", "none"):
                raise DataError(f"{path!r} has no columns but `user item item ...` lines; leave out --time {time}")
            return Layout(LINES, ("user", "item"))
        kind = "table of text"
        names = read_header(path, [name for name in (user, item) if name])[1]
        if all(name.strip().replace(".", "", 1).isdecimal() for name in names):
            raise DataError(
                f"the first line of {path!r} holds values ({', '.join(names[:4])}), not the names of its columns; "
                "put a line with the names before it"
            )
    found = [_find(path, names, user, USER, "user"), _find(path, names, item, ITEM, "item")]
    if time != "none":
        found.append(_find(path, names, time, TIME, "time"))
    if len(set(found)) < len(found):
        raise DataError(f"--user, --item and --time must name different columns of {path!r}, not {', '.join(found)}")
    return Layout(kind, tuple(found))


def _find(path: str, names: list[str], asked: str, known: list[str], flag: str) -> str:
    if asked:
        return find_column(path, names, asked)
    candidates = [name for name in names if _plain(name) in known]
    if len(candidates) == 1:
        return candidates[0]
    if len(set(candidates)) == 1:  # twice the same name
        return find_column(path, names, candidates[0])
    listed = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    what = f"{len(candidates)} columns that may be the {flag} ({', '.join(candidates)})" if candidates else ""
    without = ", or --time none if the rows are in order" if flag == "time" else ""
    raise DataError(f"{path!r} has {what or f'no column known as the {flag}'}; say --{flag} NAME{without}: {listed}")


def _plain(name: str) -> str:
    return name.split(":")[0].strip().lower().replace("_", "").replace("-", "").replace(" ", "").replace(".", "")


def _is_lines(path: str) -> bool:
    """Whether a file of text has no header and no delimiter but blanks, or tabs in numbers that differ by line."""
    opener = gzip.open if path.endswith(".gz") else open
    try:
        with opener(path, "rt", encoding="utf-8-sig") as file:
            lines = [line.rstrip("\r\n") for line in itertools.islice(file, _FIRST_LINES)]
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise broken_text(path, error) from error
    first = lines[0] if lines else ""
    if not first.strip():
        return False  # read_header has the sentence
    if any(len(split_line(first, mark, path)) > 1 for mark in ",;|"):
        return False
    words = [_plain(word) for word in first.split()]
    if "\t" in first:
        return len({line.count("\t") for line in lines if line.strip()}) > 1
    if set(words) & set(USER) and set(words) & set(ITEM):
        raise DataError(f"the columns of {path!r} are separated by blanks; separate them by tabs or commas")
    return True
