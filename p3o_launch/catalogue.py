"""The shipped presets, profiles and recipes with their descriptions, as ``p3o-launch presets`` lists them."""

from __future__ import annotations

from collections.abc import Iterator

from p3o_launch.loading import load
from p3o_launch.presets import names, shipped


def catalogue() -> str:
    """One line per shipped preset, then the profiles and recipes that can be laid on them."""
    lines: list[str] = []
    for title, folder in (("presets", ""), ("profiles (--profile)", "profiles"), ("recipes (--recipe)", "recipes")):
        lines += [f"{title}:", *_entries(folder), ""]
    return "\n".join(lines[:-1]) + "\n"


def described(folder: str) -> Iterator[tuple[str, str]]:
    """(name, description) of the shipped presets of one folder."""
    for name in names(folder):
        path = shipped(name, folder)
        root = load(path).root if path else None
        entry = root.value.get("description") if root else None
        yield name, str(entry.node.value) if entry else ""


def _entries(folder: str) -> Iterator[str]:
    for name, description in described(folder):
        yield f"  {name:<26}{description}".rstrip()
