"""3xx, how layers fill pipeline stages, and what a stage keeps for the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from p3o_launch.diagnostics import Finding
from p3o_launch.guard_tools import (
    ARGUMENTS,
    CONFIG,
    both,
    counted,
    divisors,
    either,
    named,
    nearest,
)
from p3o_launch.guards import GuardContext, guard

if TYPE_CHECKING:
    from p3o_launch.schema import Preset


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
            f"{named(preset, 'model.num_layers')}: {counted(layers % pp, 'layer')} would be left over",
            f"use {either(nearest(legal, pp))}, or set parallel.decoder_first_pipeline_num_layers",
            related=("model.num_layers", "parallel.num_layers_per_virtual_pipeline_stage"),
        )
    elif chunk is not None and layers // pp % chunk != 0:
        yield Finding(
            "parallel.num_layers_per_virtual_pipeline_stage",
            f"{named(preset, 'parallel.num_layers_per_virtual_pipeline_stage')} does not divide the "
            f"{counted(layers // pp, 'layer')} of a stage ({named(preset, 'model.num_layers')} / "
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
        even = layers % (pp * parallel.num_layers_per_virtual_pipeline_stage) == 0
        yield Finding(
            path,
            f"{named(preset, path)} cannot be combined with {written}: the stages have different numbers of layers",
            f"remove {path}" + (f", or remove {both(given)}" if even else ""),
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
        made = f"{counted(count, 'micro-batch', 'es')} per step {'is' if count == 1 else 'are'}"
        yield Finding(
            path,
            f"{named(preset, path)} asks for the interleaved schedule, but {made} no multiple of "
            f"{named(preset, 'parallel.pipeline_model_parallel_size')}",
            f"{mend}remove {path}",
            related=("parallel.pipeline_model_parallel_size", "batch.micro_batch_size", "batch.global_batch_size"),
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
            f"remove {layers}, or set {path}: full"
            + ("" if parallel.recompute_method else " and parallel.recompute_method: uniform"),
            related=(path,),
        )
