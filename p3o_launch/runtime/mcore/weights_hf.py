"""Weights between a Hugging Face directory and this rank's Megatron model, both ways, and layouts side by side.

What belongs where is described in ``hf_mapping``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file

from p3o_launch.errors import CheckpointError, PreflightError
from p3o_launch.runtime.mcore.groups import ParallelGroups
from p3o_launch.runtime.mcore.hf_files import TensorSource, carry_files, write_index
from p3o_launch.runtime.mcore.hf_mapping import Tensors, expected_names, pieces
from p3o_launch.runtime.mcore.model import unwrap


def load_hf(chunks: list[torch.nn.Module], hf_dir: Path, groups: ParallelGroups) -> None:
    """Copy a checkpoint into the model in place, each rank its own part, cast to the parameters' type.

    Raises PreflightError when a tensor is missing, unexpected, or of another shape; all names are listed.
    ``hf_config.check_hf_config`` should have been asked before.
    """
    with TensorSource(hf_dir) as source, torch.no_grad():
        _check_names(source.names(), expected_names(unwrap(chunks[0])), hf_dir)
        for piece in pieces(chunks, groups):
            whole = piece.join([source.read(name) for name in piece.names])
            group = groups.etp if piece.expert_names else groups.tp
            local = whole if piece.dim is None else whole.chunk(group.size(), piece.dim)[group.rank()]
            if tuple(local.shape) != piece.local_shape:
                raise PreflightError(
                    f"{', '.join(piece.names)} in {hf_dir}: shape {tuple(local.shape)} on this rank, "
                    f"the model needs {piece.local_shape}",
                    hint="the checkpoint's config.json does not describe its weights",
                )
            piece.parameter.copy_(local.reshape(piece.parameter.shape))


def export_hf(
    chunks: list[torch.nn.Module],
    out_dir: Path,
    groups: ParallelGroups,
    *,
    source_dir: Path,
    dtype: torch.dtype | None = None,
) -> None:
    """Write the model as a Hugging Face directory. Every rank calls it.

    Each pipeline stage writes one safetensors file, rank 0 the index; on several nodes ``out_dir`` must be shared.
    ``source_dir`` gives config.json and tokenizer. ``dtype`` None keeps the parameters' type. Raises CheckpointError,
    on every rank, when a file cannot be written.
    """
    stage = {
        name: tensor.to(device="cpu", dtype=dtype or tensor.dtype).contiguous()
        for name, tensor in gathered(chunks, groups)
    }
    file = f"model-{groups.pp_rank + 1:05d}-of-{groups.pp_size:05d}.safetensors"
    report: tuple[dict[str, tuple[str, int]], str | None] = ({}, None)
    if groups.tp_rank == 0 and groups.dp_rank == 0 and groups.cp_rank == 0:
        report = _write_stage(out_dir / file, stage)
    reports: list[Any] = [None] * groups.world_size
    dist.all_gather_object(reports, report)
    failures = [failure for _, failure in reports if failure]
    if not failures and groups.rank == 0:
        write_index(out_dir, [written for written, _ in reports])
        carry_files(source_dir, out_dir)
    dist.barrier()
    if failures:
        raise CheckpointError(f"cannot write {out_dir}: {failures[0]}")


def _write_stage(path: Path, stage: dict[str, torch.Tensor]) -> tuple[dict[str, tuple[str, int]], str | None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(stage, path, metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        return {}, str(error)
    return {name: (path.name, tensor.numel() * tensor.element_size()) for name, tensor in stage.items()}, None


def gathered(
    chunks: list[torch.nn.Module], groups: ParallelGroups, *, gradients: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Hugging Face name and whole tensor of every weight, or its gradient, of this pipeline stage.

    A collective over TP: every rank of the group must exhaust it. A tied output weight is not repeated. Gradients are
    Megatron's main gradients in the layout of the weights: the way to compare two parallel layouts.
    """
    for piece in pieces(chunks, groups):
        if not piece.owner:
            continue
        local = piece.parameter.main_grad if gradients else piece.parameter  # type: ignore[attr-defined]
        local = local.detach().reshape(piece.local_shape)
        parts = [local] if piece.dim is None else _gather(local, groups.etp if piece.expert_names else groups.tp)
        whole = parts[0] if piece.dim is None else torch.cat(parts, piece.dim)
        if not piece.expert_names:
            yield from zip(piece.names, piece.split(whole), strict=True)
            continue
        for names, expert in zip(piece.expert_names, _gather(whole, groups.ep), strict=True):
            yield from zip(names, piece.split(expert), strict=True)


def _gather(local: torch.Tensor, group: dist.ProcessGroup) -> Tensors:
    """This tensor of every rank of the group."""
    if group.size() == 1:
        return [local]
    parts = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, local.contiguous(), group=group)
    return parts


def _check_names(found: set[str], expected: set[str], hf_dir: Path) -> None:
    # A tied checkpoint may repeat the embedding as lm_head; older ones store the rotary frequencies.
    tolerated = {name for name in found if name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq")}
    missing, unexpected = sorted(expected - found), sorted(found - expected - tolerated)
    if missing or unexpected:
        parts = [f"missing: {_listed(missing)}"] if missing else []
        parts += [f"unexpected: {_listed(unexpected)}"] if unexpected else []
        raise PreflightError(
            f"the weights in {hf_dir} do not fit the model; {'; '.join(parts)}",
            hint="the directory must hold the whole checkpoint that config.json describes",
        )


def _listed(names: list[str], most: int = 5) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
