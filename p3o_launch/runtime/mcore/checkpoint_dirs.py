"""Which checkpoints a run has: names and completeness, without torch, so the driver and the CLI can ask too.

A checkpoint is written under a hidden temporary name and renamed when complete, so a directory with a visible name and
a manifest is whole.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from p3o_launch.errors import CheckpointError

MANIFEST = "checkpoint.json"
FORMAT = 1


def temporary(directory: Path) -> Path:
    """Where ``directory`` is written before it is complete."""
    return directory.with_name(f".{directory.name}.incomplete")


def is_complete(directory: Path) -> bool:
    """Whether ``directory`` is a whole checkpoint."""
    return not directory.name.startswith(".") and (directory / MANIFEST).is_file()


def complete(checkpoints_dir: Path) -> list[Path]:
    """Whole checkpoints, oldest first. Names sort as they age (``rollout_000012``)."""
    if not checkpoints_dir.is_dir():
        return []
    return sorted((path for path in checkpoints_dir.iterdir() if is_complete(path)), key=lambda path: path.name)


def latest(checkpoints_dir: Path) -> Path | None:
    """The newest whole checkpoint, None when there is none."""
    found = complete(checkpoints_dir)
    return found[-1] if found else None


def prune(checkpoints_dir: Path, keep: int) -> list[Path]:
    """Remove all but the newest ``keep`` checkpoints, and what an interrupted save left; returns what was removed.

    One process calls it (rank 0 or the driver), and never during a save.
    """
    if not checkpoints_dir.is_dir():
        return []
    whole = complete(checkpoints_dir)
    doomed = whole[: max(len(whole) - keep, 0)]
    doomed += [path for path in checkpoints_dir.iterdir() if path.name.startswith(".") and path.is_dir()]
    for path in doomed:
        # Renamed first: a process killed half way leaves a hidden remnant, not half a checkpoint under a good name.
        hidden = path if path.name.startswith(".") else temporary(path)
        if hidden != path:
            shutil.rmtree(hidden, ignore_errors=True)
            path.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)
    return doomed


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a whole checkpoint. Raises CheckpointError, saying what is wrong with the directory."""
    if not directory.is_dir():
        raise CheckpointError(f"there is no checkpoint at {directory}")
    if not is_complete(directory):
        raise CheckpointError(
            f"{directory} is not a whole checkpoint: it has no {MANIFEST}",
            hint="an interrupted save leaves such a directory; use an older checkpoint of the run",
        )
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {directory / MANIFEST}: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{directory} was written by another version of p3o-launch, in a format unknown here")
    return manifest
