"""3xx, how a model is spread over ranks: whole numbers that must divide each other.

Every hint names the nearest values that do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from p3o_launch.diagnostics import Finding
from p3o_launch.guard_tools import (
    ARGUMENTS,
    CONFIG,
    SIZES,
    both,
    divisors,
    either,
    named,
    nearest,
    up_to,
    value_at,
)
from p3o_launch.guards import GuardContext, guard

if TYPE_CHECKING:
    from p3o_launch.schema import Preset


# Every divisor of a number of GPUs that occurs; of an odd one, the nearest.
_ALL_OF_A_LIST = 12


@guard(
    "P3O301",
    "parallel-sizes-do-not-divide-gpus",
    why="The ranks are laid out as tensor x pipeline x context x data. When the first three do not divide the number "
    "of GPUs there is no whole number of data-parallel replicas.",
    fix="Choose sizes whose product divides cluster.num_nodes x cluster.gpus_per_node.",
    source=f"world size check in {ARGUMENTS}",
)
def parallel_sizes_do_not_divide_gpus(context: GuardContext) -> Iterator[Finding]:
    preset, sizes = context.preset, context.topology
    if sizes.dp is not None:
        return
    field, legal = _size_to_change(context)
    related = tuple(f"parallel.{f}" for f in SIZES if f != field and getattr(preset.parallel, f) > 1)
    path = f"parallel.{field}"
    product = sizes.tp * sizes.pp * sizes.cp
    subject = named(preset, path)
    if related:
        subject += f" x {' x '.join(named(preset, other) for other in related)} = {product}"
    yield Finding(
        path,
        f"{subject} does not divide {_world(preset)}",
        f"use {either(legal)}" if legal else f"choose sizes whose product is {either(divisors(sizes.world_size))}",
        related=(*related, "cluster.gpus_per_node", "cluster.num_nodes"),
    )


def _world(preset: Preset) -> str:
    cluster = preset.cluster
    if cluster.num_nodes == 1:
        return named(preset, "cluster.gpus_per_node")
    world = cluster.num_nodes * cluster.gpus_per_node
    return f"{named(preset, 'cluster.num_nodes')} x {named(preset, 'cluster.gpus_per_node')} = {world}"


def _size_to_change(context: GuardContext) -> tuple[str, list[int]]:
    """The size to blame and the values that mend it alone; no values when one change is not enough."""
    parallel, world = context.preset.parallel, context.topology.world_size
    values = {field: getattr(parallel, field) for field in SIZES}
    product = math.prod(values.values())

    def blame(field: str) -> tuple[bool, int]:
        # A size that does not divide by itself comes first, then the largest.
        return (world % values[field] != 0, values[field])

    mended = {}
    for field, value in values.items():
        rest = product // value
        if value > 1 and world % rest == 0:
            mended[field] = divisors(world // rest)
    if not mended:
        return max(SIZES, key=blame), []
    field = max(mended, key=blame)
    return field, _suitable(context, field, mended[field])


def _suitable(context: GuardContext, field: str, legal: list[int]) -> list[int]:
    """Those of the ``legal`` sizes that break no other relation, where there are any."""
    preset, sizes = context.preset, context.topology
    batch, others = preset.batch, 1
    for other in SIZES:
        others *= 1 if other == field else getattr(preset.parallel, other)

    def batch_divides(size: int) -> bool:
        dp = sizes.world_size // (others * size)
        micro = 1 if batch.use_dynamic_batch_size else batch.micro_batch_size
        return batch.global_batch_size % (dp * micro) == 0 and batch.rollout_batch_size % dp == 0

    def model_divides(size: int) -> bool:
        if field == "tensor_model_parallel_size":
            return _tp_fits_model(preset, size)
        layers = preset.model.num_layers if field == "pipeline_model_parallel_size" else size
        return bool(layers % size == 0)

    fitting = [size for size in legal if model_divides(size)] or legal
    return [size for size in fitting if batch_divides(size)] or fitting


def _tp_fits_heads(preset: Preset, tp: int) -> bool:
    return preset.model.num_attention_heads % tp == 0 and _tp_fits_groups(preset, tp)


def _tp_fits_model(preset: Preset, tp: int) -> bool:
    return _tp_fits_heads(preset, tp) and not _uneven_widths(preset, tp)


def _tp_fits_groups(preset: Preset, tp: int) -> bool:
    groups = preset.model.num_query_groups
    return groups is None or groups % tp == 0 or tp % groups == 0


def _legal_tensor_sizes(context: GuardContext) -> list[int]:
    """Tensor-parallel sizes that suit the GPUs, given the other sizes, and the model's widths. 1 always does."""
    sizes = context.topology
    rest = sizes.pp * sizes.cp
    legal = [tp for tp in divisors(sizes.world_size // rest) if _tp_fits_model(context.preset, tp)]
    return _suitable(context, "tensor_model_parallel_size", legal)


@guard(
    "P3O306",
    "heads-not-divisible",
    why="Heads are of equal width, and tensor parallelism gives each rank a whole number of them.",
    fix="Choose a tensor-parallel size that divides num_attention_heads, and write kv_channels where hidden_size is "
    "not a multiple of the heads.",
    source=f"num_attention_heads in {CONFIG}",
    allows="Heads whose width is written out (kv_channels), whatever hidden_size is.",
)
def heads_not_divisible(context: GuardContext) -> Iterator[Finding]:
    preset, sizes = context.preset, context.topology
    model = preset.model
    if model.kv_channels is None and model.hidden_size % model.num_attention_heads != 0:
        yield Finding(
            "model.num_attention_heads",
            f"{named(preset, 'model.num_attention_heads')} does not divide {named(preset, 'model.hidden_size')}, and "
            "model.kv_channels is absent",
            "set model.kv_channels to the checkpoint's head_dim, or correct the number of heads",
            related=("model.hidden_size", "model.kv_channels"),
        )
        return
    if sizes.dp is None or model.num_attention_heads % sizes.tp == 0:
        return
    if model.num_query_groups is not None and model.num_attention_heads % model.num_query_groups != 0:
        return  # P3O307: the number of heads, or of groups, is another one
    yield Finding(
        "parallel.tensor_model_parallel_size",
        f"{named(preset, 'parallel.tensor_model_parallel_size')} does not divide "
        f"{named(preset, 'model.num_attention_heads')}",
        f"use {either(_legal_tensor_sizes(context))}",
        related=("model.num_attention_heads",),
    )


@guard(
    "P3O307",
    "query-groups-not-divisible",
    why="A rank owns whole key/value groups, or several ranks share one. A tensor-parallel size that is neither a "
    "divisor nor a multiple of the groups would cut a group apart.",
    fix="Choose a tensor-parallel size that divides num_query_groups or is a multiple of it.",
    source=f"num_query_groups in {CONFIG}; https://github.com/ISEEKYAN/Megatron-LM/pull/91",
    allows="A tensor-parallel size that is a multiple of num_query_groups: the groups are replicated.",
)
def query_groups_not_divisible(context: GuardContext) -> Iterator[Finding]:
    preset, sizes = context.preset, context.topology
    groups, heads = preset.model.num_query_groups, preset.model.num_attention_heads
    if groups is not None and heads % groups != 0:
        yield Finding(
            "model.num_query_groups",
            f"{named(preset, 'model.num_query_groups')} does not divide {named(preset, 'model.num_attention_heads')}: "
            "heads cannot share key/value groups evenly",
            f"use {either(nearest(divisors(heads), groups))}, as the checkpoint's num_key_value_heads",
            related=("model.num_attention_heads",),
        )
    elif sizes.dp is not None and heads % sizes.tp == 0 and not _tp_fits_groups(preset, sizes.tp):
        yield Finding(
            "parallel.tensor_model_parallel_size",
            f"{named(preset, 'parallel.tensor_model_parallel_size')} is neither a divisor nor a multiple of "
            f"{named(preset, 'model.num_query_groups')}",
            f"use {either(_legal_tensor_sizes(context))}",
            related=("model.num_query_groups",),
        )


@guard(
    "P3O309",
    "sequence-parallel-without-tensor-parallel",
    why="Sequence parallelism splits activations over the tensor-parallel ranks. With one of them there is nothing to "
    "split, and Megatron refuses the combination after the processes have started.",
    fix="Set parallel.sequence_parallel: false, or a tensor-parallel size above 1.",
    source="https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/model_parallel_config.py",
)
def sequence_parallel_without_tensor_parallel(context: GuardContext) -> Iterator[Finding]:
    if context.preset.parallel.sequence_parallel and context.topology.tp == 1:
        yield Finding(
            "parallel.sequence_parallel",
            "parallel.sequence_parallel is true with parallel.tensor_model_parallel_size (1)",
            "set parallel.sequence_parallel: false",
            related=("parallel.tensor_model_parallel_size",),
        )


@guard(
    "P3O314",
    "engine-gpus-not-divisible",
    why="Every rollout engine takes num_gpus_per_engine GPUs. What is left over serves no engine, and more GPUs than "
    "the cluster has are waited for without end.",
    fix="Choose num_gpus_per_engine as a divisor of the rollout GPUs.",
    source="--rollout-num-gpus and --rollout-num-gpus-per-engine of slime and Relax",
)
def engine_gpus_not_divisible(context: GuardContext) -> Iterator[Finding]:
    preset, world = context.preset, context.topology.world_size
    gpus = preset.rollout.num_gpus if preset.rollout.num_gpus is not None else world
    per_engine, path = preset.rollout.num_gpus_per_engine, "rollout.num_gpus_per_engine"
    if gpus > world:
        yield Finding(
            "rollout.num_gpus",
            f"{named(preset, 'rollout.num_gpus')} is more than {_world(preset)}",
            f"use {up_to(world, 'fewer')}",
            related=("cluster.gpus_per_node", "cluster.num_nodes"),
        )
    elif gpus % per_engine != 0:
        builtin = preset.rollout.engine == "megatron"
        total = "rollout.num_gpus" if preset.rollout.num_gpus is not None else "the GPUs of the cluster"
        yield Finding(
            path,
            f"{named(preset, path)} does not divide {total} ({gpus})",
            # The builtin engine is laid out as the trainer: P3O119.
            f"use {either([1] if builtin else nearest(divisors(gpus), per_engine, _ALL_OF_A_LIST))}",
            related=("rollout.num_gpus", "cluster.gpus_per_node"),
        )


@guard(
    "P3O316",
    "width-not-divisible",
    why="Tensor parallelism cuts the feed-forward layer and the vocabulary into equal slices, one per rank; expert "
    "tensor parallelism does so with each expert.",
    fix="Choose a tensor-parallel size that divides ffn_hidden_size and vocab_size, and for experts their width.",
    source=f"ffn_hidden_size in {CONFIG}; --make-vocab-size-divisible-by in {ARGUMENTS}",
)
def width_not_divisible(context: GuardContext) -> Iterator[Finding]:
    preset, sizes = context.preset, context.topology
    if sizes.dp is None or not _tp_fits_heads(preset, sizes.tp):
        return
    uneven = _uneven_widths(preset, sizes.tp)
    if uneven:
        yield Finding(
            "parallel.tensor_model_parallel_size",
            f"{named(preset, 'parallel.tensor_model_parallel_size')} does not divide "
            f"{both(named(preset, path) for path in uneven)}",
            f"use {either(_legal_tensor_sizes(context))}",
            related=(*uneven, "model.num_experts") if "model.moe_ffn_hidden_size" in uneven else tuple(uneven),
        )
    path, width = "parallel.expert_tensor_parallel_size", _expert_width(preset)
    etp = preset.parallel.expert_tensor_parallel_size
    if etp is not None and preset.model.num_experts is not None and _width(preset, width) % etp:
        if sizes.world_size // sizes.pp % etp != 0:
            return  # P3O311
        ranks = sizes.world_size // (sizes.pp * preset.parallel.expert_model_parallel_size)
        legal = [size for size in divisors(max(1, ranks)) if _width(preset, width) % size == 0]
        yield Finding(
            path,
            f"{named(preset, path)} does not divide {named(preset, width)}",
            f"use {either(legal)}",
            related=(width, "model.num_experts"),
        )


def _expert_width(preset: Preset) -> str:
    return f"model.{'ffn_hidden_size' if preset.model.moe_ffn_hidden_size is None else 'moe_ffn_hidden_size'}"


def _width(preset: Preset, path: str) -> int:
    """An integer setting that is there."""
    value = value_at(preset, path)
    assert isinstance(value, int)
    return value


def _uneven_widths(preset: Preset, tp: int) -> list[str]:
    """Widths that ``tp`` ranks do not share evenly; of experts that of one, unless they have ranks of their own."""
    model, etp = preset.model, preset.parallel.expert_tensor_parallel_size
    paths = ["model.vocab_size"]
    # Whether there are experts is asked only where it decides: imported configurations often leave it open.
    if (model.moe_ffn_hidden_size is None and etp is None) or model.num_experts is None:
        paths.insert(0, "model.ffn_hidden_size")
    elif etp is None:
        paths.insert(0, _expert_width(preset))
    return [path for path in paths if _width(preset, path) % tp]


@guard(
    "P3O318",
    "overlap-without-distributed-optimizer",
    why="Parameters are gathered only where the distributed optimizer has spread them, and Megatron overlaps that with "
    "the forward pass only when the gradient reduction is overlapped too.",
    fix="Set parallel.use_distributed_optimizer and parallel.overlap_grad_reduce, or leave overlap_param_gather out.",
    source=f"--overlap-param-gather in {ARGUMENTS}",
)
def overlap_without_distributed_optimizer(context: GuardContext) -> Iterator[Finding]:
    parallel, path = context.preset.parallel, "parallel.overlap_param_gather"
    needed = [f"parallel.{f}" for f in ("use_distributed_optimizer", "overlap_grad_reduce") if not getattr(parallel, f)]
    on_cpu = context.preset.cluster.device == "cpu"
    if parallel.overlap_param_gather and needed:
        yield Finding(
            path,
            f"{path} is true without {both(needed)}",
            # On the CPU the builtin runtime has no distributed optimizer: P3O119.
            f"set {path}: false" if on_cpu else "set " + both(f"{other}: true" for other in needed),
            related=tuple(needed),
        )
