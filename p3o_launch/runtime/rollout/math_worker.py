"""Compare two maths answers in a process of its own, which may be killed.

Symbolic comparison of what a model wrote has no bound: ``9^{9^{9}}`` alone runs for minutes inside one C call that no
signal interrupts. ``MathWorker`` gives each comparison a deadline; the answer that misses it is wrong, and the process
is replaced. Run as a module, this file is that process: one JSON line in, one out.
"""

from __future__ import annotations

import atexit
import json
import selectors
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any

from p3o_launch.errors import RunError

DEADLINE_S = 5.0
START_S = 60.0
MEMORY_BYTES = 2 << 30


class MathWorker:
    """``equal(answer, label)`` with a deadline. Started at first use, ended with the interpreter or by ``close``."""

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self.deadline_s = deadline_s
        self.expired = 0
        """Comparisons that missed the deadline."""
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()  # one question at a time: the answers carry no name

    def equal(self, answer: str, label: str) -> bool:
        """Whether both say the same number or expression; False when it cannot be decided in time.

        Raises RunError when the process cannot be started: otherwise every answer of the run would count as wrong.
        """
        with self._lock:
            return self._equal(answer, label)

    def _equal(self, answer: str, label: str) -> bool:
        process = self._process if self._process is not None and self._process.poll() is None else self._start()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps([answer, label]) + "\n")
            process.stdin.flush()
        except OSError:
            self.close()
            return False
        line = self._line(process, self.deadline_s)
        if line is None:
            self.expired += 1
            self.close()
            return False
        return bool(json.loads(line))

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "p3o_launch.runtime.rollout.math_worker"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        atexit.register(self.close)
        process = self._process
        if self._line(process, START_S) is None:  # "ready": its imports take longer than a comparison may
            self.close()
            raise RunError(
                "the process that compares maths answers did not start",
                hint=f"see what this prints: {sys.executable} -m p3o_launch.runtime.rollout.math_worker < /dev/null",
            )
        return process

    def _line(self, process: subprocess.Popen[str], seconds: float) -> str | None:
        """The next line of the process, None when it ends or is silent for ``seconds``."""
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            return (process.stdout.readline() or None) if selector.select(seconds) else None

    def close(self) -> None:
        """End the process. Idempotent."""
        process, self._process = self._process, None
        atexit.unregister(self.close)
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()


def main() -> None:
    """Answer comparisons until the input ends."""
    import logging
    import resource
    import signal

    from math_verify import parse, verify

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole foreground group; the parent decides
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns at each call that its time-outs are off
    _say("ready")
    for line in sys.stdin:
        _say(json.dumps(_equal(parse, verify, *json.loads(line))))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _equal(parse: Any, verify: Any, answer: str, label: str) -> bool:
    try:
        gold = parse(label if "\\boxed" in label else f"\\boxed{{{label}}}", parsing_timeout=None)
        found = parse(f"\\boxed{{{answer}}}", parsing_timeout=None)
        return bool(gold) and bool(found) and bool(verify(gold, found, timeout_seconds=None))
    except Exception:
        # Whatever a parser makes of a model's text, the answer is not the label; the process itself must go on.
        return False


if __name__ == "__main__":
    main()
