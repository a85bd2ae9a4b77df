"""The user's own commands before and after a run (``logging.pre_command``, ``logging.post_command``)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from p3o_launch.errors import PreflightError


def before_run(command: str | None, run_dir: Path) -> None:
    """Run ``command`` in bash; the run does not start when it fails (PreflightError)."""
    code = _bash(command, run_dir, "created")
    if code != 0:
        raise PreflightError(f"logging.pre_command ended with exit code {code}", hint="its output is above")


def after_run(command: str | None, run_dir: Path, status: str) -> int:
    """Run ``command`` in bash with ``P3O_STATUS`` set; its exit code, which changes nothing about the run's."""
    return _bash(command, run_dir, status)


def _bash(command: str | None, run_dir: Path, status: str) -> int:
    if command is None:
        return 0
    environment = os.environ | {"P3O_RUN_DIR": str(run_dir), "P3O_STATUS": status}
    return subprocess.run(["bash", "-c", command], env=environment, check=False).returncode
