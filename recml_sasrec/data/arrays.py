"""The files of a store: mapped arrays and raw ids."""

import os
import shutil

import numpy as np
import pyarrow as pa

from recml_sasrec.data.errors import DataError

PLACE = "config.data.cache"  # the setting that chose a store's folder, unless it was imported
_HEADERS = 1 << 14  # bytes, of all the files


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
