"""3xx: whole numbers that must divide each other. Every hint names the nearest values that do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from p3o_launch.diagnostics import Finding
from p3o_launch.guard_tools import ARGUMENTS, CONFIG, beside, both, divisors, either, named, nearest
from p3o_launch.guards import GuardContext, guard

if TYPE_CHECKING:
    from p3o_launch.schema import Preset

_EXPERT = "parallel.expert_model_parallel_size"
_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")


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
    related = tuple(f"parallel.{f}" for f in _SIZES if f != field and getattr(preset.parallel, f) > 1)
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
    values = {field: getattr(parallel, field) for field in _SIZES}
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
        return max(_SIZES, key=blame), []
    field = max(mended, key=blame)
    return field, _suitable(context, field, mended[field])


def _suitable(context: GuardContext, field: str, legal: list[int]) -> list[int]:
    """Those of the ``legal`` sizes that break no other relation, where there are any."""
    preset, sizes = context.preset, context.topology
    batch, others = preset.batch, 1
    for other in _SIZES:
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


@guard(
    "P3O302",
    "global-batch-not-divisible",
    why="Every data-parallel rank takes the same number of micro-batches of an optimizer step. Data-parallel size is "
    "GPUs / (tensor x pipeline x context), not the number of GPUs.",
    fix="Make batch.global_batch_size a multiple of micro_batch_size x data-parallel size.",
    source=f"micro-batch calculator of Megatron; --global-batch-size in {ARGUMENTS}",
    allows="A global batch that the data-parallel size divides although the number of GPUs does not. Under a token "
    "budget micro_batch_size is not read.",
)
def global_batch_not_divisible(context: GuardContext) -> Iterator[Finding]:
    unit, dp, preset = _step_unit(context), context.topology.dp, context.preset
    batch = preset.batch
    if unit is None or dp is None or batch.global_batch_size % unit == 0:
        return
    related = tuple(f"parallel.{field}" for field in _SIZES if getattr(preset.parallel, field) > 1)
    relation = f"data-parallel size ({dp})"
    if batch.global_batch_size % dp == 0:
        share = batch.global_batch_size // dp
        yield Finding(
            "batch.micro_batch_size",
            f"{named(preset, 'batch.micro_batch_size')} x {relation} = {unit} does not divide "
            f"{named(preset, 'batch.global_batch_size')}",
            f"use {either(nearest(divisors(share), batch.micro_batch_size))}",
            related=("batch.global_batch_size", *related),
        )
        return
    if not batch.use_dynamic_batch_size and batch.micro_batch_size > 1:
        relation = f"{named(preset, 'batch.micro_batch_size')} x {relation} = {unit}"
    yield Finding(
        "batch.global_batch_size",
        f"{named(preset, 'batch.global_batch_size')} is not divisible by {relation}",
        f"use {either(_legal_global_batches(context, unit))}",
        related=("batch.micro_batch_size", *related),
    )


def _step_unit(context: GuardContext) -> int | None:
    """Samples that one micro-batch takes on all data-parallel ranks together; None when P3O301 has spoken."""
    dp = context.topology.dp
    if dp is None:
        return None
    return dp if context.preset.batch.use_dynamic_batch_size else dp * context.preset.batch.micro_batch_size


def _legal_global_batches(context: GuardContext, unit: int) -> list[int]:
    """The nearest global batches that a step can be cut into, and that use up a rollout if any does."""
    samples, target = context.topology.samples_per_rollout, context.preset.batch.global_batch_size
    whole = [size for size in divisors(samples) if size % unit == 0]
    return nearest(whole, target) if whole else beside(target, unit)


@guard(
    "P3O303",
    "rollout-does-not-fill-steps",
    why="A rollout is cut into optimizer steps of global_batch_size samples. A remainder would be generated, scored "
    "and dropped; a rollout smaller than a step makes no step at all.",
    fix="Make rollout_batch_size x n_samples_per_prompt a multiple of global_batch_size.",
    source="https://github.com/radixark/miles/pull/1929 (builds that allow a partial step)",
    allows="Several optimizer steps per rollout.",
)
def rollout_does_not_fill_steps(context: GuardContext) -> Iterator[Finding]:
    preset, samples, unit = context.preset, context.topology.samples_per_rollout, _step_unit(context) or 1
    step = preset.batch.global_batch_size
    if step % unit != 0 or samples % step == 0 or preset.batch.n_samples_per_prompt < 2:
        return  # the number of samples must change anyway: P3O112
    prompts, per_prompt = preset.batch.rollout_batch_size, preset.batch.n_samples_per_prompt
    made = f"batch.rollout_batch_size ({prompts}) x batch.n_samples_per_prompt ({per_prompt}) = {samples} samples"
    if samples < step:
        message = f"{made} never fill batch.global_batch_size ({step}): no optimizer step would be made"
    else:
        message = f"{made} do not divide into steps of batch.global_batch_size ({step}): the last {samples % step} "
        message += "of each rollout would be dropped"
    path, hint = _mend_rollout(context, unit)
    yield Finding(
        path,
        message,
        hint,
        related=("batch.global_batch_size", "batch.rollout_batch_size", "batch.n_samples_per_prompt"),
    )


def _mend_rollout(context: GuardContext, unit: int) -> tuple[str, str]:
    """The setting to blame, and the hint."""
    batch, dp = context.preset.batch, context.topology.dp or 1
    prompts = either(_legal_rollout_batches(context, dp))
    path, hint = "batch.rollout_batch_size", f"use batch.rollout_batch_size {prompts}"
    steps = [size for size in divisors(context.topology.samples_per_rollout) if size % unit == 0]
    if steps and batch.rollout_batch_size % dp == 0:
        path = "batch.global_batch_size"
        hint = f"use {path} {either(nearest(steps, batch.global_batch_size))}, or {hint[4:]}"
    return path, hint


def _legal_rollout_batches(context: GuardContext, dp: int) -> list[int]:
    """The nearest numbers of prompts that fill whole steps and spread evenly over the data-parallel ranks."""
    batch = context.preset.batch
    whole = batch.global_batch_size // math.gcd(batch.global_batch_size, batch.n_samples_per_prompt)
    return beside(batch.rollout_batch_size, math.lcm(whole, dp))


@guard(
    "P3O304",
    "layers-do-not-fill-stages",
    why="Layers per stage and per chunk are whole numbers. Builds that divide with a remainder drop the remaining "
    "layers and train a smaller network with a plausible loss.",
    fix="Make num_layers = pipeline stages x chunks x layers per chunk, or give first and last stage counts that leave "
    "an even rest.",
    source="https://github.com/NVIDIA/Megatron-LM/issues/468",
    allows="An uneven layout whose stages add up to num_layers.",
)
def layers_do_not_fill_stages(context: GuardContext) -> Iterator[Finding]:
    preset, pp = context.preset, context.topology.pp
    if pp == 1 or context.topology.dp is None:
        return
    if preset.parallel.decoder_first_pipeline_num_layers or preset.parallel.decoder_last_pipeline_num_layers:
        yield from _uneven_stages(preset, pp)
    else:
        yield from _even_stages(context)


def _even_stages(context: GuardContext) -> Iterator[Finding]:
    preset, sizes = context.preset, context.topology
    pp, world, others = sizes.pp, sizes.world_size, sizes.tp * sizes.cp
    layers, chunk = preset.model.num_layers, preset.parallel.num_layers_per_virtual_pipeline_stage
    if layers % pp != 0:
        legal = [size for size in divisors(world // others) if layers % size == 0]
        yield Finding(
            "parallel.pipeline_model_parallel_size",
            f"{named(preset, 'parallel.pipeline_model_parallel_size')} does not divide "
            f"{named(preset, 'model.num_layers')}: {layers % pp} layers would be left over",
            f"use {either(nearest(legal, pp))}, or set parallel.decoder_first_pipeline_num_layers",
            related=("model.num_layers", "parallel.num_layers_per_virtual_pipeline_stage"),
        )
    elif chunk is not None and layers // pp % chunk != 0:
        yield Finding(
            "parallel.num_layers_per_virtual_pipeline_stage",
            f"{named(preset, 'parallel.num_layers_per_virtual_pipeline_stage')} does not divide the {layers // pp} "
            f"layers of a stage ({named(preset, 'model.num_layers')} / "
            f"{named(preset, 'parallel.pipeline_model_parallel_size')})",
            f"use {either(nearest(divisors(layers // pp), chunk))}",
            related=("model.num_layers", "parallel.pipeline_model_parallel_size"),
        )


def _uneven_stages(preset: Preset, pp: int) -> Iterator[Finding]:
    parallel, layers = preset.parallel, preset.model.num_layers
    given = {
        f"parallel.{field}": getattr(parallel, field)
        for field in ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
        if getattr(parallel, field) is not None
    }
    written = " and ".join(named(preset, path) for path in given)
    first, *others = given
    related = (*others, "model.num_layers", "parallel.pipeline_model_parallel_size")
    if parallel.num_layers_per_virtual_pipeline_stage is not None:
        path = "parallel.num_layers_per_virtual_pipeline_stage"
        yield Finding(
            path,
            f"{named(preset, path)} cannot be combined with {written}: the stages have different numbers of layers",
            f"remove {path} or {either(given)}",
            related=tuple(given),
        )
        return
    rest, stages = layers - sum(given.values()), pp - len(given)
    if stages == 0 and rest != 0:
        yield Finding(
            first,
            f"{written} add up to {layers - rest} layers, but {named(preset, 'model.num_layers')}",
            f"use {first}: {given[first] + rest}" if given[first] + rest > 0 else "make the stages add up",
            related=related,
        )
    elif stages > 0 and (rest < stages or rest % stages != 0):
        per_stage = max(1, round(rest / stages))
        mended = layers - sum(given[path] for path in others) - per_stage * stages
        yield Finding(
            first,
            f"{written} {'leaves' if len(given) == 1 else 'leave'} {max(rest, 0)} of "
            f"{named(preset, 'model.num_layers')} for {stages} {'stage' if stages == 1 else 'stages of equal size'}",
            f"use {first}: {mended}" if mended > 0 else "leave at least one layer for every stage",
            related=related,
        )


def _tp_fits_heads(preset: Preset, tp: int) -> bool:
    return preset.model.num_attention_heads % tp == 0 and _tp_fits_groups(preset, tp)


def _tp_fits_model(preset: Preset, tp: int) -> bool:
    model = preset.model
    return _tp_fits_heads(preset, tp) and model.ffn_hidden_size % tp == 0 and model.vocab_size % tp == 0


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
    "P3O305",
    "stage-layout-without-pipeline",
    why="Layer counts of the first or last stage, and chunks of a stage, describe a pipeline. With one stage they have "
    "no meaning, and Megatron refuses or ignores them.",
    fix="Remove the stage layout, or set parallel.pipeline_model_parallel_size above 1.",
    source=f"--decoder-first-pipeline-num-layers and --num-layers-per-virtual-pipeline-stage in {ARGUMENTS}",
    ignorable=True,
)
def stage_layout_without_pipeline(context: GuardContext) -> Iterator[Finding]:
    parallel = context.preset.parallel
    if parallel.pipeline_model_parallel_size > 1:
        return
    fields = (
        "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers",
        "num_layers_per_virtual_pipeline_stage",
    )
    written = [f"parallel.{field}" for field in fields if getattr(parallel, field) is not None]
    if written:
        yield Finding(
            written[0],
            f"{both(named(context.preset, path) for path in written)} with parallel.pipeline_model_parallel_size (1): "
            "there are no stages to lay out",
            f"remove {both(written)}",
            related=(*written[1:], "parallel.pipeline_model_parallel_size"),
        )


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
    if sizes.dp is None or preset.model.num_attention_heads % sizes.tp == 0:
        return
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
    "P3O308",
    "sequence-padding-too-fine",
    why="Context parallelism cuts every sequence into 2 x CP chunks, and sequence parallelism into TP parts. A length "
    "that is not a multiple of both cannot be split.",
    fix="Make batch.sequence_padding_multiple a multiple of (2 x CP if CP > 1) x (TP under sequence parallel).",
    source=f"sequence length checks for --context-parallel-size and --sequence-parallel in {ARGUMENTS}",
    allows="CP 1 without sequence parallel: any length will do.",
)
def sequence_padding_too_fine(context: GuardContext) -> Iterator[Finding]:
    preset, sizes = context.preset, context.topology
    multiple, needed = preset.batch.sequence_padding_multiple, sizes.sequence_multiple
    if sizes.dp is None or multiple % needed == 0:
        return
    parts, related = [], []
    if sizes.cp > 1:
        parts.append(f"2 x parallel.context_parallel_size ({sizes.cp})")
        related.append("parallel.context_parallel_size")
    if preset.parallel.sequence_parallel:
        parts.append(f"parallel.tensor_model_parallel_size ({sizes.tp}) under parallel.sequence_parallel")
        related += ["parallel.tensor_model_parallel_size", "parallel.sequence_parallel"]
    path = "batch.sequence_padding_multiple"
    yield Finding(
        # Where the padding was left at 1, the parallel size is what the user wrote.
        path if multiple > 1 else related[0],
        f"{named(preset, path)} is not a multiple of {' x '.join(parts)} = {needed}",
        f"set {path}: {-(-multiple // needed) * needed}",
        related=(path, *related),
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
    "P3O310",
    "micro-batches-do-not-fill-pipeline",
    why="The interleaved schedule sends micro-batches round in groups of PP. A last group that is smaller stops the "
    "first training step, after the model has been loaded.",
    fix="Make the micro-batches of a step a multiple of the pipeline size, or leave virtual stages out.",
    source="https://github.com/NVIDIA-NeMo/Speech/issues/14288",
    allows="The plain schedule with any number of micro-batches; a token budget, under which the runtime rounds the "
    "number up.",
)
def micro_batches_do_not_fill_pipeline(context: GuardContext) -> Iterator[Finding]:
    preset, sizes = context.preset, context.topology
    count, path = sizes.micro_batches_per_step, "parallel.num_layers_per_virtual_pipeline_stage"
    if preset.parallel.num_layers_per_virtual_pipeline_stage is None or sizes.pp == 1 or count is None:
        return
    if count % sizes.pp != 0:
        share = count * preset.batch.micro_batch_size
        micro = [size for size in divisors(share) if share // size % sizes.pp == 0]
        sizes_that_do = either(nearest(micro, preset.batch.micro_batch_size))
        mend = f"use batch.micro_batch_size {sizes_that_do}, or " if micro else ""
        yield Finding(
            path,
            f"{named(preset, path)} asks for the interleaved schedule, but {count} micro-batches per step are not a "
            f"multiple of {named(preset, 'parallel.pipeline_model_parallel_size')}",
            f"{mend}remove {path}",
            related=("parallel.pipeline_model_parallel_size", "batch.micro_batch_size", "batch.global_batch_size"),
        )


@guard(
    "P3O311",
    "experts-not-divisible",
    why="Expert parallelism gives each rank a whole number of experts, and needs ranks of its own to spread them over.",
    fix="Choose an expert-parallel size that divides num_experts and the ranks of one pipeline stage.",
    source=f"--expert-model-parallel-size in {ARGUMENTS}",
)
def experts_not_divisible(context: GuardContext) -> Iterator[Finding]:
    preset, sizes = context.preset, context.topology
    ep, experts, path = preset.parallel.expert_model_parallel_size, preset.model.num_experts, _EXPERT
    if ep == 1 or sizes.dp is None:
        return
    if experts is None:
        yield Finding(
            path,
            f"{named(preset, path)} with model.num_experts absent: a dense model has no experts to spread",
            f"set {path}: 1",
            related=("model.num_experts",),
        )
        return
    etp = preset.parallel.expert_tensor_parallel_size or sizes.tp
    ranks = sizes.world_size // sizes.pp
    if experts % ep == 0 and ranks % (ep * etp) == 0:
        return
    legal = [size for size in divisors(experts) if ranks % (size * etp) == 0]
    relation = named(preset, "model.num_experts")
    if experts % ep == 0:
        relation = f"the {ranks} ranks of a pipeline stage with expert tensor-parallel size {etp}"
    yield Finding(
        path,
        f"{named(preset, path)} does not divide {relation}",
        f"use {either(legal)}" if legal else "set parallel.expert_tensor_parallel_size: 1",
        related=("model.num_experts", "parallel.expert_tensor_parallel_size"),
    )


@guard(
    "P3O312",
    "token-budget-too-small",
    why="Under use_dynamic_batch_size a micro-batch holds at most max_tokens_per_gpu x CP tokens. A sample longer than "
    "that fits in none; without a budget there is nothing to cut by.",
    fix="Set batch.max_tokens_per_gpu to the longest sample divided by CP, or more.",
    source="--max-tokens-per-gpu of slime and Relax",
    allows="A budget below the longest sample that context parallelism makes up for.",
)
def token_budget_too_small(context: GuardContext) -> Iterator[Finding]:
    preset, sizes = context.preset, context.topology
    if not preset.batch.use_dynamic_batch_size:
        return
    budget = preset.batch.max_tokens_per_gpu
    multiple = math.lcm(sizes.sequence_multiple, preset.batch.sequence_padding_multiple)
    longest = _padded(sizes.max_tokens_per_sample, multiple)
    needed = -(-longest // sizes.cp)
    if budget is None:
        yield Finding(
            "batch.use_dynamic_batch_size",
            "batch.use_dynamic_batch_size is true, but batch.max_tokens_per_gpu is absent",
            f"set batch.max_tokens_per_gpu to {needed} or more",
            related=("batch.max_tokens_per_gpu",),
        )
    elif budget * sizes.cp < longest:
        cp = f" x parallel.context_parallel_size ({sizes.cp})" if sizes.cp > 1 else ""
        yield Finding(
            "batch.max_tokens_per_gpu",
            f"{named(preset, 'batch.max_tokens_per_gpu')}{cp} is below the longest sample: rollout.max_prompt_len "
            f"({preset.rollout.max_prompt_len}) + rollout.max_response_len ({preset.rollout.max_response_len}), "
            f"padded to {longest} tokens",
            f"use {needed} or more",
            related=("rollout.max_prompt_len", "rollout.max_response_len", "parallel.context_parallel_size"),
        )


def _padded(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


@guard(
    "P3O313",
    "rollout-batch-not-divisible",
    why="The prompts of a rollout are dealt to the trainer's data-parallel ranks. When they do not divide evenly, "
    "frameworks wait for the missing ones instead of failing.",
    fix="Make batch.rollout_batch_size a multiple of the data-parallel size.",
    source="https://github.com/alibaba/ROLL/pull/135",
    allows="A rollout batch that the data-parallel size divides although the number of GPUs does not.",
    ignorable=True,
)
def rollout_batch_not_divisible(context: GuardContext) -> Iterator[Finding]:
    preset, sizes = context.preset, context.topology
    prompts, dp = preset.batch.rollout_batch_size, sizes.dp
    if dp is None or prompts % dp == 0 or any(rollout_does_not_fill_steps(context)):
        return
    yield Finding(
        "batch.rollout_batch_size",
        f"{named(preset, 'batch.rollout_batch_size')} is not divisible by the data-parallel size ({dp})",
        f"use {either(_legal_rollout_batches(context, dp))}",
        related=tuple(f"parallel.{field}" for field in _SIZES),
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
            f"use {world} or fewer",
            related=("cluster.gpus_per_node", "cluster.num_nodes"),
        )
    elif gpus % per_engine != 0:
        total = "rollout.num_gpus" if preset.rollout.num_gpus is not None else "the GPUs of the cluster"
        yield Finding(
            path,
            f"{named(preset, path)} does not divide {total} ({gpus})",
            f"use {either(nearest(divisors(gpus), per_engine))}",
            related=("rollout.num_gpus", "cluster.gpus_per_node"),
        )


@guard(
    "P3O316",
    "width-not-divisible",
    why="Tensor parallelism cuts the feed-forward layer and the vocabulary into equal slices, one per rank.",
    fix="Choose a tensor-parallel size that divides ffn_hidden_size and vocab_size.",
    source=f"ffn_hidden_size in {CONFIG}; --make-vocab-size-divisible-by in {ARGUMENTS}",
)
def width_not_divisible(context: GuardContext) -> Iterator[Finding]:
    preset, sizes = context.preset, context.topology
    if sizes.dp is None or not _tp_fits_heads(preset, sizes.tp):
        return
    uneven = [
        f"model.{field}" for field in ("ffn_hidden_size", "vocab_size") if getattr(preset.model, field) % sizes.tp
    ]
    if uneven:
        yield Finding(
            "parallel.tensor_model_parallel_size",
            f"{named(preset, 'parallel.tensor_model_parallel_size')} does not divide "
            f"{both(named(preset, path) for path in uneven)}",
            f"use {either(_legal_tensor_sizes(context))}",
            related=tuple(uneven),
        )


@guard(
    "P3O317",
    "recompute-incomplete",
    why="Full recomputation needs a method and a number of layers; selective recomputation takes no number. Megatron "
    "checks it when the model is built, after every rank has started.",
    fix="Full: recompute_method uniform or block, and recompute_num_layers. Selective: leave recompute_num_layers out.",
    source=f"recompute_granularity in {CONFIG}",
)
def recompute_incomplete(context: GuardContext) -> Iterator[Finding]:
    preset, parallel = context.preset, context.preset.parallel
    granularity, path = parallel.recompute_granularity, "parallel.recompute_granularity"
    layers = "parallel.recompute_num_layers"
    if granularity == "full":
        absent = [f for f in ("recompute_method", "recompute_num_layers") if getattr(parallel, f) is None]
        if absent:
            values = {"recompute_method": "uniform", "recompute_num_layers": "1"}
            yield Finding(
                path,
                f"{named(preset, path)} without {both(f'parallel.{f}' for f in absent)}",
                "set " + both(f"parallel.{f}: {values[f]}" for f in absent),
                related=tuple(f"parallel.{f}" for f in absent),
            )
    elif parallel.recompute_num_layers is not None:
        yield Finding(
            layers,
            f"{named(preset, layers)} with {named(preset, path)}: the number of layers belongs to full recomputation",
            f"remove {layers}, or set {path}: full",
            related=(path,),
        )


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
    if parallel.overlap_param_gather and needed:
        yield Finding(
            path,
            f"{path} is true without {both(needed)}",
            "set " + both(f"{other}: true" for other in needed),
            related=tuple(needed),
        )
