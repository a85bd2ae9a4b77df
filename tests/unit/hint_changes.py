"""A hint -> the changes it asks for, as a reader would make them: ``set A: V and B: W, or remove C`` is two ways."""

from __future__ import annotations

import copy
import re
from typing import Any, NamedTuple

import yaml

from p3o_launch.shape import known_path

REMOVED, QUOTED = object(), object()
_PATH = r"[a-z_]+\.[a-z_0-9]+(?:\.[A-Za-z_0-9]+)*"
_ASSIGNMENT = re.compile(rf"({_PATH}): ?(\"[^\"]*\"|[^\s,]+)")
_OF_SETTING = re.compile(rf"({_PATH})(?: to|:)? ([^:]+)")
_ENVIRONMENT = re.compile(r'([A-Z][A-Z0-9_]*): "([^"]*)"')


class Renamed(NamedTuple):
    """The value stays, its key becomes another: a sibling, or a path."""

    name: str


class Change(NamedTuple):
    """``path`` gets ``value``; ``REMOVED`` takes the key away, ``QUOTED`` makes the value a text."""

    path: str
    value: Any


def _plain(text: str) -> Any:
    return yaml.safe_load(text)


def _values(text: str) -> list[Any]:
    """``1, 2 or 4`` and ``511 or less`` as values."""
    text = re.sub(r",? or (less|more|fewer)$| for [a-z ]+$", "", text.strip())
    words = [word for word in re.split(r", | or ", text) if word]
    return [_plain(word) for word in words] if all(re.fullmatch(r"[\"'\w.:{}+-]+", word) for word in words) else []


def ways(hint: str, path: str, key: bool = False) -> list[list[Change]]:
    """Every alternative of a hint about ``path``, or about its ``key``; empty when it is prose."""
    if key and (match := re.fullmatch(r"did you mean ([^,?]*)(?:, [^?]*)?\?|.*: write (\S+)", hint)):
        return [[Change(path, Renamed(match[1] or match[2]))]]
    if hint == "put the value in quotes":
        return [[Change(path, QUOTED)]]
    hint = re.split(r"; |, which |, as the |, the ", hint)[0]
    if hint.startswith("add to cluster.env: "):
        return [[Change(f"cluster.env.{name}", value) for name, value in _ENVIRONMENT.findall(hint)]]
    if match := re.fullmatch(r'put it in quotes: "(.*)"', hint):
        return [[Change(path, match[1])]]
    if match := re.fullmatch(rf"remove it and set ({_PATH}): (\S+)", hint):
        return [[Change(path, REMOVED), Change(match[1], _plain(match[2]))]]
    if match := re.fullmatch(r"did you mean ([^,?]*)(?:, [^?]*)?\?", hint):
        return [[Change(path, match[1])]]
    if match := re.fullmatch(r"write (\S+) without the brackets", hint):
        return [[Change(path, _plain(match[1]))]]
    if match := re.fullmatch(r"write (\S+), or (\S+) if octal is meant", hint):
        return [[Change(path, int(match[1]))], [Change(path, int(match[2]))]]
    if match := re.fullmatch(r"write ([a-z_]+): (\S+)", hint):
        return [[Change(match[1], _plain(match[2]))]]
    found: list[list[Change]] = []
    for alternative in re.split(r", or ", hint):
        found += _one(alternative.strip(), path)
    return found


def _one(text: str, path: str) -> list[list[Change]]:
    if text in ("remove it", "remove the line"):
        return [[Change(path, REMOVED)]]
    if text.startswith("remove "):
        names = re.split(r", | and ", text.removeprefix("remove "))
        either = re.split(r" or ", text.removeprefix("remove "))
        if all(re.fullmatch(_PATH, name) for name in names):
            return [[Change(name, REMOVED) for name in names]]
        if all(re.fullmatch(_PATH, name) for name in either):
            return [[Change(name, REMOVED)] for name in either]
        return []
    body = re.sub(r"^(?:set|write|use|add) ", "", text)
    pairs = _ASSIGNMENT.findall(body)
    if pairs and _ASSIGNMENT.sub("", body).replace(" and ", "").strip() == "":
        return [[Change(name, _plain(value)) for name, value in pairs]]
    if match := _OF_SETTING.fullmatch(body):
        return [[Change(match[1], value)] for value in _values(match[2])]
    if text.startswith(("use ", "write ")) and path and not re.search(_PATH, body):
        return [[Change(path, value)] for value in _values(body)]
    return []


def applied(data: dict[str, Any], changes: list[Change]) -> dict[str, Any]:
    """The settings with the changes made."""
    data = copy.deepcopy(data)
    for dotted, value in changes:
        keys = known_path(dotted) or tuple(dotted.split("."))
        below = data
        for key in keys[:-1]:
            below = below.setdefault(key, {})
        if value is REMOVED:
            below.pop(keys[-1], None)
        elif value is QUOTED:
            below[keys[-1]] = str(below[keys[-1]])
        elif isinstance(value, Renamed):
            old = below.pop(keys[-1])
            _rename(data, keys[:-1], value.name, old)
        else:
            below[keys[-1]] = value
    return data


def _rename(data: dict[str, Any], group: tuple[str, ...], name: str, value: Any) -> None:
    """Put ``value`` under ``name``: beside where it was, or at a path from the top."""
    keys = tuple(name.split(".")) if "." in name or not group else (*group, name)
    below = data
    for key in keys[:-1]:
        below = below.setdefault(key, {})
    below[keys[-1]] = {**below.get(keys[-1], {}), **value} if isinstance(value, dict) else value
