"""Words + a framework's flags -> what its argument parser would hold, and where each value was written.

The last of several occurrences decides, as in argparse. Unknown flags are kept with the values behind them, because
slime and Relax drop both without a word. Values that a shell would expand are unknown, not wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from p3o_launch.diagnostics import LocatedFinding, Position
from p3o_launch.importers.flags import MILES, RELATED, Flag, FlagTable, table
from p3o_launch.importers.script import entry_of, training_command
from p3o_launch.importers.words import Word, Words, shorten
from p3o_launch.presets import nearest
from p3o_launch.rules_import import import_finding

_ENV = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_MAX_HINTS = 12
_FALSE = ("false", "0", "no", "off", "none")
# Estimators that exist on other branches of a framework than the one in the tables.
_BRANCH_CHOICES = {"advantage_estimator": ("rloo", "dr_grpo", "p3o", "sapo", "cispo", "gspo")}
UNKNOWN = object()


@dataclass(frozen=True, slots=True)
class Use:
    """One occurrence of a flag. ``value`` is ``UNKNOWN`` when a shell variable or a bad value hides it.

    ``raw``: its words as written. ``key``: place of the flag. ``place``: place of its value, or of the flag itself.
    """

    flag: str
    value: Any
    raw: str
    key: Position
    place: Position


@dataclass(slots=True)
class Arguments:
    """A parsed argument list. ``env``: variables set before the command. ``nodes``, ``gpus_per_node``: what the
    launcher was given. ``partial``: which arguments come from elsewhere too (``"model"``, ``"all"``), so that an absent
    one may be given after all."""

    table: FlagTable
    file: str
    uses: dict[str, list[Use]] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    invalid: dict[str, str] = field(default_factory=dict)
    env: dict[str, tuple[str, Position]] = field(default_factory=dict)
    nodes: int | None = None
    gpus_per_node: int | None = None
    partial: str = ""
    findings: list[LocatedFinding] = field(default_factory=list)

    def use(self, dest: str) -> Use | None:
        """The occurrence that decides ``dest``."""
        return self.uses[dest][-1] if dest in self.uses else None

    def given(self, dest: str) -> bool:
        """Is there a flag for ``dest``?"""
        return dest in self.uses

    def get(self, dest: str) -> Any:
        """The value of ``dest``, or the framework's default. ``UNKNOWN`` is returned as None; ask ``hidden``."""
        use = self.use(dest)
        value = use.value if use else self.table.defaults.get(dest)
        return None if value is UNKNOWN else value

    def hidden(self, dest: str) -> bool:
        """Was ``dest`` given a value that is not known?"""
        use = self.use(dest)
        return use is not None and use.value is UNKNOWN

    def repeated(self) -> dict[str, list[str]]:
        """Flags written more than once, with the text of each value."""
        by_flag: dict[str, list[str]] = {}
        for uses in self.uses.values():
            for use in uses:
                by_flag.setdefault(use.flag, []).append(use.raw)
        return {flag: raws for flag, raws in by_flag.items() if len(raws) > 1}


def parse(words: Words, flags: FlagTable, file: str, strict_flags: bool) -> Arguments:
    """Parse a list. ``strict_flags``: the framework stops at an unknown flag instead of dropping it."""
    command = training_command(words, file)
    arguments = Arguments(flags, file, partial=command.partial, findings=list(command.findings))
    parser = _Parser(arguments, command.words, strict_flags)
    parser.run()
    return parser.arguments


def is_flag(text: str) -> bool:
    """Does argparse read the word as a flag? A negative number is a value."""
    if not text.startswith("-") or len(text) < 2 or " " in text.partition("=")[0]:
        return False
    return not re.fullmatch(r"-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?|-inf", text, re.ASCII)


class _Parser:
    def __init__(self, arguments: Arguments, words: list[Word], strict_flags: bool) -> None:
        self.arguments, self.words, self.strict = arguments, words, strict_flags
        self.index = 0

    def at(self, word: Word, offset: int = 0) -> Position:
        return Position(self.arguments.file, word.line, word.column + offset)

    def report(self, code: str, position: Position, message: str, hint: str | None = None) -> None:
        self.arguments.findings.append(import_finding(code, position, message, hint))

    def run(self) -> None:
        self.index = self.launcher()
        while self.index < len(self.words):
            word = self.words[self.index]
            self.index += 1
            if word.text == "--":
                continue
            if is_flag(word.text):
                self.flag(word)
            else:
                self.stray(word)
        self.repeats()

    def launcher(self) -> int:
        """Skip the command in front of the flags; read the environment and the GPUs it names."""
        entry = entry_of(self.words)
        if entry is None:
            head = 0
            while head < len(self.words) and not is_flag(self.words[head].text) and self.words[head].line == 1:
                head += 1
            shell = any(_ENV.match(word.text) for word in self.words[:head])
            if shell:
                self.environment(self.words[:head])
            return head if shell else 0
        self.environment(self.words[: entry + 1])
        return entry + 1

    def environment(self, words: list[Word]) -> None:
        for index, word in enumerate(words):
            name, equals, value = word.text.partition("=")
            following = words[index + 1].text if index + 1 < len(words) else ""
            plain = name.lstrip("-").replace("_", "-")
            if not name.startswith("-") and _ENV.match(word.text) and not word.variable:
                self.arguments.env[name] = (value, self.at(word))
            elif plain == "runtime-env-json":
                self.runtime_env(value if equals else following, self.at(word))
            elif plain in ("nproc-per-node", "nnodes"):
                text = value if equals else following
                number = int(text) if text.isdecimal() and 0 < len(text) < 7 else None
                if plain == "nnodes":
                    self.arguments.nodes = number or None
                else:
                    self.arguments.gpus_per_node = number or None

    def runtime_env(self, text: str, position: Position) -> None:
        try:
            variables = json.loads(text).get("env_vars", {})
            pairs = {str(name): str(value) for name, value in variables.items()}
        except (ValueError, AttributeError, RecursionError):
            if "$" in text:
                return  # made by a shell: not known here
            self.report("P3O018", position, "the JSON of the runtime environment is broken", "submit it from a file")
            return
        for name, value in pairs.items():
            if "$" not in value:
                self.arguments.env[name] = (value, position)

    def flag(self, word: Word) -> None:
        name, equals, inline = word.text.partition("=")
        known = self.arguments.table.find(name)
        if known is None:
            self.unknown(name, word, bool(equals))
            return
        if known.is_switch:
            if equals:
                self.report(
                    "P3O015", self.at(word), f"{name} is a switch and takes no value", self.switch_hint(known, inline)
                )
            self.keep(known, Use(name, known.sets, "", self.at(word), self.at(word)))
            return
        values = [word._replace(text=inline)] if equals else list(self.values(known))
        offset = len(name) + 1 if equals else 0
        place = self.at(values[0], offset) if values else self.at(word)
        if not values and known.nargs not in ("*", "engine"):
            self.report("P3O015", self.at(word), f"{name} has no value", f"write one behind it, or remove {name}")
            return
        value = self.convert(known, name, values, place)
        self.keep(known, Use(name, value, " ".join(item.text for item in values), self.at(word), place))

    def keep(self, known: Flag, use: Use) -> None:
        self.arguments.uses.setdefault(known.dest, []).append(use)

    def values(self, known: Flag) -> Iterator[Word]:
        """The words that belong to a flag."""
        many = known.nargs in ("+", "*", "engine")
        limit = len(self.words) if many else int(known.nargs) if known.nargs.isdecimal() else 1
        taken = 0
        while taken < limit and self.index < len(self.words) and not is_flag(self.words[self.index].text):
            yield self.words[self.index]
            self.index += 1
            taken += 1

    def switch_hint(self, known: Flag, value: str) -> str:
        if value.lower() in _FALSE:
            return f"leave {known.flag} out to turn it off"
        return f"write {known.flag} alone"

    def unknown(self, name: str, word: Word, inline: bool) -> None:
        self.arguments.unknown.append(name)
        if not inline:
            while self.index < len(self.words) and not is_flag(self.words[self.index].text):
                self.index += 1
        hint = None
        if len(self.arguments.unknown) <= _MAX_HINTS:
            close = self.arguments.table.nearest(name)
            hint = f"did you mean {close}?" if close else "remove it, or check the version you run"
            relative = next((other for other in RELATED if name in table(other).flags), None)
            relative = "miles" if relative is None and name in MILES else relative
            hint = f"{relative} has it; check the version you run" if relative else hint
        fate = "the program stops at it" if self.strict else "it is dropped without a word"
        self.report("P3O014", self.at(word), f"there is no flag {shorten(name)}: {fate}", hint)

    def stray(self, word: Word) -> None:
        if word.variable:
            return  # a shell puts words here, or none
        before = self.words[self.index - 2] if self.index > 1 else None
        known = self.arguments.table.find(before.text) if before else None
        hint = None
        if known is not None and known.is_switch:
            hint = self.switch_hint(known, word.text)
        elif word.text in ("(", ")"):
            hint = "quote the parentheses"
        self.report("P3O017", self.at(word), f"{shorten(word.text)!r} belongs to no flag", hint)

    def convert(self, known: Flag, name: str, values: list[Word], place: Position) -> Any:
        converted = []
        for index, word in enumerate(values):
            if word.variable:
                return UNKNOWN
            value = self.one(known, name, word.text, place if index == 0 else self.at(word))
            if value is UNKNOWN:
                return UNKNOWN
            converted.append(value)
        if known.nargs.isdecimal() and len(converted) < int(known.nargs):
            self.report("P3O015", place, f"{name} takes {known.nargs} values, not {len(converted)}")
            return UNKNOWN
        if known.nargs == "engine":
            return converted[0] if len(converted) == 1 else converted or True
        return converted if known.nargs else converted[0]

    def one(self, known: Flag, name: str, text: str, place: Position) -> Any:
        """One value of a flag's type; reports what argparse would refuse."""
        kind = known.type.lower().lstrip("_")
        if known.choices and text not in known.choices:
            return self.choice(known, name, text, place)
        if "int" in kind and "json" not in kind:
            return self.number(name, text, place, int)
        if "float" in kind:
            return self.number(name, text, place, float)
        if kind == "bool":
            if text.lower() in _FALSE:
                message = f"{name} {text} turns it on: any text but the empty one is true for a bool flag"
                self.report("P3O015", place, message, f"remove {name}, or pass an empty text")
            return bool(text)
        if "json" in kind:
            return self.json(name, text, place)
        return text

    def choice(self, known: Flag, name: str, text: str, place: Position) -> Any:
        self.arguments.invalid[name] = text
        listed = ", ".join(known.choices[:12])
        if text in _BRANCH_CHOICES.get(known.dest, ()):
            self.report("P3O016", place, f"{name} {text} is not among {listed}", "check that your version has it")
            return text
        if known.dest == "train_backend":
            return text  # judged by what the backend does with the settings
        close = nearest(text, list(known.choices))
        hint = f"did you mean {close}?" if close else f"use one of {listed}"
        self.report("P3O015", place, f"{name} {shorten(text)!r} is not one of its choices", hint)
        return UNKNOWN

    def number(self, name: str, text: str, place: Position, kind: type) -> Any:
        try:
            if len(text) > 64:
                raise ValueError
            return kind(text)
        except ValueError:
            word = "a whole number" if kind is int else "a number"
            self.report("P3O015", place, f"{name} {shorten(text)!r} is not {word}", f"write {word}")
            return UNKNOWN

    def json(self, name: str, text: str, place: Position) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            broken = re.search(r"[{,\[]\s*[A-Za-z_]\w*\s*[:,\]]", text) or "'" in text
            cause = ": its quotes were lost or are the wrong ones" if broken else ""
            message = f"{name} {shorten(text)} is not JSON{cause}"
            self.report("P3O018" if broken else "P3O015", place, message, "keys and texts need double quotes")
            return UNKNOWN

    def repeats(self) -> None:
        for uses in self.arguments.uses.values():
            last = uses[-1]
            for use in uses[:-1]:
                flag = self.arguments.table.find(use.flag)
                same = use.value == last.value and use.value is not UNKNOWN
                if same or (use.raw == last.raw == "" and use.flag == last.flag) or (flag and flag.action == "append"):
                    continue
                shown = f"{use.flag} {shorten(use.raw)}".rstrip()
                message = f"{shown} has no effect: line {last.key.line} sets {last.flag} {shorten(last.raw)}".rstrip()
                self.report("P3O011", use.key, message, "remove this line")
