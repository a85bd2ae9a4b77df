"""A resolved preset as text: YAML that validates and runs by itself, and a flat list of ``group.field=value``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import yaml

from p3o_launch.schema import Preset


def resolved_data(preset: Preset) -> dict[str, Any]:
    """Every field with its value, defaults included. Absent stays absent: for some fields that is a meaning."""
    return preset.model_dump(mode="json", exclude_none=True)


def resolved_yaml(preset: Preset) -> str:
    """The complete preset. Written by a YAML emitter, so that text that looks like a number stays text."""
    text: str = yaml.safe_dump(resolved_data(preset), sort_keys=False, allow_unicode=True, width=2**20)
    return text


def resolved_arguments(preset: Preset) -> list[str]:
    """One ``group.field=value`` per setting, in the schema's order; values are JSON, so each is one line."""
    return list(_flat(resolved_data(preset), ""))


def _flat(data: dict[str, Any], prefix: str) -> Iterator[str]:
    for key, value in data.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}={json.dumps(value, ensure_ascii=False)}"
