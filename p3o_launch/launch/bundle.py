"""The recorder as one text: the modules it is made of, in order, without their imports of each other."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

MODULES = ("redact", "quoting", "process", "environment", "record_file", "recorder")


@cache
def recorder_source() -> str:
    """A Python program that needs the standard library alone; see ``recorder.py`` for its arguments."""
    parts = [
        _without_own_imports(Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")) for name in MODULES
    ]
    return "from __future__ import annotations\n\n" + "\n\n".join(parts)


def _without_own_imports(source: str) -> str:
    """``source`` without its docstring, its ``__future__`` line and what it imports from this package."""
    tree = ast.parse(source)
    lines = source.splitlines()
    for node in tree.body:
        own = isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("p3o_launch", "__future__"))
        if own or node is tree.body[0]:
            for number in range(node.lineno - 1, node.end_lineno or node.lineno):
                lines[number] = "\0"
    kept = "\n".join(line for line in lines if line != "\0").strip("\n")
    return f"{kept}\n"
