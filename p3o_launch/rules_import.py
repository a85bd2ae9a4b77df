"""Metadata of the rules about imported configurations: argument lists and YAML of other frameworks.

``importers`` emits them. What the settings mean is judged by the same guards that judge a preset.
"""

from __future__ import annotations

from p3o_launch.diagnostics import LocatedFinding, Position, Severity
from p3o_launch.guards import Rule, register

_ARGPARSE = "https://docs.python.org/3/library/argparse.html"
_RELAX_P3O = "https://github.com/redai-studio/Relax/pull/272"


def _rule(
    code: str, name: str, severity: Severity, why: str, fix: str, source: str, allows: str = "", ignorable: bool = True
) -> Rule:
    return register(Rule(code, name, severity, why, fix, source, allows, ignorable))


IMPORT_RULES: dict[str, Rule] = {
    rule.code: rule
    for rule in (
        _rule(
            "P3O011",
            "repeated-flag",
            Severity.WARNING,
            "argparse keeps the last value of a flag that is given twice and says nothing, so an earlier line looks"
            " like a setting and is none.",
            "Delete the line that has no effect.",
            _ARGPARSE,
            "the same value twice, and flags that collect values",
        ),
        _rule(
            "P3O014",
            "unknown-flag",
            Severity.WARNING,
            "slime and Relax parse with `ignore_unknown_args`: a misspelt flag is dropped and its default trains."
            " Megatron's own entry points stop instead. verl and NeMo-RL ask for the keys they know, so a misspelt one"
            " in YAML is never read; Hydra stops at an override without `+`.",
            "Use the name the finding offers, or remove the flag.",
            "https://github.com/THUDM/slime/blob/main/slime/utils/arguments.py",
            "flags of the engines, which are generated at run time (--sglang-*, --router-*); keys of YAML that resemble"
            " no known one, which may be another version's or the user's own",
        ),
        _rule(
            "P3O015",
            "bad-flag-value",
            Severity.ERROR,
            "The value is missing, has another type than the flag, or is not one of its choices. A switch takes no"
            " value: `--flag False` leaves it on and `False` behind.",
            "Write a value of the kind the finding names; leave a switch out to turn it off.",
            _ARGPARSE + "; https://github.com/bigcode-project/bigcode-evaluation-harness/pull/43",
            "a value that is a shell variable, which is not known here",
            ignorable=False,
        ),
        _rule(
            "P3O016",
            "choice-not-in-table",
            Severity.WARNING,
            "The estimator is not among the choices of the framework version whose arguments are known here. On that"
            " version argparse stops; on another branch it may train.",
            "Check that the version you run has it.",
            "https://github.com/redai-infra/Relax",
        ),
        _rule(
            "P3O017",
            "stray-argument",
            Severity.ERROR,
            "A word that belongs to no flag. It is what a missing backslash, a value behind a switch or a broken quote"
            " leaves, and everything the author meant by it is lost.",
            "Remove it, or give it to the flag it was meant for.",
            _ARGPARSE,
            "the entry point and its launcher in front of the first flag",
            ignorable=False,
        ),
        _rule(
            "P3O018",
            "broken-quoting",
            Severity.ERROR,
            "Quotes reached the program, or none closes: a launcher that joins and splits the command again (ray job"
            " submit, nested shells) strips or keeps them, and JSON or a list falls apart.",
            "Pass plain words, or submit a script that holds the command.",
            "https://github.com/ray-project/ray/issues/26514",
            "quotes inside JSON and lists",
            ignorable=False,
        ),
        _rule(
            "P3O019",
            "unchecked-overrides",
            Severity.WARNING,
            "A file named by --custom-config-path overrides any argument after parsing, without types. It was not"
            " found here, so what runs may differ from what was judged.",
            "Run lint where the file is, or write its settings as flags.",
            "https://github.com/THUDM/slime/blob/main/slime/utils/arguments.py",
            "a file that can be read: its values are laid over the arguments and judged",
        ),
        _rule(
            "P3O020",
            "not-policy-optimization",
            Severity.ERROR,
            "The configuration pre-trains or fine-tunes on given texts. There are no rollouts, so there is nothing P3O"
            " could be switched on for.",
            "Ask about a configuration that trains with rollouts.",
            "arXiv:2605.12380 Algorithm 2",
            "the same configuration judged on its own terms",
            ignorable=False,
        ),
        _rule(
            "P3O021",
            "undecided-setting",
            Severity.WARNING,
            "The setting comes from a checkpoint, a model configuration or a shell variable that is not part of what"
            " was read, and P3O's replay depends on it.",
            "Look it up, or write it in the configuration.",
            "https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/training/checkpointing.py",
        ),
        _rule(
            "P3O022",
            "sampling-set-elsewhere",
            Severity.WARNING,
            "A custom generate function may sample at another temperature or truncate, whatever the arguments say."
            " Relax's own P3O recipes take the behaviour temperature from an environment variable.",
            "Read the function, and record what it samples with.",
            _RELAX_P3O,
        ),
        _rule(
            "P3O023",
            "ratio-forced-to-one",
            Severity.WARNING,
            "The trainer's own log-probs are taken as those of the rollout policy. The ratio is 1 for every token, the"
            " ESS reads 1, and stale samples count as on-policy.",
            "Turn the on-policy shortcut off when rollouts may be stale or the ESS is to mean something.",
            "https://github.com/redai-infra/Relax; force_on_policy_ratio of NeMo-RL",
            "fresh, colocated rollouts with one optimizer step each",
        ),
        _rule(
            "P3O024",
            "micro-batch-token-mean",
            Severity.WARNING,
            "verl's legacy workers take the token mean of each micro-batch and average those; only its engine workers"
            " divide by the token count of the whole batch.",
            "Use the engine workers, or one micro-batch per optimizer step.",
            "https://github.com/verl-project/verl, agg_loss",
        ),
        _rule(
            "P3O025",
            "for-the-record",
            Severity.INFO,
            "Does not break P3O, but belongs into the record of a comparison: stale but complete windows, another"
            " temperature than 1, an auxiliary loss, FP8 without a history, whitened advantages.",
            "Nothing to mend.",
            "arXiv:2605.12380 Section 5",
        ),
        _rule(
            "P3O026",
            "per-token-loss-on-other-backend",
            Severity.ERROR,
            "With per-token loss the loss function returns a sum and a count. Megatron divides by the count; other"
            " backends have dropped it, and the learning rate then grows with the number of tokens.",
            "Use the Megatron backend, or the per-sample loss.",
            "https://github.com/radixark/miles/pull/3231",
            ignorable=False,
        ),
        _rule(
            "P3O029",
            "arguments-from-elsewhere",
            Severity.WARNING,
            "The command passes on a list that the text does not set: it comes from a sourced file or the environment."
            " Any flag may be in it, so nothing is concluded from a flag that is absent.",
            "Lint the argument list the script ends up with.",
            "design rule of p3o-launch",
            "lists and variables that are set in the text",
        ),
        _rule(
            "P3O028",
            "micro-batch-count-out-of-step",
            Severity.WARNING,
            "verl's FSDP workers cut a token budget into micro-batches on each rank. Versions that do not agree on the"
            " number leave the loop at different times, and the collective of the last one waits without end.",
            "Use micro-batches of fixed size, the Megatron backend, or a version with the fix.",
            "https://github.com/verl-project/verl/issues/6176",
            "one data-parallel rank; the Megatron backend",
        ),
        _rule(
            "P3O507",
            "log-prob-micro-batch-differs",
            Severity.WARNING,
            "Kernels sum in another order for another batch shape. When the trainer recomputes the denominator in"
            " micro-batches of another size than it trains in, ratios of a policy that has not moved scatter around 1:"
            " in one report the clip took tokens of an on-policy step. Tensor parallelism adds to it; the rule speaks"
            " from four ranks on.",
            "Use one micro-batch size for both, or divide by the rollout engine's log-probs.",
            "https://github.com/verl-project/verl/issues/6280, https://github.com/NVIDIA-NeMo/RL/pull/1767",
            "Fewer than four tensor-parallel ranks, token budgets, and log-probs of the engine as denominator; presets,"
            " whose runtime never recomputes them.",
        ),
        _rule(
            "P3O027",
            "learning-rate-ends-early",
            Severity.WARNING,
            "The decay horizon is an absolute end point that includes the warm-up. With the warm-up subtracted the"
            " rate reaches its floor early and stays there for the rest of the run.",
            "Set the decay length to the length of the run.",
            "https://github.com/NVIDIA/Megatron-LM/issues/2258",
            "a constant rate; a decay as long as the run; no decay length given",
        ),
    )
}


def import_finding(
    code: str, position: Position, message: str, hint: str | None = None, path: str = ""
) -> LocatedFinding:
    """A located finding of one of the rules above."""
    rule = IMPORT_RULES[code]
    return LocatedFinding(position, rule.severity, rule.code, rule.name, message, hint, path)
