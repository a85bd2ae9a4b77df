"""JSON files of the Hugging Face checkpoint a preset names, where they lie on this machine. Read offline, no torch."""

from __future__ import annotations

import os
from typing import Any

_BUILTIN = "builtin:"
_LARGEST = 1_000_000


def checkpoint_directory(name: str) -> str:
    """Where the checkpoint would lie; ``builtin:`` names ship with the package."""
    if name.startswith(_BUILTIN):
        return os.path.join(os.path.dirname(__file__), "assets", name.removeprefix(_BUILTIN))
    return os.path.expanduser(name)


def read_checkpoint_json(name: str, file: str) -> dict[str, Any] | None:
    """The JSON object in ``file`` of checkpoint ``name``; None when it is not there, not readable or no object."""
    path = os.path.join(checkpoint_directory(name), file)
    try:
        if not os.path.isfile(path) or os.path.getsize(path) > _LARGEST:
            return None
        import json  # start-up pays for it only where a checkpoint is at hand

        with open(path, encoding="utf-8") as stream:
            data = json.load(stream)
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None
