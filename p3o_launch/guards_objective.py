"""1xx, features that put another objective in the place of P3O's, or correct it twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from p3o_launch.diagnostics import Finding
from p3o_launch.guard_tools import PAPER, both, is_p3o, named
from p3o_launch.guards import GuardContext, guard

if TYPE_CHECKING:
    from p3o_launch.schema import Algorithm

RELAX_P3O = "https://github.com/redai-studio/Relax/pull/272"


@guard(
    "P3O101",
    "missing-rollout-log-probs",
    why="P3O divides by the probability each token had when it was sampled. Without the engine's log-probs the trainer "
    "would have to recompute them from its own weights: every ratio is then 1, the ESS reads 1, and the cap and the "
    "adaptive KL mean nothing.",
    fix="Set algorithm.use_rollout_logprobs: true, and keep rollout.logprobs at 0 (the sampled token's log-prob).",
    source=f"{PAPER} Eq. 7 and 11; {RELAX_P3O}",
    allows="rollout.logprobs: 0, which means the sampled token alone and is on.",
)
def missing_rollout_log_probs(context: GuardContext) -> Iterator[Finding]:
    preset = context.preset
    if not is_p3o(preset):
        return
    written = preset.algorithm.use_rollout_logprobs
    if written is not True:
        state = "is absent, which means false" if written is None else "is false"
        yield Finding(
            "algorithm.use_rollout_logprobs",
            f"algorithm.use_rollout_logprobs {state}: the p3o ratio has no behaviour log-probs to divide by",
            "set algorithm.use_rollout_logprobs: true",
        )
    if preset.rollout.logprobs is None:
        yield Finding(
            "rollout.logprobs",
            "rollout.logprobs is null: the engine returns no log-probs, so the p3o ratio has no denominator",
            "set rollout.logprobs: 0, the log-prob of the sampled token alone",
        )


@guard(
    "P3O102",
    "stacked-importance-correction",
    why="The P3O loss, and a policy ratio taken against the engine's log-probs, already correct for the difference "
    "between the engine and the trainer. A truncated or masked importance weight on top multiplies by it again.",
    fix="Turn use_tis and use_mis off and remove custom_tis_function_path.",
    source="https://github.com/THUDM/slime/pull/1912",
    allows="For grpo: a correction beside recomputed log-probs, and a custom function, which may be written for "
    "rollout log-probs.",
)
def stacked_importance_correction(context: GuardContext) -> Iterator[Finding]:
    algorithm = context.preset.algorithm
    active = corrections(algorithm)
    if not active:
        return
    custom = algorithm.custom_tis_function_path is not None
    if not is_p3o(context.preset) and (custom or not algorithm.use_rollout_logprobs):
        return
    reason = "the p3o loss is" if is_p3o(context.preset) else "with algorithm.use_rollout_logprobs (true) the ratio is"
    verb = "corrects" if len(active) == 1 else "correct"
    yield Finding(
        active[0],
        f"{both(active)} {verb} the trainer-engine mismatch a second time: {reason} already weighted by it",
        f"remove {both(active)}",
        related=(*active[1:], "algorithm.use_rollout_logprobs"),
    )


def corrections(algorithm: Algorithm) -> list[str]:
    """Paths of the importance corrections that are on."""
    return [
        f"algorithm.{field}"
        for field in ("use_tis", "use_mis", "custom_tis_function_path")
        if getattr(algorithm, field)
    ]


@guard(
    "P3O103",
    "per-sample-mean-loss",
    why="P3O's loss is a sum over the valid tokens of the whole optimizer step, divided by their number. A mean per "
    "sample or per micro-batch brings back a denominator that depends on how the step was cut.",
    fix="Set algorithm.calculate_per_token_loss: true.",
    source=f"{PAPER} Eq. 11; {RELAX_P3O}; absent means false, as Megatron's --calculate-per-token-loss",
)
def per_sample_mean_loss(context: GuardContext) -> Iterator[Finding]:
    written = context.preset.algorithm.calculate_per_token_loss
    if is_p3o(context.preset) and written is not True:
        state = "is absent, which means false" if written is None else "is false"
        yield Finding(
            "algorithm.calculate_per_token_loss",
            f"algorithm.calculate_per_token_loss {state}: p3o divides the summed loss by the step's token count",
            "set algorithm.calculate_per_token_loss: true",
        )


@guard(
    "P3O104",
    "critic",
    why="P3O takes its advantages from the rewards of a prompt's group. A value model would replace them and train a "
    "second network that nothing reads.",
    fix="Remove use_critic and critic_load.",
    source=f"{PAPER} Algorithm 2",
)
def critic(context: GuardContext) -> Iterator[Finding]:
    algorithm = context.preset.algorithm
    if not is_p3o(context.preset):
        return
    if algorithm.use_critic:
        related = ("algorithm.critic_load",) if algorithm.critic_load else ()
        yield Finding(
            "algorithm.use_critic",
            "algorithm.use_critic is true, but p3o has no value model",
            "remove " + both(("algorithm.use_critic", *related)),
            related=related,
        )
    elif algorithm.critic_load is not None:
        yield Finding(
            "algorithm.critic_load",
            f"{named(context.preset, 'algorithm.critic_load')} names a value model, but p3o has none",
            "remove algorithm.critic_load",
        )


@guard(
    "P3O105",
    "exact-kl",
    why="The exact behaviour KL needs the whole vocabulary's logits of the sampled policy at every token; rollouts "
    "store one log-prob per token.",
    fix="Use algorithm.kl_mode: proxy_safe.",
    source=f"{PAPER} Eq. 12",
)
def exact_kl(context: GuardContext) -> Iterator[Finding]:
    if is_p3o(context.preset) and context.preset.algorithm.kl_mode == "exact":
        yield Finding(
            "algorithm.kl_mode",
            "algorithm.kl_mode (exact) needs the behaviour policy's full logits, which rollouts do not hold",
            "use proxy_safe",
        )


@guard(
    "P3O106",
    "mismatch-metrics-forward",
    why="The mismatch report recomputes the trainer's log-probs in one more forward pass that nothing restores or "
    "checks. P3O's ratio statistics already report the same mismatch.",
    fix="Remove get_mismatch_metrics and read train/p3o/ratio_mean and ratio_std.",
    source=RELAX_P3O,
)
def mismatch_metrics_forward(context: GuardContext) -> Iterator[Finding]:
    if is_p3o(context.preset) and context.preset.algorithm.get_mismatch_metrics:
        yield Finding(
            "algorithm.get_mismatch_metrics",
            "algorithm.get_mismatch_metrics is true: it adds a forward pass outside the p3o step",
            "remove it; train/p3o/ratio_mean and ratio_std report the mismatch",
        )


@guard(
    "P3O107",
    "opsm-mask",
    why="Off-policy sequence masking drops whole sequences from the gradient by their own ratio test, so the loss no "
    "longer averages over the tokens the ESS and the token count were taken from.",
    fix="Remove algorithm.use_opsm; the cap already bounds off-policy tokens.",
    source=RELAX_P3O,
)
def opsm_mask(context: GuardContext) -> Iterator[Finding]:
    if is_p3o(context.preset) and context.preset.algorithm.use_opsm:
        yield Finding(
            "algorithm.use_opsm",
            "algorithm.use_opsm is true: it masks sequences that p3o's ESS and token count include",
            "remove it; the p3o cap already bounds off-policy tokens",
        )


@guard(
    "P3O108",
    "custom-loss-reducer",
    why="P3O's denominator is the token count of the step. A custom reducer puts another in its place.",
    fix="Remove custom_pg_loss_reducer_function_path.",
    source=f"{PAPER} Eq. 11; {RELAX_P3O}",
)
def custom_loss_reducer(context: GuardContext) -> Iterator[Finding]:
    path = "algorithm.custom_pg_loss_reducer_function_path"
    if is_p3o(context.preset) and context.preset.algorithm.custom_pg_loss_reducer_function_path is not None:
        yield Finding(path, f"{named(context.preset, path)} replaces p3o's token-count denominator", "remove it")


@guard(
    "P3O109",
    "opd",
    why="On-policy distillation adds a teacher term with its own weight and its own log-probs: a hybrid objective that "
    "the ESS says nothing about.",
    fix="Remove use_opd, or train distillation in a run of its own.",
    source=RELAX_P3O,
    allows="reward.type: mopd, which is the name of a reward and unrelated to distillation.",
)
def opd(context: GuardContext) -> Iterator[Finding]:
    if is_p3o(context.preset) and context.preset.algorithm.use_opd:
        yield Finding(
            "algorithm.use_opd",
            "algorithm.use_opd is true: on-policy distillation adds a teacher term to the p3o objective",
            "remove algorithm.use_opd",
        )
