"""Files that are replaced whole or not at all, and folders that are finished or removed."""

import contextlib
import os
import pathlib
import shutil
from collections.abc import Iterator

_unfinished: set[str] = set()


def write_atomically(path: pathlib.Path, text: str) -> None:
    """Writes a file so that a reader, or a crash, sees the former content or the new one and nothing between."""
    with replaced(path) as temporary:
        temporary.write_text(text)


@contextlib.contextmanager
def replaced(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """The name of a file to write, which becomes ``path`` when the block ends and is removed where it fails."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with unfinished(str(temporary)):
        yield temporary
        temporary.replace(path)


@contextlib.contextmanager
def unfinished(folder: str) -> Iterator[None]:
    """A folder or file that is removed when the block is left, or by ``remove_unfinished`` where the process ends."""
    _unfinished.add(folder)
    try:
        yield
    finally:
        _remove(folder)
        _unfinished.discard(folder)


def remove_unfinished() -> None:
    """For those who end the process at once."""
    for folder in tuple(_unfinished):
        _remove(folder)


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        if os.path.isdir(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.remove(path)
