"""``run.json`` as a file: where it is, what its first content is, how it is replaced. Standard library only.

A generated script carries this module, so that it records a run as ``p3o-launch run`` does, without p3o-launch.
"""

from __future__ import annotations

import json
import os
import socket
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from p3o_launch.launch.process import start_mark
from p3o_launch.launch.redact import redact

RECORD = "run.json"
RECORD_VERSION = 1
CREATED, RUNNING, SUCCEEDED, FAILED, INTERRUPTED, LOST = (
    "created",
    "running",
    "succeeded",
    "failed",
    "interrupted",
    "lost",
)
UNFINISHED = (CREATED, RUNNING)


def utc_now() -> str:
    """The present moment, ISO 8601, to the millisecond."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")  # noqa: UP017 - a script's python3 may be older than 3.11


def write_atomic(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` so that a crash leaves the old content or the new, never less."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def write_record(directory: Path, data: dict[str, Any]) -> None:
    """Replace the record of ``directory``, secrets left out."""
    write_atomic(directory / RECORD, json.dumps(redact(data), indent=2, ensure_ascii=False) + "\n")


def process_facts(pid: int | None = None) -> dict[str, Any]:
    """Which process the record belongs to: what tells a running run from a lost one."""
    owner = os.getpid() if pid is None else pid
    return {"process": {"host": socket.gethostname(), "pid": owner, "start": start_mark(owner)}}


def first_record(directory: Path, facts: dict[str, Any], pid: int | None = None) -> dict[str, Any]:
    """What a record says before the run starts. ``facts``: what is known of it; ``pid``: whose run it is."""
    head = {
        "record_version": RECORD_VERSION,
        "run_id": directory.name,
        "status": CREATED,
        "exit_code": None,
        "failure": None,
        "created": utc_now(),
        "started": None,
        "ended": None,
        "steps_done": 0,
        "last_checkpoint": None,
        "ray_job_id": None,
        **process_facts(pid),
    }
    return head | facts
