"""Being asked to stop: SIGTERM and Ctrl-C become a flag that the loop polls, the same in all processes of a run."""

import signal
import threading
import time
from types import FrameType

from recml_sasrec import hosts

RHYTHM = 1.0  # seconds of training after which processes ask each other again


class Interrupted(Exception):
    """The run was asked to stop and saved its state; the same call goes on from there."""


class StopRequest:
    """A context in which SIGTERM and SIGINT set ``requested`` at the next poll; a second Ctrl-C interrupts at once.

    With several processes a signal to one of them stops all of them, at the same poll. They ask each other by a
    reduction of two numbers: the signal, and how many polls to wait until the next one, so that it costs nothing
    however short a step is.

    Outside the main thread, where handlers can't be installed, it never becomes true by this process.
    """

    def __init__(self) -> None:
        self.requested: str = ""  # what all processes know
        self._signal = 0  # what this one has got
        self._previous: dict[int, object] = {}
        self._polls, self._wait, self._asked = 0, 1, time.monotonic()

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

    def poll(self, at_once: bool = False) -> bool:
        """Whether to stop; all processes must poll alike. ``at_once``: ask the others now, in a rhythm of its own."""
        if not self.requested:
            number = self._signal if hosts.count() == 1 else self._ask(at_once)
            self.requested = signal.Signals(number).name if number else ""
        return bool(self.requested)

    def _ask(self, at_once: bool) -> int:
        if at_once:
            return hosts.largest(self._signal)[0]
        self._polls += 1
        if self._polls < self._wait:
            return 0
        now = time.monotonic()
        wait = max(1, int(self._polls * RHYTHM / max(now - self._asked, 1e-6)))
        # asking waits for the steps under way, so the time between two answers is that of real steps
        number, self._wait = hosts.largest(self._signal, min(wait, 2 * self._wait))
        self._polls, self._asked = 0, time.monotonic()
        return number

    def _handle(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous.get(number)
        if self._signal and number == signal.SIGINT and callable(previous):
            previous(number, frame)  # at once, as if nobody had asked to wait
        self._signal = number
