"""Files that are replaced whole or not at all, and folders that are finished or removed."""

import contextlib
import os
import pathlib
import shutil
from collections.abc import Iterator

_unfinished: set[str] = set()


def write_atomically(path: pathlib.Path, text: str) -> None:
    """Writes a file so that a reader, or a crash, sees the former content or the new one and nothing between."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def unfinished(folder: str) -> Iterator[None]:
    """A folder that is removed when the block is left, or by ``remove_unfinished`` where the process ends inside."""
    _unfinished.add(folder)
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _unfinished.discard(folder)


def remove_unfinished() -> None:
    """For those who end the process at once."""
    for folder in tuple(_unfinished):
        shutil.rmtree(folder, ignore_errors=True)
