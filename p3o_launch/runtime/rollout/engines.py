"""Rollout engines by the name a preset gives them. Importing this loads none of them.

A new engine is a class that implements ``runtime.types.RolloutEngine``, a factory ``(EngineParts) -> RolloutEngine`` in
its own module, and one line here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from p3o_launch.errors import PreflightError
from p3o_launch.runtime.types import RolloutEngine
from p3o_launch.schema import Preset


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What a factory may build from. ``trainer_chunks`` and ``groups`` are the trainer's, on this rank.

    ``eos_ids``: tokens that end a response.
    """

    preset: Preset
    trainer_chunks: Sequence[Any]
    groups: Any
    eos_ids: tuple[int, ...]


FACTORIES = {"megatron": "p3o_launch.runtime.mcore.engine:create"}
"""Engine name -> ``module:function``; the module is imported when the engine is built."""


def create_engine(parts: EngineParts) -> RolloutEngine:
    """Build the engine that ``parts.preset.rollout.engine`` names, on this rank. Raises PreflightError for others."""
    name = parts.preset.rollout.engine
    if name not in FACTORIES:
        raise PreflightError(
            f"the rollout engine {name!r} is not available in this version",
            hint=f"set rollout.engine to one of: {', '.join(sorted(FACTORIES))}",
        )
    module, _, function = FACTORIES[name].partition(":")
    factory: Callable[[EngineParts], RolloutEngine] = getattr(import_module(module), function)
    return factory(parts)
