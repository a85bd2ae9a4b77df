"""1xx, terms and switches of the loss that do not do what they say: KL, clips, groups, scope, schedule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from p3o_launch.diagnostics import Finding, Severity
from p3o_launch.guard_tools import ARGUMENTS, PAPER, both, dropout_findings, is_p3o, named, replays
from p3o_launch.guards import GuardContext, guard
from p3o_launch.guards_objective import RELAX_P3O, corrections

if TYPE_CHECKING:
    from p3o_launch.schema import Algorithm, Preset

BAND = 0.2


def kl_loss_is_on(algorithm: Algorithm) -> bool:
    """The reference KL enters the loss: switched on, with a weight."""
    return algorithm.use_kl_loss and algorithm.kl_loss_coef > 0


def kl_reward_is_on(algorithm: Algorithm) -> bool:
    """The reference KL enters the reward. Group-relative estimators never apply kl_coef unless told to."""
    return algorithm.use_kl_in_reward is True and algorithm.kl_coef > 0


@guard(
    "P3O110",
    "kl-never-applied",
    why="Group-relative estimators leave kl_coef out of the returns, and kl_loss_coef does nothing while use_kl_loss "
    "is off. A weight with its switch left out is a penalty the run never sees, while a reference model is paid for.",
    fix="Set the weight to 0. A framework with a reference model takes use_kl_loss: true with kl_loss_coef; the "
    "builtin runtime has none.",
    source="https://github.com/THUDM/slime/issues/397",
    allows="A weight whose switch is written as false (use_kl_in_reward or use_kl_loss), and a weight beside an active "
    "KL loss: the effective switches decide.",
)
def kl_never_applied(context: GuardContext) -> Iterator[Finding]:
    algorithm = context.preset.algorithm
    if kl_loss_is_on(algorithm) or kl_reward_is_on(algorithm):
        return
    estimator = algorithm.advantage_estimator
    if algorithm.kl_coef > 0 and algorithm.use_kl_in_reward is None:
        yield Finding(
            "algorithm.kl_coef",
            f"{named(context.preset, 'algorithm.kl_coef')} is never applied: {estimator} adds no KL to the reward, "
            "and no KL loss is on",
            "set algorithm.kl_coef: 0" + (" and algorithm.use_kl_loss: false" if algorithm.use_kl_loss else ""),
            related=("algorithm.use_kl_loss", "algorithm.kl_loss_coef"),
        )
    if algorithm.kl_loss_coef > 0 and "use_kl_loss" not in algorithm.model_fields_set:
        yield Finding(
            "algorithm.kl_loss_coef",
            f"{named(context.preset, 'algorithm.kl_loss_coef')} is never applied: algorithm.use_kl_loss is absent, "
            "which means false",
            "set algorithm.kl_loss_coef: 0",
            related=("algorithm.use_kl_loss",),
        )


@guard(
    "P3O111",
    "kl-applied-twice",
    why="With the reference KL in the reward and in the loss, the pressure towards the reference is about twice what "
    "either weight says.",
    fix="Keep one: use_kl_in_reward: false, or use_kl_loss: false. The builtin runtime has no reference model: both.",
    source="https://github.com/verl-project/verl/issues/265",
    allows="Two weights above 0 with one of the switches off.",
)
def kl_applied_twice(context: GuardContext) -> Iterator[Finding]:
    algorithm = context.preset.algorithm
    if kl_loss_is_on(algorithm) and kl_reward_is_on(algorithm):
        yield Finding(
            "algorithm.use_kl_in_reward",
            f"the reference KL is applied twice: in the reward with {named(context.preset, 'algorithm.kl_coef')} and "
            f"in the loss with {named(context.preset, 'algorithm.kl_loss_coef')}",
            "set algorithm.use_kl_in_reward: false and algorithm.use_kl_loss: false",
            related=("algorithm.use_kl_loss", "algorithm.kl_coef", "algorithm.kl_loss_coef"),
        )


@guard(
    "P3O112",
    "group-of-one",
    why="A group-relative advantage is a reward minus its group's mean. In a group of one that is 0 for every token, "
    "and only the KL term is left to train.",
    fix="Set batch.n_samples_per_prompt to 2 or more.",
    source="https://github.com/OpenRLHF/OpenRLHF/pull/980",
)
def group_of_one(context: GuardContext) -> Iterator[Finding]:
    samples = context.preset.batch.n_samples_per_prompt
    if samples < 2:
        yield Finding(
            "batch.n_samples_per_prompt",
            f"batch.n_samples_per_prompt ({samples}) makes groups of one: every "
            f"{context.preset.algorithm.advantage_estimator} advantage is 0",
            f"use {_smallest_group(context)} or more",
            related=("algorithm.advantage_estimator",),
        )


def _smallest_group(context: GuardContext) -> int:
    """The smallest group of two or more that fills whole optimizer steps, if a reasonable one does."""
    batch = context.preset.batch
    filling = (n for n in range(2, 129) if batch.rollout_batch_size * n % batch.global_batch_size == 0)
    return next(filling, 2)


@guard(
    "P3O113",
    "inert-clip",
    Severity.WARNING,
    why="P3O's only bound on the ratio is the ESS cap. eps_clip belongs to the PPO clip and is not read; clip_low and "
    "clip_high set the band that the clip_fraction metric counts, and nothing else.",
    fix="Remove eps_clip and eps_clip_high; leave clip_low and clip_high at 0.2 unless the metric's band is meant.",
    source=f"{PAPER} Eq. 11; {RELAX_P3O}",
    allows="The monitoring band at its default, written or not.",
    ignorable=True,
)
def inert_clip(context: GuardContext) -> Iterator[Finding]:
    preset = context.preset
    if not is_p3o(preset):
        return
    algorithm = preset.algorithm
    clips = [f"algorithm.{f}" for f in ("eps_clip", "eps_clip_high") if getattr(algorithm, f) is not None]
    if clips:
        listed = both(named(preset, path) for path in clips)
        yield Finding(
            clips[0],
            f"{listed} {'has' if len(clips) == 1 else 'have'} no effect on the p3o loss, whose bound is the ESS cap",
            "remove " + both(clips),
            related=tuple(clips[1:]),
        )
    band = [f"algorithm.{f}" for f in ("clip_low", "clip_high") if getattr(algorithm, f) >= 0]
    tuned = [path for path in band if getattr(algorithm, path.rpartition(".")[2]) != BAND]
    if tuned:
        listed = both(named(preset, path) for path in tuned)
        yield Finding(
            tuned[0],
            f"{listed} only {'sets' if len(tuned) == 1 else 'set'} the band of the clip_fraction metric; "
            "nothing is clipped",
            f"leave {'it' if len(tuned) == 1 else 'them'} at {BAND}, or ignore P3O113 with the reason",
            related=tuple(tuned[1:]),
        )


@guard(
    "P3O114",
    "stale-as-on-policy",
    why="When the rollout policy is older than the trainer and the trainer recomputes the denominator from its own "
    "weights, the ratio is 1 by construction: off-policy samples are treated as on-policy and nothing shows it.",
    fix="Set use_rollout_logprobs: true, or refresh the rollout weights before every rollout.",
    source="https://github.com/NVIDIA-NeMo/RL/pull/3608",
    allows="Synchronous rollouts refreshed every time, and stale rollouts with an importance correction. p3o without "
    "rollout log-probs is P3O101.",
)
def stale_as_on_policy(context: GuardContext) -> Iterator[Finding]:
    if not is_stale_as_on_policy(context.preset):
        return
    rollout = context.preset.rollout
    staleness = "rollout.fully_async" if rollout.fully_async else "rollout.update_weights_interval"
    yield Finding(
        "algorithm.use_rollout_logprobs",
        f"{named(context.preset, staleness)} makes rollouts stale, but with "
        f"{named(context.preset, 'algorithm.use_rollout_logprobs')} the trainer recomputes the denominator: "
        "the ratio is 1 by construction",
        "set algorithm.use_rollout_logprobs: true",
        related=(staleness, "rollout.max_staleness"),
    )


def is_stale_as_on_policy(preset: Preset) -> bool:
    """Stale rollouts, a recomputed denominator, no correction. For p3o the missing log-probs are the fault."""
    algorithm, rollout = preset.algorithm, preset.rollout
    stale = rollout.fully_async or rollout.update_weights_interval > 1
    return stale and not is_p3o(preset) and not algorithm.use_rollout_logprobs and not corrections(algorithm)


@guard(
    "P3O115",
    "bad-monitor-band",
    why="The clip_fraction metric counts ratios outside [1 - clip_low, 1 + clip_high]. A negative width puts 1 itself "
    "outside and counts everything.",
    fix="Use widths of 0 or more; the default is 0.2.",
    source=RELAX_P3O,
    ignorable=True,
)
def bad_monitor_band(context: GuardContext) -> Iterator[Finding]:
    if not is_p3o(context.preset):
        return
    for field in ("clip_low", "clip_high"):
        if getattr(context.preset.algorithm, field) < 0:
            path = f"algorithm.{field}"
            yield Finding(path, f"{named(context.preset, path)} is negative: it is the width of a band", "use 0.2")


@guard(
    "P3O116",
    "wrong-sign-kl",
    Severity.WARNING,
    why="The plain proxy's exponential is clamped at +-10. Below a log-ratio of -10 its derivative is that of the "
    "linear term alone, so descent pushes the policy further away from the behaviour policy.",
    fix="Use algorithm.kl_mode: proxy_safe, which has the same value and the right sign. Ignore the code in parity "
    "tests against an implementation that uses the plain proxy.",
    source=f"{PAPER} Eq. 12; {RELAX_P3O}",
    ignorable=True,
)
def wrong_sign_kl(context: GuardContext) -> Iterator[Finding]:
    if is_p3o(context.preset) and context.preset.algorithm.kl_mode == "proxy":
        yield Finding(
            "algorithm.kl_mode",
            "algorithm.kl_mode (proxy) has a gradient of the wrong sign for log-ratios below -10",
            "use proxy_safe, or ignore P3O116 in a parity test",
        )


@guard(
    "P3O117",
    "micro-batch-scope-accumulation",
    Severity.WARNING,
    why="With one ESS per micro-batch the cap depends on how many tokens a micro-batch holds. Gradient accumulation, "
    "or a token budget, then changes the objective although it should only change memory.",
    fix="Use algorithm.ess_scope: step, or one micro-batch per optimizer step.",
    source=f"{PAPER} Algorithm 2; {RELAX_P3O}",
    allows="One micro-batch per optimizer step of fixed size: the two scopes agree.",
    ignorable=True,
)
def micro_batch_scope_accumulation(context: GuardContext) -> Iterator[Finding]:
    preset, sizes = context.preset, context.topology
    if not is_p3o(preset) or preset.algorithm.ess_scope != "micro_batch":
        return
    if preset.batch.use_dynamic_batch_size:
        reason, related = "batch.use_dynamic_batch_size (true)", ("batch.use_dynamic_batch_size",)
    elif sizes.micro_batches_per_step is not None and sizes.micro_batches_per_step > 1:
        reason = f"{sizes.micro_batches_per_step} micro-batches per optimizer step"
        related = ("batch.micro_batch_size",)
    else:
        return
    yield Finding(
        "algorithm.ess_scope",
        f"algorithm.ess_scope (micro_batch) with {reason}: the cap depends on how the step is cut",
        "use algorithm.ess_scope: step",
        related=related,
    )


@guard(
    "P3O118",
    "per-sample-with-dynamic-batch",
    Severity.WARNING,
    why="Without per-token loss each micro-batch is averaged on its own and the averages are averaged. Under a token "
    "budget the micro-batches differ in size and number, so a memory setting moves the objective.",
    fix="Set calculate_per_token_loss: true, or use_dynamic_batch_size: false.",
    source="https://github.com/areal-project/AReaL/pull/1273",
    allows="Per-token loss with dynamic micro-batches, and per-sample loss with micro-batches of fixed size.",
    ignorable=True,
)
def per_sample_with_dynamic_batch(context: GuardContext) -> Iterator[Finding]:
    if is_per_sample_with_dynamic_batch(context.preset):
        yield Finding(
            "algorithm.calculate_per_token_loss",
            f"{named(context.preset, 'algorithm.calculate_per_token_loss')} with batch.use_dynamic_batch_size (true): "
            "the token budget of a micro-batch changes the objective",
            "set algorithm.calculate_per_token_loss: true",
            related=("batch.use_dynamic_batch_size",),
        )


def is_per_sample_with_dynamic_batch(preset: Preset) -> bool:
    """A grpo loss averaged per micro-batch whose size follows a token budget."""
    dynamic = preset.batch.use_dynamic_batch_size
    return not is_p3o(preset) and dynamic and preset.algorithm.calculate_per_token_loss is not True


@guard(
    "P3O121",
    "optimizer-out-of-range",
    why="The rate decays from lr to min_lr, and Adam's averages need a beta below 1. Megatron and torch check both "
    "when the optimizer is built, after every rank has loaded the model.",
    fix="Set optimizer.min_lr to optimizer.lr or less, and the betas below 1.",
    source="https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/optimizer_param_scheduler.py",
    allows="min_lr equal to lr, and a beta of 0.",
)
def optimizer_out_of_range(context: GuardContext) -> Iterator[Finding]:
    preset, optimizer = context.preset, context.preset.optimizer
    if optimizer.min_lr > optimizer.lr:
        yield Finding(
            "optimizer.min_lr",
            f"{named(preset, 'optimizer.min_lr')} is above {named(preset, 'optimizer.lr')}",
            "use 0, or any rate up to optimizer.lr",
            related=("optimizer.lr",),
        )
    for field, usual in (("adam_beta1", "0.9"), ("adam_beta2", "0.95")):
        if getattr(optimizer, field) >= 1:
            path = f"optimizer.{field}"
            yield Finding(path, f"{named(preset, path)} keeps Adam's average from ever moving", f"use {usual}")


@guard(
    "P3O120",
    "dropout-in-policy-ratio",
    Severity.WARNING,
    why="The engine samples without dropout. When the trainer's forward drops units, its log-probs differ from the "
    "engine's before the policy has moved, and whatever weighs one by the other measures dropout noise: the ESS of a "
    "micro-batch, or the weight of an importance correction. Megatron's default is 0.1, so leaving the setting out is "
    "enough.",
    fix="Write model.attention_dropout: 0 and model.hidden_dropout: 0.",
    source=f"https://github.com/Human-Agent-Society/reef/pull/536; defaults in {ARGUMENTS}",
    allows="Dropout written as 0, and log-probs of the engine that are not used. Under p3o with ess_scope step the "
    "fault is P3O201, in grpo's own ratio P3O124.",
    ignorable=True,
)
def dropout_in_policy_ratio(context: GuardContext) -> Iterator[Finding]:
    preset, algorithm = context.preset, context.preset.algorithm
    if is_p3o(preset):
        if algorithm.use_rollout_logprobs is True and not replays(preset):
            yield from dropout_findings(preset, "the engine has none, so the policy ratio measures dropout noise")
    elif algorithm.use_rollout_logprobs is not True and (algorithm.use_tis or algorithm.use_mis):
        yield from dropout_findings(preset, "the engine has none, so the correction for it weighs by dropout noise")


@guard(
    "P3O124",
    "dropout-in-grpo-ratio",
    why="With the engine's log-probs as denominator, the policy ratio of a policy that has not moved is 1. The engine "
    "samples without dropout: when the trainer's forward drops units, the ratio is noise instead, and the clip or a "
    "mask discards tokens at random, half of them in one report. Megatron's default is 0.1, so leaving the setting "
    "out is enough.",
    fix="Write model.attention_dropout: 0 and model.hidden_dropout: 0.",
    source=f"https://github.com/Human-Agent-Society/reef/pull/536; defaults in {ARGUMENTS}",
    allows="Dropout written as 0, and a ratio whose denominator the trainer recomputes. Under p3o with ess_scope step "
    "the fault is P3O201, with ess_scope micro_batch P3O120.",
)
def dropout_in_grpo_ratio(context: GuardContext) -> Iterator[Finding]:
    preset = context.preset
    if preset.algorithm.use_rollout_logprobs is True and not is_p3o(preset):
        yield from dropout_findings(preset, "the engine has none, so the policy ratio measures dropout noise")
