"""Which tokens end a response, as a checkpoint directory says. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from p3o_launch.errors import PreflightError

_FILES = ("generation_config.json", "config.json")


def stop_token_ids(checkpoint: Path) -> tuple[int, ...]:
    """``eos_token_id`` of ``generation_config.json``, or else of ``config.json``; ascending.

    The first lists every token that ends a turn (chat models have several), the second often only one.
    Raises PreflightError when neither names any: a run would sample every response to its cap.
    """
    for name in _FILES:
        value = _read(checkpoint / name).get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        if value is not None and ids and all(type(i) is int and i >= 0 for i in ids):
            return tuple(sorted(set(ids)))
        if value is not None:
            raise PreflightError(
                f"{checkpoint / name}: eos_token_id must be a token id or a list of them, not {value!r}"
            )
    raise PreflightError(
        f"{checkpoint} names no end-of-sequence token",
        hint="add eos_token_id to its generation_config.json",
    )


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PreflightError(f"cannot read {path}: {error}") from None
    if not isinstance(data, dict):
        raise PreflightError(f"cannot read {path}: it does not hold a JSON object")
    return data
