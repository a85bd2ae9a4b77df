"""Weights between a Hugging Face directory and this rank's Megatron model, both ways. Dense Qwen3, Qwen2, Llama.

Every Megatron parameter is described once, by a ``Piece``: the Hugging Face tensors it is made of, how they join into
one tensor, and along which dimension tensor parallelism cuts it. Import joins and cuts; export gathers and splits.

Layouts (h hidden, n query heads, g key/value groups, d head width, f feed-forward width):

* ``linear_qkv`` [(n + 2 g) d, h]: per group its n/g query heads, then its key, then its value. TP cuts groups.
* ``linear_fc1`` [2 f, h]: the gate's rows, then the up-projection's. TP cuts each half, so joined it is [2, f, h].
* ``linear_proj`` [h, n d] and ``linear_fc2`` [h, f]: TP cuts the columns. Embedding and output layer: the words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file

from p3o_launch.errors import CheckpointError, PreflightError
from p3o_launch.runtime.mcore.groups import ParallelGroups
from p3o_launch.runtime.mcore.hf_files import TensorSource, carry_files, write_index
from p3o_launch.runtime.mcore.model import unwrap

Tensors = list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Piece:
    """One Megatron parameter of this rank.

    ``join``: the Hugging Face tensors, in the order of ``names``, as one; ``split`` undoes it. ``dim``: the dimension
    of the joined tensor that TP cuts, None when every TP rank holds all of it. ``local_shape``: this rank's part of the
    joined tensor. ``owner``: False for the copy of a tied embedding, which export leaves out.
    """

    parameter: torch.nn.Parameter
    names: tuple[str, ...]
    join: Callable[[Tensors], torch.Tensor]
    split: Callable[[torch.Tensor], Tensors]
    dim: int | None
    local_shape: tuple[int, ...]
    owner: bool = True


def load_hf(chunks: list[torch.nn.Module], hf_dir: Path, groups: ParallelGroups) -> None:
    """Copy a checkpoint into the model in place, each rank its own part, cast to the parameters' type.

    Raises PreflightError when a tensor is missing, unexpected, or of another shape; all names are listed.
    ``hf_config.check_hf_config`` should have been asked before.
    """
    with TensorSource(hf_dir) as source, torch.no_grad():
        _check_names(source.names(), expected_names(unwrap(chunks[0])), hf_dir)
        for piece in pieces(chunks):
            whole = piece.join([source.read(name) for name in piece.names])
            local = whole if piece.dim is None else whole.chunk(groups.tp_size, piece.dim)[groups.tp_rank]
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

    Each pipeline stage writes one safetensors file, rank 0 the index. ``source_dir`` gives config.json and tokenizer.
    ``dtype`` None keeps the parameters' type. Raises CheckpointError, on every rank, when a file cannot be written.
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
    for piece in pieces(chunks):
        if not piece.owner:
            continue
        local = piece.parameter.main_grad if gradients else piece.parameter  # type: ignore[attr-defined]
        whole = _gather_tp(local.detach().reshape(piece.local_shape), piece.dim, groups)
        yield from zip(piece.names, piece.split(whole), strict=True)


def _gather_tp(local: torch.Tensor, dim: int | None, groups: ParallelGroups) -> torch.Tensor:
    if dim is None or groups.tp_size == 1:
        return local
    parts = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(groups.tp_size)]
    dist.all_gather(parts, local.contiguous(), group=groups.tp)
    return torch.cat(parts, dim)


def pieces(chunks: Iterable[torch.nn.Module]) -> Iterator[Piece]:
    """Every parameter of this rank's chunks, in order."""
    for chunk in chunks:
        model: Any = unwrap(chunk)
        layer_numbers = [layer.layer_number - 1 for layer in model.decoder.layers]
        for name, parameter in model.named_parameters():
            yield _piece(name, parameter, layer_numbers, model)


def expected_names(model: Any) -> set[str]:
    """Every tensor a checkpoint of this architecture holds."""
    config = model.config
    names = {"model.embed_tokens.weight", "model.norm.weight"}
    if not model.share_embeddings_and_output_weights:
        names.add("lm_head.weight")
    attention = [f"{side}_proj.weight" for side in "qkvo"]
    if config.add_qkv_bias:
        attention += [f"{side}_proj.bias" for side in "qkv"]
    if config.qk_layernorm:
        attention += ["q_norm.weight", "k_norm.weight"]
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        names |= {f"{prefix}.self_attn.{name}" for name in attention}
        names |= {f"{prefix}.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
        names |= {f"{prefix}.input_layernorm.weight", f"{prefix}.post_attention_layernorm.weight"}
    return names


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


# Megatron's name of a layer's parameter -> Hugging Face's, for those that map one to one, with the dimension TP cuts.
# Transformer Engine fuses a norm into the projection behind it and renames its weight.
_LAYER_NAMES: dict[str, tuple[str, int | None]] = {
    "input_layernorm.weight": ("input_layernorm.weight", None),
    "self_attention.linear_qkv.layer_norm_weight": ("input_layernorm.weight", None),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight", None),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight", None),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight", 1),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight", None),
    "mlp.linear_fc1.layer_norm_weight": ("post_attention_layernorm.weight", None),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight", 1),
}


def _piece(name: str, parameter: torch.nn.Parameter, layer_numbers: list[int], model: Any) -> Piece:
    if name == "embedding.word_embeddings.weight":
        return _single(parameter, "model.embed_tokens.weight", 0)
    if name == "decoder.final_layernorm.weight":
        return _single(parameter, "model.norm.weight", None)
    if name == "output_layer.weight":
        tied = model.share_embeddings_and_output_weights
        return _single(parameter, "model.embed_tokens.weight" if tied else "lm_head.weight", 0, owner=not tied)
    assert name.startswith("decoder.layers."), f"parameter {name} has no Hugging Face name"
    _, _, index, rest = name.split(".", 3)
    prefix = f"model.layers.{layer_numbers[int(index)]}."
    if rest in _LAYER_NAMES:
        hf_name, dim = _LAYER_NAMES[rest]
        return _single(parameter, prefix + hf_name, dim)
    if rest == "mlp.linear_fc1.weight":
        halves = (f"{prefix}mlp.gate_proj.weight", f"{prefix}mlp.up_proj.weight")
        shape = (2, parameter.shape[0] // 2, parameter.shape[1])
        return Piece(parameter, halves, torch.stack, lambda whole: list(whole.unbind(0)), 1, shape)
    kind = rest.removeprefix("self_attention.linear_qkv.")
    assert kind in ("weight", "bias"), f"parameter {name} has no Hugging Face name"
    names = tuple(f"{prefix}self_attn.{side}_proj.{kind}" for side in "qkv")
    join, split = _qkv(model.config)
    return Piece(parameter, names, join, split, 0, tuple(parameter.shape))


def _single(parameter: torch.nn.Parameter, name: str, dim: int | None, owner: bool = True) -> Piece:
    return Piece(parameter, (name,), lambda parts: parts[0], lambda whole: [whole], dim, tuple(parameter.shape), owner)


def _qkv(config: Any) -> tuple[Callable[[Tensors], torch.Tensor], Callable[[torch.Tensor], Tensors]]:
    """Joined: for each key/value group its query heads, its key head, its value head, on dim 0."""
    groups, width = config.num_query_groups, config.kv_channels
    rows = [config.num_attention_heads // groups * width, width, width]

    def join(parts: Tensors) -> torch.Tensor:
        return torch.cat([part.reshape(groups, -1, *part.shape[1:]) for part in parts], 1).flatten(0, 1)

    def split(whole: torch.Tensor) -> Tensors:
        return [part.flatten(0, 1) for part in whole.reshape(groups, -1, *whole.shape[1:]).split(rows, 1)]

    return join, split
