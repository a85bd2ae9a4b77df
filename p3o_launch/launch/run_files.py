"""The files of a run directory that say what runs: resolved preset, arguments, script, uncommitted changes."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from p3o_launch.launch.arguments import resolved_yaml
from p3o_launch.launch.job import Job
from p3o_launch.launch.record import RunRecord, write_atomic
from p3o_launch.launch.recorder import begin
from p3o_launch.launch.redact import redact_text
from p3o_launch.launch.script import run_script

_NAMES = ("resolved.yaml", "resolved_args.txt", "command.sh", "git.patch")


def write_run_dir(directory: Path, job: Job, **facts: Any) -> RunRecord:
    """Fill a new run directory: record, resolved preset, arguments, and the script that does it again.

    ``facts``: what else the record says.
    """
    facts = {**job.facts, "command_line": list(sys.argv), **facts}
    data = begin(directory, facts, job.arguments_in(str(directory)))
    write_preset(directory, job)
    return RunRecord(directory, data)


def write_preset(directory: Path, job: Job) -> None:
    """The resolved preset of a run, and the script that does it again."""
    write_atomic(directory / "resolved.yaml", redact_text(resolved_yaml(job.preset)))
    write_atomic(directory / "command.sh", run_script(job))
    (directory / "command.sh").chmod(0o755)


def set_aside(directory: Path, number: int) -> None:
    """Copy the files to ``earlier/number`` before a resumed run writes its own.

    The patch is moved: by now the tree may be clean.
    """
    aside = directory / "earlier" / str(number)
    aside.mkdir(parents=True, exist_ok=True)
    for name in _NAMES:
        if (directory / name).is_file():
            shutil.copy2(directory / name, aside / name)
    (directory / "git.patch").unlink(missing_ok=True)
