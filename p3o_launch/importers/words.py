"""Text -> words that know where they were written.

Two layouts are read: one argument per line, taken as it stands, and shell lines with quotes, escapes, comments,
continued lines and here documents. Nothing is expanded here: a word that holds a shell variable says so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from p3o_launch.diagnostics import LocatedFinding, Position
from p3o_launch.rules_import import import_finding

_FLAG_AND_VALUE = re.compile(r"\s*--?[A-Za-z][\w.-]*[ \t]+\S")
_TWO_OVERRIDES = re.compile(r"\s*[+~]{0,2}[\w.@/-]+=\S*[ \t]+[+~]{0,2}[\w.@/-]+=")
_COMMAND = re.compile(
    r"\s*(?:.*(?:&&|\|\||;)\s*)?(?:[A-Za-z_]\w*=\S*\s+)*(?:python[\d.]*|torchrun|ray|uv|srun|bash|accelerate)\s+\S"
)
_ASSIGNS = re.compile(r"[A-Za-z_]\w*\+?=")
_HERE = re.compile(r"<<-?\s*['\"]?([A-Za-z_]\w*)['\"]?")
_MAX_SUBSTITUTION = 2000
_VARIABLE = re.compile(r"\$[{(\w@*]|`")


class Word(NamedTuple):
    """One argument. ``line`` and ``column`` count from 1. ``variable``: holds something a shell would expand.

    ``starts``: a new command begins with it. ``quoted``: a part of it is in quotes or escaped.
    """

    text: str
    line: int
    column: int
    variable: bool = False
    starts: bool = False
    quoted: bool = False


@dataclass(slots=True)
class Words:
    """The words of a file and what is wrong with its quoting. ``shell``: they were read from shell lines.
    ``script``: the text says that it is a script.
    """

    words: list[Word]
    findings: list[LocatedFinding]
    shell: bool = False
    script: bool = False


def split(text: str, file: str) -> Words:
    """The words of ``text``, in whichever of the two layouts it is written. Never raises."""
    lines = text.split("\n")
    if not _is_shell(lines):
        return _lines(lines, file)
    found = _shell(text, file)
    found.script = text.startswith("#!")
    return found


def _is_shell(lines: list[str]) -> bool:
    return any(
        line.rstrip("\r").endswith("\\")
        or _FLAG_AND_VALUE.match(line)
        or _TWO_OVERRIDES.match(line)
        or _COMMAND.match(line)
        for line in lines
        if not line.lstrip().startswith("#")
    )


def _lines(lines: list[str], file: str) -> Words:
    found = Words([], [])
    for number, raw in enumerate(lines, start=1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        column = raw.index(line[0]) + 1
        found.words.append(Word(line, number, column))
        inner = line.rpartition("=")[2] if line.startswith("--") else line
        if len(inner) > 1 and inner[0] == inner[-1] and inner[0] in "'\"":
            found.findings.append(
                import_finding(
                    "P3O018",
                    Position(file, number, column),
                    f"the quotes of {shorten(line)} are part of the value",
                    "one argument per line needs no quotes; remove them",
                )
            )
    return found


class _Shell:
    """A POSIX-like word splitter. ``at``: line and column of the current character."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.found = Words([], [], shell=True)
        self.line = self.column = 1
        self.start: tuple[int, int] | None = None
        self.parts: list[str] = []
        self.variable = self.quoted = False
        self.fresh = True

    def begin(self) -> None:
        if self.start is None:
            self.start = (self.line, self.column)

    def end(self) -> None:
        if self.start is not None:
            text = "".join(self.parts)
            self.found.words.append(Word(text, *self.start, self.variable, self.fresh, self.quoted))
            self.fresh = False
        self.start, self.parts, self.variable, self.quoted = None, [], False, False

    def sign(self, text: str) -> None:
        """A sign of the shell's own, as a word."""
        self.begin()
        self.parts.append(text)
        self.end()

    def advance(self, text: str) -> None:
        for character in text:
            self.line, self.column = (self.line + 1, 1) if character == "\n" else (self.line, self.column + 1)


def _shell(text: str, file: str) -> Words:
    state, index, size = _Shell(file), 0, len(text)
    while index < size:
        taken = _step(state, text, index)
        state.advance(text[index : index + taken])
        index += taken
    state.end()
    return state.found


def _step(state: _Shell, text: str, index: int) -> int:
    """Read what starts at ``index``; returns how many characters that was."""
    character = text[index]
    if character in " \t\n\r;":
        state.end()
        if character == ";":
            state.sign(character)
        state.fresh = state.fresh or character in "\n;"
        return 1
    if character in "()":
        if character == "(" and _ASSIGNS.fullmatch("".join(state.parts)) and not state.quoted:
            state.parts.append(character)
            state.end()
        else:
            state.end()
            state.sign(character)
        return 1
    if character == "<" and (skipped := _here_document(text, index)):
        state.end()
        return skipped
    if character == "#" and state.start is None:
        stop = text.find("\n", index)
        return (len(text) if stop < 0 else stop) - index
    if character == "\\":
        return _escape(state, text, index)
    state.begin()
    if character in "'\"":
        return _quoted(state, text, index, character)
    if _VARIABLE.match(text, index):
        state.variable = True
        taken = _substitution(text, index)
        state.parts.append(text[index : index + taken])
        return taken
    state.parts.append(character)
    return 1


def _substitution(text: str, index: int) -> int:
    """Length of ``$(...)``, whose words are not ours; 1 for anything else that starts like a variable."""
    if not text.startswith("$(", index):
        return 1
    depth = 0
    for stop in range(index + 1, min(len(text), index + _MAX_SUBSTITUTION)):
        depth += {"(": 1, ")": -1}.get(text[stop], 0)
        if depth == 0:
            return stop + 1 - index
    return 1


def _here_document(text: str, index: int) -> int:
    """Length of ``<<WORD ... WORD``; 0 when none starts here."""
    match = _HERE.match(text, index)
    if match is None:
        return 0
    closing = re.compile(rf"^\t*{re.escape(match[1])}[ \t\r]*$", re.MULTILINE).search(text, match.end())
    return closing.end() - index if closing else 0


def _escape(state: _Shell, text: str, index: int) -> int:
    follows = text[index + 1 : index + 2]
    if follows == "\n" or (follows == "\r" and text[index + 2 : index + 3] == "\n"):
        state.end()
        return 2 if follows == "\n" else 3
    if not follows:
        return 1
    state.begin()
    state.quoted = True
    state.parts.append(follows)
    return 2


def _quoted(state: _Shell, text: str, index: int, quote: str) -> int:
    stop = index + 1
    state.quoted = True
    while stop < len(text) and text[stop] != quote:
        if quote == '"' and (taken := _substitution(text, stop)) > 1:
            state.variable = True
            state.parts.append(text[stop : stop + taken])
            stop += taken
            continue
        step = 2 if quote == '"' and text[stop] == "\\" and text[stop + 1 : stop + 2] in ('"', "\\", "$", "`") else 1
        if step == 1 and quote == '"' and _VARIABLE.match(text, stop):
            state.variable = True
        state.parts.append(text[stop + step - 1])
        stop += step
    if stop >= len(text):
        position = Position(state.file, state.line, state.column)
        message = f"the quote {quote} is never closed: everything after it is one word"
        state.found.findings.append(import_finding("P3O018", position, message, "close the quote"))
        return len(text) - index
    return stop + 1 - index


def shorten(text: str, limit: int = 60) -> str:
    """A word as messages show it: printable and short."""
    plain = text if text.isprintable() else ascii(text)
    return plain if len(plain) <= limit else plain[: limit - 3] + "..."
