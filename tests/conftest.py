"""For all tests: the suite's processes heed signals, wherever it was started."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Under ``nohup`` or in a shell's background SIGINT and SIGHUP are ignored, and every child would inherit that.

    A run keeps ignoring what it was started to ignore, so tests that send signals would wait for nothing.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
