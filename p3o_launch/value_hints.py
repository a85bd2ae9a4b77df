"""The value that was most likely meant by one its field does not take."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from p3o_launch.fields import FIELDS, TOP
from p3o_launch.nodes import Path, octal_digits, shown_key
from p3o_launch.presets import nearest

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_GROUPED = re.compile(r"[-+]?\d{1,3}(?:[, '_]\d{3})+")
_DECIMAL_COMMA = re.compile(r"[-+]?\d+,\d+")
_PERCENT = re.compile(rf"({_NUMBER})\s*%")
_FRACTION = re.compile(rf"({_NUMBER})\s*/\s*({_NUMBER})")
_SUFFIXED = re.compile(r"(\d+(?:\.\d+)?)\s*([kKmM])i?")
_LEADING = re.compile(rf"({_NUMBER})(?![\d.,/:])\D", re.ASCII)
_POWERS = {"k": (10**3, 2**10), "m": (10**6, 2**20)}
_NUMBERS = {"int_type": "a whole number", "int_from_float": "a whole number", "float_type": "a number"}
_BOUNDS = {
    "greater_than_equal": ("ge", "use {:g} or more"),
    "greater_than": ("gt", "use a number above {:g}"),
    "less_than_equal": ("le", "use {:g} or less"),
}
_TRUE, _FALSE = ("true", "on", "yes", "1"), ("false", "off", "no", "0", "none")


def value_hint(kind: str, value: Any, raw: str | None, context: Mapping[str, Any], path: Path) -> str | None:
    """The hint for pydantic's error ``kind`` about ``value`` at ``path``. ``raw``: the unquoted text of a scalar."""
    if isinstance(value, list) and len(value) == 1 and _fits(kind, value[0], context):
        return f"write {shown_key(str(value[0]))} without the brackets"
    if kind == "literal_error":
        return _choice(value, raw, context)
    if kind in _BOUNDS:
        bound, words = _BOUNDS[kind]
        return words.format(context[bound])
    if kind in _NUMBERS:
        return _number(kind, value, raw, path)
    if kind == "bool_type":
        return _switch(value, raw, path)
    if kind in ("string_type", "string_too_short"):
        return _text(kind, value, raw, path)
    if kind in ("model_type", "model_attributes_type"):
        optional = value is None and not any(spec[1] for spec in FIELDS.get(path[0], {}).values())
        return "write its settings below it, indented" + (", or remove the line" if optional else "")
    if kind == "dict_type":
        return "use {}" if value is None else "write `NAME: value` lines below it, indented"
    if kind == "finite_number":
        overflow = raw is not None and raw[-1:].isdigit()
        large = "numbers above 3.4e38 are infinite in float32; write a smaller one"
        return large if overflow else "write a finite number" + _or_nothing(path)
    if kind == "string_pattern_mismatch" and isinstance(value, str):
        mended = re.sub(r"[^A-Za-z0-9._-]+", "_", value).strip("._-")[:64]
        return f"use {mended}" if mended else None
    return None


def _fits(kind: str, item: Any, context: Mapping[str, Any]) -> bool:
    """Is the only item of a list what the field wants?"""
    if kind == "literal_error":
        return f"'{item}'" in context["expected"]
    if kind == "bool_type":
        return isinstance(item, bool)
    if kind in _NUMBERS:
        number = isinstance(item, (int, float)) and not isinstance(item, bool)
        return number or (isinstance(item, str) and re.fullmatch(_NUMBER, item, re.ASCII) is not None)
    return kind == "string_type" and isinstance(item, str) and item != ""


def trap_hint(raw: str, value: Any, path: Path) -> str:
    """What to write for an unquoted number that does not mean what it looks like."""
    free = path[:2] not in {(group, name) for group, fields in FIELDS.items() for name in fields} or len(path) > 2
    quote = ", or quote it if it is text" if free else ""
    digits = octal_digits(raw)
    if digits is None:
        return f"write {value}{quote}"
    return f"write {digits}, {'' if free else 'or '}{value} if octal is meant{quote}"


def _spec(path: Path) -> tuple[Any, ...] | None:
    if len(path) == 1:
        return TOP.get(path[0])
    return FIELDS.get(path[0], {}).get(path[1]) if len(path) == 2 else None


def _or_nothing(path: Path) -> str:
    """``, or remove the line`` where the field may be absent."""
    spec = _spec(path)
    return ", or remove the line" if spec is not None and not spec[1] else ""


def _listed(options: list[str]) -> str:
    return " or ".join(filter(None, (", ".join(options[:-1]), options[-1])))


def _choice(value: Any, raw: str | None, context: Mapping[str, Any]) -> str:
    options = re.findall(r"'([^']*)'", context["expected"])
    if isinstance(value, (bool, int, float)) and raw in options:
        return f'put it in quotes: "{raw}"'
    close = nearest(value, options) if isinstance(value, str) else None
    return f"did you mean {close}?" if close else f"use {_listed(options)}"


def _number(kind: str, value: Any, raw: str | None, path: Path) -> str:
    whole = kind != "float_type"
    meant = None
    if isinstance(value, str):
        meant = _from_text(value.strip().replace("\N{MINUS SIGN}", "-"), raw, whole)
    elif isinstance(value, float) and whole and abs(value) < 1e15:
        meant = f"write {int(value)}" if value.is_integer() else f"write {int(value // 1)} or {int(value // 1) + 1}"
    if meant:
        return meant
    return f"write {'one' if isinstance(value, (list, dict)) else 'a'} {_NUMBERS[kind][2:]}" + _or_nothing(path)


def _from_text(text: str, raw: str | None, whole: bool) -> str | None:
    if raw is None and whole and text.isdigit():
        return "remove the quotes"
    if match := _SUFFIXED.fullmatch(text):
        amounts = [float(match[1]) * power for power in _POWERS[match[2].lower()]]
        return "write " + " or ".join(f"{amount:.0f}" for amount in amounts)
    for number in _readings(text):
        if not whole:
            return f"write {number}"
        if float(number).is_integer() and abs(float(number)) < 1e15:
            return f"write {int(float(number))}"
    return None


def _readings(text: str) -> list[str]:
    """Numbers a text may stand for, as they are written."""
    if re.fullmatch(_NUMBER, text, re.ASCII):
        return [text]
    if _GROUPED.fullmatch(text):
        return [re.sub(r"[, '_]", "", text)]
    if _DECIMAL_COMMA.fullmatch(text):
        return [text.replace(",", ".")]
    if match := _PERCENT.fullmatch(text):
        return [f"{float(match[1]) / 100:g}"]
    if (match := _FRACTION.fullmatch(text)) and float(match[2]):
        return [f"{float(match[1]) / float(match[2]):g}"]
    match = _LEADING.match(text)
    return [match[1]] if match else []


def _switch(value: Any, raw: str | None, path: Path) -> str:
    text = str(value).lower()
    if isinstance(value, str) and raw is None and text in (*_TRUE[:3], *_FALSE[:3]):
        return "remove the quotes"
    if isinstance(value, (str, int, float)):
        if text in _TRUE or text in _FALSE:
            return f"write {'true' if text in _TRUE else 'false'}"
        if close := nearest(text, ["true", "false"]):
            return f"did you mean {close}?"
    return "write true or false" + _or_nothing(path)


def _text(kind: str, value: Any, raw: str | None, path: Path) -> str:
    if raw is not None and isinstance(value, (bool, int, float)):
        return f'put it in quotes: "{raw[:60]}"'
    if path[0] == "ignore":
        return "write the reason as text"
    if value is None and len(path) > 2:
        return 'write "" for an empty one'
    words = "write one text" if isinstance(value, (list, dict)) else "write a text"
    return words + _or_nothing(path)
