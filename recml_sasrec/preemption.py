"""Being asked to stop: SIGTERM and Ctrl-C become a flag that the loop polls."""

import signal
import threading
from types import FrameType


class Interrupted(Exception):
    """The run was asked to stop and saved its state; the same call goes on from there."""


class StopRequest:
    """A context in which SIGTERM and SIGINT set ``requested``; a second Ctrl-C interrupts at once.

    Outside the main thread, where handlers can't be installed, it never becomes true.
    """

    def __init__(self) -> None:
        self.requested: str = ""
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return bool(self.requested)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous.get(number)
        if self.requested and number == signal.SIGINT and callable(previous):
            previous(number, frame)  # at once, as if nobody had asked to wait
        self.requested = signal.Signals(number).name
