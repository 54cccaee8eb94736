"""Histories to recommend for: of a parquet or JSON-lines file, streamed, or of users of a store."""

import json
import logging
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from recml_sasrec.data.events import DataError, find_column, open_parquet, parquet_batches
from recml_sasrec.data.loader import Data
from recml_sasrec.data.queries import evaluated_users, target_ranges
from recml_sasrec.data.vocabulary import Encoder
from recml_sasrec.data.windows import ranges

log = logging.getLogger("recml_sasrec")
CHUNK = 1024  # histories in memory at a time
_LISTS = (
    pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list,
    pa.types.is_list_view, pa.types.is_large_list_view,
)  # fmt: skip


class Chunk(NamedTuple):
    """Users and, of each, the raw ids of its items, oldest first, and of those it may and may not get."""

    users: list
    histories: list[list]
    allow: list[list | None]  # None: all
    block: list[list | None]


def read_histories(path: pathlib.Path) -> Iterator[Chunk]:
    """Streams parquet with columns ``user`` and ``history`` (lists), or lines ``{"user": ..., "history": [...]}``.

    Columns or keys ``allow`` and ``block``, where there are any, hold lists of item ids too. A history that is null is
    empty, an allow list that is null allows all. Users are integers or strings.

    Raises:
        DataError: a missing or broken file, column or field.
    """
    if not path.is_file():
        raise DataError(f"file {str(path)!r} of histories does not exist; check --input")
    yield from _parquet_chunks(path) if path.suffix == ".parquet" else _json_chunks(path)


def store_histories(data: Data, users: str | Sequence[Any]) -> Iterator[Chunk]:
    """Streams histories of a run's own users.

    Args:
        users: raw user ids, of which unknown ones are skipped with a word, or ``all``: with all their events. ``test``
            or ``validation``: who is evaluated on that split, with the history that evaluation gives the model.

    Raises:
        DataError: users of whom the store has none.
    """
    store = data.store
    start, end = store.offsets[:-1], store.offsets[1:]
    if users in ("test", "validation"):
        dense = evaluated_users(data.split, str(users))
        start, end = data.split.train_start, target_ranges(data.split, str(users))[2]
    elif users == "all":
        dense = np.arange(store.num_users)
    else:
        dense = _dense_users(store.user_ids, users)
    for first in range(0, len(dense), CHUNK):
        some = dense[first : first + CHUNK]
        sizes = end[some] - start[some]
        raw = store.item_ids.take(pa.array(store.items[ranges(start[some], sizes)])).to_pylist()
        ends = np.cumsum(sizes)
        names = store.user_ids.take(pa.array(some)).to_pylist()
        free: list[list | None] = [None] * len(some)
        yield Chunk(names, [raw[e - n : e] for e, n in zip(ends, sizes, strict=True)], free, free)


def _dense_users(user_ids: pa.Array, users: Sequence[Any]) -> np.ndarray:
    find = Encoder(user_ids)
    dense = np.empty(len(users), np.int64)
    for index, user in enumerate(users):
        try:
            dense[index] = find(pa.array([str(user)], pa.large_string()).cast(user_ids.type))[0]
        except (pa.ArrowInvalid, UnicodeError):
            dense[index] = -1
    unknown = [user for user, row in zip(users, dense, strict=True) if row < 0]
    if unknown:
        whose = f"{len(user_ids):,} users of the run's data"
        if len(unknown) == len(users):
            raise DataError(f"user {unknown[0]!r} is none of the {whose}; give its history")
        log.warning(
            "skipped %d of %d users, %r first, who are none of the %s", len(unknown), len(users), unknown[0], whose
        )
    return dense[dense >= 0]


def _parquet_chunks(path: pathlib.Path) -> Iterator[Chunk]:
    name = str(path)
    file = open_parquet(name)
    names = file.schema_arrow.names
    columns = [find_column(name, names, column) for column in ("user", "history")]
    columns += [find_column(name, names, column) for column in ("allow", "block") if column in names]
    for column in columns[1:]:
        kind = file.schema_arrow.field(column).type
        if not any(is_one(kind) for is_one in _LISTS):
            what = "histories" if column == columns[1] else f"{column} lists"
            raise DataError(f"column {column!r} of {name!r} holds {kind} values but {what} must be lists of item ids")
    row = 0
    for batch in parquet_batches(name, file, columns, CHUNK):
        values = dict(zip(columns, (column.to_pylist() for column in batch.columns), strict=True))
        users, histories = values[columns[0]], values[columns[1]]
        for number, user in enumerate(users, row + 1):
            _check_user(user, f"row {number} of {name!r}")
        row += len(users)
        free: list[list | None] = [None] * len(users)
        yield Chunk(
            users, [history or [] for history in histories], values.get("allow", free), values.get("block", free)
        )


def _json_chunks(path: pathlib.Path) -> Iterator[Chunk]:
    rows: list[tuple] = []
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                rows.append(_parse(line, f"line {number} of {str(path)!r}"))
                if len(rows) == CHUNK:
                    yield Chunk(*map(list, zip(*rows, strict=True)))
                    rows = []
    except UnicodeDecodeError as error:
        raise DataError(f"{str(path)!r} is not UTF-8 text ({error.reason}); write it as UTF-8 or as .parquet") from None
    if rows:
        yield Chunk(*map(list, zip(*rows, strict=True)))


def _parse(line: str, place: str) -> tuple[Any, list, list | None, list | None]:
    try:
        entry = json.loads(line)
        user, history = entry["user"], entry["history"]
        allow, block = entry.get("allow"), entry.get("block")
    except (ValueError, TypeError, KeyError, RecursionError):
        raise DataError(f'{place} is not {{"user": ..., "history": [...]}}; correct it') from None
    _check_user(user, place)
    for what, ids in (("history", history), ("allow list", allow), ("block list", block)):
        if ids is not None and not isinstance(ids, list):
            raise DataError(f"the {what} in {place} is {ids!r} but must be a list of item ids; correct it")
    return user, history or [], allow, block


def _check_user(user: Any, place: str) -> None:
    try:
        if isinstance(user, int) and not isinstance(user, bool):
            return
        user.encode()
    except (AttributeError, UnicodeError):
        raise DataError(f"the user in {place} is {user!r} but must be an integer or text; correct it") from None
