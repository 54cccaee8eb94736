"""A connection of every process to process 0: its end tells the others at once that one died, and which.

The runtimes alone notice it when a heartbeat has been missed for minutes, and end with a stack trace; until then
the others wait in a collective, where no exception reaches them. Where no connection can be made that is what is left.
"""

import atexit
import contextlib
import os
import secrets
import socket
import sys
import threading
from typing import NoReturn

EXIT_LOST = 4

_leaving = threading.Event()  # from then on an end is no news
_connections: dict[int, socket.socket] = {}  # by the number of the process at the other end


def offer(host: str) -> str:
    """Process 0 listens; returns the invitation for ``take``.

    Args:
        host: a name or address by which the others reach this one.
    """
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    server = socket.create_server(("", 0), family=family, backlog=1024, dualstack_ipv6=dual)
    secret = secrets.token_hex(8)

    def accept() -> None:
        while True:
            connection, _ = server.accept()
            threading.Thread(target=greet, args=(connection,), daemon=True).start()

    def greet(connection: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):
            word, process = connection.recv(64).decode().split(":")
            if word == secret:
                _follow(connection, int(process))
        connection.close()  # of a stranger, or one who took leave

    threading.Thread(target=accept, daemon=True).start()
    atexit.register(take_leave)
    return f"{host} {server.getsockname()[1]} {secret}"


def take(invitation: str, process: int) -> None:
    """Another process connects; without success where the network does not let it."""
    host, port, secret = invitation.split()
    try:
        connection = socket.create_connection((host, int(port)), timeout=10)
        connection.sendall(f"{secret}:{process}".encode())
    except OSError:
        return
    connection.settimeout(None)
    threading.Thread(target=_follow, args=(connection, 0), daemon=True).start()
    atexit.register(take_leave)


def take_leave() -> None:
    """Tells the others that this process ends on purpose."""
    expect_ends()
    _tell("bye")


def expect_ends() -> None:
    """From now on the end of another process does not end this one, which is about to end anyway."""
    _leaving.set()


def _follow(connection: socket.socket, process: int) -> None:
    """Waits for a leave, or for an end without one, which ends this process too."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # after 60 silent seconds, which networks may forget a connection for, six questions 10 seconds apart
    for option, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    _connections[process] = connection
    try:
        word = connection.recv(64).decode()
    except OSError:
        word = ""
    del _connections[process]
    if word != "bye" and not _leaving.is_set():
        _end(word or f"process {process}")


def _end(who: str) -> NoReturn:
    _leaving.set()
    _tell(who)
    print(
        f"error: {who} of this run was lost; its own output says why, and the same command, also with another number "
        "of processes, goes on from the last checkpoint",
        file=sys.stderr,
        flush=True,
    )
    sys.stdout.flush()
    os._exit(EXIT_LOST)  # the main thread may wait in a collective, deaf to exceptions


def _tell(word: str) -> None:
    for connection in list(_connections.values()):
        with contextlib.suppress(OSError):
            connection.sendall(word.encode())
