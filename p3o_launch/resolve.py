"""A resolved preset as YAML whose comments tell where each value comes from, and the difference of two presets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from p3o_launch.check import CheckResult
from p3o_launch.nodes import Path

# What may differ between two arms that compare P3O with GRPO: the estimator, and the settings only one of them reads.
ALGORITHM_OWN: tuple[Path, ...] = (
    ("name",),
    ("description",),
    *(
        ("algorithm", field)
        for field in (
            "advantage_estimator",
            "ess_scope",
            "kl_mode",
            "clip_low",
            "clip_high",
            "eps_clip",
            "eps_clip_high",
        )
    ),
)


def annotated(result: CheckResult) -> str:
    """The resolved data of ``result`` as YAML; every scalar is followed by ``# file:line`` and its origin."""
    lines = [(text, _origin(result, path)) for text, path in _yaml(result.resolved, (), "")]
    width = min(48, max((len(text) for text, origin in lines if origin), default=0))
    return "".join(f"{text:<{width}}  # {origin}\n" if origin else f"{text}\n" for text, origin in lines)


def _origin(result: CheckResult, path: Path | None) -> str:
    position = result.values.get(path) if path is not None else None
    if position is None:
        return ""
    by = f" ({position.origin})" if position.origin not in ("", position.file) else ""
    return f"{position.file}:{position.line}{by}"


def _yaml(value: dict[str, Any], path: Path, indent: str) -> Iterator[tuple[str, Path | None]]:
    for key, item in value.items():
        below = (*path, key)
        if isinstance(item, dict) and item:
            yield f"{indent}{_key(key)}:", None
            yield from _yaml(item, below, indent + "  ")
        else:
            yield f"{indent}{_key(key)}: {scalar_text(item)}", below


def _key(key: str) -> str:
    return key if key.replace("_", "").isalpha() else json.dumps(key)


def scalar_text(value: Any) -> str:
    """A value as YAML on one line: JSON, but for what JSON lacks."""
    if isinstance(value, float):
        special = {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}
        return special.get(repr(value), repr(value) if "." in repr(value) else repr(value).replace("e", ".0e"))
    return json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Difference:
    """One path at which two resolved presets differ; None where a side does not have it."""

    path: Path
    left: str | None
    right: str | None


def differences(left: dict[str, Any], right: dict[str, Any]) -> list[Difference]:
    """Every path at which two complete presets (defaults included) differ, sorted."""
    a, b = dict(_leaves(left, ())), dict(_leaves(right, ()))
    paths = sorted(path for path in a.keys() | b.keys() if a.get(path) != b.get(path))
    return [Difference(path, a.get(path), b.get(path)) for path in paths]


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, str]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, (*path, str(key)))
    else:
        yield path, scalar_text(value)


def undeclared(found: list[Difference], own: tuple[Path, ...] = ALGORITHM_OWN) -> list[Difference]:
    """Differences that a comparison of two objectives may not have."""
    return [item for item in found if not any(item.path[: len(prefix)] == prefix for prefix in own)]


def difference_text(found: list[Difference]) -> str:
    """One line per difference: ``path: left -> right``; ``absent`` where a side does not have the path."""
    sides = [
        ("absent" if item.left is None else item.left, "absent" if item.right is None else item.right) for item in found
    ]
    return "".join(f"{'.'.join(item.path)}: {a} -> {b}\n" for item, (a, b) in zip(found, sides, strict=True))
