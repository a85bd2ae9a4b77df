"""The source line of a finding with a caret below it, as terminals show it. Never a line that may hold a secret."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING

from p3o_launch.diagnostics import Position

if TYPE_CHECKING:
    from p3o_launch.loading import ChainFile

WIDTH = 100
_BEFORE = 60
_SECRET_RULE = "P3O705"


def excerpt(chain: Sequence[ChainFile], position: Position, code: str) -> list[str]:
    """Two lines, ``9 | text`` and the caret; none when the text is not at hand or must not be shown."""
    raw = next((file.raw for file in chain if file.path == position.file), None)
    if raw is None or code == _SECRET_RULE:
        return []
    lines = raw.decode("utf-8-sig", "replace").replace("\r\n", "\n").split("\n")
    if not 1 <= position.line <= len(lines) or not lines[position.line - 1].strip():
        return []
    line = lines[position.line - 1]
    if _may_hold_a_secret(line):
        return []
    start = max(0, position.column - 1 - _BEFORE)
    before, after = line[start : position.column - 1], line[position.column - 1 : start + WIDTH]
    shown = ("..." if start else "") + _safe(before)
    rest = _safe(after) + ("..." if len(line) > start + WIDTH else "")
    number = str(position.line)
    return [f"{number:>5} | {shown}{rest}", f"{'':>5} | {' ' * _columns(shown)}^"]


def _may_hold_a_secret(line: str) -> bool:
    from p3o_launch.secret_shapes import is_secret_name, shape_of

    return shape_of(line) is not None or any(is_secret_name(word) for word in re.findall(r"[\w-]+", line))


def _safe(text: str) -> str:
    """Every character that could move the cursor or reorder the line, escaped."""
    return "".join(char if char.isprintable() else " " if char == "\t" else ascii(char)[1:-1] for char in text)


def _columns(text: str) -> int:
    """Columns that a terminal gives the text."""
    return sum(0 if unicodedata.combining(char) else 1 + (unicodedata.east_asian_width(char) in "WF") for char in text)
