"""Files -> one tree of settings: ``extends``, recipe, profile and ``--set``, with the origin of every value.

Layers, later ones win: parents in the order written, the file's ``recipe``, its ``profile``, its own keys, then what
the command line names: recipe, profile, ``--set``. A profile (or recipe) named later, or on the command line,
*replaces* one named earlier; it is not laid over it. Mappings merge key by key, everything else is replaced as a whole.

This module reports faults of files and YAML. What the settings mean is ``check.py``'s business.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from p3o_launch.diagnostics import LocatedFinding, Position
from p3o_launch.errors import UsageError
from p3o_launch.nodes import MAX_BYTES, Entry, Node, parse, shown, shown_key
from p3o_launch.presets import SUFFIXES, display, names, nearest, shipped
from p3o_launch.rules_file import file_finding

MAX_FILES = 64
STDIN, STDIN_NAME = "-", "<stdin>"
_FOLDERS = {"profile": "profiles", "recipe": "recipes"}
_DIRECTIVES = ("extends", "profile", "recipe", "partial")
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class ChainFile:
    """A file that took part: its path as reports show it, its bytes, and its role (an origin)."""

    path: str
    raw: bytes
    origin: str

    @property
    def sha256(self) -> str:
        """SHA-256 of the bytes that were read, in hexadecimal."""
        import hashlib

        return hashlib.sha256(self.raw).hexdigest()


@dataclass(slots=True)
class Loaded:
    """The merged tree; None when a file could not be used, in which case ``findings`` say why."""

    root: Node | None
    findings: list[LocatedFinding]
    chain: list[ChainFile]
    choices: dict[str, str]
    partial: bool = False


@dataclass(slots=True)
class _Layer:
    """One file's own keys, or the place where a profile or recipe is named (``choice``: kind, name, place)."""

    tree: Node | None
    choice: tuple[str, str, Position] | None = None
    partial: bool = False


@dataclass(slots=True)
class _Loader:
    findings: list[LocatedFinding] = field(default_factory=list)
    chain: list[ChainFile] = field(default_factory=list)
    files: int = 0
    stuck: bool = False

    def fail(self, code: str, position: Position, message: str, hint: str | None = None) -> None:
        self.findings.append(file_finding(code, position, message, hint))
        self.stuck = True

    def file(self, path: str, origin: str, open_files: tuple[str, ...], asked: Position | None) -> Iterator[_Layer]:
        """Layers of one file, parents first. ``asked``: where the name of this file was written."""
        if "\0" in path:
            self.fail("P3O008" if asked else "P3O001", asked or Position("preset", 1, 1), "a file name with a NUL byte")
            return
        real = os.path.realpath(path)
        self.files += 1
        if asked and (real in open_files or self.files > MAX_FILES):
            loop = " -> ".join(os.path.basename(name) for name in (*open_files, real))
            what = f"extends itself: {loop}" if real in open_files else f"more than {MAX_FILES} files take part"
            self.fail("P3O008", asked, what, "remove one of the `extends`")
            return
        text = self.read(path, origin, asked)
        if text is not None:
            yield from self.text(text, path, origin, (*open_files, real))

    def read(self, path: str, origin: str, asked: Position | None) -> str | None:
        here = Position(path, 1, 1, origin)
        try:
            raw = standard_input() if path == STDIN_NAME else read_limited(path)
            self.chain.append(ChainFile(path, raw, origin))
            text = decode(raw)
        except FileNotFoundError:
            if asked:
                self.fail("P3O008", asked, f"the file {shown(path)} does not exist", _file_hint(path))
            else:
                self.fail("P3O001", here, "the file does not exist", _file_hint(path))
        except OSError as error:
            message = f"the file cannot be read: {error.strerror or error}"
            hint = "name the files in it" if isinstance(error, IsADirectoryError) else None
            if asked and not os.path.exists(path):
                self.fail("P3O008", asked, message)
            else:
                self.fail("P3O001", here, message, hint)
        except Oversized:
            self.fail("P3O004", here, f"the file is larger than {MAX_BYTES:,} bytes", "no preset needs that much")
        except NotText as error:
            self.fail("P3O001", Position(path, error.line, 1, origin), str(error), "save it as UTF-8 text")
        else:
            return text
        return None

    def text(self, text: str, path: str, origin: str, open_files: tuple[str, ...]) -> Iterator[_Layer]:
        tree, findings = _parsed(text, path, origin)
        self.findings += findings
        if tree is None or not isinstance(tree.value, dict):
            self.stuck = True
            if not findings:
                what = "the file is empty" if tree is None or tree.value is None else "the file is not a mapping"
                where = Position(path, 1, 1, origin) if tree is None else tree.position
                self.fail("P3O001", where, what, "write settings as `key: value` lines")
            return
        own = Node(tree.position, dict(tree.value))
        directives = {name: own.value.pop(name) for name in _DIRECTIVES if name in own.value}
        for node in self.strings(directives.get("extends"), "extends"):
            if parent := self.parent(node, path):
                yield from self.file(parent, origin or "extends", open_files, node.position)
        for kind in ("recipe", "profile"):
            for node in self.strings(directives.get(kind), kind, single=True):
                yield _Layer(None, (kind, node.value, node.position))
        yield _Layer(own, partial=self.switch(directives.get("partial"), "partial"))

    def switch(self, entry: Entry | None, key: str) -> bool:
        """What a directive that is true or false says; a finding when it says something else."""
        if entry is None or entry.node.broken:
            return False
        if not isinstance(entry.node.value, bool):
            hint = f"write {key}: true, or remove it"
            self.findings.append(file_finding("P3O007", entry.node.position, f"{key} must be true or false", hint))
        return entry.node.value is True

    def strings(self, entry: Entry | None, key: str, single: bool = False) -> list[Node]:
        """The names a directive gives; a finding when it gives something else."""
        if entry is None or entry.node.broken or entry.node.value is None:
            return []
        items = entry.node.value if isinstance(entry.node.value, list) and not single else [entry.node]
        for item in items:
            if not isinstance(item.value, str) or not item.value:
                what = "a name" if single else "a name or a list of names"
                self.fail("P3O007", item.position, f"{key} must be {what}", _one_name_hint(key, item))
                return []
        return list(items)

    def parent(self, node: Node, child: str) -> str | None:
        name = node.value
        if name.endswith(SUFFIXES):
            return os.path.normpath(os.path.join(os.path.dirname(child), name))
        path = shipped(name)
        if path is None:
            self.fail("P3O008", node.position, f"there is no preset named {shown(name)}", _name_hint(name, names()))
        return path

    def choice(self, kind: str, name: str, position: Position) -> Iterator[_Layer]:
        """Layers of a profile or recipe: a shipped name, or a file."""
        if name.endswith(SUFFIXES):
            path: str | None = os.path.normpath(os.path.join(os.path.dirname(position.file), name))
        else:
            path = shipped(name, _FOLDERS[kind])
        if path is None:
            known = names(_FOLDERS[kind])
            hint = _name_hint(name, known) or f"the {kind}s are {', '.join(known)}"
            self.fail("P3O008", position, f"there is no {kind} named {shown(name)}", hint)
            return
        for layer in self.file(path, f"{kind} {name}", (), position):
            if layer.tree is not None:
                yield layer


@lru_cache(maxsize=128)
def _parsed(text: str, path: str, origin: str) -> tuple[Node | None, tuple[LocatedFinding, ...]]:
    """A file's tree. Presets share parents, profiles and recipes; nothing below changes a tree once it is parsed."""
    tree, findings = parse(text, path, origin)
    return tree, tuple(findings)


class Oversized(Exception):
    """A file above ``MAX_BYTES``."""


class NotText(Exception):
    """Bytes that are not UTF-8 text; ``line`` holds the first bad one."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


def read_limited(path: str) -> bytes:
    """The bytes of a regular file; OSError, or Oversized when it is larger than ``MAX_BYTES``."""
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "it is a directory")
    if not stat.S_ISREG(mode):  # a pipe or a device could block for ever
        raise OSError(errno.EINVAL, "it is not a regular file")
    with open(path, "rb") as stream:
        raw = stream.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        raise Oversized
    return raw


def standard_input() -> bytes:
    """The bytes of the standard input, read to its end; OSError where there is none, or Oversized."""
    stream = getattr(sys.stdin, "buffer", None)
    if stream is None:
        raise OSError(errno.EBADF, "there is no standard input")
    raw: bytes = stream.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        raise Oversized
    return raw


def decode(raw: bytes) -> str:
    """UTF-8 text, with or without a byte order mark; control characters are refused."""
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise NotText(f"the file is not UTF-8 text: it holds the byte 0x{raw[error.start]:02x}", line) from None
    if bad := _CONTROL.search(text):
        line = text.count("\n", 0, bad.start()) + 1
        raise NotText(f"the file is not text: it holds the character 0x{ord(bad[0]):02x}", line)
    return text


def _one_name_hint(key: str, item: Node) -> str:
    """What to write for something that is no name."""
    only = item.value[0].value if isinstance(item.value, list) and len(item.value) == 1 else None
    if isinstance(only, str) and only:
        return f"write {shown_key(only)} without the brackets"
    return f"write {key}: NAME" if isinstance(item.value, (dict, list)) else "quote a name that looks like a number"


def _name_hint(name: str, known: list[str]) -> str | None:
    close = nearest(name, known)
    return f"did you mean {close}?" if close else None


def _file_hint(path: str) -> str | None:
    if not path.endswith(SUFFIXES):
        return None
    stem = os.path.splitext(os.path.basename(path))[0]
    close = stem if shipped(stem) else nearest(stem, names())
    return f"the preset that ships with p3o-launch is named {close}" if close else None


def merge(base: Node | None, over: Node) -> Node:
    """``over`` laid on ``base``: mappings key by key, anything else replaced. Inputs are left as they are."""
    if base is None or not isinstance(base.value, dict) or not isinstance(over.value, dict):
        return over
    entries = dict(base.value)
    for key, entry in over.value.items():
        old = entries.get(key)
        entries[key] = Entry(entry.key, merge(old.node, entry.node)) if old else entry
    return Node(over.position, entries)


def parse_overrides(overrides: Sequence[str]) -> list[tuple[str, str, Position]]:
    """``["a.b=c"]`` -> dotted path, value text, place of the value. Raises UsageError without an ``=``."""
    parsed = []
    for index, override in enumerate(overrides, start=1):
        path, equals, value = override.partition("=")
        if not equals or not path.strip():
            raise UsageError(f"--set {shown(override)} is not of the form path=value")
        parsed.append((path.strip(), value, Position("--set", index, len(path) + 2, "--set")))
    return parsed


def load(
    path: str,
    *,
    text: str | None = None,
    overrides: Sequence[str] = (),
    profile: str | None = None,
    recipe: str | None = None,
) -> Loaded:
    """Load a file (or ``text``, shown as ``path``) with everything it builds on. Never raises for what a file holds.

    ``STDIN_NAME`` is the standard input; what it extends is relative to the working directory.
    ``--set profile=NAME`` and ``--set recipe=NAME`` choose like the arguments of the same name, which win over them.
    Other overrides are left to ``check.py``, which knows the paths that exist; only their form is looked at here.
    """
    loader = _Loader()
    sets = parse_overrides(overrides)
    layers = list(
        loader.file(path, "", (), None) if text is None else loader.text(text, path, "", (os.path.realpath(path),))
    )
    own = layers[-1] if layers else _Layer(None)
    named = {kind: (value, place) for kind, value, place in sets if kind in _FOLDERS}
    for kind, name in (("recipe", recipe), ("profile", profile)):
        if name is not None:
            named[kind] = (name, Position(f"--{kind}", 1, 1, f"--{kind}"))
    for kind in ("recipe", "profile"):
        if kind in named:
            layers.append(_Layer(None, (kind, *named[kind])))
    last = {layer.choice[0]: layer for layer in layers if layer.choice}
    root: Node | None = None
    for layer in layers:
        if layer.tree is not None:
            root = merge(root, layer.tree)
        elif layer.choice is not None and last[layer.choice[0]] is layer:
            for part in loader.choice(*layer.choice):
                root = merge(root, part.tree) if part.tree is not None else root
    if root is not None and own.tree is not None:
        root = _own_words(root, own.tree, path)
    choices = {kind: layer.choice[1] for kind, layer in last.items() if layer.choice}
    return Loaded(None if loader.stuck else root, loader.findings, loader.chain, choices, own.partial)


def _own_words(root: Node, own: Node, path: str) -> Node:
    """Name and description are the file's own; a parent's would be a lie. The file's name is the default."""
    entries = {
        key: entry for key, entry in root.value.items() if key not in ("name", "description") or key in own.value
    }
    if "name" not in entries:
        stem = re.sub(r"[^A-Za-z0-9._-]+", "_", os.path.splitext(os.path.basename(path))[0]).strip("._-")[:64]
        position = Position(path, 1, 1, "file name")
        entries["name"] = Entry(position, Node(position, stem or "preset"))
    for key in ("name", "description"):
        entries[key] = own.value.get(key, entries.get(key))
    return Node(root.position, {key: entry for key, entry in entries.items() if entry is not None})


@dataclass(slots=True)
class Flat:
    """A tree as plain data, with the place of each value and key by path."""

    data: Any
    values: dict[tuple[str, ...], Position] = field(default_factory=dict)
    keys: dict[tuple[str, ...], Position] = field(default_factory=dict)
    raw: dict[tuple[str, ...], str] = field(default_factory=dict)
    broken: set[tuple[str, ...]] = field(default_factory=set)


def flatten(root: Node) -> Flat:
    """Plain data and the places of a tree."""
    flat = Flat(None)
    flat.data = _plain(root, (), flat)
    return flat


def _plain(node: Node, path: tuple[str, ...], flat: Flat) -> Any:
    flat.values[path] = node.position
    if node.broken and path:
        flat.broken.add(path)
    if isinstance(node.value, dict):
        result = {}
        for key, entry in node.value.items():
            flat.keys[(*path, key)] = entry.key
            result[key] = _plain(entry.node, (*path, key), flat)
        return result
    if isinstance(node.value, list):
        return [_plain(item, (*path, str(index)), flat) for index, item in enumerate(node.value)]
    if node.raw is not None:
        flat.raw[path] = node.raw
    return node.value


__all__ = ["ChainFile", "Flat", "Loaded", "display", "flatten", "load", "merge", "parse_overrides", "shown_key"]
