"""SIGINT, SIGTERM and SIGHUP as a request that the run's own loops answer; a second one does not wait for them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from p3o_launch.errors import EXIT_INTERRUPTED

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequest:
    """Set by the first signal. The second calls the action of ``on_force`` and ends the process at once, exit code 130.

    A signal that was ignored when the run started (``nohup``) stays ignored. Used as a context manager, it puts the
    previous handlers back.
    """

    def __init__(self, exit_now: Callable[[int], Any] = os._exit) -> None:
        self._force: Callable[[], None] = lambda: None
        self._exit_now = exit_now
        self._previous: dict[signal.Signals, Any] = {}
        self.received: signal.Signals | None = None

    def on_force(self, action: Callable[[], None]) -> None:
        """What the second signal does before the process ends."""
        self._force = action

    def install(self) -> None:
        """Take the signals over; again after a library has put handlers of its own in place."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS:
            before = signal.getsignal(number)
            if number not in self._previous:
                if before is signal.SIG_IGN:
                    continue
                self._previous[number] = before
            signal.signal(number, self._handle)

    def restore(self) -> None:
        """Put back what was in place before the first ``install``."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def __enter__(self) -> StopRequest:
        self.install()
        return self

    def __exit__(self, *exception: object) -> None:
        self.restore()

    def __call__(self) -> bool:
        """Whether the run was asked to stop."""
        return self.received is not None

    @property
    def name(self) -> str:
        """The signal that came first."""
        return self.received.name if self.received is not None else "no signal"

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number)
            return
        try:
            self._force()
        finally:
            self._exit_now(EXIT_INTERRUPTED)
