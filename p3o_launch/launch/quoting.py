"""Text as a word of a shell script: what the shell reads back is the text, and nothing in it is executed."""

from __future__ import annotations

import re
import shlex

_PLAIN = re.compile(r"[A-Za-z0-9_@%+:,./-][A-Za-z0-9_@%+=:,./-]*", re.ASCII)
_CONTROL = re.compile(r"[\x01-\x1f\x7f]")
_ESCAPES = {"\\": "\\\\", "'": "\\'", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def word(text: str) -> str:
    """``text`` as one bash word on one line. NUL cannot be part of an argument: ValueError.

    Plain where nothing needs quoting, in single quotes otherwise; ``$'...'`` where there are control characters.
    """
    if "\0" in text:
        raise ValueError("an argument cannot hold a NUL byte")
    if _PLAIN.fullmatch(text):
        return text
    if not _CONTROL.search(text):
        return shlex.quote(text)
    return "$'" + "".join(_ESCAPES.get(character) or _escaped(character) for character in text) + "'"


def _escaped(character: str) -> str:
    return f"\\{ord(character):03o}" if _CONTROL.match(character) else character
