"""The flags of a framework: which exist, their types, choices and defaults. Read from packaged tables when first used.

slime and Relax accept every Megatron flag beside their own, and generate the engine's flags when they start. Their own
entry decides where both know a flag; ``reset_arg`` in their sources changes only a default.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from p3o_launch.presets import nearest

# Forks of each other: a flag that one lacks may be another's.
RELATED = ("slime", "relax")
# Flags of miles, another fork of slime, that decide a rule: no table of it is kept here.
MILES = frozenset(("--allow-partial-train-step", "--disable-rollout-trim-samples"))
_CHAINS = {"megatron": ("megatron",), "slime": ("slime", "megatron"), "relax": ("relax", "megatron")}


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag. ``action``: ``store_true``, ``store_false``, ``toggle`` (a switch with a ``--no-`` twin), ``append`` or
    empty. ``nargs``: ``"+"``, ``"*"``, a number as text, or empty. ``default`` is None where it is not known."""

    flag: str
    dest: str
    type: str = "str"
    default: Any = None
    choices: tuple[str, ...] = ()
    action: str = ""
    nargs: str = ""
    alias_of: str = ""

    @property
    def is_switch(self) -> bool:
        """Takes no value."""
        return self.action in ("store_true", "store_false", "toggle")

    @property
    def sets(self) -> bool:
        """What a switch sets its destination to."""
        if self.action == "toggle":
            return not self.flag.startswith("--no-")
        return self.action == "store_true"


@dataclass(frozen=True, slots=True)
class FlagTable:
    """Every flag of a framework, by name. ``defaults`` and ``by_dest`` (the flag that turns it on) go by destination.
    ``prefixes``: of flags that the framework makes when it starts."""

    flags: dict[str, Flag]
    defaults: dict[str, Any]
    by_dest: dict[str, str]
    prefixes: tuple[str, ...]

    def find(self, flag: str) -> Flag | None:
        """The flag; one with a generated prefix takes as many values as follow it (``nargs`` ``"engine"``)."""
        known = self.flags.get(flag)
        if known is None and any(flag.startswith(prefix) for prefix in self.prefixes):
            return Flag(flag, flag.lstrip("-").replace("-", "_"), nargs="engine")
        return known

    def nearest(self, flag: str) -> str | None:
        """The flag most like an unknown one; looked for among those that share a word or a beginning with it."""
        plain = flag.replace("_", "-")
        words = {word for word in plain.split("-") if len(word) > 2}
        start = plain[:6]
        alike = [name for name in self.flags if name.startswith(start) or not words.isdisjoint(name.split("-"))]
        return nearest(plain, alike)

    def flag_of(self, dest: str) -> str:
        """How a user sets ``dest``: the first flag that turns it on."""
        return self.by_dest.get(dest, "--" + dest.replace("_", "-"))


@cache
def table(framework: str) -> FlagTable:
    """The flags of ``megatron``, ``slime`` or ``relax``."""
    flags: dict[str, Flag] = {}
    defaults: dict[str, Any] = {}
    prefixes: list[str] = []
    for name in reversed(_CHAINS[framework]):
        data = json.loads(files("p3o_launch.importers").joinpath(f"data/{name}.json").read_text("utf-8"))
        prefixes += data["meta"]["prefixes"]
        for name_, record in data["flags"].items():
            entry = _flag(name_, record)
            flags[name_] = entry
            defaults[entry.dest] = entry.default
    by_dest: dict[str, str] = {}
    for flag in flags.values():
        if not flag.alias_of and (flag.dest not in by_dest or flag.action == "store_true"):
            by_dest[flag.dest] = flag.flag
    return FlagTable(flags, defaults, by_dest, tuple(prefixes))


def _flag(flag: str, record: dict[str, Any]) -> Flag:
    return Flag(
        flag,
        record["dest"],
        record.get("type", "str"),
        record.get("default"),
        tuple(str(choice) for choice in record.get("choices", ())),
        record.get("action", ""),
        str(record.get("nargs", "")),
        record.get("alias_of", ""),
    )
