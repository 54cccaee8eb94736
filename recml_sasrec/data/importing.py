"""A user's own log into a store: looked at, checked, written with what it suggests; and more events added to it."""

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import re
import shlex
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from recml_sasrec.config import ConfigError
from recml_sasrec.data import scan, suggest
from recml_sasrec.data.arrays import read_meta
from recml_sasrec.data.columns import LINES, Layout, recognise
from recml_sasrec.data.describe import describe
from recml_sasrec.data.errors import DataError
from recml_sasrec.data.events import EventBatch, changed, check_file
from recml_sasrec.data.folders import restore
from recml_sasrec.data.store import FRACTIONS, Store, fingerprint_of, make_store, open_store, read_store
from recml_sasrec.data.times import INT64_MAX, TICKS, YEAR_1980

FILE = "import.json"
_ARRAYS = ("items.npy", "timestamps.npy", "offsets.npy", "user_ids.arrow", "item_ids.arrow")
_FILES = (*_ARRAYS, FRACTIONS, "meta.json", suggest.FILE, FILE)


class Asked(NamedTuple):
    """What the user says of a file; empty: recognised."""

    user: str = ""
    item: str = ""
    time: str = ""  # "none": the rows of a user are in order
    time_unit: str = ""  # s, ms, us or ns
    drop_nulls: bool = False


NOTHING = Asked()


class Source(NamedTuple):
    """A file that has been looked at."""

    path: str
    layout: Layout
    found: scan.Scan
    unit: str  # of plain numbers; "": they are no dates
    asked: Asked


def import_log(path: str, output: str, asked: Asked = NOTHING, append: bool = False, replace: bool = False) -> str:
    """Writes a log to the store ``output``, or adds it to the events that are there, and returns the report.

    The folder holds the store, ``suggestion.json`` and ``import.json`` (the files it was made of, by their content). It
    is there whole or not at all; until a new one is complete the old one stays.

    Args:
        append: add to the store that is there.
        replace: put the new store in place of another one.

    Raises:
        DataError: whatever is wrong with the file, or a store that is there and is another one.
    """
    check_file(path, "--input")
    restore(output)
    digest = _digest(path)
    with _held(output):
        return _import(path, digest, output, asked, append, replace)


def _import(path: str, digest: str, output: str, asked: Asked, append: bool, replace: bool) -> str:
    old = _existing(output, append, replace)
    inputs: list[dict[str, Any]] = []
    usual = ""
    if append:
        assert old is not None
        inputs = _read_inputs(output)["inputs"]
        again = [entry for entry in inputs if entry["digest"] == digest]
        if again:
            raise DataError(
                f"{output!r} already holds the events of {path!r} (added as {again[0]['name']!r}); there is nothing to "
                "do"
            )
        first = Asked(**inputs[0]["asked"])
        first, usual = first._replace(time_unit=""), first.time_unit
        asked = asked._replace(**{name: value for name, value in first._asdict().items() if not getattr(asked, name)})
    before = old.fingerprint if old is not None and append else ""
    fingerprint = fingerprint_of(digest=digest, asked=asked._asdict(), before=before)
    same = old is not None and old.fingerprint == fingerprint
    if same:
        with contextlib.suppress(DataError, ConfigError):  # a file beside the store is gone: it is written again
            suggest.read(output)
            return _read_inputs(output)["report"]
        _check_ours(output)
    elif old is not None and not append and not replace:
        raise DataError(
            f"--output {output!r} holds another store, of {_names(output)}; use another folder, --replace to write "
            "over it, or --append to add to it"
        )
    suggested: dict[str, Any] = {}
    if append:
        with contextlib.suppress(ConfigError):
            suggested = suggest.read(output)
    report: list[str] = []

    def finish(work: str) -> None:
        if append and open_store(output).fingerprint != before:
            raise DataError(f"{output!r} was changed by another process; start again")
        if _digest(path) != digest:
            raise changed(path)
        store = open_store(work)
        fields = suggest.write(work, suggest.facts_of(store), suggested)
        lines = _report(source, integers, store, old if append else None, fields, output)
        report.append("\n".join(lines + _changes(suggested, fields)))
        entry = {"name": os.path.basename(path), "digest": digest, "asked": asked._asdict()}
        with open(os.path.join(work, FILE), "w") as file:
            json.dump({"inputs": [*inputs, entry], "report": report[0]}, file, indent=1)

    try:
        source = look(path, asked, usual)
        read, integers = _reader(source, old if append else None, output)
        make_store(read, output, fingerprint, path, place="--output", finish=finish, replace=old is not None or replace)
    except DataError as error:  # half of a row, no row at all, ...: that is not what to correct
        if _digest(path) != digest:
            raise changed(path) from error
        raise
    return report[0]


def look(path: str, asked: Asked, usual: str = "") -> Source:
    """Recognises a file's columns and the unit of its times by a pass over it.

    Args:
        usual: the unit that was named for the files before it.

    Raises:
        DataError: whatever is wrong with it, or ambiguous.
    """
    layout = recognise(path, asked.user, asked.item, asked.time)
    found = scan.scan(path, layout, asked.time_unit, usual)
    if not found.rows:
        raise DataError(f"{path!r} has no events; give a file with at least one row")
    if found.complete < found.rows and not asked.drop_nulls:
        nulls = ", ".join(
            f"{name} {count:,}" for name, count in zip(layout.columns, found.nulls, strict=False) if count
        )
        raise DataError(
            f"{path!r} has {found.rows - found.complete:,} of {found.rows:,} rows with an empty value ({nulls}); "
            "--drop-nulls leaves them out"
        )
    if not found.complete:
        raise DataError(f"{path!r} has no row with a value in each of {', '.join(layout.columns)}; name other columns")
    if asked.time_unit and found.number is None:
        what = "datetimes, which have a unit" if found.datetime is not None else "no times"
        raise DataError(f"{path!r} has {what}; leave out --time-unit {asked.time_unit}")
    return Source(path, layout, found, found.unit, asked)


def _existing(output: str, append: bool, replace: bool) -> Store | None:
    """The store at ``output``, if there is one; a folder of anything else is never touched."""
    if not os.path.exists(output) or (os.path.isdir(output) and not os.listdir(output)):
        if append:
            raise DataError(f"--append needs a store at --output {output!r}, and there is none; leave it out")
        return None
    if not _is_store(output):
        raise DataError(f"--output {output!r} is there and holds no store; choose another folder")
    if append or replace:
        _check_ours(output)
    try:
        return open_store(output)
    except DataError:
        if replace:
            return None
        raise


def _is_store(output: str) -> bool:
    """Whether a folder is a store, though perhaps a damaged one."""
    try:
        entries = os.listdir(output)
        with open(os.path.join(output, "meta.json"), "rb") as file:
            meta = json.load(file)
    except OSError:
        return False
    except ValueError:
        meta = None
    theirs = isinstance(meta, dict) and "version" not in meta  # a well-formed file of some other program
    return not theirs and any(entry in entries for entry in _ARRAYS)


def _check_ours(output: str) -> None:
    """Refuses to put another folder in place of one that holds what is not the store's: it would be gone."""
    for entry in sorted(os.listdir(output)):
        if entry not in _FILES and not re.fullmatch(r"content-.*\.npy|\.content-.*\.tmp-.*", entry):
            raise DataError(
                f"--output {output!r} also holds {entry!r}, which is not the store's and would be removed; move it "
                "out of the folder"
            )


@contextlib.contextmanager
def _held(output: str) -> Iterator[None]:
    """Holds the store that is there, if one is, against others that would add to it or replace it."""
    path = os.path.join(output, "meta.json")
    if not os.path.isfile(path) or not os.access(path, os.W_OK):
        yield  # nothing to lose, or nothing that could be written
        return
    with open(path, "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"another process writes to the store {output!r}; wait until it is done") from None
        if not os.path.exists(path) or not os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
            raise DataError(f"{output!r} was changed by another process; start again")
        yield


def _read_inputs(output: str) -> dict[str, Any]:
    try:
        with open(os.path.join(output, FILE)) as file:
            tree = json.load(file)
        texts = [tree["report"], *(entry[name] for entry in tree["inputs"] for name in ("name", "digest"))]
        asked = [Asked(**entry["asked"]) for entry in tree["inputs"]]
        whole = all(type(a) is type(b) for one in asked for a, b in zip(one, NOTHING, strict=True))
        if asked and whole and all(isinstance(text, str) for text in texts):
            return tree
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise DataError(f"{output!r} was not made by prepare --input ({FILE} is missing or damaged); use another folder")


def _names(output: str) -> str:
    """The files that a store was made of."""
    try:
        return ", ".join(repr(entry["name"]) for entry in _read_inputs(output)["inputs"])
    except DataError:
        return repr(os.path.basename(read_meta(output)["source"]))


def _digest(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, functools.partial(hashlib.blake2b, digest_size=16)).hexdigest()
    except OSError as error:
        raise DataError(f"{path!r} can't be read ({error.strerror}); check --input") from error


def _reader(source: Source, old: Store | None, output: str) -> tuple[Callable[[], Iterator[EventBatch]], list[bool]]:
    """The stream of all events, those of the old store first; and whether users and items in text are integers."""
    texts = [False, False]
    if old is not None:
        texts = [not pa.types.is_integer(ids.type) for ids in (old.user_ids, old.item_ids)]
        _check_fits(source, old, texts, output)
    typed = source.layout.kind == "parquet"
    integers = [ids.integers and not text and not typed for ids, text in zip(source.found.ids, texts, strict=True)]
    new = functools.partial(scan.read, source.path, source.layout, source.found, source.unit, integers)
    if old is None:
        return new, integers
    share = old.num_events / (old.num_events + source.found.complete)
    ticks = max(next(read_store(old)).ticks, next(new()).ticks)
    if old.last_time >= INT64_MAX // ticks:
        raise DataError(
            f"{output!r} holds times up to second {old.last_time:,}, too late for ticks of {source.path!r} "
            f"({ticks:,} a second); correct them"
        )

    def read() -> Iterator[EventBatch]:
        for batch in read_store(old):
            yield _at(batch, ticks, batch.share * share)
        for batch in new():
            yield _at(batch, ticks, share + batch.share * (1 - share) if batch.share else 0.0)

    return read, integers


def _at(batch: EventBatch, ticks: int, share: float) -> EventBatch:
    """The batch with finer ticks."""
    time = batch.timestamp
    if time is not None and batch.ticks < ticks:
        time = pc.multiply(time, ticks // batch.ticks)
    return EventBatch(batch.user, batch.item, time, share, ticks)


def _check_fits(source: Source, old: Store, texts: list[bool], output: str) -> None:
    """Refuses a file whose ids or times are of another kind than the store's."""
    for name, text, ids in zip(("user", "item"), texts, source.found.ids, strict=True):
        if not text and ids.text and not ids.integers:
            raise DataError(
                f"the {name} ids of {output!r} are integers but {source.path!r} has {ids.example!r} in row "
                f"{ids.row:,}; correct it, or import all files again as text"
            )
        # text of digits in a typed file is text, in a file of nothing but text it is what the store has
        typed = source.layout.kind == "parquet"
        if typed and text != ids.text:
            kinds = ("integers", "text")
            raise DataError(
                f"the {name} ids of {output!r} are {kinds[text]} but those of {source.path!r} {kinds[ids.text]}; "
                "convert the file's"
            )
    high = source.found.high if source.found.datetime is not None else source.found.high // TICKS[source.unit or "s"]
    if old.has_time and len(source.layout.columns) > 2 and (high < YEAR_1980) != (old.last_time < YEAR_1980):
        dates, numbers = (output, source.path) if high < YEAR_1980 else (source.path, output)
        raise DataError(
            f"the times of {dates!r} are dates but those of {numbers!r} are none, up to second "
            f"{int(min(high, old.last_time)):,}; convert them so that all count from the same moment"
        )
    if old.has_time != (len(source.layout.columns) > 2):
        with_times, without = (output, source.path) if old.has_time else (source.path, output)
        raise DataError(f"{with_times!r} has times but {without!r} has none; import both with them or with --time none")


def _report(
    source: Source,
    integers: list[bool],
    store: Store,
    old: Store | None,
    fields: dict[str, suggest.Suggested],
    output: str,
) -> list[str]:
    found, meta = source.found, read_meta(store.directory)
    columns = ", ".join(
        f"{name} {column!r}" for name, column in zip(("user", "item", "time"), source.layout.columns, strict=False)
    )
    lines = [
        f"{source.path}: {source.layout.kind}, {found.rows:,} rows"
        + (f"; {columns}" if source.layout.kind != LINES else "")
    ]
    for name, ids, whole in zip(("user", "item"), found.ids, integers, strict=True):
        lines.append(scan.ids_line(ids, name, found.rows, whole))
    if store.has_time:
        lines.append(scan.clock_line(found, source.unit))
    dropped = found.rows - found.complete
    lines.append(f"empty values: {f'{dropped:,} rows, left out' if dropped else 'none'}")
    if old is not None:
        lines.append(
            f"added to {old.num_events:,} events: {store.num_events - old.num_events:,} events, "
            f"{store.num_users - old.num_users:,} new users, {store.num_items - old.num_items:,} new items"
        )
    lines += ["", f"store {output}:", describe(store)]
    if store.has_time:
        lines.append(
            f"ties: {meta['ties']:,} events share their user's time with another (kept in the order of the file); "
            f"{meta['duplicates']:,} repeat an earlier one's user, item and time"
        )
    width = max(map(len, fields))
    lines += ["", f"suggested ({suggest.FILE}; each can be set on the command line):"]
    lines += [f"  {name:<{width}}  {_text(field.value):>12}  {field.reason}" for name, field in fields.items()]
    name = os.path.basename(os.path.abspath(output))
    lines += [
        "",
        f"train: python -m recml_sasrec.train --config configs/custom.py --workdir {shlex.quote(f'runs/{name}')} "
        f"--config.data.path={shlex.quote(output)}",
    ]
    if old is not None:
        lines.append("go on from a run on the store before: with --config.init.from_run=RUN and another --workdir")
    return lines


def _changes(before: dict[str, Any], fields: dict[str, suggest.Suggested]) -> list[str]:
    """What is suggested otherwise than before events were added."""
    changed = [name for name in fields if name in before and _text(before[name]) != _text(fields[name].value)]
    return [f"changed: {name} {_text(before[name])} to {_text(fields[name].value)}" for name in changed]


def _text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
