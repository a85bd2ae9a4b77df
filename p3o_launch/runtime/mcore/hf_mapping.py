"""Which Hugging Face tensors each Megatron parameter is made of, and how. Qwen3, Qwen2, Llama, Qwen3-MoE.

Every Megatron parameter is described once, by a ``Piece``: the Hugging Face tensors it is made of, how they join into
one tensor, and along which dimension tensor parallelism cuts it. Import joins and cuts; export gathers and splits.

Layouts (h hidden, n query heads, g key/value groups, d head width, f feed-forward width):

* ``linear_qkv`` [(n + 2 g) d, h]: per group its n/g query heads, then its key, then its value. TP cuts groups.
* ``linear_fc1`` [2 f, h]: the gate's rows, then the up-projection's. TP cuts each half, so joined it is [2, f, h].
* ``linear_proj`` [h, n d] and ``linear_fc2`` [h, f]: TP cuts the columns. Embedding and output layer: the words.
* Experts: the same two matrices for each; expert parallelism deals out whole experts, in order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from p3o_launch.runtime.mcore.groups import ParallelGroups
from p3o_launch.runtime.mcore.model import unwrap

Tensors = list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Piece:
    """One Megatron parameter of this rank.

    ``join``: the Hugging Face tensors, in the order of ``names``, as one; ``split`` undoes it. ``dim``: the dimension
    of the joined tensor that TP cuts, None when every TP rank holds all of it. ``local_shape``: this rank's part of the
    joined tensor. ``owner``: False for the copy of a tied embedding, which export leaves out. ``expert_names``: for an
    expert's parameter, the names of its counterpart on each expert-parallel rank.
    """

    parameter: torch.nn.Parameter
    names: tuple[str, ...]
    join: Callable[[Tensors], torch.Tensor]
    split: Callable[[torch.Tensor], Tensors]
    dim: int | None
    local_shape: tuple[int, ...]
    owner: bool = True
    expert_names: tuple[tuple[str, ...], ...] = ()


def pieces(chunks: Iterable[torch.nn.Module], groups: ParallelGroups) -> Iterator[Piece]:
    """Every parameter of this rank's chunks, in order."""
    for chunk in chunks:
        model: Any = unwrap(chunk)
        layer_numbers = [layer.layer_number - 1 for layer in model.decoder.layers]
        for name, parameter in model.named_parameters():
            if name.startswith("decoder.layers."):
                _, _, index, rest = name.split(".", 3)
                yield _layer_piece(rest, parameter, f"model.layers.{layer_numbers[int(index)]}.", model.config, groups)
            else:
                yield _outer_piece(name, parameter, tied=model.share_embeddings_and_output_weights)


def expected_names(model: Any) -> set[str]:
    """Every tensor a checkpoint of this architecture holds. ``model``: any chunk, unwrapped."""
    config = model.config
    names = {"model.embed_tokens.weight", "model.norm.weight"}
    if not model.share_embeddings_and_output_weights:
        names.add("lm_head.weight")
    inner = [f"self_attn.{side}_proj.weight" for side in "qkvo"]
    inner += ["input_layernorm.weight", "post_attention_layernorm.weight"]
    if config.add_qkv_bias:
        inner += [f"self_attn.{side}_proj.bias" for side in "qkv"]
    if config.qk_layernorm:
        inner += ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
    stems = ["mlp."]
    if config.num_moe_experts:
        inner.append("mlp.gate.weight")
        stems = [f"mlp.experts.{number}." for number in range(config.num_moe_experts)]
    inner += [f"{stem}{side}_proj.weight" for stem in stems for side in ("gate", "up", "down")]
    return names | {f"model.layers.{layer}.{name}" for layer in range(config.num_layers) for name in inner}


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
    "mlp.router.weight": ("mlp.gate.weight", None),
}
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")


def _outer_piece(name: str, parameter: torch.nn.Parameter, tied: bool) -> Piece:
    if name == "embedding.word_embeddings.weight":
        return _single(parameter, "model.embed_tokens.weight", 0)
    if name == "decoder.final_layernorm.weight":
        return _single(parameter, "model.norm.weight", None)
    assert name == "output_layer.weight", f"parameter {name} has no Hugging Face name"
    return _single(parameter, "model.embed_tokens.weight" if tied else "lm_head.weight", 0, owner=not tied)


def _layer_piece(name: str, parameter: torch.nn.Parameter, prefix: str, config: Any, groups: ParallelGroups) -> Piece:
    if name in _LAYER_NAMES:
        hf_name, dim = _LAYER_NAMES[name]
        return _single(parameter, prefix + hf_name, dim)
    if expert := _EXPERT.fullmatch(name):
        # Rank r of the expert-parallel group holds the r-th run of experts.
        per_rank = config.num_moe_experts // groups.ep_size
        numbers = [rank * per_rank + int(expert[1]) for rank in range(groups.ep_size)]
        every = [_mlp(expert[2], parameter, f"{prefix}mlp.experts.{number}.") for number in numbers]
        return replace(every[groups.ep_rank], expert_names=tuple(piece.names for piece in every))
    if name in ("mlp.linear_fc1.weight", "mlp.linear_fc2.weight"):
        return _mlp(name.removeprefix("mlp."), parameter, f"{prefix}mlp.")
    kind = name.removeprefix("self_attention.linear_qkv.")
    assert kind in ("weight", "bias"), f"parameter {prefix}{name} has no Hugging Face name"
    names = tuple(f"{prefix}self_attn.{side}_proj.{kind}" for side in "qkv")
    join, split = _qkv(config)
    return Piece(parameter, names, join, split, 0, tuple(parameter.shape))


def _mlp(matrix: str, parameter: torch.nn.Parameter, stem: str) -> Piece:
    if matrix == "linear_fc2.weight":
        return _single(parameter, f"{stem}down_proj.weight", 1)
    assert matrix == "linear_fc1.weight", f"parameter {stem}{matrix} has no Hugging Face name"
    names = (f"{stem}gate_proj.weight", f"{stem}up_proj.weight")
    shape = (2, parameter.shape[0] // 2, parameter.shape[1])
    return Piece(parameter, names, torch.stack, lambda whole: list(whole.unbind(0)), 1, shape)


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
