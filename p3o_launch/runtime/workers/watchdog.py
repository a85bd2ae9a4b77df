"""A small process that ends a local cluster when its driver is killed and cannot.

The driver holds the other end of this process's standard input. A line means that the driver has closed the cluster
itself; the end of the stream without one means that it is gone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import p3o_launch
from p3o_launch.runtime.workers.processes import MARK_VARIABLE, cluster_processes, end_processes

GRACE_S = 1.0
ROUNDS = 3
NOTICE = "the run's process ended before it closed its Ray cluster; what was left of the cluster has been ended"


class Watchdog:
    """The driver's handle. ``dismiss`` may be called twice."""

    def __init__(self, mark: str, directory: Path) -> None:
        root = str(Path(p3o_launch.__file__).parents[1])
        environment = {name: value for name, value in os.environ.items() if name != MARK_VARIABLE}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, mark, str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # Ctrl-C at the terminal is for the driver
        )

    def dismiss(self) -> None:
        """The cluster is closed: there is nothing left to watch."""
        stream = self._process.stdin
        if stream is None or stream.closed:
            return
        try:
            stream.write(b"closed\n")
            stream.close()
            self._process.wait(timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()


def main() -> None:
    """Wait for the driver's word or its end; in the second case end what it left."""
    mark, directory = sys.argv[1], Path(sys.argv[2])
    if sys.stdin.readline():
        return
    for _ in range(ROUNDS):  # a dying server may just have started another process
        left = cluster_processes(mark, directory)
        if not left:
            break
        end_processes(left, GRACE_S)
    shutil.rmtree(directory, ignore_errors=True)
    # Ray ends its driver without a word when the local raylet dies: somebody must say something.
    with contextlib.suppress(OSError):
        sys.stderr.write(f"error: {NOTICE}\n    hint: was the run, or Ray, killed for want of memory?\n")


if __name__ == "__main__":
    main()
