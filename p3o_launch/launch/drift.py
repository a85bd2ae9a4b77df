"""How the code and packages here differ from those a run was recorded with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from p3o_launch.launch.environment import Tree, versions, working_tree


def drift(directory: Path, data: Mapping[str, Any]) -> list[str]:
    """How the code and packages here differ from the recorded ones, a line each."""
    return [*_package_drift(data.get("versions") or {}, versions()), *_code_drift(directory, data, working_tree())]


def _package_drift(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    changed = [name for name in sorted({*then, *now}) if then.get(name) != now.get(name)]
    return [f"{name} was {then.get(name) or 'absent'}, is {now.get(name) or 'absent'}" for name in changed]


def _code_drift(directory: Path, data: Mapping[str, Any], now: Tree | None) -> list[str]:
    then = data.get("git")
    if then is None or now is None:
        return [] if then is None and now is None else ["the run was started in a git repository, or this is: not both"]
    lines = []
    if then["commit"] != now.commit:
        lines.append(f"the commit was {then['commit'][:12]}, is {now.commit[:12]}")
    patch = directory / "git.patch"
    if (patch.read_text(encoding="utf-8") if patch.is_file() else "") != now.patch:
        lines.append(f"the uncommitted changes differ from {patch if patch.is_file() else 'none'}")
    before = then.get("untracked_sha256") or {}
    changed = [name for name in sorted({*before, *now.untracked}) if before.get(name) != now.untracked.get(name)]
    if changed:
        lines.append(f"{len(changed)} untracked files differ, such as {', '.join(changed[:3])}")
    return lines
