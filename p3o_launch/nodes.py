"""YAML text -> a tree of values that know where they were written. Builds no Python objects from tags.

The parser's events are folded into ``Node`` values one by one, so that depth, aliases and size are bounded *before*
anything is expanded. Scalars follow YAML 1.1, as PyYAML reads them; timestamps stay text.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any

import yaml

from p3o_launch.diagnostics import LocatedFinding, Position
from p3o_launch.rules_file import file_finding

Path = tuple[str, ...]

MAX_BYTES = 1_000_000
MAX_NODES = 10_000
MAX_DEPTH = 32
_MAX_NUMBER_TEXT = 64

_BOOLEANS = {
    spelling: value
    for word, value in (("true", True), ("yes", True), ("on", True), ("false", False), ("no", False), ("off", False))
    for spelling in (word, word.capitalize(), word.upper())
}
_NULLS = frozenset(("", "~", "null", "Null", "NULL"))
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)")
_PREFIXED = re.compile(r"([-+]?)0(?:b([01_]+)|x([0-9a-fA-F_]+))")
_OCTAL = re.compile(r"([-+]?)0([0-7_]+)")
_SEXAGESIMAL = re.compile(r"([-+]?)([1-9][0-9_]*(?::[0-5]?[0-9])+|[0-9][0-9_]*(?::[0-5]?[0-9])+\.[0-9_]*)")
_FLOAT = re.compile(r"(?:[-+]?[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+][0-9]+)?")
_SPECIAL = {".inf": "inf", "+.inf": "inf", "-.inf": "-inf", ".nan": "nan"}
_CORE = "tag:yaml.org,2002:"
_CORE_TAGS = frozenset(_CORE + name for name in ("str", "int", "float", "bool", "null", "map", "seq"))
_ODD_BREAK = re.compile("\r(?!\n)|[\x85\u2028\u2029]")
_ANCHOR = "mark the value it means with & and that name, or put text that starts with * in quotes"
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(slots=True)
class Node:
    """A value and its place. ``value``: a scalar, ``dict[str, Entry]`` or ``list[Node]``. ``raw``: an unquoted scalar's
    text. ``size`` and ``height`` count the nodes and levels below, with aliases expanded. ``broken``: reported already.
    """

    position: Position
    value: Any
    raw: str | None = None
    size: int = 1
    height: int = 1
    broken: bool = False


@dataclass(slots=True)
class Entry:
    """One key of a mapping: the key's place and the value."""

    key: Position
    node: Node


@dataclass(slots=True)
class _Open:
    """A collection whose end has not been read yet."""

    node: Node
    anchor: str | None
    pending: tuple[str, Position, bool] | None = None
    merges: list[Node] = field(default_factory=list)
    size: int = 1
    height: int = 0


class Stop(Exception):
    """Parsing ends here; carries the finding."""

    def __init__(self, finding: LocatedFinding) -> None:
        super().__init__(finding.message)
        self.finding = finding


def shown(value: object, limit: int = 60) -> str:
    """A value as messages show it: one line, printable, shortened."""
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def shown_key(key: str) -> str:
    """A key as messages show it: bare when it is a plain word, else quoted and shortened."""
    return key if re.fullmatch(r"[\w.-]{1,60}", key, re.ASCII) else shown(key)


def scalar(text: str) -> Any:
    """The value of an unquoted YAML 1.1 scalar."""
    if text in _NULLS:
        return None
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    if len(text) > _MAX_NUMBER_TEXT or text[0] not in "+-.0123456789":
        return text
    return _number(text)


def _number(text: str) -> Any:
    digits = text.replace("_", "")
    if _INT.fullmatch(text):
        return int(digits)
    if _FLOAT.fullmatch(text):
        return float(digits)
    if text.lower() in _SPECIAL:
        return float(_SPECIAL[text.lower()])
    if match := _PREFIXED.fullmatch(text):
        body, base = (match[2], 2) if match[2] is not None else (match[3], 16)
        body = body.replace("_", "")
        return int(match[1] + body, base) if body else text
    if match := _OCTAL.fullmatch(text):
        return int(match[1] + (match[2].replace("_", "") or "0"), 8)
    if match := _SEXAGESIMAL.fullmatch(text):
        return _sexagesimal(match[1], match[2].replace("_", ""))
    return text


def _sexagesimal(sign: str, body: str) -> int | float:
    total: int | float = 0
    for part in body.split(":"):
        total = total * 60 + (float(part) if "." in part else int(part))
    return -total if sign == "-" else total


def trap(raw: str) -> str | None:
    """What an unquoted number means that does not look like it: ``"010 is octal ..."``; None when it is plain."""
    if not raw or raw[0] not in "+-0123456789" or len(raw) > _MAX_NUMBER_TEXT:
        return None
    if _OCTAL.fullmatch(raw) and raw.strip("+-0_"):
        return f"{raw} is octal in YAML 1.1 and means {scalar(raw)}"
    if _SEXAGESIMAL.fullmatch(raw):
        return f"{raw} is a base-60 number in YAML 1.1 and means {scalar(raw)}"
    return None


def octal_digits(raw: str) -> int | None:
    """The decimal number that an octal one looks like: ``010`` -> 10. None for anything else, as for ``0_``."""
    digits = raw.replace("_", "")
    return int(digits) if _OCTAL.fullmatch(raw) and digits.lstrip("+-") else None


class _Builder:
    """Folds events into nodes. ``place``: file, origin and the offset of the text's first character."""

    def __init__(self, file: str, origin: str, line: int, column: int) -> None:
        self.file, self.origin, self.line, self.column = file, origin, line, column
        self.findings: list[LocatedFinding] = []
        self.anchors: dict[str, Node | None] = {}
        self.stack: list[_Open] = []
        self.root: Node | None = None
        self.count = 0
        self.end = (0, 0)
        self.breaks: list[int] | None = None

    def at(self, mark: Any) -> Position:
        line, column = mark.line, mark.column
        if self.breaks is not None:
            line = bisect_right(self.breaks, mark.index - 1)
            column = mark.index - (self.breaks[line - 1] + 1 if line else 0)
        elif line > self.end[0]:
            line, column = self.end
        return Position(self.file, line + self.line, column + (self.column if line == 0 else 1), self.origin)

    def stop(self, code: str, mark: Any, message: str, hint: str | None = None) -> Stop:
        return Stop(file_finding(code, self.at(mark), message, hint))

    def feed(self, text: str) -> None:
        # The parser's end of an unfinished text lies a line below it; and it ends lines where editors do not.
        self.end = (text.count("\n"), len(text) - text.rfind("\n") - 1)
        if _ODD_BREAK.search(text):
            self.breaks = [match.start() for match in re.finditer("\n", text)]
        for event in yaml.parse(text, Loader=_LOADER):
            kind = type(event).__name__
            if kind == "ScalarEvent":
                self.scalar(event)
            elif kind in ("MappingStartEvent", "SequenceStartEvent"):
                self.open(event, {} if kind == "MappingStartEvent" else [])
            elif kind in ("MappingEndEvent", "SequenceEndEvent"):
                self.close()
            elif kind == "AliasEvent":
                self.alias(event)
            elif kind == "DocumentStartEvent" and self.root is not None:
                raise self.stop("P3O002", event.start_mark, "a second document starts here", "keep one per file")

    def scalar(self, event: Any) -> None:
        node = Node(self.at(event.start_mark), event.value)
        tag = event.tag
        plain = event.implicit[0] and tag is None
        if plain:
            node.raw = event.value
        if tag not in (None, "!", _CORE + "str"):
            plain = self.core(event, node)
        is_key = bool(self.stack) and isinstance(self.stack[-1].node.value, dict) and self.stack[-1].pending is None
        if plain and not is_key:
            node.value = scalar(event.value)
        self.anchor(event.anchor, node)
        self.add(node, event, plain and event.value == "<<")

    def core(self, event: Any, node: Node) -> bool:
        """Report a tag that is not a core one; True when it is."""
        if event.tag is None or event.tag in _CORE_TAGS:
            return True
        node.broken = True
        message = f"the tag {shown_key(event.tag.replace(_CORE, '!!'))} asks for an object that presets cannot hold"
        self.findings.append(file_finding("P3O005", node.position, message, "remove the tag and write a plain value"))
        return False

    def open(self, event: Any, value: dict[str, Entry] | list[Node]) -> None:
        if len(self.stack) >= MAX_DEPTH:
            raise self.stop("P3O004", event.start_mark, f"nested more than {MAX_DEPTH} levels deep")
        if self.stack and isinstance(self.stack[-1].node.value, dict) and self.stack[-1].pending is None:
            raise self.stop("P3O002", event.start_mark, "a key must be plain text, not a list or a mapping")
        node = Node(self.at(event.start_mark), value)
        self.core(event, node)
        if event.anchor:
            self.anchors[event.anchor] = None  # an alias inside its own anchor is a loop
        self.stack.append(_Open(node, event.anchor))

    def close(self) -> None:
        done = self.stack.pop()
        node = done.node
        for merged in done.merges:
            for key, entry in merged.value.items():
                node.value.setdefault(key, entry)
        node.size, node.height = done.size, done.height + 1
        self.anchor(done.anchor, node)
        self.add(node, None, False)

    def alias(self, event: Any) -> None:
        name = event.anchor
        if name not in self.anchors:
            raise self.stop(
                "P3O002", event.start_mark, f"the alias *{shown_key(name)} has no anchor before it", _ANCHOR
            )
        node = self.anchors[name]
        if node is None:
            raise self.stop("P3O004", event.start_mark, f"the alias *{shown_key(name)} contains itself", "remove it")
        if len(self.stack) + node.height > MAX_DEPTH + 1:
            raise self.stop("P3O004", event.start_mark, f"nested more than {MAX_DEPTH} levels deep")
        self.count += node.size - 1
        self.add(node, event, False)

    def anchor(self, name: str | None, node: Node) -> None:
        if name:
            self.anchors[name] = node

    def add(self, node: Node, event: Any, merge_key: bool) -> None:
        """Give a finished node to the collection that is open, or make it the root."""
        self.count += 1
        if self.count > MAX_NODES:
            raise Stop(file_finding("P3O004", node.position, f"expands to more than {MAX_NODES:,} values"))
        if not self.stack:
            self.root = node
            return
        parent = self.stack[-1]
        if isinstance(parent.node.value, list):
            parent.node.value.append(node)
        elif parent.pending is None:
            self.key(parent, node, event, merge_key)
            return
        else:
            key, position, merge = parent.pending
            parent.pending = None
            if merge:
                self.merge(parent, node, position)
            else:
                parent.node.value[key] = Entry(position, node)
        parent.size += node.size
        parent.height = max(parent.height, node.height)

    def key(self, parent: _Open, node: Node, event: Any, merge_key: bool) -> None:
        if isinstance(node.value, (dict, list)):
            raise self.stop("P3O002", event.start_mark, "a key must be plain text, not a list or a mapping")
        name = node.raw if node.raw is not None else str(node.value)
        position = self.at(event.start_mark)
        parent.pending = (name, position, merge_key)
        first = parent.node.value.get(name)
        if first is not None and not merge_key:
            message = f"the key {shown_key(name)} is given twice, first on line {first.key.line}"
            self.findings.append(file_finding("P3O003", position, message, "delete one of the two lines"))

    def merge(self, parent: _Open, node: Node, position: Position) -> None:
        sources = node.value if isinstance(node.value, list) else [node]
        if not all(isinstance(source.value, dict) for source in sources):
            message = "`<<` needs a mapping or a list of mappings"
            raise Stop(file_finding("P3O002", position, message))
        parent.merges.extend(sources)


def parse(
    text: str, file: str, origin: str = "", line: int = 1, column: int = 1
) -> tuple[Node | None, list[LocatedFinding]]:
    """One YAML document as a tree, and what is wrong with it. The tree is None when nothing could be kept."""
    builder = _Builder(file, origin, line, column)
    try:
        builder.feed(text)
    except Stop as stop:
        return None, [stop.finding]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        position = builder.at(mark) if mark else Position(file, line, column, origin)
        if mark and text[mark.index : mark.index + 1] == "\t":
            return None, [
                file_finding("P3O002", position, "a tab stands where YAML wants spaces", "indent with spaces")
            ]
        code = "P3O004" if "nesting depth" in (error.problem or "") else "P3O002"
        return None, [file_finding(code, position, _problem(error, builder.end[0]), _syntax_hint(error))]
    except yaml.YAMLError as error:
        return None, [file_finding("P3O002", Position(file, line, column, origin), shown(str(error), 120))]
    return builder.root, builder.findings


def _problem(error: yaml.MarkedYAMLError, last: int) -> str:
    text = error.problem or "the YAML syntax is broken"
    if error.context and error.context_mark:
        text += f", {error.context} that starts on line {min(error.context_mark.line, last) + 1}"
    return (text if text.isprintable() else ascii(text))[:200]


def _syntax_hint(error: yaml.MarkedYAMLError) -> str | None:
    problem = error.problem or ""
    if "any token" in problem:
        return "put text that starts with @, ` or % in quotes"
    if "quoted scalar" in (error.context or ""):
        return "close the quote"
    if "flow " in (error.context or ""):
        return "close the bracket, and put a comma between its entries"
    if "mapping values are not allowed" in problem:
        return "put text that holds a colon and a space in quotes, and check the indentation"
    return None
