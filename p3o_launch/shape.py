"""pydantic's errors about a preset -> faults in the user's words: one fault each, with the nearest legal value.

Also the schema's paths: which exist, which is meant by a misspelt one, and a complete placeholder that lets guards read
the healthy part of a broken preset.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from p3o_launch.fields import FIELDS, SCHEMA_VERSION, TOP
from p3o_launch.nodes import Path, shown, shown_key, trap
from p3o_launch.presets import nearest
from p3o_launch.synonyms import note, plain, synonym
from p3o_launch.value_hints import value_hint

_MAX_SUGGESTIONS = 50
_MAX_LISTED = 10
_SECRET = re.compile(r"key|token|secret|passw|credential", re.IGNORECASE)


@dataclass(slots=True)
class ShapeFault:
    """One fault of shape. ``meant``: what a misspelt or misplaced key stands for. ``others``: paths that share it."""

    code: str
    path: Path
    message: str
    hint: str | None = None
    at_key: bool = False
    meant: Path | None = None
    others: tuple[Path, ...] = ()


@cache
def _homes() -> dict[str, list[Path]]:
    """Field name -> every path with that name."""
    homes: dict[str, list[Path]] = {}
    for group, fields in FIELDS.items():
        for name in fields:
            homes.setdefault(name, []).append((group, name))
    return homes


def known_path(dotted: str) -> Path | None:
    """``"cluster.env.A.B"`` -> ``("cluster", "env", "A.B")``; None for a path the schema does not have."""
    head, _, rest = dotted.partition(".")
    if not rest:
        return (head,) if head in TOP or head in FIELDS else None
    if head in TOP:
        return (head, rest) if TOP[head][0] == "map" else None
    name, _, below = rest.partition(".")
    field = FIELDS.get(head, {}).get(name)
    if field is None:
        return None
    if not below:
        return (head, name)
    if field[0] != "map":
        return None
    nested = name in ("extra", "runtime_env")
    return (head, name, *(below.split(".") if nested else [below]))


def is_text(path: Path) -> bool:
    """Does the setting hold a text? Environment variables do, wherever they are written."""
    if len(path) == 1:
        return path[0] in TOP and TOP[path[0]][0] in ("text", "name")
    if path[:3] == ("cluster", "runtime_env", "env_vars") and len(path) == 4:
        return True
    field = TOP.get(path[0]) or FIELDS[path[0]].get(path[1])
    if field is None:
        return False
    if len(path) == 2 and path[0] not in TOP:
        return bool(field[0] == "text")
    return bool(field[0] == "map" and field[6][0] == "text")


def suggest(path: Path, value: Any = None) -> Path | None:
    """The path that an unknown one most likely means; the keys inside a mapping tell which group it was to be."""
    homes = _homes()
    if len(path) > 2 and path[0] not in FIELDS:
        path = path[-2:]  # another framework's deep path: the last words say what it is
    if len(path) == 1 and isinstance(value, dict):
        votes = [home[0] for key in value for home in _meant_by(key)]
        if votes:
            return (max(votes, key=votes.count),)
    if len(path) > 1 and path[0] not in FIELDS:
        group = nearest(path[0], list(FIELDS))
        if group and path[1] in FIELDS[group]:
            return (group, path[1])
    name = path[1] if len(path) > 1 else path[0]
    meant = _meant_by(name)
    if meant:
        return next((home for home in meant if home[0] == path[0]), meant[0])
    if len(path) == 1:
        close = nearest(name, [*TOP, *FIELDS, "extends", "profile", "recipe", *homes])
        return None if close is None else homes[close][0] if close in homes and close not in FIELDS else (close,)
    close = nearest(name, list(FIELDS[path[0]])) if path[0] in FIELDS else None
    if close:
        return (path[0], close)
    close = nearest(name, list(homes))
    return homes[close][0] if close else None


def _meant_by(name: str) -> list[Path]:
    """Where a field of that name lives, or of the name that another framework gives it."""
    homes = _homes().get(name) or _homes().get(plain(name))
    other = synonym(name)
    return homes or ([other] if other else [])


def shape_faults(
    errors: Sequence[Mapping[str, Any]], data: Any, raw: Mapping[Path, str], partial: bool
) -> list[ShapeFault]:
    """Faults of one validation. ``raw``: unquoted text by path. ``partial``: missing keys are not faults."""
    unknown = [error for error in errors if error["type"] == "extra_forbidden"]
    faults = [_unknown(_path(error), error["input"], index < _MAX_SUGGESTIONS) for index, error in enumerate(unknown)]
    meant = {fault.meant for fault in faults}
    meant |= {path[:1] for path in meant if path}
    missing: dict[Path, list[str]] = {}
    for error in errors:
        path = _path(error)
        if error["type"] == "extra_forbidden":
            continue
        if error["type"] == "missing":
            if not partial and path not in meant:
                missing.setdefault(path[:-1], []).append(path[-1])
        elif path[:1] == ("schema_version",):
            faults.append(_version(error["input"]))
        else:
            faults.append(_wrong(error, path, raw.get(path)))
    return faults + [_missing(parent, names) for parent, names in missing.items()]


def _path(error: Mapping[str, Any]) -> Path:
    return tuple(str(part) for part in error["loc"] if part != "[key]")


def _unknown(path: Path, value: Any, look: bool) -> ShapeFault:
    dotted = ".".join(shown_key(key) for key in path)
    meant = suggest(path, value) if look else None
    message = f"there is no setting {dotted}"
    if meant is None:
        return ShapeFault("P3O006", path, message, _listed(path) if look else None, at_key=True)
    where = ".".join(meant)
    if meant[-1] == path[-1] and len(meant) > 1:
        hint = f"{path[-1]} belongs under {meant[0]}: write {where}"
    else:
        hint = f"did you mean {where}{note(path[-1])}?"
    return ShapeFault("P3O006", path, message, hint, at_key=True, meant=meant)


def _listed(path: Path) -> str:
    """The settings there are, where none is like the one that was written."""
    if len(path) == 1 or path[0] not in FIELDS:
        return f"the groups are {', '.join(FIELDS)}"
    names = list(FIELDS[path[0]])
    return (
        f"{path[0]} has {', '.join(names)}" if len(names) <= _MAX_LISTED else "`p3o-launch schema` lists the settings"
    )


def _version(value: Any) -> ShapeFault:
    message = f"schema_version is {shown(value)}; this p3o-launch reads version {SCHEMA_VERSION}"
    return ShapeFault("P3O010", ("schema_version",), message, f"write schema_version: {SCHEMA_VERSION}")


def _missing(parent: Path, names: list[str]) -> ShapeFault:
    """All keys that one group lacks, in one finding: an absent parent file is one fault, not ten."""
    if names == ["schema_version"]:
        message, hint = "schema_version is missing", f"write schema_version: {SCHEMA_VERSION}"
        return ShapeFault("P3O010", ("schema_version",), message, hint)
    paths = [".".join((*parent, name)) for name in names]
    listed = paths[0] if len(paths) == 1 else ", ".join(paths[:-1]) + " and " + paths[-1]
    message = f"{listed} {'is' if len(paths) == 1 else 'are'} missing"
    hint = "add it, or extend a preset that has it, such as `extends: on_policy`"
    return ShapeFault("P3O012", (*parent, names[0]), message, hint, others=tuple((*parent, name) for name in names))


_WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "model_type": "a group of settings",
    "model_attributes_type": "a group of settings",
    "dict_type": "a mapping",
    "finite_number": "a finite number",
    "string_too_short": "a text that is not empty",
    "string_pattern_mismatch": "1 to 64 letters, digits, dots, dashes or underscores, the first a letter or a digit",
}
_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "above"),
    "less_than_equal": ("le", "at most"),
}


def _wrong(error: Mapping[str, Any], path: Path, raw: str | None) -> ShapeFault:
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    if kind == "literal_error":
        options = re.findall(r"'([^']*)'", context["expected"])
        wanted = "one of " + ", ".join(options) if len(options) > 1 else " ".join(options)
    elif kind in _BOUNDS:
        bound, words = _BOUNDS[kind]
        wanted = f"{words} {context[bound]:g}"
    else:
        wanted = _WANTED.get(kind, "")
    name = ".".join(shown_key(key) for key in path)
    secret = len(path) > 2 and _SECRET.search(path[-1]) is not None
    got = f"a {type(value).__name__} that is not shown" if secret else _described(value, raw)
    message = f"{name} must be {wanted}, but is {got}" if wanted else f"{name} is {got}: {error['msg'].lower()}"
    return ShapeFault("P3O007", path, message, None if secret else value_hint(kind, value, raw, context, path))


def _described(value: Any, raw: str | None) -> str:
    if isinstance(value, (dict, list)):
        return f"a {'mapping' if isinstance(value, dict) else 'list'}"
    if raw is not None and (meaning := trap(raw)):
        return f"{shown(value)} ({meaning})"
    if isinstance(value, bool) and raw is not None and raw.lower() not in ("true", "false"):
        return f"the boolean {shown(value)} ({raw} is a boolean in YAML 1.1)"
    if isinstance(value, bool):
        return f"the boolean {shown(value)}"
    if isinstance(value, str):
        return f"the text {shown(value)}"
    if value is None:
        return "empty"
    if raw is not None and raw != repr(value):
        return f"the number {raw[:60]} ({shown(value)})"
    return f"the number {shown(value)}"


def placeholder(kept: Mapping[str, Any]) -> dict[str, Any]:
    """``kept`` completed with values for required fields that are absent. They are never read: see ``check.py``."""
    whole = dict(kept)
    for name, required in _REQUIRED.items():
        if isinstance(required, dict):
            whole[name] = {**required, **whole[name]} if isinstance(whole.get(name), dict) else dict(required)
        else:
            whole.setdefault(name, required)
    return whole


_REQUIRED: dict[str, Any] = {
    "schema_version": SCHEMA_VERSION,
    "name": "placeholder",
    "algorithm": {"advantage_estimator": "p3o"},
    "model": {
        "hf_checkpoint": "placeholder",
        "num_layers": 1,
        "hidden_size": 1,
        "ffn_hidden_size": 1,
        "num_attention_heads": 1,
        "vocab_size": 1,
    },
    "batch": {"num_rollout": 1, "rollout_batch_size": 1, "n_samples_per_prompt": 1, "global_batch_size": 1},
    "optimizer": {"lr": 0.0},
    "rollout": {"max_response_len": 1},
    "data": {"prompt_data": "placeholder"},
}
