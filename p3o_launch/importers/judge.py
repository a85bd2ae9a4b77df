"""Facts -> findings: the guards that judge presets, in the words and at the places of the user's own configuration."""

from __future__ import annotations

import re
import traceback
from dataclasses import replace
from functools import cache
from typing import Any, cast

from p3o_launch.diagnostics import Finding, LocatedFinding
from p3o_launch.guards import GuardContext, Rule, all_guards
from p3o_launch.importers.facts import Facts
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
    words = Words(facts)
    return LocatedFinding(
        facts.place(finding.path, *finding.related),
        rule.severity,
        rule.code,
        rule.name,
        words.sentence(finding.message),
        words.remedy(finding.hint) if finding.hint else None,
        finding.path,
    )


_SET = re.compile(r"\b(?:set|write|use|add) ([a-z_]+\.[a-z_0-9.]+): ?([^\s,;()]+)")
_AND_SET = re.compile(r"\b(and|or) ([a-z_]+\.[a-z_0-9.]+): ?([^\s,;()]+)")
_PATH = re.compile(r"\b(?:" + "|".join(Preset.model_fields) + r")\.[a-z_0-9]+(?:\.[\w]+)*")


_FIELD = re.compile(r"(?<![\w.-])[a-z]+(?:_[a-z0-9]+)+(?![\w.=-])")


@cache
def _fields() -> dict[str, str]:
    """Names of settings that one group alone has -> their path: rules name a neighbour without its group."""
    paths: dict[str, list[str]] = {}
    for group, info in Preset.model_fields.items():
        kind = info.annotation
        for name in kind.model_fields if isinstance(kind, type) and issubclass(kind, Group) else ():
            paths.setdefault(name, []).append(f"{group}.{name}")
    return {name: found[0] for name, found in paths.items() if len(found) == 1}


class Words:
    """Preset paths -> the names by which the user sets them."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts

    def name(self, path: str) -> str:
        """The user's name of a path; the path itself where the framework has no such setting."""
        return self.facts.names.get(path, path)

    def sentence(self, text: str) -> str:
        """Every path in a text, renamed."""
        text = _PATH.sub(lambda match: self.name(match[0]), text)
        return _FIELD.sub(lambda match: self.name(_fields().get(match[0], match[0])), text)

    def remedy(self, text: str) -> str:
        """A hint, with ``set PATH: VALUE`` in the way the user writes a setting."""
        text = _SET.sub(lambda match: self.setting(match[1], match[2]), text)
        text = _AND_SET.sub(lambda match: f"{match[1]} {self.setting(match[2], match[3]).removeprefix('pass ')}", text)
        return self.sentence(text)

    def setting(self, path: str, value: str) -> str:
        """``pass --flag value``, or ``set key=value``."""
        if path in self.facts.remedies:
            return self.facts.remedies[path]
        name = self.name(path)
        if name == path:
            return f"set {name}: {value}"
        if self.facts.style != "flag":
            return f"set {name}{'=' if self.facts.style == 'override' else ': '}{value}"
        if not name.startswith("--"):
            return f"set {name}={value}"
        if value == "true":
            return f"pass {name}"
        return f"leave out {name}" if value in ("false", "null") else f"pass {name} {value}"


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
