"""Types and names of a loaded preset: what is wrong with its shape, and what of it the guards can still read.

A sound preset is read by ``quick.py``; only when something is doubtful does the schema, and with it pydantic, decide.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from p3o_launch.diagnostics import LocatedFinding, Position
from p3o_launch.loading import Flat
from p3o_launch.nodes import Path, trap
from p3o_launch.quick import facts
from p3o_launch.rules_file import file_finding

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from p3o_launch.schema import Preset
    from p3o_launch.shape import ShapeFault


class Verdict:
    """The verdict on types and names. ``sound``: the preset has its shape. ``readable``: what guards may look at."""

    def __init__(self, flat: Flat, partial: bool) -> None:
        self.flat = flat
        self.findings: list[LocatedFinding] = []
        self.failed: set[Path] = {path[:2] for path in flat.broken}
        self.readable: Any = None if self.failed else facts(flat.data)
        self.sound = self.readable is not None
        if not self.sound:
            self.ask_schema(partial)
        self.findings += self.traps()
        if self.failed:
            self.sound = False
            self.readable = None if partial else _readable(flat.data, self.failed)

    def ask_schema(self, partial: bool) -> None:
        from p3o_launch.shape import shape_faults

        self.readable, errors = _validate(self.flat.data)
        self.sound = self.readable is not None
        for fault in shape_faults(errors, self.flat.data, self.flat.raw, partial):
            if not self.known(fault.path):
                self.findings.append(self.locate(fault))
                self.failed.update(path[:2] for path in (fault.path, fault.meant, *fault.others) if path)

    def known(self, path: Path) -> bool:
        """Reported already, by the loader."""
        return any(path[: len(bad)] == bad for bad in self.flat.broken)

    def locate(self, fault: ShapeFault) -> LocatedFinding:
        position = place(self.flat, fault.path, fault.at_key)
        return file_finding(fault.code, position, fault.message, fault.hint, ".".join(fault.path))

    def traps(self) -> Iterator[LocatedFinding]:
        """Numbers that do not mean what they look like, where nothing else is wrong with them."""
        for path, raw in self.flat.raw.items():
            meaning = trap(raw)
            if meaning and path[:2] not in self.failed:
                from p3o_launch.value_hints import trap_hint

                self.failed.add(path[:2])
                message = f"{'.'.join(path)}: {meaning}"
                hint = trap_hint(raw, self.value(path), path)
                yield file_finding("P3O007", self.flat.values[path], message, hint, ".".join(path))

    def value(self, path: Path) -> Any:
        data = self.flat.data
        for key in path:
            data = data[int(key)] if isinstance(data, list) else data[key]
        return data


def _validate(data: dict[str, Any]) -> tuple[Preset | None, list[ErrorDetails]]:
    from pydantic import ValidationError

    from p3o_launch.schema import Preset

    try:
        return Preset.model_validate(data), []
    except ValidationError as error:
        return None, error.errors(include_url=False, include_context=True, include_input=True)


def _readable(data: dict[str, Any], failed: set[Path]) -> Any:
    """A preset whose failed fields raise when read, or None when none can be built."""
    from p3o_launch.shape import placeholder

    kept: dict[str, Any] = {}
    for name, value in data.items():
        if (name,) in failed:
            continue
        group = isinstance(value, dict)
        kept[name] = {k: v for k, v in value.items() if (name, k) not in failed} if group else value
    whole = placeholder(kept)
    preset, _ = _validate(whole)
    return _Watched(preset, failed) if preset is not None else None


class Unreadable(Exception):
    """A guard asked for a field that is broken; what it would say is not known."""


class _Watched:
    """Stands for a preset, or one of its groups, while some fields below it are broken."""

    def __init__(self, model: Any, failed: set[Path]) -> None:
        self._model, self._failed = model, failed

    def __getattr__(self, name: str) -> Any:
        if (name,) in self._failed or name not in type(self._model).model_fields:
            raise Unreadable(name)
        below = {path[1:] for path in self._failed if len(path) > 1 and path[0] == name}
        value = getattr(self._model, name)
        if isinstance(value, dict):  # its broken entries are as good as absent
            return {key: item for key, item in value.items() if (key,) not in below}
        return _Watched(value, below) if below else value


def place(flat: Flat, path: Path, at_key: bool = False) -> Position:
    """Where ``path`` is written; for an absent one the key of its nearest present ancestor, else the whole file."""
    if path in flat.values and path:
        return flat.keys[path] if at_key and path in flat.keys else flat.values[path]
    for length in range(len(path) - 1, 0, -1):
        if path[:length] in flat.keys:
            return flat.keys[path[:length]]
    return flat.values[()]
