"""``run.json``: what a run is and how it ended. Written atomically, so that a reader never sees half a record."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p3o_launch.errors import UsageError
from p3o_launch.launch.process import is_alive
from p3o_launch.launch.record_file import (
    CREATED,
    FAILED,
    INTERRUPTED,
    LOST,
    RECORD,
    RUNNING,
    SUCCEEDED,
    UNFINISHED,
    first_record,
    process_facts,
    utc_now,
    write_atomic,
    write_record,
)

__all__ = [
    "CREATED",
    "ENDED_EARLY",
    "FAILED",
    "INTERRUPTED",
    "LOST",
    "RUNNING",
    "SUCCEEDED",
    "UNFINISHED",
    "RunRecord",
    "find_run",
    "find_runs",
    "process_facts",
    "utc_now",
    "write_atomic",
]


ENDED_EARLY = (INTERRUPTED, FAILED, LOST)


@dataclass
class RunRecord:
    """The record of one run, kept in ``directory``. ``data``: what ``run.json`` holds, before secrets are replaced."""

    directory: Path
    data: dict[str, Any]

    @classmethod
    def create(cls, directory: Path, facts: dict[str, Any]) -> RunRecord:
        """Write the first record of a run of this process. ``facts``: what is known before the start."""
        record = cls(directory, first_record(directory, facts))
        record.write()
        return record

    @classmethod
    def load(cls, directory: Path) -> RunRecord:
        """Read a record; one whose process died without saying so becomes ``lost``, on disk too.

        Raises UsageError when there is no readable record.
        """
        try:
            data = json.loads((directory / RECORD).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"{directory} holds no readable {RECORD}: {error}") from error
        if not isinstance(data, dict) or "status" not in data:
            raise UsageError(f"{directory / RECORD} is not a run record")
        record = cls(directory, data)
        record._notice_loss()
        return record

    def _notice_loss(self) -> None:
        process = self.data.get("process") or {}
        if self.status not in UNFINISHED or process.get("host") != socket.gethostname():
            return
        if is_alive(int(process.get("pid") or 0), process.get("start")):
            return
        failure = {"class": "lost", "message": "the process ended without writing how", "rank": None}
        self.data |= {"status": LOST, "failure": failure, "ended": utc_now()}
        with contextlib.suppress(OSError):  # someone else's directory: the verdict stands for this look
            self.write()

    @property
    def status(self) -> str:
        return str(self.data["status"])

    def update(self, **changes: Any) -> None:
        """Change fields and write."""
        self.data |= changes
        self.write()

    def write(self) -> None:
        """Write the record as it stands."""
        write_record(self.directory, self.data)


def find_runs(root: Path) -> Iterator[Path]:
    """Run directories below an output root, oldest first by run id."""
    yield from sorted((path.parent for path in root.glob(f"*/seed_*/*/{RECORD}")), key=lambda path: path.name)


def find_run(root: Path, name: str) -> Path:
    """The directory ``name`` means: a path, a run id, or the unambiguous beginning or end of one.

    Raises UsageError when there is none, or more than one.
    """
    if (Path(name) / RECORD).is_file():
        return Path(name)
    runs = list(find_runs(root))
    exact = [run for run in runs if run.name == name]
    matches = exact or [run for run in runs if run.name.startswith(name) or run.name.endswith(name)]
    if len(matches) == 1:
        return matches[0]
    if not matches:
        raise UsageError(f"there is no run {name!r} below {root}", hint="p3o-launch runs list")
    shown = ", ".join(run.name for run in matches[:5])
    raise UsageError(f"{name!r} fits {len(matches)} runs: {shown}", hint="give more of the run id")
