"""The store: an event log as memory-mapped arrays, users in order of their ids, events of a user in time order.

Built once by two streaming passes over the source, renamed into place when complete. The arrays are .npy files and the
raw ids Arrow files, so 4.6e9 events open in milliseconds and processes share pages.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from recml_sasrec.data.arrays import (
    PLACE,
    VERSION,
    check_space,
    create_array,
    open_array,
    open_arrays,
    read_meta,
    write_ids,
    write_meta,
)
from recml_sasrec.data.events import DataError, EventBatch, changed
from recml_sasrec.data.folders import put_in_place, remove_stale, restore, temporary_name
from recml_sasrec.data.progress import watched
from recml_sasrec.data.times import TICKS
from recml_sasrec.data.vocabulary import Collector, Encoder
from recml_sasrec.data.vocabulary import fingerprint as vocabulary_fingerprint
from recml_sasrec.files import unfinished

log = logging.getLogger("recml_sasrec")

FRACTIONS = "fractions.npy"  # int32 [E] nanoseconds, of imported logs alone
_SORT_EVENTS = 1 << 20  # events sorted at once
_READ_EVENTS = 1 << 19  # of a batch read back
_MAX_IDS = 2**31 - 1


@dataclass(frozen=True, eq=False)
class Store:
    """An opened store; user u owns events offsets[u]:offsets[u+1]."""

    items: np.ndarray  # int32 [E], dense item ids, a user's events in time order, ties in file order
    timestamps: np.ndarray  # int64 [E], seconds
    offsets: np.ndarray  # int64 [U+1]
    num_users: int
    num_items: int
    has_time: bool  # false: the source had no times, timestamps are the row order of a user
    fingerprint: str  # of the source and its filters
    vocabulary: str  # fingerprint of the raw item ids
    user_ids: pa.Array  # raw ids, int64 or large_string
    item_ids: pa.Array
    directory: str
    first_time: int  # of all events
    last_time: int

    @property
    def num_events(self) -> int:
        return len(self.items)


def source_fingerprint(path: str, **options: object) -> str:
    """A fingerprint of a source file (path, size, modification time) and the reader's options."""
    stat = os.stat(path)
    return fingerprint_of(path=os.path.abspath(path), size=stat.st_size, mtime_ns=stat.st_mtime_ns, **options)


def fingerprint_of(**options: object) -> str:
    """A hash of what determines a store's content, and of this module's version."""
    text = json.dumps({"store": VERSION, **options}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def open_store(directory: str) -> Store:
    """Maps a store into memory.

    Raises:
        DataError: there is no store, or one of another version.
    """
    restore(directory)
    try:
        meta = read_meta(directory)
        if meta["version"] != VERSION:
            raise DataError(
                f"store {directory!r} has version {meta['version']} but this program reads {VERSION}; delete it"
            )
        arrays = open_arrays(directory, meta)
    except DataError:
        raise
    except (OSError, KeyError) as error:
        raise DataError(f"{directory!r} holds no complete store; delete it and prepare the data again") from error
    except (ValueError, EOFError, pa.ArrowException) as error:
        raise _damaged(directory) from error
    return Store(
        **arrays,
        num_users=meta["num_users"],
        num_items=meta["num_items"],
        has_time=meta["has_time"],
        fingerprint=meta["fingerprint"],
        vocabulary=meta["vocabulary"],
        directory=directory,
        first_time=meta["first_time"],
        last_time=meta["last_time"],
    )


def _damaged(directory: str) -> DataError:
    return DataError(f"store {directory!r} is damaged; delete it and prepare the data again")


def build_store(read: Callable[[], Iterator[EventBatch]], directory: str, fingerprint: str, source: str = "") -> Store:
    """Builds the store of a source, or opens the one that is there if its fingerprint matches.

    ``read`` starts the stream of events and is called twice. Memory is proportional to the numbers of users and
    items and to the longest history, not to the number of events. The store is made in a temporary folder beside
    ``directory`` and renamed into place, so it is there whole or not at all, also with several processes building it
    at once.

    Raises:
        DataError: no events, bad values, mixed types of ids, too little disk.
    """
    source = source or os.path.abspath(directory)
    build = lambda work: _build(read, work, fingerprint, source, PLACE)  # noqa: E731
    return build_in_place(build, directory, fingerprint, source)


def build_in_place(build: Callable[[str], None], directory: str, fingerprint: str, source: str) -> Store:
    """Opens the store of a fingerprint, or has ``build`` write it to a temporary folder, renamed when complete.

    Raises:
        DataError: too little disk, a folder that can't be written, or what ``build`` raises.
    """
    directory = os.path.realpath(directory)
    try:
        store = open_store(directory)
        if store.fingerprint == fingerprint:
            return store
        log.info("%r has changed since its store was made: reading it again", source)
    except DataError:
        if os.path.exists(directory):
            log.info("the store of %r is damaged or of another version: reading it again", source)
    return _put(build, directory, fingerprint, source)


def make_store(
    read: Callable[[], Iterator[EventBatch]],
    directory: str,
    fingerprint: str,
    source: str,
    place: str,
    finish: Callable[[str], None],
    replace: bool,
) -> Store:
    """Builds the store of a source; see ``build_store``.

    The fractions of a second are kept too, so that ``read_store`` gives what was read.

    Args:
        place: the setting that chose the folder, for messages.
        finish: is called with the complete store's temporary folder, and may add files or refuse it.
        replace: in place of the store that is there; else none may be there, unless it is the same.
    """

    def build(work: str) -> None:
        _build(read, work, fingerprint, source, place, keep_fractions=True)
        finish(work)

    # of a link the folder, which the link goes on to name
    return _put(build, os.path.realpath(directory), fingerprint, source, place, replace, keep_same=not replace)


def _put(
    build: Callable[[str], None],
    directory: str,
    fingerprint: str,
    source: str,
    place: str = PLACE,
    replace: bool = True,
    keep_same: bool = True,
) -> Store:
    """Has a store built and puts it in place; ``keep_same``: unless the same one is there by then."""
    parent, name = os.path.split(directory)
    try:
        os.makedirs(parent, exist_ok=True)
        remove_stale(parent, name)
        work = os.path.join(parent, temporary_name(name))
        os.mkdir(work)
    except OSError as error:
        raise DataError(f"folder {parent!r} can't be written ({error.strerror}); choose another {place}") from error
    begin = time.perf_counter()
    try:
        with unfinished(work):
            build(work)
            same = lambda: keep_same and open_store(directory).fingerprint == fingerprint  # noqa: E731
            put_in_place(work, directory, same, replace)
    except OSError as error:
        raise DataError(
            f"the store of {source!r} can't be written to {parent!r} ({error.strerror or error}); "
            f"free disk space or choose another {place}"
        ) from error
    store, seconds = open_store(directory), time.perf_counter() - begin
    log.info("read %s events in %.1f s, %s/s", f"{store.num_events:,}", seconds, f"{store.num_events / seconds:,.0f}")
    return store


def read_store(store: Store) -> Iterator[EventBatch]:
    """The events of a store with their raw ids, user by user, a user's in time order: what it was built from, sorted.

    Their ticks are those of the source if the store was made by ``make_store``, else seconds.
    """
    fractions, ticks = None, 1
    path = os.path.join(store.directory, FRACTIONS)
    try:
        meta = read_meta(store.directory)
        if meta.get("fractions", os.path.exists(path)):
            fractions, ticks = open_array(path, np.int32, store.num_events), meta["ticks"]
            if ticks not in TICKS.values():
                raise ValueError(f"{ticks} ticks")
    except (OSError, KeyError, ValueError) as error:
        raise _damaged(store.directory) from error
    for first, last in user_chunks(store.offsets, _READ_EVENTS):
        bounds = store.offsets[first : last + 1]
        user = np.repeat(np.arange(first, last), np.diff(bounds))
        for begin in range(int(bounds[0]), int(bounds[-1]), _READ_EVENTS):  # a long history in several
            part = slice(begin, min(begin + _READ_EVENTS, int(bounds[-1])))
            times = store.timestamps[part]
            if fractions is not None:
                times = times * ticks + fractions[part] // (TICKS["ns"] // ticks)
            yield EventBatch(
                store.user_ids.take(pa.array(user[begin - bounds[0] : part.stop - bounds[0]])),
                store.item_ids.take(pa.array(store.items[part])),
                pa.array(np.asarray(times)) if store.has_time else None,
                part.stop / store.num_events,
                ticks,
            )


def _build(
    read: Callable[[], Iterator[EventBatch]],
    work: str,
    fingerprint: str,
    source: str,
    place: str,
    keep_fractions: bool = False,
) -> None:
    users, items = Collector("user"), Collector("item")
    events, has_time, ticks = 0, True, 1
    for batch in watched(read(), "reading ids (1 of 2)"):
        users.add(batch.user)
        items.add(batch.item)
        events += len(batch.user)
        has_time, ticks = batch.timestamp is not None, batch.ticks
    if not events:
        raise DataError(
            f"{source!r} has no events after its filters; loosen config.data.min_played_ratio and the "
            "others, or give a file with at least two items"
        )
    user_ids, counts = users.finish()
    item_ids, _ = items.finish()
    for name, ids in (("users", user_ids), ("items", item_ids)):
        if len(ids) > _MAX_IDS:
            raise DataError(f"{source!r} has {len(ids)} {name}, over the limit {_MAX_IDS} (int32); use a part of it")
    keep_fractions &= ticks > 1
    arrays = events * (4 + 8 + 4 * keep_fractions) + (len(user_ids) + 1) * 8 + user_ids.nbytes + item_ids.nbytes
    check_space(work, arrays, source, place)
    write_ids(os.path.join(work, "user_ids.arrow"), user_ids)
    write_ids(os.path.join(work, "item_ids.arrow"), item_ids)
    offsets = np.zeros(len(user_ids) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    np.save(os.path.join(work, "offsets.npy"), offsets)
    item_map = create_array(os.path.join(work, "items.npy"), (events,), np.int32)
    time_map = create_array(os.path.join(work, "timestamps.npy"), (events,), np.int64)
    _scatter(read, Encoder(user_ids), Encoder(item_ids), offsets, item_map, time_map, source)
    fractions = create_array(os.path.join(work, FRACTIONS), (events,), np.int32) if keep_fractions else None
    found = _sort_users(offsets, item_map, time_map, has_time, ticks, fractions)
    for array in (item_map, time_map, fractions):
        if array is not None:
            array.flush()
    has_fractions = fractions is not None and bool(fractions.any())
    if fractions is not None and not has_fractions:
        os.remove(os.path.join(work, FRACTIONS))
    meta = {
        "version": VERSION,
        "fingerprint": fingerprint,
        "source": source,
        "num_users": len(user_ids),
        "num_items": len(item_ids),
        "num_events": events,
        "has_time": has_time,
        "vocabulary": vocabulary_fingerprint(item_ids),
        "ticks": ticks,
        "fractions": has_fractions,
        **found._asdict(),
    }
    write_meta(work, meta)


def _scatter(
    read: Callable[[], Iterator[EventBatch]],
    encode_user: Encoder,
    encode_item: Encoder,
    offsets: np.ndarray,
    items: np.ndarray,
    timestamps: np.ndarray,
    source: str,
) -> None:
    """Writes each event to the next free place of its user: file order is kept."""
    cursor = offsets[:-1].copy()
    for batch in watched(read(), "reading events (2 of 2)"):
        user, item = encode_user(batch.user), encode_item(batch.item)
        n = len(user)
        if n and (user.min() < 0 or item.min() < 0):
            raise changed(source)
        # Sorting (user, row) as one number is several times faster than a stable argsort.
        order = np.sort((user.astype(np.int64) << 32) | np.arange(n, dtype=np.int64))
        user, order = order >> 32, order & 0xFFFFFFFF
        starts = np.flatnonzero(np.r_[True, user[1:] != user[:-1]]) if n else np.zeros(0, np.int64)
        lengths = np.diff(np.r_[starts, n])
        owners = user[starts]
        if np.any(cursor[owners] + lengths > offsets[owners + 1]):
            raise changed(source)
        place = np.repeat(cursor[owners] - starts, lengths) + np.arange(n)
        cursor[owners] += lengths
        items[place] = item[order]
        if batch.timestamp is None:
            timestamps[place] = place - offsets[user]
        else:
            timestamps[place] = batch.timestamp.to_numpy(zero_copy_only=False)[order]
    if not np.array_equal(cursor, offsets[1:]):
        raise changed(source)


def user_chunks(offsets: np.ndarray, events: int) -> Iterator[tuple[int, int]]:
    """Ranges of users with about ``events`` events each (a longer history is a range of its own)."""
    first, num_users = 0, len(offsets) - 1
    while first < num_users:
        last = int(np.searchsorted(offsets, offsets[first] + events, side="right")) - 1
        last = min(max(last, first + 1), num_users)
        yield first, last
        first = last


class Sorted(NamedTuple):
    first_time: int  # seconds
    last_time: int
    ties: int  # events that share their user's time with another
    duplicates: int  # events that share user, time and item with an earlier one


def _sort_users(
    offsets: np.ndarray,
    items: np.ndarray,
    timestamps: np.ndarray,
    sort: bool,
    ticks: int = 1,
    fractions: np.ndarray | None = None,
) -> Sorted:
    """Sorts each user's events by time, stably, and turns ticks to seconds and, if asked for, nanoseconds."""
    low, high = np.iinfo(np.int64).max, np.iinfo(np.int64).min
    ties = duplicates = 0
    for first, last in user_chunks(offsets, _SORT_EVENTS):
        part = slice(int(offsets[first]), int(offsets[last]))
        times = np.array(timestamps[part])
        low, high = min(low, int(times.min())), max(high, int(times.max()))
        if not sort:
            continue
        user = np.repeat(np.arange(last - first, dtype=np.int32), np.diff(offsets[first : last + 1]))
        if not np.all((times[1:] >= times[:-1]) | (user[1:] != user[:-1])):
            order = np.lexsort((times, user))  # stable: file order inside a tie
            times = times[order]
            timestamps[part] = times
            items[part] = np.asarray(items[part])[order]
        tied = _tied(user, times)
        ties += int(np.count_nonzero(tied))
        duplicates += _duplicates(user[tied], times[tied], np.asarray(items[part])[tied])
        if ticks > 1:
            timestamps[part] = times // ticks
        if fractions is not None:
            fractions[part] = times % ticks * (TICKS["ns"] // ticks)
    return Sorted(low // ticks, high // ticks, ties, duplicates)


def _tied(user: np.ndarray, times: np.ndarray) -> np.ndarray:
    """bool [n]: which events share user and time with a neighbour."""
    same = (times[1:] == times[:-1]) & (user[1:] == user[:-1])
    return np.r_[same, False] | np.r_[False, same]


def _duplicates(user: np.ndarray, times: np.ndarray, items: np.ndarray) -> int:
    order = np.lexsort((items, times, user))
    same = [column[order][1:] == column[order][:-1] for column in (user, times, items)]
    return int(np.count_nonzero(np.logical_and.reduce(same)))
