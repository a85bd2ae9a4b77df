"""Process groups of one rank: Megatron's ``parallel_state``, started and stopped, and read once into a frozen record.

Rank order is Megatron's: TP fastest, then CP, EP, DP, and PP slowest. The rest of the runtime takes groups from here
and asks ``parallel_state`` nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from p3o_launch.errors import PreflightError
from p3o_launch.runtime.mcore import cpu_backend
from p3o_launch.runtime.mcore.compat import quiet_import
from p3o_launch.schema import Preset
from p3o_launch.topology import topology


@dataclass(frozen=True, slots=True)
class ParallelSizes:
    """How many ranks share what. ``vpp``: model chunks per pipeline rank, None without virtual stages."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    vpp: int | None = None

    @classmethod
    def from_preset(cls, preset: Preset) -> ParallelSizes:
        """The sizes a preset asks for."""
        parallel, sizes = preset.parallel, topology(preset)
        return cls(
            tp=sizes.tp,
            pp=sizes.pp,
            cp=sizes.cp,
            ep=parallel.expert_model_parallel_size,
            etp=parallel.expert_tensor_parallel_size,
            vpp=sizes.vpp,
        )


@dataclass(frozen=True, slots=True)
class ParallelGroups:
    """Groups, ranks and sizes as seen by this process. ``dp_cp`` are the ranks that hold different tokens.
    ``ep`` and ``etp`` share out experts, and each expert; they cut across the same ranks as DP, CP and TP do.

    ``embd`` joins the first and last pipeline stage, whose word embeddings are one tensor; None on other stages.
    """

    device: str
    rank: int
    world_size: int
    vpp: int | None
    tp: dist.ProcessGroup
    pp: dist.ProcessGroup
    cp: dist.ProcessGroup
    dp: dist.ProcessGroup
    dp_cp: dist.ProcessGroup
    ep: dist.ProcessGroup
    etp: dist.ProcessGroup
    embd: dist.ProcessGroup | None
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    cp_rank: int
    cp_size: int
    dp_rank: int
    dp_size: int
    ep_rank: int
    ep_size: int
    etp_rank: int
    etp_size: int
    last_stage_global_rank: int
    first_stage_global_rank: int

    @property
    def is_first_stage(self) -> bool:
        """Holds the embedding (of its first chunk, under virtual stages)."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Holds the output layer (of its last chunk, under virtual stages)."""
        return self.pp_rank == self.pp_size - 1

    def destroy(self) -> None:
        """Close every group and take the CPU backend's replacements back. Idempotent."""
        destroy_distributed()


def init_distributed(
    sizes: ParallelSizes,
    *,
    rank: int,
    world_size: int,
    init_method: str,
    backend: str = "gloo",
    local_rank: int | None = None,
    timeout_s: float = 600.0,
) -> ParallelGroups:
    """Join the process group and build Megatron's groups on top.

    ``backend``: ``gloo`` runs on the CPU, ``nccl`` on the GPU numbered ``local_rank`` (default: ``rank``).
    ``timeout_s``: longest wait of one collective [s]; a rank that waits longer raises.
    Raises PreflightError when the ranks do not divide by TP x PP x CP.
    """
    _check_sizes(sizes, world_size)
    device = "cpu" if backend == "gloo" else "cuda"
    if device == "cuda":
        torch.cuda.set_device(rank if local_rank is None else local_rank)
    else:
        cpu_backend.install()
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size, timeout=timeout)
    state = quiet_import("megatron.core.parallel_state")
    state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tp,
        pipeline_model_parallel_size=sizes.pp,
        virtual_pipeline_model_parallel_size=sizes.vpp,
        context_parallel_size=sizes.cp,
        expert_model_parallel_size=sizes.ep,
        expert_tensor_parallel_size=sizes.etp,
        distributed_timeout_minutes=timeout_s / 60.0,
        create_gloo_process_groups=False,
    )
    return _read_groups(device, sizes.vpp)


def _check_sizes(sizes: ParallelSizes, world_size: int) -> None:
    model = sizes.tp * sizes.pp * sizes.cp
    if world_size % model:
        raise PreflightError(
            f"{world_size} ranks cannot be shared out to TP {sizes.tp} x PP {sizes.pp} x CP {sizes.cp}",
            hint=f"the number of ranks must be a multiple of {model}",
        )
    if sizes.vpp is not None and sizes.pp < 2:
        raise PreflightError(
            "virtual pipeline stages need at least two pipeline stages",
            hint="remove num_layers_per_virtual_pipeline_stage, or raise pipeline_model_parallel_size",
        )


def _read_groups(device: str, vpp: int | None) -> ParallelGroups:
    state = quiet_import("megatron.core.parallel_state")
    tp, pp = state.get_tensor_model_parallel_group(), state.get_pipeline_model_parallel_group()
    cp, dp = state.get_context_parallel_group(), state.get_data_parallel_group()
    dp_cp = state.get_data_parallel_group(with_context_parallel=True)
    etp = state.get_expert_tensor_parallel_group()
    ep, embd = state.get_expert_model_parallel_group(), state.get_embedding_group(check_initialized=False)
    stages = dist.get_process_group_ranks(pp)
    return ParallelGroups(
        device=device,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        vpp=vpp,
        tp=tp,
        pp=pp,
        cp=cp,
        dp=dp,
        dp_cp=dp_cp,
        ep=ep,
        etp=etp,
        embd=embd if isinstance(embd, dist.ProcessGroup) else None,
        tp_rank=tp.rank(),
        tp_size=tp.size(),
        pp_rank=pp.rank(),
        pp_size=pp.size(),
        cp_rank=cp.rank(),
        cp_size=cp.size(),
        dp_rank=dp.rank(),
        dp_size=dp.size(),
        ep_rank=ep.rank(),
        ep_size=ep.size(),
        etp_rank=etp.rank(),
        etp_size=etp.size(),
        first_stage_global_rank=stages[0],
        last_stage_global_rank=stages[-1],
    )


def destroy_distributed() -> None:
    """Close Megatron's groups and the process group. Idempotent, and safe when start-up failed half way."""
    if dist.is_initialized():
        quiet_import("megatron.core.parallel_state").destroy_model_parallel()
        dist.destroy_process_group()
    cpu_backend.uninstall()
