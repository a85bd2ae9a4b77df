"""The guard registry. A guard is one function about one relation between settings; its metadata stands beside it.

``@guard(code, name, severity, ...)`` registers a generator ``(GuardContext) -> Iterator[Finding]``. A family of guards
lives in ``guards_<family>.py``; importing this module's ``all_guards()`` loads them. ``check.py`` runs the guards,
turns one that raises into P3O901, and locates what they yield.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING

from p3o_launch.diagnostics import Finding, Severity
from p3o_launch.topology import Topology, topology

if TYPE_CHECKING:
    from p3o_launch.schema import Preset

FAMILIES = (
    "objective",
    "loss",
    "replay",
    "topology",
    "moe",
    "batch",
    "stages",
    "rollout",
    "evaluation",
    "precision",
    "resources",
    "memory",
    "identity",
    "checkpoint",
    "runtime",
    "unused",
)


@dataclass(frozen=True)
class GuardContext:
    """What a guard may look at: the preset and sizes derived from it. Never the machine it runs on."""

    preset: Preset

    @cached_property
    def topology(self) -> Topology:
        return topology(self.preset)


GuardBody = Callable[[GuardContext], Iterator[Finding]]


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule's metadata.

    ``code``: ``"P3O301"``. ``name``: kebab-case, named after the defect. ``why``: the reason in one or two sentences.
    ``fix``: how to mend it. ``source``: equation, report or file the rule comes from. ``allows``: what it must not
    reject. ``ignorable``: False when silencing it would change the objective or break the replay. ``own``: the rule is
    about what the preset's author wrote; a finding counts only when its ``path``, or one of its ``related`` paths but
    the last, stands in the preset itself or in ``--set``. The last is the setting that decides: a recipe, profile or
    ``--set`` that changes it for one run makes nothing of the preset wrong.
    ``body`` is None for rules that other modules emit (file and YAML rules, preflight).
    """

    code: str
    name: str
    severity: Severity
    why: str
    fix: str
    source: str
    allows: str = ""
    ignorable: bool = False
    body: GuardBody | None = None
    own: bool = False


_RULES: dict[str, Rule] = {}


def register(rule: Rule) -> Rule:
    """Add a rule; a code or a name used twice is our own bug."""
    assert rule.code not in _RULES, f"{rule.code} is registered twice"
    assert all(rule.name != other.name for other in _RULES.values()), f"{rule.name} is registered twice"
    _RULES[rule.code] = rule
    return rule


def guard(
    code: str,
    name: str,
    severity: Severity = Severity.ERROR,
    *,
    why: str,
    fix: str,
    source: str,
    allows: str = "",
    ignorable: bool = False,
    own: bool = False,
) -> Callable[[GuardBody], GuardBody]:
    """Register the decorated generator as the rule ``code``."""

    def decorate(body: GuardBody) -> GuardBody:
        register(Rule(code, name, severity, why, fix, source, allows, ignorable, body, own))
        return body

    return decorate


def all_guards() -> dict[str, Rule]:
    """Every rule by code, sorted; loads the families on first use."""
    if not _LOADED:
        for family in FAMILIES:
            import_module(f"p3o_launch.guards_{family}")
        for module in ("rules_file", "rules_import", "rules_pair"):
            import_module(f"p3o_launch.{module}")
        _LOADED.append(True)
    return dict(sorted(_RULES.items()))


_LOADED: list[bool] = []
