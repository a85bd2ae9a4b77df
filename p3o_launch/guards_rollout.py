"""4xx: what makes the distribution the engine samples another than the one whose log-probs it reports.

Training rollouts only, unless a rule says otherwise: evaluation may truncate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from p3o_launch.diagnostics import Finding, Severity
from p3o_launch.guard_tools import (
    leaves,
    named,
    policy_ratio_from_rollout,
    printable,
    replays,
    shown,
    up_to,
    version_of,
)
from p3o_launch.guards import GuardContext, guard
from p3o_launch.guards_loss import is_stale_as_on_policy
from p3o_launch.guards_objective import corrections
from p3o_launch.sampling_rules import FIELDS, knob_of, same_name

if TYPE_CHECKING:
    from p3o_launch.schema import Preset


@guard(
    "P3O401",
    "truncated-sampling",
    why="The engine renormalises over the tokens that survive top-p, top-k, a penalty or a bias; the trainer "
    "normalises over the whole vocabulary. The ratio of an unchanged policy is then below 1 by the surviving mass.",
    fix="Training rollouts: top_p 1.0, top_k -1, everything else off, also inside rollout.extra. Temperature may be "
    "anything above 0.",
    source="https://github.com/huggingface/trl/issues/6789; https://github.com/redai-studio/Relax/pull/272",
    allows="Any truncation in evaluation; top_k 0 or as large as the vocabulary; for grpo, truncation beside "
    "log-probs that the trainer recomputes, without an importance correction.",
)
def truncated_sampling(context: GuardContext) -> Iterator[Finding]:
    preset = context.preset
    # A correction beside recomputed log-probs divides by the engine's as well.
    if not policy_ratio_from_rollout(preset) and not corrections(preset.algorithm):
        return
    consequence = "the engine's log-probs are not those of the full softmax"
    for field, knob in FIELDS.items():
        value = getattr(preset.rollout, field)
        if knob.is_neutral(value) or (field == "top_k" and value >= preset.model.vocab_size):
            continue
        yield Finding(
            f"rollout.{field}",
            f"rollout.{field} ({shown(value)}) {knob.effect}: {consequence}",
            f"use {knob.off}",
        )
    for path, value, effect, off in _hidden_knobs(preset):
        yield Finding(path, f"{printable(path)} ({shown(value)}) {effect}: {consequence}", f"remove it, or use {off}")


def _hidden_knobs(preset: Preset) -> Iterator[tuple[str, object, str, str]]:
    """Knobs turned inside the free-form parameters, at any depth, as (path, value, effect, neutral value)."""
    open_mappings: list[tuple[str, Mapping[str, object]]] = [("rollout.extra", preset.rollout.extra)]
    while open_mappings:
        parent, mapping = open_mappings.pop()
        for name, value in mapping.items():
            path = f"{parent}.{name}"
            knob = knob_of(str(name))
            if knob is not None:
                whole = same_name(str(name), "top_k") and isinstance(value, int) and value >= preset.model.vocab_size
                if not knob.is_neutral(value) and not whole:
                    yield path, value if not isinstance(value, Mapping) else "...", knob.effect, knob.off
            elif isinstance(value, Mapping):
                open_mappings.append((path, value))


@guard(
    "P3O402",
    "raw-engine-log-probs",
    why="Raw log-probs are those of the softmax before temperature. At another temperature than 1 the tokens were "
    "drawn from a different distribution, and the ratio's denominator belongs to none of them.",
    fix="Set rollout.logprobs_mode: processed_logprobs.",
    source="logprobs_mode in vLLM's engine arguments",
    allows="Raw log-probs at temperature 1, where both are the same.",
)
def raw_engine_log_probs(context: GuardContext) -> Iterator[Finding]:
    preset, temperature = context.preset, context.preset.rollout.temperature
    if not policy_ratio_from_rollout(preset) or not _is_temperature(temperature) or temperature == 1:
        return
    if preset.rollout.logprobs_mode == "raw_logprobs" and preset.rollout.logprobs is not None:
        yield Finding(
            "rollout.logprobs_mode",
            f"rollout.logprobs_mode (raw_logprobs) with {named(preset, 'rollout.temperature')}: the engine reports the "
            "softmax before temperature, which is not what it sampled",
            "use processed_logprobs",
            related=("rollout.temperature",),
        )


def _is_temperature(value: float) -> bool:
    return math.isfinite(value) and value > 0


@guard(
    "P3O404",
    "identical-samples",
    why="An engine that is deterministic, or that is given the same seed for a whole group, answers the same prompt "
    "with the same text. All rewards of a group are then equal and every advantage is 0.",
    fix="Set rollout.per_sample_seed: true.",
    source="--sglang-enable-deterministic-inference of SGLang; sampling seeds of slime and Relax",
    allows="Deterministic inference with a seed per sample; no seed per sample on an engine that draws its own.",
)
def identical_samples(context: GuardContext) -> Iterator[Finding]:
    preset = context.preset
    rollout, group = preset.rollout, preset.batch.n_samples_per_prompt
    if group < 2:
        return
    if not rollout.per_sample_seed and (rollout.deterministic_inference or rollout.engine == "megatron"):
        cause = (
            "with rollout.deterministic_inference (true)"
            if rollout.deterministic_inference
            else "with rollout.engine (megatron), which draws only from the request's seed"
        )
        yield Finding(
            "rollout.per_sample_seed",
            f"rollout.per_sample_seed (false) {cause}: the {group} samples of a prompt are identical",
            "set rollout.per_sample_seed: true",
            related=("rollout.deterministic_inference", "rollout.engine", "batch.n_samples_per_prompt"),
        )
    for path, key, value in leaves(rollout.extra, "rollout.extra"):
        if value is not None and any(same_name(key, seed) for seed in ("seed", "sampling_seed")):
            yield Finding(
                path,
                f"{printable(path)} ({shown(value)}) gives every request the same seed: the {group} samples of a "
                "prompt are identical",
                f"remove {printable(path)}; seed.rollout_seed seeds the rollouts",
                related=("batch.n_samples_per_prompt",),
            )


@guard(
    "P3O405",
    "speculative-decoding-log-probs",
    why="Before vLLM 0.11.1 a request with speculative decoding returns no log-probs of the target model: they read 0, "
    "or those of the draft. The ratio's denominator is then made up.",
    fix="Set rollout.speculative_decoding: false, or use vLLM 0.11.1 or later.",
    source="https://github.com/vllm-project/vllm/pull/26060; https://github.com/vllm-project/vllm/issues/17876",
    allows="vLLM 0.11.1 and later, SGLang, and an engine whose version is not declared.",
)
def speculative_decoding_log_probs(context: GuardContext) -> Iterator[Finding]:
    preset, rollout = context.preset, context.preset.rollout
    version = version_of(rollout.engine_version)
    if not rollout.speculative_decoding or rollout.engine != "vllm" or not policy_ratio_from_rollout(preset):
        return
    if version is not None and version < (0, 11, 1):
        yield Finding(
            "rollout.speculative_decoding",
            f"rollout.speculative_decoding (true) with vllm {shown(rollout.engine_version)}: the log-probs it returns "
            "are not the target model's",
            "set rollout.speculative_decoding: false, or use vllm 0.11.1 or later",
            related=("rollout.engine", "rollout.engine_version"),
        )


@guard(
    "P3O406",
    "adapter-never-synced",
    why="Separate rollout servers receive the base weights. An adapter that is neither merged into them nor sent "
    "leaves the servers with the initial model for the whole run, which looks like staleness and is not.",
    fix="Set model.lora_merge_before_sync: true, or rollout.colocate: true.",
    source="https://github.com/verl-project/verl/issues/7495",
    allows="lora_rank 0; a merged adapter; a colocated synchronous engine.",
)
def adapter_never_synced(context: GuardContext) -> Iterator[Finding]:
    preset = context.preset
    separate = not preset.rollout.colocate or preset.rollout.fully_async
    if preset.model.lora_rank > 0 and separate and not preset.model.lora_merge_before_sync:
        cause = "rollout.fully_async" if preset.rollout.fully_async else "rollout.colocate"
        yield Finding(
            "model.lora_merge_before_sync",
            f"model.lora_merge_before_sync (false) with {named(preset, cause)}: the rollout servers never see the "
            "adapter",
            "set model.lora_merge_before_sync: true",
            related=("model.lora_rank", cause),
        )


@guard(
    "P3O407",
    "quantized-rollout-uncorrected",
    Severity.WARNING,
    why="Rounded rollout weights are another policy. When the trainer recomputes the denominator from its own weights, "
    "the difference goes uncorrected.",
    fix="Set algorithm.use_rollout_logprobs: true, or use an importance correction.",
    source="https://github.com/NVIDIA-NeMo/RL/pull/1212",
    allows="p3o, and grpo against the engine's log-probs or with an importance correction.",
    ignorable=True,
)
def quantized_rollout_uncorrected(context: GuardContext) -> Iterator[Finding]:
    preset = context.preset
    uncorrected = not policy_ratio_from_rollout(preset) and not corrections(preset.algorithm)
    if preset.rollout.weight_quantization != "none" and uncorrected:
        yield Finding(
            "rollout.weight_quantization",
            f"{named(preset, 'rollout.weight_quantization')} makes the rollout policy another one, and with "
            f"{named(preset, 'algorithm.use_rollout_logprobs')} nothing corrects for it",
            "set algorithm.use_rollout_logprobs: true",
            related=("algorithm.use_rollout_logprobs",),
        )


@guard(
    "P3O408",
    "bad-temperature",
    why="Training rollouts sample from the softmax of logits / temperature. At 0 every sample of a group is the same "
    "greedy text, and its log-prob is 0; below 0 or not finite there is no distribution.",
    fix="Use a finite temperature above 0.",
    source="arXiv:2605.12380 Eq. 7 (the behaviour policy gives every sampled token a probability)",
    allows="Any temperature above 0, and greedy evaluation (evaluation.temperature 0).",
)
def bad_temperature(context: GuardContext) -> Iterator[Finding]:
    if not _is_temperature(context.preset.rollout.temperature):
        yield Finding(
            "rollout.temperature",
            f"{named(context.preset, 'rollout.temperature')} is not a finite number above 0",
            "use 1.0, or another temperature above 0",
        )
    for path, key, value in leaves(context.preset.rollout.extra, "rollout.extra"):
        if same_name(key, "temperature") and value is not None and value != context.preset.rollout.temperature:
            yield Finding(
                path,
                f"{printable(path)} ({shown(value)}) contradicts {named(context.preset, 'rollout.temperature')}",
                f"remove it and set rollout.temperature: {shown(value)}",
                related=("rollout.temperature",),
            )


@guard(
    "P3O409",
    "stale-prefix-cache",
    Severity.WARNING,
    why="A prefix cache keeps keys and values computed with the weights of its time. Without a reset at a weight "
    "update, new tokens attend to states of the old policy, and the log-probs belong to neither.",
    fix="Set rollout.reset_prefix_cache_on_update: true.",
    source="reset_prefix_cache of vLLM; flush_cache of SGLang",
    allows="A prefix cache that is reset at every weight update.",
    ignorable=True,
)
def stale_prefix_cache(context: GuardContext) -> Iterator[Finding]:
    rollout = context.preset.rollout
    if rollout.enable_prefix_caching and not rollout.reset_prefix_cache_on_update:
        yield Finding(
            "rollout.reset_prefix_cache_on_update",
            "rollout.reset_prefix_cache_on_update (false) with rollout.enable_prefix_caching (true): responses after a "
            "weight update attend to keys and values of the old weights",
            "set rollout.reset_prefix_cache_on_update: true",
            related=("rollout.enable_prefix_caching",),
        )


@guard(
    "P3O416",
    "weights-never-refreshed",
    Severity.WARNING,
    why="Every rollout is sampled from the weights the run began with: the ratio measures the distance from the start, "
    "the ESS falls for the whole run, and the cap with it.",
    fix="Use an update_weights_interval below batch.num_rollout.",
    source="design rule of p3o-launch: a cadence that never comes due is said, as P3O415 and P3O707 do",
    allows="A run of one rollout; any interval below the number of rollouts.",
    ignorable=True,
)
def weights_never_refreshed(context: GuardContext) -> Iterator[Finding]:
    preset, interval = context.preset, context.preset.rollout.update_weights_interval
    if 1 < preset.batch.num_rollout <= interval:
        yield Finding(
            "rollout.update_weights_interval",
            f"{named(preset, 'rollout.update_weights_interval')} is not below {named(preset, 'batch.num_rollout')}: "
            "the rollout weights are never refreshed",
            f"use {up_to(preset.batch.num_rollout - 1)}",
            related=("batch.num_rollout",),
        )


@guard(
    "P3O410",
    "no-staleness-bound",
    Severity.WARNING,
    why="Under asynchronous generation a sample may be as old as the queue is long. Without a bound the ratios drift "
    "as the engine falls behind, and two runs of one preset see different ages.",
    fix="Write rollout.max_staleness: the number of rollouts a sample may be older than the trainer.",
    source="https://arxiv.org/abs/2505.24298",
    allows="A written bound, also of 0; rollouts in turn with training, which update_weights_interval bounds.",
    ignorable=True,
)
def no_staleness_bound(context: GuardContext) -> Iterator[Finding]:
    preset = context.preset
    # Under p3o's step scope fully_async is refused (P3O204); with a recomputed denominator so is staleness (P3O114).
    if not preset.rollout.fully_async or replays(preset) or is_stale_as_on_policy(preset):
        return
    if "max_staleness" not in preset.rollout.model_fields_set:
        yield Finding(
            "rollout.fully_async",
            "rollout.fully_async is true and rollout.max_staleness is absent: nothing bounds the age of a sample",
            "write rollout.max_staleness: 0",
            related=("rollout.max_staleness",),
        )
