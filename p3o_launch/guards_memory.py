"""603: does the preset fit the declared GPU? The arithmetic is ``memory.py``; the formula is in docs/memory.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from p3o_launch.diagnostics import Finding, Severity
from p3o_launch.guard_tools import named
from p3o_launch.guards import GuardContext, guard
from p3o_launch.guards_evaluation import length_is_refused
from p3o_launch.guards_moe import experts_not_divisible, router_out_of_range
from p3o_launch.guards_resources import logits_memory
from p3o_launch.guards_stages import layers_do_not_fill_stages
from p3o_launch.guards_topology import query_groups_not_divisible
from p3o_launch.hardware import find_gpu
from p3o_launch.memory import GIB, Bar, bars

if TYPE_CHECKING:
    from p3o_launch.schema import Preset

# What mends the largest part of a bar.
_REMEDIES = {
    "weights": ("parallel.tensor_model_parallel_size", "raise parallel.tensor_model_parallel_size"),
    "rollout weights": ("parallel.tensor_model_parallel_size", "raise parallel.tensor_model_parallel_size"),
    "gradients": ("parallel.tensor_model_parallel_size", "raise parallel.tensor_model_parallel_size"),
    "optimizer": ("parallel.use_distributed_optimizer", "set parallel.use_distributed_optimizer: true"),
    "activations": ("parallel.recompute_granularity", "set parallel.recompute_granularity: full"),
    "logits": ("rollout.max_response_len", "raise parallel.tensor_model_parallel_size, or shorten responses"),
    "key/value cache": ("rollout.max_response_len", "lower rollout.max_response_len"),
}


@guard(
    "P3O603",
    "memory-budget",
    Severity.WARNING,
    why="Weights, gradients, Adam's state and the rollout copy stay on the GPU for the whole run; activations and "
    "logits of the longest samples, or the key/value cache, come on top. A run that does not fit ends when responses "
    "grow, not when it starts. The CUDA context, buffers and fragmentation are left out: the estimate is a lower "
    "bound.",
    fix="Split the model (tensor or pipeline parallel), use the distributed optimizer, recompute activations, lower "
    "the micro-batch, or declare a larger GPU.",
    source="docs/memory.md; activations after arXiv:2205.05198, section 4",
    allows="An estimate within the declared GPU's memory; a GPU that is not declared, not known, or sold in several "
    "sizes without one in its name; engines of their own that take memory by gpu_memory_utilization.",
    ignorable=True,
)
def memory_budget(context: GuardContext) -> Iterator[Finding]:
    preset, sizes = context.preset, context.topology
    gpu = find_gpu(preset.cluster.gpu)
    if preset.cluster.device != "cuda" or gpu is None or gpu.memory_gib is None or sizes.dp is None:
        return
    room = gpu.memory_gib * GIB
    bar = max(bars(preset, sizes), key=lambda bar: bar.total)
    if bar.total <= room or any(logits_memory(context)) or _rests_on_a_refused_figure(context):
        return
    path, hint = _remedy(bar, context)
    yield Finding(
        path,
        f"{bar.name} needs about {bar.total / GIB:.0f} GiB per GPU ({shares(bar)}); {named(preset, 'cluster.gpu')} has "
        f"{gpu.memory_gib} GiB",
        hint,
        related=("cluster.gpu", "cluster.gpus_per_node", "model.num_layers", "model.hidden_size", "model.vocab_size"),
    )


def _rests_on_a_refused_figure(context: GuardContext) -> bool:
    """A number of layers, heads, experts or tokens that has to change anyway."""
    figures = (query_groups_not_divisible, layers_do_not_fill_stages, experts_not_divisible, router_out_of_range)
    return length_is_refused(context) or any(True for body in figures for _ in body(context))


def _remedy(bar: Bar, context: GuardContext) -> tuple[str, str]:
    """The setting that moves the largest part which still can be moved, and what to do with it."""
    preset, sizes = context.preset, context.topology
    for part, _ in sorted(bar.parts, key=lambda item: -item[1]):
        spread = preset.parallel.use_distributed_optimizer or (sizes.dp or 1) * sizes.cp == 1
        if (part == "optimizer" and spread) or (part == "activations" and _recomputes_all(preset)):
            continue
        if part in ("logits", "activations") and preset.batch.micro_batch_size > 1:
            return "batch.micro_batch_size", "lower batch.micro_batch_size"
        if part == "activations" and preset.parallel.recompute_granularity == "full":
            return "parallel.recompute_num_layers", "raise parallel.recompute_num_layers"
        return _REMEDIES[part]
    return _REMEDIES["weights"]


def _recomputes_all(preset: Preset) -> bool:
    """No layer keeps more than its block's input: always with uniform blocks, else where enough layers are named."""
    parallel = preset.parallel
    stage = -(-preset.model.num_layers // parallel.pipeline_model_parallel_size)
    named_layers = parallel.recompute_num_layers or 1
    uniform = parallel.recompute_method != "block"
    return parallel.recompute_granularity == "full" and (uniform or named_layers >= stage)


def shares(bar: Bar) -> str:
    """``weights 7.5, gradients 15.0``: the parts in GiB, those that round to 0 left out."""
    shown = [f"{name} {size / GIB:.1f}" for name, size in bar.parts if size / GIB >= 0.05]
    return ", ".join(shown) or "every part below 0.1"
