"""A sound preset, read without pydantic: the happy path of ``validate``. Anything doubtful is left to the schema.

``facts(data)`` gives an object with the attributes of ``schema.Preset``, or None when a value is not plainly right;
the caller then asks the schema, whose word is final. It must never accept what the schema refuses, nor fill in another
value: a property test compares the two.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from p3o_launch.fields import FIELDS, TOP

_FLOAT32_MAX = 3.4028235e38
_NOT_PLAIN = object()


def facts(data: Any) -> SimpleNamespace | None:
    """The preset ``data`` describes, defaults filled in; None when the schema has to look."""
    if not isinstance(data, dict) or not data.keys() <= TOP.keys() | FIELDS.keys():
        return None
    top = _fill(TOP, {key: value for key, value in data.items() if key in TOP})
    if top is None:
        return None
    for name, fields in FIELDS.items():
        group = data.get(name, {})
        filled = _fill(fields, group) if isinstance(group, dict) else None
        if filled is None:
            return None
        top[name] = SimpleNamespace(**filled, model_fields_set=frozenset(group))
    return SimpleNamespace(**top, model_fields_set=frozenset(data))


def _fill(fields: dict[str, Any], given: dict[str, Any]) -> dict[str, Any] | None:
    if not given.keys() <= fields.keys():
        return None
    filled = {}
    for name, (kind, required, nullable, default, low, high, options) in fields.items():
        if name not in given:
            if required:
                return None
            filled[name] = dict(default) if kind == "map" and default is not None else default
            continue
        value = given[name]
        if value is not None or not nullable:
            value = _plain(kind, value, low, high, options)
            if value is _NOT_PLAIN:
                return None
        filled[name] = value
    return filled


def _plain(kind: str, value: Any, low: Any, high: Any, options: tuple[Any, ...]) -> Any:
    """The value of a field, or ``_NOT_PLAIN``."""
    kept: Any = _NOT_PLAIN
    if kind == "int":
        if type(value) is int and (low is None or value >= low) and (high is None or value <= high):
            kept = value
    elif kind == "float":
        kept = _plain_float(value, low, high, options)
    elif kind == "bool":
        kept = value if type(value) is bool else _NOT_PLAIN
    elif kind == "choice":
        if any(type(value) is type(option) and value == option for option in options):
            kept = value
    elif kind == "map":
        kept = _plain_map(value, *options)
    elif type(value) is str and len(value) >= low and (kind == "text" or _is_name(value)):
        kept = value
    return kept


def _plain_float(value: Any, low: Any, high: Any, options: tuple[Any, ...]) -> Any:
    if type(value) is str:  # `1e-5`, which YAML 1.1 reads as text
        if len(value) > 64 or not value.isascii() or not value.replace("e", "").replace("-", "").isdigit():
            return _NOT_PLAIN
        try:
            value = float(value)
        except ValueError:
            return _NOT_PLAIN
    if type(value) not in (int, float) or not -_FLOAT32_MAX <= value <= _FLOAT32_MAX:
        return _NOT_PLAIN
    below = low is not None and (value <= low if options else value < low)
    return _NOT_PLAIN if below or (high is not None and value > high) else float(value)


def _plain_map(value: Any, kind: str, low: int | None = None) -> Any:
    if type(value) is not dict:
        return _NOT_PLAIN
    if kind == "any":
        return value
    kept = {key: _plain(kind, item, low, None, ()) for key, item in value.items()}
    return _NOT_PLAIN if any(item is _NOT_PLAIN for item in kept.values()) else kept


def _is_name(text: str) -> bool:
    return (
        0 < len(text) <= 64
        and text.isascii()
        and text[0].isalnum()
        and text.replace(".", "").replace("_", "").replace("-", "").isalnum()
    )
