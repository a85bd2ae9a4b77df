"""YAML of Hydra and OmegaConf -> one tree of settings that know where they were written.

Parents (``defaults:``) come first and the child wins; overrides ``a.b=c``, ``+a.b=c``, ``~a.b`` come last. Simple
interpolations are followed (``${a.b}``, ``${.sibling}``, ``${oc.select:a.b,default}``, ``${mul:a,b}``); what is left is
unknown. A parent that is not there is a finding, and verl's own trainers are read from packaged defaults.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, TypeAlias

from p3o_launch.diagnostics import LocatedFinding, Position
from p3o_launch.importers.hydra import override, repeats
from p3o_launch.importers.numbers import number
from p3o_launch.importers.script import entry_of, training_command
from p3o_launch.importers.source import read_source
from p3o_launch.importers.words import Word, shorten, split
from p3o_launch.importers.yaml_keys import misspelt_keys
from p3o_launch.loading import merge
from p3o_launch.nodes import Entry, Node, parse, scalar
from p3o_launch.rules_file import file_finding

MAX_FILES = 32
MAX_HOPS = 16
MAX_LOOKED_AT = 100
"""Overrides for which a name that was meant is looked for."""
DEFAULT_ORIGIN = "default"
_WHOLE = re.compile(r"\$\{([^${}]*)\}")
_INNER = re.compile(r"\$\{([^${}]*)\}")
_COMPLETE = {"actor_rollout_ref", "algorithm", "data", "trainer"}
UNKNOWN = object()


@dataclass(slots=True)
class Settings:
    """The merged tree. ``get`` answers by dotted path; ``UNKNOWN`` is an interpolation that cannot be followed.

    ``listed``: the source is a list of overrides, not YAML.
    """

    root: Node
    file: str
    findings: list[LocatedFinding] = field(default_factory=list)
    listed: bool = False

    def node(self, path: str) -> Node | None:
        """The node at a dotted path, or None."""
        node = self.root
        for key in path.split("."):
            if not isinstance(node.value, dict) or key not in node.value:
                return None
            node = node.value[key].node
        return node

    def has(self, path: str) -> bool:
        """Is the path there, be it null?"""
        return self.node(path) is not None

    def place(self, path: str) -> Position | None:
        """Where a value is written; None for a packaged default, and for one that is not there."""
        node = self.node(path)
        return node.position if node is not None and node.position.origin != DEFAULT_ORIGIN else None

    def get(self, path: str, default: Any = None) -> Any:
        """The value at a path, interpolations followed; ``default`` where it is absent. ``???`` is absent."""
        node = self.node(path)
        if node is None:
            return default
        value = self._plain(node, path, MAX_HOPS)
        return default if value == "???" else value

    def _plain(self, node: Node, path: str, hops: int) -> Any:
        if isinstance(node.value, dict):
            return {key: self._plain(entry.node, f"{path}.{key}", hops) for key, entry in node.value.items()}
        if isinstance(node.value, list):
            return [self._plain(item, path, hops) for item in node.value]
        value = node.value
        if isinstance(value, str) and "${" in value:
            return self._follow(value, path, hops)
        return number(value)

    def _follow(self, text: str, path: str, hops: int) -> Any:
        """The value of a text with interpolations."""
        for _ in range(MAX_HOPS):
            if match := _WHOLE.fullmatch(text):
                return self._resolve(match[1], path, hops)
            match = _INNER.search(text)
            if match is None:
                return number(scalar(text)) if len(text) < 64 else text
            value = self._resolve(match[1], path, hops)
            if value is UNKNOWN or isinstance(value, (dict, list)):
                return UNKNOWN
            text = text[: match.start()] + ("null" if value is None else str(value)) + text[match.end() :]
            if len(text) > 10_000:
                break
        return UNKNOWN

    def _resolve(self, inner: str, path: str, hops: int) -> Any:
        """What one ``${...}`` stands for."""
        if hops <= 0:
            return UNKNOWN
        name, colon, rest = inner.partition(":")
        name = name.strip()
        if not colon:
            return self._at(name, path, hops, UNKNOWN)
        operands = [part.strip() for part in rest.split(",", 1)]
        if name == "oc.select":
            fallback = number(scalar(operands[1].strip("'\""))) if len(operands) > 1 and operands[1] else None
            return self._at(operands[0], path, hops, fallback)
        if name in ("mul", "add", "sub") and len(operands) == 2:
            sides = [_operand(part) for part in operands]
            if None not in sides:
                left, right = sides
                return {"mul": left * right, "add": left + right, "sub": left - right}[name]
        return UNKNOWN

    def _at(self, target: str, path: str, hops: int, fallback: Any) -> Any:
        dots = len(target) - len(target.lstrip("."))
        if dots:
            parents = path.split(".")[:-dots] if dots < len(path.split(".")) else []
            target = ".".join([*parents, target[dots:]])
        node = self.node(target)
        if node is None or isinstance(node.value, (dict, list)):
            return fallback if node is None else UNKNOWN
        value = self._plain(node, target, hops - 1)
        return fallback if value is None and fallback is not UNKNOWN else value


def _operand(text: str) -> Any:
    """A number that sums and products can hold, or None."""
    value = number(scalar(text)) if text else None
    usable = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e12
    return value if usable else None


@cache
def _packaged() -> dict[str, Any]:
    text = files("p3o_launch.importers").joinpath("data/verl_defaults.json").read_text("utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def _default_tree(value: Any, position: Position) -> Node:
    if isinstance(value, dict):
        return Node(position, {key: Entry(position, _default_tree(item, position)) for key, item in value.items()})
    if isinstance(value, list):
        return Node(position, [_default_tree(item, position) for item in value])
    return Node(position, value)


class _Loader:
    def __init__(self, framework: str, file: str) -> None:
        self.framework, self.file = framework, file
        self.findings: list[LocatedFinding] = []
        self.files = 0

    def trainer(self, name: str) -> Node | None:
        """verl's own configuration ``name``, from the package."""
        stem = name.removesuffix(".yaml").rpartition("/")[2]
        data = _packaged().get(stem) if self.framework == "verl" else None
        return _default_tree(data, Position(self.file, 1, 1, DEFAULT_ORIGIN)) if data is not None else None

    def text(self, text: str, file: str, open_files: tuple[str, ...]) -> Node | None:
        """One file with its parents under it."""
        own, findings = parse(text, file)
        self.findings += findings
        if own is None or not isinstance(own.value, dict):
            if not findings:
                here = own.position if own is not None else Position(file, 1, 1)
                self.findings.append(file_finding("P3O001", here, "the file is not a mapping"))
            return None
        entries = dict(own.value)
        defaults = entries.pop("defaults", None)
        root = Node(own.position, entries)
        base: Node | None = None
        for parent in self.parents(defaults, file, open_files, complete=entries.keys() >= _COMPLETE):
            base = parent if base is None else merge(base, parent)
        return merge(base, root) if base is not None else root

    def parents(self, entry: Entry | None, file: str, open_files: tuple[str, ...], complete: bool) -> list[Node]:
        if entry is None:
            if self.framework == "verl" and not open_files and not complete:
                # A resolved configuration stands alone; a part of one is laid over verl's own trainer.
                base = self.trainer("ppo_trainer")
                return [base] if base is not None else []
            return []
        items = entry.node.value if isinstance(entry.node.value, list) else [entry.node]
        found = []
        for item in items:
            name = item.value
            if isinstance(name, dict) or name == "_self_" or name is None:
                continue  # a config group: its files are verl's own, and part of the packaged trainers
            parent = self.parent(str(name), item.position, file, open_files)
            if parent is not None:
                found.append(parent)
        return found

    def parent(self, name: str, asked: Position, file: str, open_files: tuple[str, ...]) -> Node | None:
        packaged = self.trainer(name)
        stem = name if name.endswith((".yaml", ".yml")) else name + ".yaml"
        path = _beside(file, stem)
        real = os.path.realpath(path) if path else ""
        if not path or real in open_files or self.files >= MAX_FILES:
            what = "is not a path" if not path else "leads back to itself" if real in open_files else "is one too many"
            self.findings.append(file_finding("P3O008", asked, f"the parent {shorten(name)} {what}"))
            return packaged
        if packaged is not None and not os.path.isfile(path):
            return packaged
        self.files += 1
        text, shown, _ = read_source(path)
        if text is None:
            message = f"the parent {shorten(name)} cannot be read ({shown}): its settings are unknown"
            self.findings.append(file_finding("P3O008", asked, message, "run lint where the file is"))
            return None
        return self.text(text, path, (*open_files, real))


def _beside(file: str, name: str) -> str | None:
    """The file ``name`` relative to ``file``; also by the flat names of an archive (``a__b__c.yaml``)."""
    if "\0" in name:
        return None
    directory, own = os.path.split(file)
    path = os.path.normpath(os.path.join(directory, name))
    if not os.path.isfile(path) and "__" in own:
        folder = own.split("__")[:-1]
        flat = os.path.normpath(os.path.join("/".join(folder), name)).replace("/", "__")
        archived = os.path.join(directory, flat)
        return archived if os.path.isfile(archived) else path
    return path


_Loaded: TypeAlias = tuple[Settings | None, list[LocatedFinding]]


def load_tree(
    text: str, framework: str, file: str, overrides: Sequence[str]
) -> tuple[Settings | None, list[LocatedFinding]]:
    """The settings of a YAML file, or of a list of Hydra overrides for verl, and what is wrong with the files."""
    loader = _Loader(framework, file)
    words: list[Word] = []
    listed = framework == "verl" and _is_override_list(text)
    if listed:
        command = training_command(split(text, file), file)
        loader.findings += command.findings
        entry = entry_of(command.words)
        words = command.words if entry is None else command.words[entry + 1 :]
        root = _launch_base(loader, words)
    else:
        root = loader.text(text, file, ())
    if root is None:
        return None, loader.findings
    placed = [(word, Position(file, word.line, word.column)) for word in words]
    placed += [
        (Word(entry, line, 1), Position("<overrides>", line, 1)) for line, entry in enumerate(overrides, start=1)
    ]
    repeats(loader.findings, placed)
    if not listed:
        loader.findings += misspelt_keys(root, framework, DEFAULT_ORIGIN)
    own = len(loader.findings)
    for index, (word, position) in enumerate(placed):
        look = index < MAX_LOOKED_AT
        root = override(loader.findings, root, word, position, known=framework == "verl", look=look)
    if framework == "nemo_rl" and overrides:
        told = {finding.path for finding in loader.findings[:own]}
        found = misspelt_keys(root, framework, DEFAULT_ORIGIN)
        loader.findings += [finding for finding in found if finding.path not in told]
    return Settings(root, file, loader.findings, listed), loader.findings


def _is_override_list(text: str) -> bool:
    """A launch list rather than YAML: its first word is an override, a flag or a command."""
    for line in text.split("\n"):
        first = line.strip()
        if first.startswith("#!"):
            return True
        if not first or first.startswith("#"):
            continue
        return bool(
            re.match(
                r"(?:--?[a-z]|[+~]{0,2}[\w.@/-]+=|(?:\w+=\S*\s+)*(?:python[\d.]*|ray|torchrun|uv|set|export|source|cd)\s|\w+=\()",
                first,
            )
        )
    return False


def _launch_base(loader: _Loader, words: list[Word]) -> Node | None:
    """The configuration an override list starts from: ``--config-name``, or verl's default trainer."""
    name, place, directory = "ppo_trainer", Position(loader.file, 1, 1), ""
    for index, word in enumerate(words):
        flag, equals, value = word.text.partition("=")
        if flag in ("--config-name", "-cn", "--config-path", "-cp", "--config-dir", "-cd"):
            text = value if equals else words[index + 1].text if index + 1 < len(words) else ""
            if flag in ("--config-name", "-cn"):
                name, place = text, Position(loader.file, word.line, word.column)
            else:
                directory = text
    packaged = loader.trainer(name)
    if packaged is not None:
        return packaged
    inside = os.path.join(directory, name) if directory and not os.path.isabs(name) else name
    found = loader.parent(inside or name, place, loader.file, (os.path.realpath(loader.file),))
    return found if found is not None else loader.trainer("ppo_trainer")
