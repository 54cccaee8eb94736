"""The files of a store: mapped arrays, raw ids and what it says of itself."""

import json
import os
import shutil
from typing import Any

import numpy as np
import pyarrow as pa

from recml_sasrec.data.errors import DataError

VERSION = 2
PLACE = "config.data.cache"  # the setting that chose a store's folder, unless it was imported
_HEADERS = 1 << 14  # bytes, of all the files
# of meta.json, what every store has
_META = {
    "version": int, "fingerprint": str, "source": str, "num_users": int, "num_items": int, "num_events": int,
    "has_time": bool, "vocabulary": str, "first_time": int, "last_time": int,
}  # fmt: skip


def check_space(folder: str, arrays: int, source: str, place: str = PLACE) -> None:
    """Refuses to begin arrays of so many bytes that the disk of a store's temporary folder has no room for."""
    needed = arrays + _HEADERS
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DataError(
            f"the store of {source!r} needs {needed:,} bytes but {os.path.dirname(folder)!r} has {free:,} free; "
            f"free disk space or choose another {place}"
        )


def create_array(path: str, shape: tuple[int, ...], dtype: type) -> np.memmap:
    """A new .npy file of zeros, mapped into memory to be written."""
    array = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
    if hasattr(os, "posix_fallocate"):  # a full disk is then an error here, not a bus error while writing
        with open(path, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, os.path.getsize(path))
    return array


def open_array(path: str, dtype: type, length: int) -> np.ndarray:
    """Maps an array of a store; ValueError where it is not what the store wrote."""
    array = np.lib.format.open_memmap(path, mode="r").view(np.ndarray)
    if array.shape != (length,) or array.dtype != dtype:
        raise ValueError(f"{path} holds {array.dtype} {array.shape}, not {np.dtype(dtype)} ({length},)")
    return array


def read_meta(directory: str) -> dict[str, Any]:
    """What ``meta.json`` of a store says: the fields of ``Store``, source, ticks, ties and duplicates.

    Raises:
        OSError: there is none.
        ValueError: it is not what ``write_meta`` wrote.
    """
    with open(os.path.join(directory, "meta.json")) as file:
        meta = json.load(file)
    if not isinstance(meta, dict):
        raise ValueError("meta.json is no object")
    # another version may have other fields: its number is all there is to say of it
    wrong = [name for name, kind in _META.items() if type(meta.get(name)) is not kind]
    if wrong and ("version" in wrong or meta["version"] == VERSION):
        raise ValueError(f"meta.json has no {wrong[0]}")
    return meta


def write_meta(work: str, meta: dict[str, Any]) -> None:
    """Writes what a store says of itself beside its arrays."""
    with open(os.path.join(work, "meta.json"), "w") as file:
        json.dump(meta, file, indent=1)


def write_ids(path: str, ids: pa.Array) -> None:
    """Writes raw ids as ``read_ids`` reads them."""
    table = pa.table({"id": ids})
    # One record batch, so that the mapped column is one contiguous array.
    with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=max(len(ids), 1))


def read_ids(path: str) -> pa.Array:
    """The raw ids of an Arrow file of the store, mapped into memory; int64 or large_string."""
    column = pa.ipc.open_file(pa.memory_map(path)).read_all().column("id")
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def open_arrays(directory: str, meta: dict[str, Any]) -> dict[str, Any]:
    """The mapped arrays and raw ids of a store by field of ``Store``; ValueError where they don't fit together."""
    users, items, events = meta["num_users"], meta["num_items"], meta["num_events"]
    kinds = {"items": (np.int32, events), "timestamps": (np.int64, events), "offsets": (np.int64, users + 1)}
    found: dict[str, Any] = {
        name: open_array(os.path.join(directory, f"{name}.npy"), *kind) for name, kind in kinds.items()
    }
    found |= {name: read_ids(os.path.join(directory, f"{name}.arrow")) for name in ("user_ids", "item_ids")}
    if (len(found["user_ids"]), len(found["item_ids"])) != (users, items):
        raise ValueError("the raw ids are not those of meta.json")
    if (found["offsets"][0], found["offsets"][-1]) != (0, events):
        raise ValueError("the offsets are of other events")
    return found
