"""A run's directory: ``OUTPUT_ROOT/PRESET/seed_S/RUN_ID``. Made exclusively: two runs never share one."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime
from pathlib import Path

from p3o_launch.errors import PreflightError
from p3o_launch.launch.record_file import RECORD

ATTEMPTS = 20
_HARMLESS = ("logs",)


def new_run_id(now: datetime | None = None) -> str:
    """UTC time to the second and six random hexadecimal digits: ``20260131T235959Z-1a2b3c``. Sorts by time."""
    moment = now or datetime.now(UTC)
    return f"{moment:%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"


def absolute(path: Path) -> Path:
    """``path`` from the root; a leading ``~`` is the user's home, and only that."""
    text = str(path)
    return (path.expanduser() if text == "~" or text.startswith("~/") else path).absolute()


def create_run_dir(output_root: Path, preset: str, seed: int) -> Path:
    """A new directory below ``output_root``. Raises PreflightError when none can be made there."""
    parent = absolute(output_root) / preset / f"seed_{seed}"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for _ in range(ATTEMPTS):
            directory = parent / new_run_id()
            try:
                directory.mkdir()
                return directory
            except FileExistsError:
                continue
    except OSError as error:
        raise PreflightError(
            f"no run directory can be made in {parent}: {error.strerror}", hint="set logging.output_root"
        ) from error
    raise PreflightError(f"no free run id in {parent} after {ATTEMPTS} attempts")


def claim_run_dir(directory: Path) -> Path:
    """Use exactly ``directory``: made if absent, else it must be empty or hold nothing but logs.

    Raises PreflightError, P3O701, when it holds another run.
    """
    directory = absolute(directory)
    if holds_a_run(directory):
        raise PreflightError(
            f"P3O701 {directory} holds another run [output-holds-another-run]",
            hint="name a directory that does not exist yet, or leave the choice to the run",
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # The record's first writer wins: opening exclusively makes two runs that arrive together differ.
        (directory / RECORD).open("x").close()
    except OSError as error:
        raise PreflightError(f"P3O701 {directory} cannot be claimed: {error.strerror}") from error
    return directory


def holds_a_run(directory: Path) -> bool:
    """True unless ``directory`` is absent, empty, or holds logs only."""
    if not directory.exists():
        return False
    return not directory.is_dir() or any(entry.name not in _HARMLESS for entry in directory.iterdir())
