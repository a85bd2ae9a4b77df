"""Facts -> findings: the guards that judge presets, in the words and at the places of the user's own configuration."""

from __future__ import annotations

import traceback
from dataclasses import replace
from typing import Any, cast

from p3o_launch.diagnostics import Finding, LocatedFinding
from p3o_launch.guards import GuardContext, Rule, all_guards
from p3o_launch.importers.facts import Facts
from p3o_launch.importers.wording import Wording
from p3o_launch.rules_file import file_finding
from p3o_launch.schema import Group, Preset
from p3o_launch.topology import topology

# Placeholders below any real value: what is too long with them is too long.
_LOWER_BOUNDS = ("rollout.max_prompt_len",)
# What a framework's own loss allows and P3O does not.
_BACK_UNDER_P3O = ("P3O112", "P3O401", "P3O114")
_ABOUT_ROLLOUTS = ("P3O1", "P3O4")


class _Watched:
    """Stands for a preset or one of its groups, and notes which unknown facts a rule reads."""

    __slots__ = ("_below", "_model", "_opaque", "_read")

    def __init__(self, model: Any, below: str, opaque: frozenset[str], read: set[str]) -> None:
        self._model, self._below, self._opaque, self._read = model, below, opaque, read

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._model, name)
        path = f"{self._below}{name}"
        if path in self._opaque:
            self._read.add(path)
        return _Watched(value, f"{path}.", self._opaque, self._read) if isinstance(value, Group) else value


def judge(facts: Facts) -> tuple[list[LocatedFinding], list[str]]:
    """Every finding of the guards, and the tracebacks of guards that raised (P3O901)."""
    located: list[LocatedFinding] = []
    crashes: list[str] = []
    read: set[str] = set()
    watched = cast(Preset, _Watched(facts.preset, "", facts.opaque, read))
    sizes = topology(facts.preset)
    rollouts = facts.extra.get("kind", "rl") == "rl"
    for code, rule in all_guards().items():
        if rule.body is None or code in facts.inapplicable or (not rollouts and code.startswith(_ABOUT_ROLLOUTS)):
            continue
        context = GuardContext(watched)
        context.__dict__["topology"] = sizes  # derived once, from the facts themselves
        read.clear()
        try:
            found = list(rule.body(context))
        except Exception:  # any bug in a rule must show, and must not hide the other rules
            crashes.append(traceback.format_exc())
            message = f"the rule {code} failed: {crashes[-1].strip().splitlines()[-1]}"
            located.append(file_finding("P3O901", facts.start, message, "this is a bug of p3o-launch"))
            continue
        if not read:
            located += [_located(facts, rule, finding) for finding in found if not _rests_on_unknown(facts, finding)]
    return located, crashes


def _rests_on_unknown(facts: Facts, finding: Finding) -> bool:
    related = [path for path in finding.related if path not in _LOWER_BOUNDS]
    return any(path in facts.unknown for path in (finding.path, *related))


def _located(facts: Facts, rule: Rule, finding: Finding) -> LocatedFinding:
    words = Wording(facts)
    return LocatedFinding(
        facts.place(finding.path, *finding.related),
        rule.severity,
        rule.code,
        rule.name,
        words.sentence(finding.message),
        words.hint(rule.code, finding.hint) if finding.hint else None,
        finding.path,
    )


def switched(facts: Facts) -> Facts:
    """The same configuration with P3O as its estimator and one ESS per optimizer step, and nothing else changed."""
    preset = facts.preset
    algorithm = preset.algorithm.model_copy(
        update={
            "advantage_estimator": "p3o",
            "ess_scope": "step",
            "kl_mode": "proxy_safe",
            "eps_clip": None,  # the PPO clip goes with the estimator it belongs to
            "eps_clip_high": None,
        }
    )
    rollout = preset.rollout.model_copy(update={"fully_async": bool(facts.extra.get("streaming"))})
    inapplicable = {code: reason for code, reason in facts.inapplicable.items() if code not in _BACK_UNDER_P3O}
    preset = preset.model_copy(update={"algorithm": algorithm, "rollout": rollout})
    remedies = dict(facts.remedies)
    if facts.framework in ("megatron", "nemo_rl"):  # their corrections are not a denominator
        remedies["algorithm.use_rollout_logprobs"] = "P3O needs a trainer that divides by them"
    return replace(facts, preset=preset, inapplicable=inapplicable, remedies=remedies)
