"""JSON files of the Hugging Face checkpoint a preset names, where they lie on this machine. Read offline, no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_BUILTIN = "builtin:"
_LARGEST = 1_000_000


def checkpoint_directory(name: str) -> Path:
    """Where the checkpoint would lie; ``builtin:`` names ship with the package."""
    if name.startswith(_BUILTIN):
        return Path(__file__).parent / "assets" / name.removeprefix(_BUILTIN)
    return Path(name).expanduser()


def read_checkpoint_json(name: str, file: str) -> dict[str, Any] | None:
    """The JSON object in ``file`` of checkpoint ``name``; None when it is not there, not readable or no object."""
    path = checkpoint_directory(name) / file
    try:
        if not path.is_file() or path.stat().st_size > _LARGEST:
            return None
        import json  # start-up pays for it only where a checkpoint is at hand

        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None
