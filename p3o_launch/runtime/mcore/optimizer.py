"""Megatron's optimizer and learning-rate schedule from a preset.

Plain Adam on the CPU (and wherever ``use_distributed_optimizer`` is off); Megatron's distributed optimizer on GPUs that
ask for it (written for A100, not run here). On the CPU plain Adam takes its place on purpose: without
Transformer Engine the distributed one shares a step counter between parameters after a load, and Adam drifts.
"""

from __future__ import annotations

from typing import Any

import torch

from p3o_launch.runtime.mcore.compat import filter_arguments, quiet_import
from p3o_launch.runtime.mcore.config import params_dtype
from p3o_launch.schema import Optimizer, Parallel, Precision


def build_optimizer(
    chunks: list[torch.nn.Module], optimizer: Optimizer, precision: Precision, parallel: Parallel, device: str
) -> Any:
    """Megatron's optimizer over the wrapped chunks. Call it inside ``device_backend``.

    AdamW with decoupled weight decay; norms and biases are not decayed. float64 weights get float64 moments.
    """
    module = quiet_import("megatron.core.optimizer")
    config = module.OptimizerConfig(
        optimizer=optimizer.optimizer,
        lr=optimizer.lr,
        min_lr=optimizer.min_lr,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.adam_beta1,
        adam_beta2=optimizer.adam_beta2,
        adam_eps=optimizer.adam_eps,
        clip_grad=optimizer.clip_grad,
        bf16=precision.bf16,
        fp16=precision.fp16,
        params_dtype=params_dtype(precision),
        use_distributed_optimizer=parallel.use_distributed_optimizer and device != "cpu",
        overlap_param_gather=parallel.overlap_param_gather,
    )
    extra = filter_arguments(module.get_megatron_optimizer, {"use_gloo_process_groups": False})
    return module.get_megatron_optimizer(config, chunks, **extra)


def zero_gradients(chunks: list[Any], optimizer: Any) -> None:
    """Clear what the previous step left. Both halves are needed: after a step Megatron's plain optimizer has made each
    ``param.grad`` the main gradient itself, and a backward would then add the main gradient to itself."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()


def build_scheduler(optimizer: Any, settings: Optimizer, total_steps: int) -> Any:
    """Megatron's ``OptimizerParamScheduler``, counted in optimizer steps: call ``step(1)`` after each.

    As in Megatron, the rate rises from 0 over the first ``lr_warmup_fraction`` of the run, so the very first step has
    rate 0 when there is a warm-up; then it decays to ``min_lr`` at the run's end.
    """
    scheduler = quiet_import("megatron.core.optimizer_param_scheduler").OptimizerParamScheduler
    total = max(total_steps, 1)
    return scheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=min(int(settings.lr_warmup_fraction * total), total - 1),
        lr_decay_steps=total,
        lr_decay_style=settings.lr_decay_style,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=total,
        wd_incr_style="constant",
    )
