"""Hydra overrides: ``a.b=c`` sets, ``+a.b=c`` adds, ``~a.b`` deletes. Each value keeps the place of its override."""

from __future__ import annotations

import re
from typing import Any

from p3o_launch.diagnostics import LocatedFinding, Position
from p3o_launch.importers.numbers import number
from p3o_launch.importers.words import Word, shorten
from p3o_launch.importers.yaml_keys import is_known, meant, misspelt_override
from p3o_launch.loading import merge
from p3o_launch.nodes import Entry, Node, scalar
from p3o_launch.presets import nearest
from p3o_launch.rules_import import import_finding

_OVERRIDE = re.compile(r"([+~]{0,2})([A-Za-z_][\w.@/-]*)(?:(=)(.*))?", re.DOTALL)
# Groups that the packaged trainers leave out, or that hold whatever an engine takes.
_FREE = {"profiler", "trace", "prometheus", "agent", "multi_turn", "checkpoint_engine", "ref", "engine_kwargs"}


def repeats(findings: list[LocatedFinding], placed: list[tuple[Word, Position]]) -> None:
    """An override given twice with two values: the first has no effect."""
    last: dict[str, tuple[str, Position]] = {}
    for word, position in reversed(placed):
        match = _OVERRIDE.fullmatch(word.text)
        if match is None or match[3] is None:
            continue
        value, later = last.setdefault(match[2], (match[4], position))
        if later is not position and value != match[4]:
            where = f"line {later.line} sets" if later.file == position.file else "a later override sets"
            message = f"{shorten(word.text)} has no effect: {where} {shorten(value)!r}"
            findings.append(import_finding("P3O011", position, message, "remove it"))


def override(
    findings: list[LocatedFinding], root: Node, word: Word, position: Position, known: bool, look: bool = True
) -> Node:
    """One override laid over the tree. ``known``: the tree holds every key there is, so another is a mistake; ``look``
    for what it was to be."""
    if word.text.startswith("-") or (word.variable and "=" not in word.text):
        return root
    match = _OVERRIDE.fullmatch(word.text)
    if match is None or (match[3] is None and "~" not in match[1]):
        message = f"{shorten(word.text)!r} is not an override of the form key=value"
        findings.append(import_finding("P3O017", position, message, "quote values that hold spaces"))
        return root
    keys = match[2].split(".")[:32]
    if not match[1] and known:
        _known_key(findings, root, keys, position, look)
    elif match[1] == "+" and known and look:
        _added_key(findings, root, keys, position)
    if "~" in match[1]:
        return _without(root, keys)
    place = Position(position.file, position.line, position.column + word.text.index("=") + 1)
    value = Node(place, _override_value(match[4], word.variable))
    for key in reversed(keys):
        value = Node(value.position, {key: Entry(position, value)})
    return merge(root, value)


def _known_key(findings: list[LocatedFinding], root: Node, keys: list[str], position: Position, look: bool) -> None:
    """Hydra stops at a key that is not there, unless it is added with ``+``."""
    node = root
    for depth, key in enumerate(keys):
        entries = node.value
        if key in _FREE or not isinstance(entries, dict) or not entries:
            return
        if key not in entries:
            if depth == 0:
                if look:
                    _unknown_group(findings, keys, position)
                return
            close = nearest(key, list(entries)) if look else None
            path = ".".join(keys)
            hint = f"did you mean {'.'.join([*keys[:depth], close])}?" if close else f"write +{shorten(path)} to add it"
            message = f"there is no setting {shorten(path)}: Hydra stops at it"
            findings.append(import_finding("P3O014", position, message, hint))
            return
        node = entries[key].node


def _added_key(findings: list[LocatedFinding], root: Node, keys: list[str], position: Position) -> None:
    """``+`` lets any name pass: one that resembles a key beside it is most likely that key."""
    node = root
    for depth, key in enumerate(keys):
        entries = node.value
        if not isinstance(entries, dict):
            return
        if key not in entries:
            close = meant(key, set(entries)) if not is_known(key, "verl") else None
            if close:
                path = ".".join(keys)
                message = f"{shorten(path, 100)} is added as a setting of its own: nothing that is known here reads it"
                hint = f"did you mean {'.'.join([*keys[:depth], close, *keys[depth + 1 :]])}?"
                findings.append(import_finding("P3O014", position, message, hint))
            return
        node = entries[key].node


def _unknown_group(findings: list[LocatedFinding], keys: list[str], position: Position) -> None:
    """A first word that the tree lacks: not every group is known here, so only a misprint is one."""
    close = misspelt_override(keys, "verl")
    if close:
        message = f"there is no setting {shorten('.'.join(keys))}: Hydra stops at it"
        findings.append(import_finding("P3O014", position, message, f"did you mean {close}?"))


def _override_value(text: str, variable: bool) -> Any:
    if variable and "${" not in text:
        return "${" + "shell}"  # a shell variable: not known here
    plain = text.strip()
    if len(plain) > 1 and plain[0] == plain[-1] and plain[0] in "'\"":
        return plain[1:-1]
    lowered = plain.lower()
    if lowered in ("true", "false"):
        return lowered == "true"
    return number(scalar(plain)) if len(plain) < 64 else plain


def _without(root: Node, keys: list[str]) -> Node:
    if not isinstance(root.value, dict) or keys[0] not in root.value:
        return root
    entries = dict(root.value)
    if len(keys) == 1:
        del entries[keys[0]]
    else:
        entry = entries[keys[0]]
        entries[keys[0]] = Entry(entry.key, _without(entry.node, keys[1:]))
    return Node(root.position, entries)
