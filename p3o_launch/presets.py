"""Where the shipped presets are, from a checkout and from an installed wheel alike.

A checkout keeps them in ``presets/`` beside the package; the wheel carries the same files as ``p3o_launch/_presets``.
"""

from __future__ import annotations

import os

from p3o_launch.errors import UsageError

SUFFIXES = (".yaml", ".yml")


def preset_root() -> str:
    """Directory of the shipped presets."""
    package = os.path.dirname(os.path.abspath(__file__))
    packaged = os.path.join(package, "_presets")
    return packaged if os.path.isdir(packaged) else os.path.join(os.path.dirname(package), "presets")


def is_path(name: str) -> bool:
    """True when the user means a file rather than a shipped preset."""
    return name.endswith(SUFFIXES) or os.sep in name or os.path.isfile(name)


def shipped(name: str, folder: str = "") -> str | None:
    """Path of the shipped preset ``name`` (``temp_1p2``, or ``cpu`` in the folder ``profiles``), or None."""
    path = os.path.normpath(os.path.join(preset_root(), folder, name + ".yaml"))
    inside = path.startswith(os.path.join(preset_root(), ""))
    return display(path) if inside and os.path.isfile(path) else None


def names(folder: str = "") -> list[str]:
    """Names of the shipped presets of one folder, sorted."""
    directory = os.path.join(preset_root(), folder)
    if not os.path.isdir(directory):
        return []
    return sorted(name.removesuffix(".yaml") for name in os.listdir(directory) if name.endswith(".yaml"))


def display(path: str) -> str:
    """``path`` as reports show it: relative when it lies below the working directory."""
    try:
        relative = os.path.relpath(path)
    except ValueError:  # another drive
        return path
    return path if relative.startswith(os.pardir) else relative


def nearest(name: str, known: list[str]) -> str | None:
    """The known name most like ``name``, or None when nothing is close."""
    if len(name) > 64:
        return None
    from difflib import get_close_matches

    lowered = {candidate.lower(): candidate for candidate in known}
    close = get_close_matches(name.lower(), list(lowered), n=1, cutoff=0.7)
    return lowered[close[0]] if close else None


def resolve_name(name: str) -> str:
    """Path of what the user named on the command line: a file, or a shipped preset. UsageError when it is neither."""
    if is_path(name):
        return name
    path = shipped(name)
    if path is None:
        close = nearest(name, names())
        hint = f"did you mean {close}?" if close else f"the presets are {', '.join(names())}"
        raise UsageError(f"there is no preset named {name!r}, and no such file", hint=hint)
    return path
