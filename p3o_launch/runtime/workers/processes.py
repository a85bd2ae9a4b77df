"""Finding and ending the processes a cluster leaves, by a mark in their environment.

Every process of a local cluster, and every child it starts, inherits one random variable. What still carries it after
a shutdown belongs to this run and to nothing else, also when its parent has died.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence

import psutil

MARK_VARIABLE = "P3O_LAUNCH_CLUSTER"


def marked_processes(mark: str) -> list[psutil.Process]:
    """Processes of this user whose environment at their start held ``mark``; never the caller itself."""
    found = []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            if process.environ().get(MARK_VARIABLE) == mark:
                found.append(process)
        except (psutil.Error, OSError):  # gone in the meantime, or another user's
            continue
    return found


def children() -> list[psutil.Process]:
    """Every process below this one, at any depth."""
    try:
        return psutil.Process().children(recursive=True)
    except psutil.Error:
        return []


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
