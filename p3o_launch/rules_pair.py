"""Metadata of the rules about two presets that are to be compared (8xx and 506); ``paired.py`` emits them."""

from __future__ import annotations

from p3o_launch.diagnostics import LocatedFinding, Position, Severity
from p3o_launch.guards import Rule, register

_SEEDS = "https://arxiv.org/abs/1709.06560"


def _rule(code: str, name: str, severity: Severity, why: str, fix: str, source: str, allows: str) -> Rule:
    return register(Rule(code, name, severity, why, fix, source, allows))


PAIR_RULES: dict[str, Rule] = {
    rule.code: rule
    for rule in (
        _rule(
            "P3O506",
            "attention-backend-auto",
            Severity.WARNING,
            "Under `auto`, Transformer Engine chooses the attention kernel by version, GPU and shape. Two arms, or two"
            " machines, may then compute with different kernels, whose rounding differs.",
            "Set model.attention_backend to one kernel in both arms: flash, fused or unfused.",
            "--attention-backend in https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/training/arguments.py",
            "A single preset; the CPU, where `auto` has one kernel to choose; a comparison of backends, declared with"
            " `--factor model.attention_backend`.",
        ),
        _rule(
            "P3O801",
            "pair-differs",
            Severity.ERROR,
            "Two arms that differ in more than the factor under study say nothing about it: their curves may differ by"
            " a batch size or a learning rate as well as by the objective.",
            "Give both arms the same value, or declare the setting with `--factor`.",
            "https://arxiv.org/abs/2005.12729",
            "Name and description; the estimator and the settings only one objective reads (ess_scope, kl_mode, the"
            " clip widths); any setting declared with `--factor`, and what is below it.",
        ),
        _rule(
            "P3O802",
            "seeds-differ",
            Severity.ERROR,
            "With other seeds the arms see other prompts in another order and sample other tokens, which moves a short"
            " run more than most objectives do.",
            "Give both arms the same seed.seed and seed.rollout_seed, or name the seeds both will run with: `--seeds`.",
            _SEEDS,
            "A rollout_seed that is absent in one arm and equal to seed.seed in the other; seeds that `--seeds`"
            " replaces.",
        ),
        _rule(
            "P3O803",
            "single-seed",
            Severity.INFO,
            "One run per arm cannot tell a difference between objectives from the difference between two seeds of the"
            " same objective.",
            "Run both arms with several seeds and say so: `--seeds 42,43,44`.",
            _SEEDS,
            "Two or more distinct seeds given with `--seeds`.",
        ),
    )
}


def pair_finding(code: str, position: Position, message: str, hint: str | None, path: str) -> LocatedFinding:
    """A located finding of one of the rules above."""
    rule = PAIR_RULES[code]
    return LocatedFinding(position, rule.severity, rule.code, rule.name, message, hint, path)
