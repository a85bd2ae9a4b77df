"""3xx, how a rollout is cut into optimizer steps, micro-batches and sequences that can be split."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from p3o_launch.diagnostics import Finding
from p3o_launch.guard_tools import (
    ARGUMENTS,
    SIZES,
    beside,
    divisors,
    either,
    named,
    nearest,
)
from p3o_launch.guards import GuardContext, guard
from p3o_launch.guards_evaluation import length_is_refused

if TYPE_CHECKING:
    pass


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
    related = tuple(f"parallel.{field}" for field in SIZES if getattr(preset.parallel, field) > 1)
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
    if budget is not None and length_is_refused(context):
        return
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
    if preset.batch.global_batch_size % dp != 0:
        return  # P3O302: the data-parallel size suits neither
    yield Finding(
        "batch.rollout_batch_size",
        f"{named(preset, 'batch.rollout_batch_size')} is not divisible by the data-parallel size ({dp})",
        f"use {either(_legal_rollout_batches(context, dp))}",
        related=tuple(f"parallel.{field}" for field in SIZES),
    )
