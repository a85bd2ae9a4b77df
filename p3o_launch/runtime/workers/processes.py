"""Finding and ending the processes a local cluster leaves.

Every process of a cluster inherits one random variable and keeps a log open below the cluster's own directory. Some
rename themselves, which wipes the first; some have not opened the second yet: either is proof of belonging to this run.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

MARK_VARIABLE = "P3O_LAUNCH_CLUSTER"


def cluster_processes(mark: str, directory: Path) -> list[psutil.Process]:
    """This user's processes that carry ``mark`` or hold a file below ``directory`` open; never the caller itself."""
    found = []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            if process.environ().get(MARK_VARIABLE) == mark or _holds_file_below(process, directory):
                found.append(process)
        except (psutil.Error, OSError):  # gone in the meantime, or another user's
            continue
    return found


def _holds_file_below(process: psutil.Process, directory: Path) -> bool:
    prefix = f"{directory}{os.sep}"
    return any(file.path.startswith(prefix) for file in process.open_files())


def end_processes(processes: Sequence[psutil.Process], grace_s: float) -> list[int]:
    """Ask, wait up to ``grace_s`` [s], then kill. Returns the pids that outlived even that (none, in practice).

    psutil compares start times, so a recycled pid is never signalled.
    """
    for process in processes:
        _quietly(process.terminate)
    _, alive = psutil.wait_procs(processes, timeout=grace_s)
    for process in alive:
        _quietly(process.kill)
    _, alive = psutil.wait_procs(alive, timeout=grace_s)
    return [process.pid for process in alive]


def _quietly(action: Callable[[], None]) -> None:
    with contextlib.suppress(psutil.Error):
        action()
