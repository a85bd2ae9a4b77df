"""Preset and run directory -> everything a rank must know before it starts. Plain data: no torch, no ray, no megatron.

A plan travels to every rank as it is; nothing in it depends on which rank reads it.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from p3o_launch.schema import Preset
from p3o_launch.topology import Topology, topology


@dataclass(frozen=True, slots=True)
class RunPlan:
    """One run, resolved.

    ``world_size``: ranks of the run; ``ranks_per_node``: ranks of one node. ``env``: environment of every rank's
    process. ``seed`` starts model and data order, ``rollout_seed`` the sampling streams. ``steps_per_rollout`` and
    ``total_steps`` count optimizer steps. ``local``: the run starts a cluster of its own on this machine.
    """

    preset: Preset
    topology: Topology
    device: Literal["cpu", "cuda"]
    dist_backend: Literal["gloo", "nccl"]
    world_size: int
    num_nodes: int
    ranks_per_node: int
    local: bool
    env: Mapping[str, str]
    seed: int
    rollout_seed: int
    steps_per_rollout: int
    total_steps: int
    run_dir: Path

    @property
    def checkpoints_dir(self) -> Path:
        return self.run_dir / "checkpoints"

    @property
    def rollouts_dir(self) -> Path:
        return self.run_dir / "rollouts"

    @property
    def logs_dir(self) -> Path:
        return self.run_dir / "logs"

    @property
    def tensorboard_dir(self) -> Path:
        return self.run_dir / "tensorboard"

    @property
    def metrics_file(self) -> Path:
        return self.run_dir / "metrics.jsonl"

    def rank_log(self, rank: int) -> Path:
        """Where the process of ``rank`` writes its standard output and error."""
        return self.logs_dir / f"rank_{rank}.log"


def make_plan(preset: Preset, run_dir: Path) -> RunPlan:
    """Resolve ``preset`` for a run in ``run_dir``. The preset has passed its guards, so every size divides."""
    sizes = topology(preset)
    assert sizes.steps_per_rollout is not None, "a guard lets no such preset through"
    assert sizes.total_steps is not None
    cluster = preset.cluster
    seed = preset.seed.seed
    return RunPlan(
        preset=preset,
        topology=sizes,
        device=cluster.device,
        dist_backend="gloo" if cluster.device == "cpu" else "nccl",
        world_size=sizes.world_size,
        num_nodes=cluster.num_nodes,
        ranks_per_node=cluster.gpus_per_node,
        local=cluster.ray_address is None,
        env=rank_environment(preset),
        seed=seed,
        rollout_seed=seed if preset.seed.rollout_seed is None else preset.seed.rollout_seed,
        steps_per_rollout=sizes.steps_per_rollout,
        total_steps=sizes.total_steps,
        run_dir=run_dir.absolute(),
    )


def rank_environment(preset: Preset) -> dict[str, str]:
    """Environment of a rank's process. What the preset writes in ``cluster.env`` wins over every default."""
    env = default_environment(preset)
    if preset.cluster.device == "cpu" and preset.cluster.num_nodes == 1 and preset.cluster.ray_address is None:
        env["GLOO_SOCKET_IFNAME"] = _loopback_interface()
    return env | preset.cluster.env


def default_environment(preset: Preset) -> dict[str, str]:
    """What every rank's environment has, on whatever machine."""
    threads = str(preset.cluster.threads_per_rank)
    env = {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    return env | ({"CUDA_VISIBLE_DEVICES": ""} if preset.cluster.device == "cpu" else cuda_environment(preset))


def cuda_environment(preset: Preset) -> dict[str, str]:
    """What Megatron and deterministic kernels want of the environment on GPUs."""
    parallel = preset.parallel
    env: dict[str, str] = {}
    if parallel.tensor_model_parallel_size > 1 or parallel.context_parallel_size > 1:
        # One hardware queue keeps a collective ahead of the GEMM it overlaps with (Megatron, before Blackwell).
        env["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if preset.precision.deterministic_mode:
        env |= {
            "NCCL_ALGO": "Ring",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
        }
    return env


def _loopback_interface() -> str:
    """Name of the loopback interface: ``lo`` on Linux, ``lo0`` on macOS."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), "lo")
