"""Random state of one rank: seeding, and a snapshot that can be put back.

Megatron draws from named states beside torch's default generator (dropout inside tensor-parallel regions differs over
TP ranks, elsewhere it must not). A snapshot therefore holds the CPU generator, the GPU's, and the tracker's states.
"""

from __future__ import annotations

from typing import Any

import torch

from p3o_launch.runtime.mcore.compat import quiet_import
from p3o_launch.runtime.mcore.groups import ParallelGroups


def seed_rank(seed: int, groups: ParallelGroups) -> None:
    """Seed every generator of this rank: the same over DP and CP, different over pipeline stages.

    Source: Megatron's training script, which adds 100 per pipeline stage.
    """
    staged = seed + 100 * groups.pp_rank
    torch.manual_seed(staged)
    random = quiet_import("megatron.core.tensor_parallel.random")
    random.get_cuda_rng_tracker().reset()
    random.model_parallel_cuda_manual_seed(staged)


def rng_state() -> dict[str, Any]:
    """A copy of every random state of this rank."""
    states = tracker_states()
    snapshot: dict[str, Any] = {"cpu": torch.get_rng_state(), "tracker": states}
    if torch.cuda.is_available():
        snapshot["cuda"] = torch.cuda.get_rng_state()
    return snapshot


def restore_rng_state(snapshot: dict[str, Any]) -> None:
    """Put a snapshot of ``rng_state`` back."""
    torch.set_rng_state(snapshot["cpu"])
    set_tracker_states(snapshot["tracker"])
    if "cuda" in snapshot and torch.cuda.is_available():
        torch.cuda.set_rng_state(snapshot["cuda"])


def tracker_states() -> dict[str, torch.Tensor]:
    """A copy of the named states of Megatron's tracker."""
    tracker = quiet_import("megatron.core.tensor_parallel.random").get_cuda_rng_tracker()
    return {name: state.clone() for name, state in tracker.get_states().items()}


def set_tracker_states(states: dict[str, torch.Tensor]) -> None:
    """Put a copy of ``tracker_states`` back."""
    tracker = quiet_import("megatron.core.tensor_parallel.random").get_cuda_rng_tracker()
    tracker.set_states({name: state.clone() for name, state in states.items()})
