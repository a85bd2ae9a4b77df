"""Read -> facts -> judge: the one function behind ``p3o-launch lint``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from p3o_launch.check import CheckResult
from p3o_launch.diagnostics import LocatedFinding, Position
from p3o_launch.errors import UsageError
from p3o_launch.importers.arguments import Arguments, parse
from p3o_launch.importers.facts import Draft, Facts
from p3o_launch.importers.flags import table
from p3o_launch.importers.judge import judge, switched
from p3o_launch.importers.megatron import Reader, megatron_rl
from p3o_launch.importers.notes import notes
from p3o_launch.importers.record import argument_record
from p3o_launch.importers.slime import slime_facts
from p3o_launch.importers.words import split
from p3o_launch.loading import decode, read_text

FRAMEWORKS = ("relax", "slime", "megatron", "verl", "nemo_rl")
TARGETS = ("p3o",)
STDIN = "-"
STDIN_NAME = "<stdin>"


@dataclass(frozen=True)
class LintResult:
    """What is known about one configuration. ``facts`` is None when the file could not be read at all."""

    check: CheckResult
    facts: Facts | None
