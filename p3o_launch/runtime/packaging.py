"""The working directory of a Ray job: what is left out of it, and how large the rest is. Looks; packs nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

# Ray refuses a package above its largest message, after it has packed and sent it; its Jobs server takes less.
LIMIT_BYTES = 512 * 2**20
JOBS_LIMIT_BYTES = 100 * 2**20
# Ray's package is a zip without compression: of a file it holds a little more than its bytes, the name twice.
_ENTRY_BYTES = 76
# Ray reads these patterns as .gitignore does.
EXCLUDES = (
    ".git",
    ".hg",
    ".venv",
    "venv",
    "node_modules",
    "__pycache__",
    "*.pyc",
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
    ".hypothesis",
    "wandb",
)


def packed_env(runtime_env: Mapping[str, Any], output_root: str) -> dict[str, Any]:
    """``runtime_env`` as a job gets it: with a local ``working_dir``, what no job needs is excluded."""
    if local_directory(runtime_env) is None:
        return dict(runtime_env)
    return {**runtime_env, "excludes": excludes(runtime_env, output_root)}


def local_directory(runtime_env: Mapping[str, Any]) -> Path | None:
    """The directory that would be packed; None without one, or when it is a package somewhere else."""
    place = runtime_env.get("working_dir")
    return Path(place) if isinstance(place, str) and "://" not in place else None


def excludes(runtime_env: Mapping[str, Any], output_root: str) -> list[str]:
    """Patterns of what is left out: the usual ones, the runs below the directory, and the preset's own."""
    directory = local_directory(runtime_env)
    own = runtime_env.get("excludes")
    patterns = [*EXCLUDES, *(own if isinstance(own, list) else ())]
    root = Path(output_root)
    if directory is not None:
        inside = os.path.relpath(root.absolute(), directory.absolute())
        if not inside.startswith(os.pardir) and inside != os.curdir:
            patterns.append(f"/{inside}")
    return list(dict.fromkeys(patterns))


def packed_size(directory: Path, patterns: Sequence[str]) -> tuple[int, list[tuple[str, int]]]:
    """Bytes of the package of what is not excluded, and its largest files, as (relative path, bytes)."""
    largest: list[tuple[str, int]] = []
    total = 0
    for folder, names, files in os.walk(directory):
        here = os.path.relpath(folder, directory)
        names[:] = [name for name in names if not is_excluded(os.path.normpath(os.path.join(here, name)), patterns)]
        for name in files:
            relative = os.path.normpath(os.path.join(here, name))
            if is_excluded(relative, patterns):
                continue
            try:
                size = os.lstat(os.path.join(folder, name)).st_size
            except OSError:  # gone in the meantime
                continue
            total += size + _ENTRY_BYTES + 2 * len(os.fsencode(relative))
            largest = sorted([*largest, (relative, size)], key=lambda item: -item[1])[:3]
    return total, largest


def is_excluded(relative: str, patterns: Iterable[str]) -> bool:
    """Whether a .gitignore with ``patterns`` leaves the path out: the last pattern that fits decides."""
    left_out = False
    for pattern in patterns:
        negated = pattern.startswith("!")
        if _fits(relative, pattern.removeprefix("!").rstrip("/")):
            left_out = not negated
    return left_out


def _fits(relative: str, pattern: str) -> bool:
    if "/" in pattern:
        anchored = pattern.removeprefix("/")
        return fnmatchcase(relative, anchored) or relative.startswith(f"{anchored}/")
    return any(fnmatchcase(part, pattern) for part in relative.split("/"))
