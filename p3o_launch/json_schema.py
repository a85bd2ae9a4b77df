"""The JSON Schema of a preset file, for editors: the schema's fields plus the keys that ``loading.py`` resolves."""

from __future__ import annotations

from typing import Any

from p3o_launch.schema import Preset

_NAMES = {"type": "string", "minLength": 1}
_DIRECTIVES: dict[str, Any] = {
    "extends": {
        "description": "Presets this one builds on: shipped names, or files relative to this one. Later ones win.",
        "anyOf": [_NAMES, {"type": "array", "items": _NAMES}],
    },
    "profile": {"description": "Hardware profile laid under this file's own keys.", **_NAMES},
    "recipe": {"description": "Model, data and batch laid under this file's own keys.", **_NAMES},
    "partial": {"description": "This file is a part of presets: missing keys are not faults.", "type": "boolean"},
}


def preset_schema() -> dict[str, Any]:
    """JSON Schema (2020-12). Nothing is required inside a file, because a parent may hold it; types and names are."""
    schema = Preset.model_json_schema()
    for shape in (schema, *schema["$defs"].values()):
        shape.pop("required", None)
        for field in shape.get("properties", {}).values():
            _accept_number_text(field)
            field.pop("title", None)
    schema["properties"]["ignore"]["propertyNames"] = {"pattern": "^P3O[0-9]{3}$"}
    schema["properties"] = {**_DIRECTIVES, **schema["properties"]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _accept_number_text(field: dict[str, Any]) -> None:
    """Numeric fields take text such as ``1e-5``, which YAML 1.1 does not read as a number."""
    options = field.get("anyOf", [field])
    number = next((option for option in options if option.get("type") == "number"), None)
    if number is None:
        return
    text = {"type": "string", "pattern": r"^[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?$"}
    if "anyOf" in field:
        field["anyOf"] = [*options, text]
        return
    bounds = {key: field.pop(key) for key in list(field) if key in ("type", "minimum", "maximum", "exclusiveMinimum")}
    field["anyOf"] = [bounds, text]
