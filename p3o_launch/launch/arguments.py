"""A resolved preset as text: YAML that validates and runs by itself, and a list of ``group.field=value``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from p3o_launch.errors import UsageError
from p3o_launch.fields import FIELDS
from p3o_launch.schema import Preset


def resolved_data(preset: Preset) -> dict[str, Any]:
    """Every field with its value, defaults included. Absent stays absent: for some fields that is a meaning.

    What is written as null stays so: the author has said that it is off.
    """
    data: dict[str, Any] = preset.model_dump(mode="json")
    return {
        name: _without_absent(value, getattr(preset, name).model_fields_set) if name in FIELDS else value
        for name, value in data.items()
        if value is not None
    }


def _without_absent(group: dict[str, Any], written: set[str]) -> dict[str, Any]:
    return {field: value for field, value in group.items() if value is not None or field in written}


def resolved_yaml(preset: Preset) -> str:
    """The complete preset. Written by a YAML emitter, so that text that looks like a number stays text."""
    text: str = yaml.safe_dump(resolved_data(preset), sort_keys=False, allow_unicode=True, width=2**20)
    return text


def resolved_arguments(preset: Preset) -> list[str]:
    """One ``group.field=value`` per setting, in the schema's order; values are JSON, so each is one line."""
    return list(_flat(resolved_data(preset)))


def _flat(data: dict[str, Any]) -> Iterator[str]:
    for key, value in data.items():
        fields = {f"{key}.{field}": item for field, item in value.items()} if key in FIELDS else {key: value}
        for path, item in fields.items():
            yield f"{path}={json.dumps(item, ensure_ascii=False)}"


def data_of(arguments: Sequence[str]) -> dict[str, Any]:
    """The data ``resolved_arguments`` was made of. Raises UsageError for anything else."""
    data: dict[str, Any] = {}
    for argument in arguments:
        path, equals, text = argument.partition("=")
        group, _, field = path.partition(".")
        try:
            value = json.loads(text)
        except ValueError:
            equals = ""
        if not equals or (group in FIELDS) != bool(field):
            raise UsageError(f"{argument!r} is not a setting, such as batch.num_rollout=30")
        (data.setdefault(group, {}) if field else data)[field or group] = value
    return data
