"""Histories to recommend for: of a parquet or JSON-lines file, streamed, or of users of a store."""

import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from recml_sasrec.data.events import DataError, find_column, open_parquet, parquet_batches
from recml_sasrec.data.loader import Data
from recml_sasrec.data.queries import evaluated_users, target_ranges
from recml_sasrec.data.vocabulary import Encoder
from recml_sasrec.data.windows import ranges

CHUNK = 1024  # histories in memory at a time
Chunk = tuple[list, list[list]]  # users and, of each, the raw ids of its items, oldest first


def read_histories(path: pathlib.Path) -> Iterator[Chunk]:
    """Streams parquet with columns ``user`` and ``history`` (lists), or lines ``{"user": ..., "history": [...]}``.

    A history that is null is empty. Users are integers or strings.

    Raises:
        DataError: a missing or broken file, column or field.
    """
    if not path.is_file():
        raise DataError(f"file {str(path)!r} of histories does not exist; check --input")
    yield from _parquet_chunks(path) if path.suffix == ".parquet" else _json_chunks(path)


def store_histories(data: Data, users: str | Sequence[Any]) -> Iterator[Chunk]:
    """Streams histories of a run's own users.

    Args:
        users: raw user ids, or ``all``: with all their events. ``test`` or ``validation``: who is evaluated on that
            split, with the history that evaluation gives the model.

    Raises:
        DataError: a user that the store has not.
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
        yield (
            store.user_ids.take(pa.array(some)).to_pylist(),
            [raw[e - n : e] for e, n in zip(ends, sizes, strict=True)],
        )


def _dense_users(user_ids: pa.Array, users: Sequence[Any]) -> np.ndarray:
    find = Encoder(user_ids)
    dense = np.empty(len(users), np.int64)
    for index, user in enumerate(users):
        try:
            dense[index] = find(pa.array([str(user)], pa.large_string()).cast(user_ids.type))[0]
        except (pa.ArrowInvalid, UnicodeError):
            dense[index] = -1
        if dense[index] < 0:
            raise DataError(f"user {user!r} is none of the {len(user_ids):,} users of the run's data; give its history")
    return dense


def _parquet_chunks(path: pathlib.Path) -> Iterator[Chunk]:
    name = str(path)
    file = open_parquet(name)
    columns = [find_column(name, file.schema_arrow.names, column) for column in ("user", "history")]
    kind = file.schema_arrow.field(columns[1]).type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        raise DataError(
            f"column {columns[1]!r} of {name!r} holds {kind} values but histories must be lists of item ids"
        )
    row = 0
    for batch in parquet_batches(name, file, columns, CHUNK):
        users = batch.column(0).to_pylist()
        for number, user in enumerate(users, row + 1):
            _check_user(user, f"row {number} of {name!r}")
        row += len(users)
        yield users, [history or [] for history in batch.column(1).to_pylist()]


def _json_chunks(path: pathlib.Path) -> Iterator[Chunk]:
    users: list = []
    histories: list[list] = []
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                user, history = _parse(line, f"line {number} of {str(path)!r}")
                users.append(user)
                histories.append(history)
                if len(users) == CHUNK:
                    yield users, histories
                    users, histories = [], []
    except UnicodeDecodeError as error:
        raise DataError(f"{str(path)!r} is not UTF-8 text ({error.reason}); write it as UTF-8 or as .parquet") from None
    if users:
        yield users, histories


def _parse(line: str, place: str) -> tuple[Any, list]:
    try:
        entry = json.loads(line)
        user, history = entry["user"], entry["history"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise DataError(f'{place} is not {{"user": ..., "history": [...]}}; correct it') from None
    _check_user(user, place)
    if history is not None and not isinstance(history, list):
        raise DataError(f"the history in {place} is {history!r} but must be a list of item ids; correct it")
    return user, history or []


def _check_user(user: Any, place: str) -> None:
    try:
        if isinstance(user, int) and not isinstance(user, bool):
            return
        user.encode()
    except (AttributeError, UnicodeError):
        raise DataError(f"the user in {place} is {user!r} but must be an integer or text; correct it") from None
