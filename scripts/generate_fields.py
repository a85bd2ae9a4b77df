"""Write ``p3o_launch/fields.py``, the schema as a plain table, from the pydantic models in ``p3o_launch/schema.py``.

Importing pydantic's models takes longer than everything else that ``validate`` does; the table lets a sound preset pass
without them. A test fails when the table is stale: ``python scripts/generate_fields.py`` writes it anew.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from p3o_launch.schema import SCHEMA_VERSION, Preset

TARGET = Path(__file__).parents[1] / "p3o_launch" / "fields.py"
HEADER = '''"""The schema as a plain table. Generated from schema.py by scripts/generate_fields.py; do not edit.

``FIELDS``: group -> field -> ``(kind, required, nullable, default, low, high, options)``; ``TOP``: the same for fields
outside groups. ``low``/``high`` bound numbers, ``low`` is also the least length of a text; ``above`` in ``options``
makes ``low`` exclusive.
"""

from __future__ import annotations

from typing import Any

'''
KINDS = {"integer": "int", "number": "float", "boolean": "bool"}
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"


def entry(field: dict[str, Any], required: bool) -> tuple[Any, ...]:
    """One row of the table; a shape it does not know stops the generation."""
    options = field.get("anyOf", [field])
    nullable = {"type": "null"} in options
    (shape,) = [option for option in options if option != {"type": "null"}]
    default = None if required else field.get("default", {} if shape.get("type") == "object" else None)
    kind, low, high, extra = kind_of(shape)
    return kind, required, nullable, default, low, high, extra


def kind_of(shape: dict[str, Any]) -> tuple[str, Any, Any, tuple[Any, ...]]:
    known = {"type", "title", "description", "default", "enum", "const", "minimum", "maximum", "exclusiveMinimum"}
    known |= {"minLength", "pattern", "additionalProperties"}
    assert set(shape) <= known, f"the table cannot express {set(shape) - known}"
    if "enum" in shape or "const" in shape:
        return "choice", None, None, tuple(shape.get("enum", [shape.get("const")]))
    if shape["type"] == "object":
        inside = shape["additionalProperties"]
        return "map", None, None, ("any",) if inside is True else kind_of(inside)[:2]
    if shape["type"] == "string":
        assert shape.get("pattern") in (None, NAME_PATTERN), "quick.py knows the pattern of names only"
        return "name" if "pattern" in shape else "text", shape.get("minLength", 0), None, ()
    above = "exclusiveMinimum" in shape
    return (
        KINDS[shape["type"]],
        shape.get("exclusiveMinimum" if above else "minimum"),
        shape.get("maximum"),
        (("above",) if above else ()),
    )


def table() -> str:
    """The module's text, formatted."""
    schema = Preset.model_json_schema()
    groups: dict[str, dict[str, Any]] = {}
    top: dict[str, Any] = {}
    for name, field in schema["properties"].items():
        reference = field.get("$ref", "").rpartition("/")[2]
        if not reference:
            top[name] = entry(field, name in schema["required"])
            continue
        shape = schema["$defs"][reference]
        required = shape.get("required", [])
        groups[name] = {key: entry(value, key in required) for key, value in shape["properties"].items()}
    body = f"SCHEMA_VERSION = {SCHEMA_VERSION}\nTOP: dict[str, Any] = {top!r}\n"
    body += f"FIELDS: dict[str, dict[str, Any]] = {groups!r}\n"
    command = [sys.executable, "-m", "ruff", "format", "--line-length", "120", "-"]
    return subprocess.run(command, input=HEADER + body, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    TARGET.write_text(table(), encoding="utf-8")
