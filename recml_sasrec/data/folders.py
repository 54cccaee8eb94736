"""Folders made under a temporary name and renamed into place, so that each is there whole or not at all."""

import contextlib
import errno
import os
import secrets
import shutil
import socket
from collections.abc import Callable

from recml_sasrec.data.errors import DataError


def temporary_name(name: str) -> str:
    """A name for work in progress on ``name``, which tells the process that does it."""
    return f".{name}.tmp-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


def remove_stale(parent: str, name: str) -> None:
    """Removes what processes of this machine that no longer run have left behind for ``name``."""
    prefix = f".{name}.tmp-{socket.gethostname()}-"
    for entry in os.listdir(parent):
        process = entry[len(prefix) :].split("-")[0]
        if entry.startswith(prefix) and process.isdigit() and not _runs(int(process)):
            path = os.path.join(parent, entry)
            if os.path.isdir(path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    os.remove(path)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def put_in_place(work: str, directory: str, is_there: Callable[[], bool], replace: bool = True) -> None:
    """Gives the folder ``work`` the name ``directory``, in place of a folder of that name; at any time, even after a
    kill, one of them or ``restore`` gives a complete one.

    Args:
        is_there: whether another process has put the same content there.
        replace: what else is there may be replaced.

    Raises:
        DataError: something else is there and may not.
    """
    replaced = _replaced(directory)
    for _ in range(10):  # another process may do the same at the same time
        try:
            os.rename(work, directory)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        finally:
            if os.path.exists(replaced) and os.path.exists(directory):
                _remove(replaced)
        with contextlib.suppress(DataError):
            if is_there():
                return
        if not replace:
            raise DataError(f"another process has just written {directory!r}; choose another folder, or start again")
        with contextlib.suppress(OSError):
            os.rename(directory, replaced)
    raise DataError(f"folder {directory!r} is being replaced by other processes; start again")


def _remove(folder: str) -> None:
    """Removes a folder, under a name by which ``restore`` can't put back what a kill leaves of it."""
    parent, name = os.path.split(folder)
    rest = os.path.join(parent, temporary_name(name.removeprefix(".").removesuffix(".replaced")))
    with contextlib.suppress(OSError):  # another process removes it
        os.rename(folder, rest)
        shutil.rmtree(rest, ignore_errors=True)


def _replaced(directory: str) -> str:
    """Where a folder waits while its successor takes its name: a kill between the two renames must not lose it."""
    parent, name = os.path.split(os.path.realpath(directory))
    return os.path.join(parent, f".{name}.replaced")


def restore(directory: str) -> None:
    """Puts a folder back that a kill has left without its name."""
    if not os.path.exists(directory):
        with contextlib.suppress(OSError):
            os.rename(_replaced(directory), os.path.realpath(directory))
