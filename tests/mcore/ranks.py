"""The product's local ranks, as the tests use them: megatron-core is imported once per pytest session. Not a test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from p3o_launch.runtime.local_ranks import LocalRankError as RankFailedError
from p3o_launch.runtime.local_ranks import RankEnv, run_local_ranks
from p3o_launch.runtime.mcore.preload import MODULES

__all__ = ["RankEnv", "RankFailedError", "run_ranks"]


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0) -> list[Any]:
    """Call ``function(env, *args)`` on ``world_size`` processes; results in rank order. Raises RankFailedError."""
    return run_local_ranks(function, world_size, *args, timeout=timeout, preload=MODULES)
