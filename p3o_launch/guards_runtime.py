"""119: settings the schema knows, because other frameworks have them, and the builtin runtime does not carry out.

A run that silently left one out would be another run than the preset describes. When the runtime learns a feature, its
line leaves the table. A setting that another rule refuses already is not reported twice; a rule that only warns lets
the run start, and this one must not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from p3o_launch.diagnostics import Finding, Severity
from p3o_launch.guard_tools import both, is_p3o, named, printable, value_at
from p3o_launch.guards import GuardContext, all_guards, guard
from p3o_launch.guards_loss import kl_loss_is_on, kl_reward_is_on
from p3o_launch.sampling_rules import FIELDS, knob_of

if TYPE_CHECKING:
    from p3o_launch.schema import Preset

_CODE = "P3O119"
# Truncation the megatron engine performs; the other sampling settings it does not know.
_ENGINE_KNOWS = ("top_p", "top_k")


class Limit(NamedTuple):
    """``asks``: does the preset use the setting? ``instead``: what the runtime does. ``mend``: the smallest change."""

    path: str
    asks: Callable[[Preset], bool]
    instead: str
    mend: str


def _on(path: str) -> Callable[[Preset], bool]:
    group, _, field = path.partition(".")
    return lambda preset: bool(getattr(getattr(preset, group), field))


def _grpo_without(field: str) -> Callable[[Preset], bool]:
    return lambda preset: not is_p3o(preset) and getattr(preset.algorithm, field) is not True


def _switch(path: str, instead: str) -> Limit:
    return Limit(path, _on(path), instead, f"set {path}: false")


def _value(path: str, instead: str) -> Limit:
    return Limit(path, _on(path), instead, f"remove {path}")


def _on_cpu(path: str, *values: object) -> Callable[[Preset], bool]:
    group, _, field = path.partition(".")
    return lambda preset: preset.cluster.device == "cpu" and getattr(getattr(preset, group), field) in values


def _double_on_gpu(preset: Preset) -> bool:
    return preset.precision.params_dtype == "float64" and preset.cluster.device == "cuda"


def _separate_gpus(preset: Preset) -> bool:
    world = preset.cluster.num_nodes * preset.cluster.gpus_per_node
    return preset.rollout.num_gpus not in (None, world)


LIMITS = (
    Limit(
        "algorithm.use_rollout_logprobs",
        _grpo_without("use_rollout_logprobs"),
        "always divides by the rollout engine's log-probs",
        "set algorithm.use_rollout_logprobs: true",
    ),
    Limit(
        "algorithm.calculate_per_token_loss",
        _grpo_without("calculate_per_token_loss"),
        "always divides by the step's token count",
        "set algorithm.calculate_per_token_loss: true",
    ),
    _switch("algorithm.use_tis", "has no importance correction beside the policy ratio"),
    _switch("algorithm.use_mis", "has no importance correction beside the policy ratio"),
    _value("algorithm.custom_tis_function_path", "has no importance correction beside the policy ratio"),
    _switch("algorithm.use_critic", "trains no value model"),
    _value("algorithm.critic_load", "trains no value model"),
    _switch("algorithm.get_mismatch_metrics", "reports train/grpo/ratio_mean and ratio_std instead"),
    _switch("algorithm.use_opsm", "masks no sequences"),
    _value("algorithm.custom_pg_loss_reducer_function_path", "always divides by the step's token count"),
    _switch("algorithm.use_opd", "has no distillation loss"),
    Limit(
        "algorithm.entropy_coef",
        _on("algorithm.entropy_coef"),
        "reports the entropy and adds no bonus for it",
        "set algorithm.entropy_coef: 0",
    ),
    Limit(
        "algorithm.kl_loss_coef",
        lambda preset: kl_loss_is_on(preset.algorithm),
        "holds no reference model",
        "set algorithm.use_kl_loss: false",
    ),
    Limit(
        "algorithm.kl_coef",
        lambda preset: kl_reward_is_on(preset.algorithm),
        "holds no reference model",
        "set algorithm.use_kl_in_reward: false",
    ),
    Limit("model.lora_rank", _on("model.lora_rank"), "trains all weights", "set model.lora_rank: 0"),
    _value("model.custom_forward_hook_path", "registers no hooks"),
    Limit(
        "model.moe_router_force_biased",
        lambda preset: preset.model.num_experts is not None and bool(preset.model.moe_router_force_biased),
        "gives the router no random bias",
        "remove model.moe_router_force_biased",
    ),
    _switch("model.enable_mtp_training", "builds no multi-token-prediction layers"),
    Limit(
        "model.attention_backend",
        _on_cpu("model.attention_backend", "flash", "fused"),
        "computes attention with torch's own kernel on the CPU",
        "set model.attention_backend: local",
    ),
    Limit(
        "precision.params_dtype",
        lambda preset: (
            preset.precision.params_dtype is not None
            and (preset.precision.bf16 or preset.precision.fp16)
            and not _double_on_gpu(preset)
        ),
        "holds the weights in the half-precision format that is on",
        "remove precision.params_dtype, or set precision.bf16 and precision.fp16 to false",
    ),
    Limit(
        "precision.params_dtype",
        _double_on_gpu,
        "computes in float64 on the CPU only",
        "remove precision.params_dtype, or use the profile cpu",
    ),
    _switch("precision.cross_entropy_loss_fusion", "computes log-probs itself, from the same logits as the entropy"),
    Limit(
        "parallel.use_distributed_optimizer",
        _on_cpu("parallel.use_distributed_optimizer", True),
        "uses plain Adam on the CPU",
        "set parallel.use_distributed_optimizer: false",
    ),
    Limit(
        "parallel.cuda_graph_scope",
        _on_cpu("parallel.cuda_graph_scope", "attn", "full_iteration"),
        "has no CUDA graphs on the CPU",
        "set parallel.cuda_graph_scope: none",
    ),
    _switch("parallel.overlap_moe_expert_parallel_comm", "keeps to the plain and the interleaved schedule"),
    _switch("parallel.use_routing_replay", "routes anew in every forward pass"),
    _switch("parallel.use_rollout_routing_replay", "routes anew in every forward pass"),
    Limit(
        "rollout.engine",
        lambda preset: preset.rollout.engine != "megatron",
        "samples on the trainer's own ranks",
        "set rollout.engine: megatron",
    ),
    _switch("rollout.fully_async", "generates and trains in turn"),
    Limit(
        "rollout.max_staleness",
        _on("rollout.max_staleness"),
        "generates and trains in turn",
        "set rollout.max_staleness: 0; rollout.update_weights_interval gives older samples",
    ),
    Limit(
        "rollout.colocate",
        lambda preset: not preset.rollout.colocate,
        "samples on the trainer's own ranks",
        "set rollout.colocate: true",
    ),
    Limit("rollout.num_gpus", _separate_gpus, "samples on every rank of the trainer", "remove rollout.num_gpus"),
    Limit(
        "rollout.num_gpus_per_engine",
        lambda preset: preset.rollout.num_gpus_per_engine > 1,
        "lays the engine out as the trainer",
        "set rollout.num_gpus_per_engine: 1",
    ),
    Limit(
        "rollout.generation_config",
        lambda preset: preset.rollout.generation_config == "auto",
        "takes no sampling values from generation_config.json",
        "set rollout.generation_config: ignore",
    ),
    _switch("rollout.speculative_decoding", "samples token by token"),
    _switch("rollout.enable_prefix_caching", "keeps no cache from one rollout to the next"),
)


@guard(
    _CODE,
    "not-carried-out",
    why="The setting is known and the builtin runtime does something else. A run that left it out without a word would "
    "not be the run the preset describes, and its record would say it was.",
    fix="Make the change the message names, or run the preset with a framework that has the feature.",
    source="the builtin runtime: p3o_launch/runtime",
    allows="Settings at the value that means off, and settings that another rule refuses already. A warning about the "
    "setting stands beside this error: it lets the run start.",
)
def not_carried_out(context: GuardContext) -> Iterator[Finding]:
    preset = context.preset
    found = [Finding(limit.path, _message(preset, limit), limit.mend) for limit in LIMITS if limit.asks(preset)]
    found += _unknown_sampling(preset)
    if not found:
        return
    refused = refused_elsewhere(context)
    for finding in found:
        if not any(path == finding.path or path.startswith(finding.path + ".") for path in refused):
            yield finding


def _message(preset: Preset, limit: Limit) -> str:
    value = value_at(preset, limit.path)
    subject = named(preset, limit.path) if value is not None else f"{limit.path} (absent, which means false)"
    return f"{subject} has no effect: the builtin runtime {limit.instead}"


def _unknown_sampling(preset: Preset) -> Iterator[Finding]:
    if preset.rollout.engine != "megatron":
        return
    instead = "the megatron engine samples by temperature, top_p and top_k"
    for field, knob in FIELDS.items():
        path = f"rollout.{field}"
        if field not in _ENGINE_KNOWS and not knob.is_neutral(getattr(preset.rollout, field)):
            yield Finding(path, f"{named(preset, path)} has no effect: {instead}", f"remove {path}")
    unknown = [name for name, value in preset.rollout.extra.items() if not _changes_nothing(preset, name, value)]
    if unknown:
        yield Finding(
            "rollout.extra",
            f"rollout.extra ({both(map(printable, unknown))}) has no effect: {instead}",
            f"remove {both(f'rollout.extra.{printable(name)}' for name in unknown)}",
        )


def _changes_nothing(preset: Preset, name: str, value: object) -> bool:
    knob = knob_of(name)
    if value is None or (knob is not None and knob.is_neutral(value)):
        return True
    return name in ("temperature", "logprobs") and value == getattr(preset.rollout, name)


def refused_elsewhere(context: GuardContext) -> set[str]:
    """Paths that take part in what stops the run already: an error of another rule that the preset does not ignore."""
    paths: set[str] = set()
    ignored = context.preset.ignore
    for rule in all_guards().values():
        if rule.body is None or rule.code == _CODE or rule.severity is not Severity.ERROR:
            continue
        if rule.ignorable and rule.code in ignored:
            continue
        try:
            for finding in rule.body(context):
                paths.update((finding.path, *finding.related))
        except Exception:  # a rule that cannot be judged is reported where the rules are run
            continue
    return paths
