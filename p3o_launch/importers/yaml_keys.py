"""Misspelt keys of verl's and NeMo-RL's configurations: a key that nobody asks for leaves its default in force.

A key is taken for a misprint when no configuration that is known here has the name, and one that its group has differs
by a letter or two. Anything else may be a setting of another version, or the user's own: nothing is said about it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from difflib import SequenceMatcher
from functools import cache
from importlib.resources import files
from itertools import islice
from typing import Any

from p3o_launch.diagnostics import LocatedFinding, Position
from p3o_launch.importers.flags import table
from p3o_launch.importers.words import shorten
from p3o_launch.nodes import Node
from p3o_launch.rules_import import import_finding

_LIKE = 0.9
_LIKE_IN_SHORT_WORDS = 0.85
_SHORT = 7
_MAX_FINDINGS = 12
_MAX_UNKNOWN = 100
"""Unknown keys that are looked at: a file with more of them is no configuration of the framework."""
# Groups whose keys are Megatron's own settings, beside those that the framework writes there itself.
_MEGATRON = ("override_transformer_config", "megatron_cfg", "model_overrides")
# What other versions and extensions put at the top.
_GROUPS = {"verl": ("reward", "distillation", "model_engine", "global_profiler"), "nemo_rl": ("sft", "dpo", "rm")}


@cache
def _keys(framework: str) -> Mapping[str, Any]:
    text = files("p3o_launch.importers").joinpath("data/yaml_keys.json").read_text("utf-8")
    tree: Mapping[str, Any] = json.loads(text)[framework]
    return tree


@cache
def _homes(framework: str) -> Mapping[str, str]:
    """Every key that is known -> one path that ends in it, the shortest."""
    found: dict[str, str] = {}
    for path in sorted(_paths(_keys(framework), ""), key=lambda path: (path.count("."), path)):
        found.setdefault(path.rpartition(".")[2], path)
    return found


def _paths(tree: Mapping[str, Any], below: str) -> Iterator[str]:
    for key, inner in tree.items():
        yield f"{below}{key}"
        yield from _paths(inner, f"{below}{key}.")


def is_known(name: str, framework: str) -> bool:
    """Has some group a key of that name, or Megatron?"""
    return name in _homes(framework) or name in table("megatron").defaults


def meant(name: str, known: set[str]) -> str | None:
    """The key of ``known`` that ``name`` is a misprint of; None when none is close."""
    best, score = None, 0.0
    for other in sorted(known):
        limit = _LIKE_IN_SHORT_WORDS if len(other) < _SHORT else _LIKE
        least = max(limit, score)
        if 2 * min(len(name), len(other)) < least * (len(name) + len(other)):
            continue  # too different in length to be as alike as that
        matcher = SequenceMatcher(None, name.lower(), other.lower(), autojunk=False)
        if matcher.quick_ratio() >= least and (ratio := matcher.ratio()) >= least:
            best, score = other, ratio
    return best


def misspelt_keys(root: Node, framework: str, default_origin: str) -> Iterator[LocatedFinding]:
    """Findings for the keys that the user wrote; what lies in ``default_origin`` is the framework's own."""
    told = 0
    unknown = _unknown(root, _keys(framework), framework, "", default_origin)
    for path, place, known in islice(unknown, _MAX_UNKNOWN):
        close = meant(path.rpartition(".")[2], set(known))
        if close is None:
            continue
        message = f"{shorten(path, 100)} is no setting that is known here"
        yield import_finding("P3O014", place, message, f"did you mean {known[close]}?", path)
        told += 1
        if told == _MAX_FINDINGS:
            return


def _unknown(
    node: Node, known: Mapping[str, Any], framework: str, below: str, default_origin: str
) -> Iterator[tuple[str, Position, Mapping[str, str]]]:
    """(path, place, name -> path of what may be meant) of every key that no configuration here has."""
    if not isinstance(node.value, dict):
        return
    names, homes = _names(below, known, framework), _homes(framework)
    for key, entry in node.value.items():
        path = f"{below}{key}"
        if key in names:
            yield from _unknown(entry.node, known.get(key, {}), framework, f"{path}.", default_origin)
        elif entry.key.origin != default_origin and key not in homes:
            # Both names in one file: then it is no misprint of the other.
            beside = {name for name, other in node.value.items() if _same_file(other.key, entry.key)}
            yield path, entry.key, {name: f"{below}{name}" for name in names - beside}
            if not below and isinstance(entry.node.value, dict) and not meant(key, names - beside):
                # A group that is not known at all: its keys may be meant for any.
                for inner, item in entry.node.value.items():
                    if inner not in homes:
                        yield f"{path}.{inner}", item.key, homes


def _same_file(one: Position, other: Position) -> bool:
    """Every override on the command line stands for itself."""
    return (one.file, one.origin) == (other.file, other.origin) and not one.file.startswith("<overrides")


def _names(below: str, known: Mapping[str, Any], framework: str) -> set[str]:
    names = set(known)
    if not below:
        names |= set(_GROUPS[framework])
    if below.rstrip(".").rpartition(".")[2] in _MEGATRON:
        names |= set(table("megatron").defaults)
    return names


def misspelt_override(keys: list[str], framework: str) -> str | None:
    """The path that an override whose first word is unknown was to have; None when nothing is close."""
    names = set(_keys(framework)) | set(_GROUPS[framework])
    if keys[0] in names:
        return None
    if close := meant(keys[0], names):
        return ".".join([close, *keys[1:]])
    homes = _homes(framework)
    close = meant(keys[-1], set(homes)) if len(keys) > 1 and keys[-1] not in homes else None
    return homes[close] if close else None
