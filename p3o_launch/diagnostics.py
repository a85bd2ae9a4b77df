"""Findings: what is wrong with a preset, and where. Frozen data, no logic beyond ordering.

A rule yields a ``Finding`` about a dotted path; ``check.py`` resolves the path to the place in a file that decides
the value and makes a ``LocatedFinding``; ``report.py`` prints it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Severity(Enum):
    """How much a finding matters: an error refuses the launch."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault, before it is located.

    ``path``: dotted preset path of the value that decides (``"parallel.tensor_model_parallel_size"``); ``""`` means the
    whole file. When the value is absent, the location is that of its nearest present ancestor.
    ``message``: lower-case sentence with dotted names and values. ``hint``: the smallest change that mends it.
    ``key``: point at the key rather than at the value. ``related``: other dotted paths that take part.
    """

    path: str
    message: str
    hint: str | None = None
    key: bool = False
    related: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """A place in a file. ``line`` and ``column`` count from 1; ``file`` is as the user wrote it.

    ``origin`` is ``""`` for the preset itself, else how the value got there: ``"extends"``, ``"profile a100x4"``,
    ``"--set"``, ``"default"``.
    """

    file: str
    line: int
    column: int
    origin: str = ""


@dataclass(frozen=True, slots=True)
class LocatedFinding:
    """One fault with its place, its code (``"P3O301"``), its name (``"tp-does-not-divide-gpus"``) and its severity."""

    position: Position
    severity: Severity
    code: str
    name: str
    message: str
    hint: str | None = None
    path: str = ""

    @property
    def sort_key(self) -> tuple[str, int, int, str, str]:
        """File, then line, column, code, message: the order in which reports list findings."""
        p = self.position
        return (p.file, p.line, p.column, self.code, self.message)
