"""The rollout policy as a copy of the trainer's weights: a second model, refreshed when asked and rounded when asked.

The copy has the trainer's tensor- and pipeline-parallel layout, so a refresh is local to each rank. It has no context
parallelism and no sequence parallelism: a decode step has one position, which cannot be split.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from p3o_launch.runtime.mcore.groups import ParallelGroups
from p3o_launch.runtime.mcore.model import build_model, unwrap
from p3o_launch.runtime.mcore.rng import restore_rng_state, rng_state
from p3o_launch.runtime.rollout.quantize import Scheme, channel_amax, rounded
from p3o_launch.schema import Preset

STATE_PREFIX = "rollout_snapshot."


def build_rollout_chunks(preset: Preset, groups: ParallelGroups) -> list[torch.nn.Module]:
    """A second set of this rank's model chunks, in ``eval`` mode and without gradients; ``refresh`` fills its weights.

    The trainer's random streams are as before.
    """
    parallel = preset.parallel.model_copy(
        update={
            "context_parallel_size": 1,
            "sequence_parallel": False,
            "recompute_granularity": "none",
            "recompute_method": None,
            "recompute_num_layers": None,
            "cuda_graph_scope": "none",
            "overlap_moe_expert_parallel_comm": False,
        }
    )
    # One token per row is no matrix that FP8 kernels take: rollouts compute in the trainer's wider type.
    precision = preset.precision.model_copy(update={"fp8": None, "fp8_recipe": None})
    before = rng_state()
    try:
        chunks = build_model(preset.model, parallel, precision, groups)
    finally:
        restore_rng_state(before)
    if groups.cp_size > 1:
        _leave_context_parallel(chunks)
    for chunk in chunks:
        chunk.eval().requires_grad_(False)
    return chunks


def _leave_context_parallel(chunks: Sequence[torch.nn.Module]) -> None:
    """Give every module a context-parallel group of this rank alone: Megatron hands out the trainer's."""
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    for chunk in chunks:
        for module in chunk.modules():
            if getattr(module, "cp_group", None) is not None:
                module.cp_group = alone
            collection: Any = getattr(module, "pg_collection", None)
            if collection is not None and getattr(collection, "cp", None) is not None:
                collection = copy.copy(collection)
                collection.cp = alone
                module.pg_collection = collection


@torch.no_grad()
def refresh(
    rollout: Sequence[torch.nn.Module], trainer: Sequence[torch.nn.Module], scheme: Scheme, groups: ParallelGroups
) -> None:
    """Make ``rollout`` the trainer's present weights, matrix weights rounded to ``scheme``. ``trainer`` is only read.

    TP ranks must call it together when ``scheme`` rounds.
    """
    for copy_chunk, source_chunk in zip(rollout, trainer, strict=True):
        _finish_param_gather(source_chunk)
        sources = dict(unwrap(source_chunk).named_parameters())
        targets = dict(unwrap(copy_chunk).named_parameters())
        assert sources.keys() == targets.keys(), sorted(sources.keys() ^ targets.keys())
        for name, target in targets.items():
            source = sources[name].detach()
            target.copy_(_rounded_shard(source, sources[name], scheme, groups) if is_rounded(name) else source)


def _finish_param_gather(chunk: Any) -> None:
    """Wait for weights that the distributed optimizer would otherwise gather during the next forward.

    Written for GPUs (the CPU uses plain Adam), not run there here.
    """
    config = getattr(chunk, "ddp_config", None)
    if config is not None and config.use_distributed_optimizer and config.overlap_param_gather:
        chunk.start_param_sync(force_sync=True)


def is_rounded(name: str) -> bool:
    """Whether low-precision engines store this parameter rounded: the matrices of attention and MLP.

    Embeddings, output layer, norms and biases keep their precision in the usual weight-only formats.
    """
    owner, _, leaf = name.rpartition(".")
    return leaf == "weight" and owner.rpartition(".")[2].startswith("linear_")


def _rounded_shard(
    weight: torch.Tensor, parameter: torch.nn.Parameter, scheme: Scheme, groups: ParallelGroups
) -> torch.Tensor:
    """Round this rank's slice as the whole matrix would be: the scale of a channel spans all ranks that share it."""
    if scheme == "none":
        return weight
    amax = channel_amax(weight)
    if groups.tp_size > 1 and getattr(parameter, "partition_dim", -1) == 1:
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=groups.tp)
    return rounded(weight, scheme, amax)


def sharded_state(rollout: Sequence[torch.nn.Module], groups: ParallelGroups) -> dict[str, Any]:
    """The snapshot's weights as Megatron's sharded tensors, for ``dist_checkpointing``; one entry per chunk."""
    metadata = {"dp_cp_group": groups.dp_cp}
    return {
        f"chunk_{index}": unwrap(chunk).sharded_state_dict(prefix=STATE_PREFIX, metadata=metadata)  # type: ignore[operator]
        for index, chunk in enumerate(rollout)
    }


@torch.no_grad()
def load_sharded_state(rollout: Sequence[torch.nn.Module], state: dict[str, Any]) -> None:
    """Put weights that ``dist_checkpointing.load`` returned for ``sharded_state`` into the chunks."""
    for index, chunk in enumerate(rollout):
        values = state[f"chunk_{index}"]
        for name, parameter in _parameters(chunk):
            parameter.copy_(values[STATE_PREFIX + name])


def _parameters(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    return unwrap(chunk).named_parameters()
