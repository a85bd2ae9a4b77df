"""What differs between the megatron-core versions this package runs on (0.16 to 0.19): one place.

Measured on 0.16.1; the branches for later versions follow their source. No other module asks which version runs.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist


def quiet_import(name: str) -> ModuleType:
    """Import a megatron module without its notices about absent Apex and Transformer Engine.

    Both are absent on purpose on the CPU, and ``have_transformer_engine`` reports what is there.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_module(name)


def have_transformer_engine() -> bool:
    """Whether megatron-core found Transformer Engine, and so can build its layer spec."""
    return bool(quiet_import("megatron.core.models.gpt.gpt_layer_specs").HAVE_TE)


def accepts(function: Callable[..., Any], parameter: str) -> bool:
    """Whether ``function`` takes ``parameter`` by name."""
    return parameter in inspect.signature(function).parameters


def cp_batch_split(batch: dict[str, torch.Tensor], cp_group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    """Megatron's own zig-zag split of ``batch`` ([b, s] tensors) over the context-parallel group.

    0.19 needs ``is_hybrid_cp``, and reads ``cp_group=None`` as the whole world: the group is always passed.
    """
    split = quiet_import("megatron.core.utils").get_batch_on_this_cp_rank
    extra = {"is_hybrid_cp": False} if accepts(split, "is_hybrid_cp") else {}
    result: dict[str, torch.Tensor] = split(dict(batch), cp_group=cp_group, **extra)
    return result


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor, tp_group: dist.ProcessGroup) -> torch.Tensor:
    """Megatron's vocab-parallel cross entropy: ``logits`` [s, b, v/tp] and ``targets`` [s, b] -> [s, b], float32."""
    function = quiet_import("megatron.core.tensor_parallel.cross_entropy").vocab_parallel_cross_entropy
    extra = {"tp_group": tp_group} if accepts(function, "tp_group") else {}
    result: torch.Tensor = function(logits, targets, **extra)
    return result


def all_gather_single(output: torch.Tensor, local: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Concatenate ``local`` of every rank on dim 0 into ``output``. torch 2.13 renamed the function."""
    function = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    function(output, local, group=group)


def reduce_scatter_single(output: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sum ``whole`` over the ranks and keep this rank's rows in ``output``. torch 2.13 renamed the function."""
    function = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    function(output, whole, group=group)


def filter_arguments(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """The part of ``arguments`` that this version's ``function`` knows."""
    known = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in known}
