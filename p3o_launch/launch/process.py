"""Telling one process from another that got its pid later. No psutil: ``runs list`` needs the core install only."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def start_mark(pid: int) -> str | None:
    """A text that differs between two processes with the same pid on one machine; None when there is no process.

    On Linux the boot id and the start time in clock ticks since boot, elsewhere what ``ps`` prints.
    """
    stat = Path(f"/proc/{pid}/stat")
    if Path("/proc/self/stat").exists():
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return None if fields[0] in ("Z", "X") else f"{_boot_id()}/{fields[19]}"
    shown = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return shown.stdout.strip() or None


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def is_alive(pid: int, mark: str | None) -> bool:
    """Whether the process that had ``mark`` when it was recorded still runs."""
    return mark is not None and pid > 0 and start_mark(pid) == mark


def own_mark() -> tuple[int, str | None]:
    """Pid and mark of this process."""
    return os.getpid(), start_mark(os.getpid())
