"""Checkpoints of the whole training state through Megatron's ``dist_checkpointing``, readable in any layout.

Saved: weights, Adam's moments and step, schedule, random states, the rollout engine's snapshot, and the caller's own
state. Weights and moments are stored as whole tensors in pieces, so another TP, PP or DP layout can load them. Random
states belong to ranks and are restored only into the layout they were saved in; elsewhere the seed decides.

Complete or absent: written under a hidden name, renamed by rank 0 when every rank is done (``checkpoint_dirs``).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as torch_save

from p3o_launch.errors import CheckpointError
from p3o_launch.runtime.mcore.checkpoint_dirs import (
    FORMAT,
    MANIFEST,
    complete,
    is_complete,
    latest,
    prune,
    read_manifest,
    temporary,
)
from p3o_launch.runtime.mcore.compat import quiet_import
from p3o_launch.runtime.mcore.cpu_backend import device_backend
from p3o_launch.runtime.mcore.groups import ParallelGroups
from p3o_launch.runtime.mcore.model import unwrap
from p3o_launch.runtime.mcore.rng import restore_rng_state, rng_state

# Whatever a storage layer raises, the caller gets one kind of error; torch's own is no Exception.
_STORAGE_ERRORS = (Exception, CheckpointException)

__all__ = ["complete", "is_complete", "latest", "load", "prune", "read_manifest", "save"]


def save(
    directory: Path,
    chunks: list[Any],
    optimizer: Any,
    scheduler: Any,
    groups: ParallelGroups,
    extra: dict[str, Any],
    engine_state: dict[str, Any] | None = None,
) -> None:
    """Write a checkpoint to ``directory``. Every rank calls it with the same ``extra`` (plain picklable data).

    ``engine_state``: a nested dict of plain data and Megatron's sharded tensors. An existing checkpoint of that name is
    replaced. Raises CheckpointError on every rank when a rank cannot write; the directory is then as before.
    """
    hidden = temporary(directory)
    _on_rank_zero(groups, lambda: _fresh(hidden), f"cannot make {hidden}")
    # No optimizer step yet means no moments yet; asking Megatron for them would invent some without a step count.
    has_moments = _has_stepped(optimizer)
    state = _sharded_state(chunks, optimizer if has_moments else None, groups, loading=False)
    state |= {"scheduler": scheduler.state_dict(), "extra": extra, "engine": engine_state or {}}
    problem = None
    try:
        with device_backend(groups.device):
            _write(state, hidden)
    except _STORAGE_ERRORS as error:
        problem = _reason(error)
    _agree(problem, groups, f"cannot write checkpoint {directory}")
    manifest = {"format": FORMAT, "layout": _layout(groups), "optimizer": has_moments, "engine": bool(engine_state)}
    _on_rank_zero(groups, lambda: _publish(hidden, directory, manifest), f"cannot write checkpoint {directory}")


def load(
    directory: Path,
    chunks: list[Any],
    optimizer: Any,
    scheduler: Any,
    groups: ParallelGroups,
    engine_state: dict[str, Any] | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a checkpoint into the model, optimizer, schedule and random states; returns ``(extra, engine state)``.

    ``engine_state`` is the template the engine gave ``save``. Raises CheckpointError when the directory is not a whole
    checkpoint, or does not fit the model; model and optimizer are then not to be used.
    """
    manifest = read_manifest(directory)
    if engine_state is not None and not manifest["engine"]:
        raise CheckpointError(f"{directory} holds no rollout snapshot")
    template = _sharded_state(chunks, optimizer if manifest["optimizer"] else None, groups, loading=True)
    if manifest["layout"] != _layout(groups):
        del template["rng"]
    template["engine"] = engine_state or {}
    try:
        with device_backend(groups.device):
            state = quiet_import("megatron.core.dist_checkpointing").load(template, str(directory))
            _restore(state, chunks, optimizer, scheduler)
    except _STORAGE_ERRORS as error:
        raise CheckpointError(
            f"cannot load checkpoint {directory}: {_reason(error)}",
            hint="the preset's model must be the one the checkpoint was saved from",
        ) from error
    dist.barrier()
    return state["extra"], state.get("engine", {})


def _sharded_state(chunks: list[Any], optimizer: Any, groups: ParallelGroups, *, loading: bool) -> dict[str, Any]:
    """Megatron's sharded state: what to save, or where to load. ``optimizer`` None leaves the moments out."""
    metadata = {
        "dp_cp_group": groups.dp_cp,
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
    }
    sharded_object = quiet_import("megatron.core.dist_checkpointing").ShardedObject
    with device_backend(groups.device):
        model = {f"chunk{i}": _gpt(chunk).sharded_state_dict(metadata=metadata) for i, chunk in enumerate(chunks)}
        state = {
            "model": model,
            "rng": sharded_object("rng", rng_state(), (groups.world_size,), (groups.rank,), replica_id=0),
        }
        if optimizer is not None:
            state["optimizer"] = optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)
    return state


def _gpt(chunk: Any) -> Any:
    """The model below its wrappers, whose names do not belong in a checkpoint."""
    return unwrap(chunk)


def _torch_optimizers(optimizer: Any) -> list[Any]:
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part.optimizer for part in parts if part.optimizer is not None]


def _has_stepped(optimizer: Any) -> bool:
    return any(len(part.state) > 0 for part in _torch_optimizers(optimizer))


def _restore(state: dict[str, Any], chunks: list[Any], optimizer: Any, scheduler: Any) -> None:
    for index, chunk in enumerate(chunks):
        _gpt(chunk).load_state_dict(state["model"][f"chunk{index}"])
    if "optimizer" in state:
        optimizer.load_state_dict(state["optimizer"])
    else:
        for part in _torch_optimizers(optimizer):
            part.state.clear()
    # Megatron's scheduler adds the saved count to its own.
    scheduler.num_steps = 0
    scheduler.load_state_dict(state["scheduler"])
    if "rng" in state:
        restore_rng_state(state["rng"])


def _layout(groups: ParallelGroups) -> dict[str, int]:
    sizes = {"world": groups.world_size, "tp": groups.tp_size, "pp": groups.pp_size, "cp": groups.cp_size}
    return sizes | {"ep": groups.ep_size}


def _write(state: dict[str, Any], directory: Path) -> None:
    checkpointing = quiet_import("megatron.core.dist_checkpointing")
    checkpointing.save(state, str(directory), sharded_strategy=_in_process_strategy())


def _in_process_strategy() -> Any:
    """Megatron's torch_dist format, written by this process.

    Megatron's own writer forks helpers and starts a manager process at every save: slow for small models, unsafe below
    gloo's threads, and impossible in a daemonic worker. Format and reader are the same.
    """
    strategies = quiet_import("megatron.core.dist_checkpointing.strategies.torch")

    class InProcessStrategy(strategies.TorchDistSaveShardedStrategy):  # type: ignore[name-defined]
        def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
            flat, _, _ = strategies._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
            tensors = strategies.mcore_to_pyt_state_dict(flat, False)
            planner = strategies.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
            writer = FileSystemWriter(checkpoint_dir, single_file_per_rank=True, sync_files=True)
            torch_save(tensors, storage_writer=writer, planner=planner)

    return InProcessStrategy("torch_dist", 1)


def _reason(error: BaseException) -> str:
    """One line; torch's collective error carries every rank's exception and traceback."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {error}"


def _fresh(directory: Path) -> None:
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True)


def _publish(hidden: Path, directory: Path, manifest: dict[str, Any]) -> None:
    (hidden / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    if directory.exists():
        replaced = directory.with_name(f".{directory.name}.replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        directory.rename(replaced)
        hidden.rename(directory)
        shutil.rmtree(replaced)
    else:
        hidden.rename(directory)


def _on_rank_zero(groups: ParallelGroups, action: Callable[[], None], failure: str) -> None:
    """Run ``action`` on rank 0; every rank learns whether it worked. Raises CheckpointError on all of them."""
    problem = None
    if groups.rank == 0:
        try:
            action()
        except OSError as error:
            problem = str(error)
    _agree(problem, groups, failure)


def _agree(problem: str | None, groups: ParallelGroups, failure: str) -> None:
    problems: list[str | None] = [None] * groups.world_size
    dist.all_gather_object(problems, problem)
    for rank, found in enumerate(problems):
        if found is not None:
            raise CheckpointError(f"{failure}: rank {rank}: {found}", hint="check free space and permissions")
