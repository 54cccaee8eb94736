"""The catalogue beside the events: items that join it without any, and what a table says of the items.

The table, ``config.data.items_path``, has a row an item: its id, and a content vector, a category, both or neither. It
is streamed; the vectors become one mapped array in the store's folder, in the order of the dense ids.
"""

import contextlib
import hashlib
import logging
import os
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recml_sasrec.config import DataConfig
from recml_sasrec.data.arrays import check_space, create_array, read_meta, write_ids, write_meta
from recml_sasrec.data.events import DataError, as_ids, check_file, integer_columns, open_table
from recml_sasrec.data.folders import remove_stale, temporary_name
from recml_sasrec.data.store import Store, build_in_place, fingerprint_of, source_fingerprint
from recml_sasrec.data.times import is_text
from recml_sasrec.data.vocabulary import Collector, Encoder
from recml_sasrec.data.vocabulary import fingerprint as vocabulary_fingerprint
from recml_sasrec.files import unfinished

log = logging.getLogger("recml_sasrec")

_FIELD = "config.data.items_path"
_BATCH_ROWS = 1 << 13  # of the table: its vectors are long
_BLOCK = 1 << 24  # events given new ids at a time


def joined(store: Store, data: DataConfig, folder: str) -> Store:
    """The store, or one in ``folder`` with the table's items too, where they join the catalogue.

    Raises:
        DataError: whatever is wrong with the table.
    """
    if not data.items_path or not data.items_join:
        return store
    found = Collector("item")
    for ids, _ in _rows(store, data, None):
        found.add(ids)
    item_ids, counts = found.finish()
    if counts.max(initial=0) > 1:
        raise _duplicate(item_ids[int(counts.argmax())], data)
    key = fingerprint_of(store=os.path.abspath(store.directory), items=_path(data), column=data.item_column)
    return store_with(store, item_ids, os.path.join(folder, f"{os.path.basename(store.directory)}-{key[:16]}"))


def store_with(store: Store, raw_ids: pa.Array, directory: str) -> Store:
    """A store of the same events whose items are also those of ``raw_ids``; the same store where it has them all.

    Its dense ids are ranks in the union. Built once, opened again when ``directory`` holds it; what does not depend
    on the items is hard links to the other store's files. Memory is proportional to the number of items.

    Args:
        raw_ids: int64 or large_string, as the store's ids; in any order, repeats allowed.
        directory: of the store to build.

    Raises:
        DataError: ids of another type than the store's, or a folder that can't be written.
    """
    items = Collector("item")
    items.add(store.item_ids)
    items.add(raw_ids)
    item_ids, _ = items.finish()
    if len(item_ids) == store.num_items:
        return store
    vocabulary = vocabulary_fingerprint(item_ids)
    fingerprint = fingerprint_of(events=store.fingerprint, vocabulary=vocabulary)

    def build(work: str) -> None:
        check_space(work, store.num_events * 4 + item_ids.nbytes, store.directory)
        for name in os.listdir(store.directory):
            if name not in ("items.npy", "item_ids.arrow", "meta.json") and not name.startswith((".", "content-")):
                _link(os.path.join(store.directory, name), os.path.join(work, name))
        write_ids(os.path.join(work, "item_ids.arrow"), item_ids)
        new_of_old = Encoder(item_ids)(store.item_ids)
        array = create_array(os.path.join(work, "items.npy"), (store.num_events,), np.int32)
        for start in range(0, store.num_events, _BLOCK):
            part = slice(start, start + _BLOCK)
            array[part] = new_of_old[store.items[part]]
        array.flush()
        changed = {"fingerprint": fingerprint, "num_items": len(item_ids), "vocabulary": vocabulary}
        write_meta(work, read_meta(store.directory) | changed)

    return build_in_place(build, directory, fingerprint, store.directory)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)


def content_of(store: Store, data: DataConfig) -> np.ndarray | None:
    """float32 [V, C] content vectors by dense id, mapped into memory; None where there is no content column.

    Items without a row in the table have zeros. Read once, streamed, into the store's folder.

    Raises:
        DataError: whatever is wrong with the table; a vector that is null, of another length, or not finite in float32;
            two rows of an item; no row of any item; a folder that can't be written.
    """
    if not data.content_column:
        return None
    check_file(_path(data), _FIELD)
    columns = {"item": data.item_column, "content": data.content_column}
    name = f"content-{fingerprint_of(path=os.path.abspath(_path(data)), **columns)[:16]}"
    path = os.path.join(store.directory, f"{name}-{source_fingerprint(_path(data), **columns)[:16]}.npy")
    array = _opened(path, store)
    if array is None:
        try:
            remove_stale(store.directory, name)
            temporary = os.path.join(store.directory, temporary_name(name))
            with unfinished(temporary):
                _write_content(store, data, temporary)
                os.replace(temporary, path)
            for entry in os.listdir(store.directory):  # of the file before it changed
                if entry.startswith(f"{name}-") and entry != os.path.basename(path):
                    with contextlib.suppress(FileNotFoundError):  # another process removed it
                        os.remove(os.path.join(store.directory, entry))
        except OSError as error:
            raise DataError(
                f"the content vectors of {data.items_path!r} can't be written to the store {store.directory!r} "
                f"({error.strerror or error}); free disk space or make it writable"
            ) from error
        array = _opened(path, store)
        assert array is not None
    return array


def _opened(path: str, store: Store) -> np.ndarray | None:
    """The vectors in a file; None where it is not there or damaged."""
    try:
        array = np.lib.format.open_memmap(path, mode="r").view(np.ndarray)
    except (OSError, ValueError):
        return None
    return array if array.ndim == 2 and len(array) == store.num_items and array.dtype == np.float32 else None


def _write_content(store: Store, data: DataConfig, path: str) -> None:
    encode, seen = Encoder(store.item_ids), np.zeros(store.num_items, bool)
    array: np.ndarray | None = None
    for ids, column in _rows(store, data, data.content_column):
        vectors_RC = _vectors(column, ids, data)
        if array is None and len(ids):
            width = vectors_RC.shape[1]
            check_space(store.directory, store.num_items * width * 4, data.items_path)
            array = create_array(path, (store.num_items, width), np.float32)
        if array is not None and vectors_RC.shape[1:] != array.shape[1:]:
            raise _bad_vector(f"{vectors_RC.shape[1]} numbers, others {array.shape[1]}", ids[0], data)
        rows, known = _new_rows(encode, ids, seen, data)
        if array is not None:
            array[rows] = vectors_RC[known]
    if array is None or not seen.any():
        raise _no_item(store, data)
    if not seen.all():
        log.info("%d of %d items have no row in %r: their content is zeros", (~seen).sum(), len(seen), data.items_path)


def content_mark(content: np.ndarray) -> str:
    """A fingerprint of content vectors: of up to 2^20 items, evenly spaced."""
    rows_RC = content[:: -(-len(content) // 2**20)]
    digest = hashlib.blake2b(repr(content.shape).encode(), digest_size=16)
    for start in range(0, len(rows_RC), _BATCH_ROWS):
        digest.update(np.ascontiguousarray(rows_RC[start : start + _BATCH_ROWS]).data)
    return digest.hexdigest()


def categories_of(store: Store, data: DataConfig) -> np.ndarray | None:
    """int32 [V] category numbers by dense id, -1 for items without one; None where there is no category column.

    Categories are numbered in the order of their text.

    Raises:
        DataError: whatever is wrong with the table; categories that are neither text nor integers; two rows of an item;
            no row of any item.
    """
    if not data.category_column:
        return None
    encode, seen = Encoder(store.item_ids), np.zeros(store.num_items, bool)
    all_rows, texts = [], []
    for ids, column in _rows(store, data, data.category_column):
        kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
        if not (pa.types.is_integer(kind) or is_text(kind)):
            raise DataError(
                f"column {data.category_column!r} of {data.items_path!r} holds {kind} values but categories must be "
                "text or integers; convert it"
            )
        rows, known = _new_rows(encode, ids, seen, data)
        all_rows.append(rows)
        texts.append(column.cast(kind).cast(pa.large_string()).filter(pa.array(known)).dictionary_encode())
    if not seen.any():
        raise _no_item(store, data)
    encoded = pa.chunked_array(texts).unify_dictionaries().combine_chunks()
    encoded = encoded.chunk(0) if isinstance(encoded, pa.ChunkedArray) else encoded
    numbers = pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False)
    rank = pc.rank(encoded.dictionary, tiebreaker="dense").to_numpy(zero_copy_only=False)
    categories = np.full(store.num_items, -1, np.int32)
    categories[np.concatenate(all_rows)] = np.append(rank.astype(np.int64) - 1, -1)[numbers]  # its last is the -1
    return categories


def _path(data: DataConfig) -> str:
    return os.path.expanduser(data.items_path)


def _rows(store: Store, data: DataConfig, column: str | None) -> Iterator[tuple[pa.Array, Any]]:
    """(ids of the store's type, the values of a column if one is named) of the table, streamed."""
    check_file(_path(data), _FIELD)
    table = open_table(_path(data), [data.item_column, *([column] if column else [])], _BATCH_ROWS)
    integers = None
    if table.text:  # without types it says nothing against events' ids of text
        integers = pa.types.is_integer(store.item_ids.type) and integer_columns(_path(data), table.columns[:1])[0]
    row = 0
    for batch in table.batches():
        ids = as_ids(batch.column(0), table.columns[0], _path(data), row, integers)
        if ids.type != store.item_ids.type:
            here, events = ("integers" if pa.types.is_integer(i.type) else "text" for i in (ids, store.item_ids))
            raise DataError(
                f"the item ids in column {table.columns[0]!r} of {data.items_path!r} are {here} but those of the "
                f"events are {events}; convert one of them"
            )
        yield ids, batch.column(1) if column else None
        row += batch.num_rows


def _new_rows(encode: Encoder, ids: pa.Array, seen: np.ndarray, data: DataConfig) -> tuple[np.ndarray, np.ndarray]:
    """(dense ids of the items of the store among ``ids``, bool which they are), now marked as seen."""
    dense = encode(ids)
    known = dense >= 0
    rows = dense[known]
    again = np.flatnonzero(seen[rows]) if len(np.unique(rows)) == len(rows) else _repeats(rows)
    if len(again):
        raise _duplicate(ids.filter(pa.array(known))[int(again[0])], data)
    seen[rows] = True
    return rows, known


def _repeats(rows: np.ndarray) -> np.ndarray:
    return np.setdiff1d(np.arange(len(rows)), np.unique(rows, return_index=True)[1])


def _vectors(column: Any, ids: pa.Array, data: DataConfig) -> np.ndarray:
    """float32 [R, C] of a column of lists."""
    kind = column.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)) or not (
        pa.types.is_floating(kind.value_type) or pa.types.is_integer(kind.value_type)
    ):
        raise DataError(
            f"column {data.content_column!r} of {data.items_path!r} holds {kind} values but content must be lists of "
            "numbers, which parquet has; convert it"
        )
    if column.null_count:
        raise _bad_vector("no value", ids[_first(column.is_null())], data)
    lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False)
    if not len(lengths):
        return np.zeros((0, 0), np.float32)
    other = np.flatnonzero(lengths != lengths[0])
    if not lengths[0]:
        raise _bad_vector("an empty list", ids[0], data)
    if len(other):
        raise _bad_vector(f"{lengths[other[0]]} numbers, others {lengths[0]}", ids[int(other[0])], data)
    values = pc.list_flatten(column)
    if values.null_count:
        raise _bad_vector("a number missing", ids[_first(values.is_null()) // int(lengths[0])], data)
    with np.errstate(over="ignore"):  # what float32 can't hold becomes inf, and is refused
        vectors_RC = values.to_numpy(zero_copy_only=False).astype(np.float32).reshape(len(ids), -1)
    bad = np.flatnonzero(~np.isfinite(vectors_RC).all(1))
    if len(bad):
        raise _bad_vector("a number that is not finite in float32", ids[int(bad[0])], data)
    return vectors_RC


def _first(mask: pa.Array) -> int:
    return int(np.flatnonzero(mask.to_numpy(zero_copy_only=False))[0])


def _bad_vector(what: str, item: pa.Scalar, data: DataConfig) -> DataError:
    return DataError(
        f"item {item.as_py()!r} has {what} in column {data.content_column!r} of {data.items_path!r}; give every item "
        "the same number of finite numbers, or no row"
    )


def _duplicate(item: pa.Scalar, data: DataConfig) -> DataError:
    return DataError(f"item {item.as_py()!r} has more than one row in {data.items_path!r}; keep one of them")


def _no_item(store: Store, data: DataConfig) -> DataError:
    return DataError(
        f"{data.items_path!r} has no row for any of the {store.num_items:,} items; check that "
        f"config.data.item_column={data.item_column!r} holds the ids of the events"
    )
