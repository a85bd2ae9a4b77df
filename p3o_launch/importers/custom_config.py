"""slime's and Relax's ``--custom-config-path``: a YAML file laid over the arguments after parsing, without types.

A value keeps the type YAML gives it: ``lr: 2e-5`` is text there, and reaches the optimizer as text.
"""

from __future__ import annotations

import os
import re
from typing import Any

from p3o_launch.diagnostics import Position
from p3o_launch.importers.arguments import UNKNOWN, Arguments, Use
from p3o_launch.importers.flags import Flag
from p3o_launch.importers.source import read_source
from p3o_launch.importers.words import shorten
from p3o_launch.nodes import Entry, parse
from p3o_launch.rules_file import file_finding
from p3o_launch.rules_import import import_finding

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", re.ASCII)


def custom_config(arguments: Arguments) -> None:
    """Lay the file over the arguments when it can be read; say so when it cannot."""
    use = arguments.use("custom_config_path")
    if use is None or not isinstance(use.value, str):
        return
    path = os.path.normpath(os.path.join(os.path.dirname(arguments.file), use.value)) if use.value else ""
    text, _, _ = read_source(path) if path and path != "-" else (None, "", [])
    if text is None:
        message = f"{use.flag} {shorten(use.value)} overrides any argument after parsing, and was not found here"
        hint = "run lint where the file is, or write its settings as flags"
        arguments.findings.append(import_finding("P3O019", use.place, message, hint))
        return
    root, findings = parse(text, path)
    arguments.findings += findings
    if root is None or not isinstance(root.value, dict):
        return
    by_dest = {flag.dest: flag for flag in arguments.table.flags.values()}
    for name, entry in root.value.items():
        _lay(arguments, by_dest.get(name), name, entry)


def _lay(arguments: Arguments, flag: Flag | None, name: str, entry: Entry) -> None:
    place = entry.node.position
    if flag is None:
        arguments.findings.append(
            import_finding("P3O014", entry.key, f"there is no argument {shorten(name)}: nothing reads it", None)
        )
        return
    value: Any = [item.value for item in entry.node.value] if isinstance(entry.node.value, list) else entry.node.value
    kind = flag.type.lower()
    if isinstance(value, str) and ("float" in kind or "int" in kind) and not flag.is_switch:
        looks = _NUMBER.fullmatch(value) is not None
        cause = "is text in YAML 1.1, and nothing converts it" if looks else "is not a number"
        hint = f"write {float(value):.1e}" if looks and len(value) < 32 else "write a number"
        arguments.findings.append(file_finding("P3O007", place, f"{name}: {shorten(value)} {cause}", hint))
        value = UNKNOWN
    elif "float" in kind and type(value) is int:
        value = float(value)
    elif isinstance(value, dict):
        value = UNKNOWN
    shown = entry.node.raw if entry.node.raw is not None else str(entry.node.value)
    arguments.uses.setdefault(flag.dest, []).append(Use(name, value, shown, _plain(entry.key), _plain(place)))


def _plain(position: Position) -> Position:
    return Position(position.file, position.line, position.column)
