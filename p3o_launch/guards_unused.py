"""122: settings that are written and that nothing reads, because what they belong to is off. 123: nothing learns.

The table is about relations inside a preset. What the builtin runtime does not carry out at all is 119's; a setting
that a rule refuses is not reported here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from p3o_launch.diagnostics import Finding, Severity
from p3o_launch.fields import FIELDS
from p3o_launch.guard_tools import both, named, value_at
from p3o_launch.guards import GuardContext, guard
from p3o_launch.guards_runtime import refused_elsewhere

if TYPE_CHECKING:
    from p3o_launch.schema import Preset

_DEFAULT = 3  # place of the default in a row of FIELDS


class Group(NamedTuple):
    """``paths`` are read only where ``reads`` holds, which the setting ``decides``.

    Where that setting is written as off, what is left over is left on purpose; unless it is not off, but names
    something that takes the place of the paths (``instead``).
    """

    decides: str
    reads: Callable[[Preset], bool]
    paths: tuple[str, ...]
    instead: bool = False


def _below(group: str, *fields: str) -> tuple[str, ...]:
    return tuple(f"{group}.{field}" for field in fields)


GROUPS = (
    Group(
        "batch.use_dynamic_batch_size",
        lambda preset: preset.batch.use_dynamic_batch_size,
        ("batch.max_tokens_per_gpu",),
    ),
    Group(
        "batch.use_dynamic_batch_size",
        lambda preset: not preset.batch.use_dynamic_batch_size,
        ("batch.micro_batch_size",),
        instead=True,
    ),
    Group(
        "model.num_experts",
        lambda preset: preset.model.num_experts is not None,
        (
            *_below("model", "moe_router_topk", "moe_ffn_hidden_size", "moe_router_load_balancing_type"),
            *_below("model", "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_input_jitter_eps"),
            *_below("model", "moe_router_force_load_balancing", "moe_router_force_biased"),
            "parallel.expert_tensor_parallel_size",
        ),
    ),
    Group(
        "model.moe_router_load_balancing_type",
        lambda preset: preset.model.num_experts is None or preset.model.moe_router_load_balancing_type != "none",
        ("model.moe_aux_loss_coeff",),
    ),
    Group(
        "model.moe_aux_loss_coeff",
        lambda preset: (
            preset.model.num_experts is None
            or preset.model.moe_router_load_balancing_type == "sinkhorn"
            or preset.model.moe_aux_loss_coeff > 0
        ),
        ("model.moe_router_load_balancing_type",),
    ),
    Group("precision.fp8", lambda preset: preset.precision.fp8 is not None, ("precision.fp8_recipe",)),
    Group(
        "parallel.recompute_granularity",
        lambda preset: preset.parallel.recompute_granularity == "full",
        ("parallel.recompute_method",),
        instead=True,
    ),
    Group(
        "optimizer.lr_decay_style",
        lambda preset: preset.optimizer.lr_decay_style != "constant" or preset.optimizer.min_lr == preset.optimizer.lr,
        ("optimizer.min_lr",),
        instead=True,
    ),
    Group(
        "algorithm.kl_loss_coef",
        # With a weight for the reward instead, the switch is P3O110's.
        lambda preset: preset.algorithm.kl_loss_coef > 0 or preset.algorithm.kl_coef > 0,
        ("algorithm.use_kl_loss",),
        instead=True,
    ),
    Group(
        "algorithm.kl_coef",
        lambda preset: preset.algorithm.kl_coef > 0 or not preset.algorithm.use_kl_in_reward,
        ("algorithm.use_kl_in_reward",),
        instead=True,
    ),
    Group(
        "evaluation.interval",
        lambda preset: preset.evaluation.interval is not None,
        (
            *_below("evaluation", "before_train", "n_samples_per_prompt", "temperature", "top_p", "top_k"),
            *_below("evaluation", "max_response_len", "max_prompts"),
        ),
    ),
    Group(
        "rollout.engine",
        lambda preset: preset.rollout.engine != "megatron",
        _below("rollout", "engine_version", "gpu_memory_utilization", "deterministic_inference"),
    ),
    Group(
        "rollout.enable_prefix_caching",
        lambda preset: preset.rollout.enable_prefix_caching,
        ("rollout.reset_prefix_cache_on_update",),
    ),
    Group(
        "checkpoint.save_interval",
        lambda preset: preset.checkpoint.save_interval is not None,
        ("checkpoint.keep",),
    ),
)


@guard(
    "P3O122",
    "setting-without-effect",
    Severity.WARNING,
    why="The preset writes a setting that belongs to a feature which is off, so nothing reads it. Either the feature "
    "was meant and its switch is missing, or the line is left over and misleads the next reader.",
    fix="Turn the feature on by the setting the message names, or remove the line.",
    source="what the schema's descriptions and the builtin runtime read",
    allows="Values at their default; a feature that is written as off; settings that came through extends, a recipe or "
    "a profile; a feature that a recipe, profile or --set turns off for one run; an adapter's settings at rank 0; "
    "other frameworks' configurations, whose templates write what is off.",
    ignorable=True,
    own=True,
)
def setting_without_effect(context: GuardContext) -> Iterator[Finding]:
    preset = context.preset
    found = [(group, paths) for group in GROUPS if (paths := _left_over(preset, group))]
    if not found:
        return
    refused = refused_elsewhere(context)
    for group, paths in found:
        unused = [path for path in paths if path not in refused]
        if unused:
            verb = "has" if len(unused) == 1 else "have"
            yield Finding(
                unused[0],
                f"{both(named(preset, path) for path in unused)} {verb} no effect with {named(preset, group.decides)}",
                f"remove {both(unused)}",
                related=(*unused[1:], group.decides),
            )


def _left_over(preset: Preset, group: Group) -> list[str]:
    if group.reads(preset) or (not group.instead and _is_written(preset, group.decides)):
        return []
    return [path for path in group.paths if value_at(preset, path) != _default(path)]


def _is_written(preset: Preset, path: str) -> bool:
    group, _, field = path.partition(".")
    return field in getattr(preset, group).model_fields_set


def _default(path: str) -> object:
    group, _, field = path.partition(".")
    return FIELDS[group][field][_DEFAULT]


@guard(
    "P3O123",
    "nothing-learns",
    Severity.WARNING,
    why="With a learning rate of 0 every optimizer step leaves the weights as they are: the run generates, computes "
    "gradients, writes a curve, and learns nothing.",
    fix="Set optimizer.lr above 0. To measure without training, ignore the code with that reason.",
    source="design rule of p3o-launch: what a preset asks for is done or refused",
    allows="Any rate above 0, and a schedule that ends at 0.",
    ignorable=True,
)
def nothing_learns(context: GuardContext) -> Iterator[Finding]:
    optimizer = context.preset.optimizer
    if optimizer.lr == 0 and optimizer.min_lr == 0:
        yield Finding("optimizer.lr", "optimizer.lr (0) leaves the weights as they are: nothing is trained", "use 1e-6")
