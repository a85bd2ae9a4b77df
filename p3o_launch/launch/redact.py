"""Keeping secrets out of files, by the name of a setting and by the shape of a value."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

REDACTED = "<redacted>"

_NAMES = re.compile(
    r"(?i)(?:^|[_\-.])(?:token|secret|password|passwd|passphrase|api[_-]?key|access[_-]?key|secret[_-]?key"
    r"|private[_-]?key|credentials?|bearer|cookie|authorization)(?:$|[_\-.])"
)
_SHAPES = (
    re.compile(r"\bhf_[A-Za-z0-9]{20,}\b"),
    re.compile(r"\bsk-[A-Za-z0-9_-]{20,}"),
    re.compile(r"\bgh[pousr]_[A-Za-z0-9]{30,}\b"),
    re.compile(r"\bgithub_pat_[A-Za-z0-9_]{30,}\b"),
    re.compile(r"\bglpat-[A-Za-z0-9_-]{20,}"),
    re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"),
    re.compile(r"\bxox[abprs]-[A-Za-z0-9-]{10,}"),
    re.compile(r"\beyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]*"),
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"),
)
_USERINFO = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/\s:@]*:[^/\s@]+@")
_ASSIGNMENT = re.compile(r"(?i)\b([A-Za-z0-9_.-]*(?:token|secret|passw(?:or)?d|api[_-]?key|access[_-]?key))=(\S+)")


def is_secret_name(name: str) -> bool:
    """Whether a setting of this name holds a secret: ``HF_TOKEN`` does, ``max_tokens_per_gpu`` does not."""
    return bool(_NAMES.search(name))


def redact_text(text: str) -> str:
    """``text`` with everything that has the shape of a secret replaced."""
    for shape in _SHAPES:
        text = shape.sub(REDACTED, text)
    text = _USERINFO.sub(rf"\g<1>{REDACTED}@", text)
    return _ASSIGNMENT.sub(lambda match: f"{match[1]}={REDACTED}" if is_secret_name(match[1]) else match[0], text)


def redact(value: Any, name: str = "") -> Any:
    """A copy of plain data with secrets replaced; ``name`` is the key ``value`` stands under."""
    if isinstance(value, Mapping):
        return {key: redact(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact(item, name) for item in value]
    if not isinstance(value, str):
        return value
    return REDACTED if value and is_secret_name(name) else redact_text(value)
