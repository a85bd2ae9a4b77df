"""Are two presets arms of one comparison? ``p3o-launch diff --paired``: what differs beyond the declared factor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from p3o_launch.check import CheckResult
from p3o_launch.diagnostics import LocatedFinding, Position
from p3o_launch.errors import UsageError
from p3o_launch.nodes import Path
from p3o_launch.resolve import ALGORITHM_OWN, Difference, differences, undeclared
from p3o_launch.rules_pair import pair_finding
from p3o_launch.schema import Preset
from p3o_launch.shape import known_path, suggest

_OF_A_FILE: tuple[Path, ...] = (("name",), ("description",), ("ignore",))
_SEEDS: tuple[Path, ...] = (("seed", "seed"), ("seed", "rollout_seed"))


def factors(names: Sequence[str]) -> tuple[Path, ...]:
    """Paths that may differ: the algorithm's own, or exactly those named. UsageError for a path that is none."""
    if not names:
        return (*ALGORITHM_OWN, *_OF_A_FILE)
    paths = []
    for name in names:
        path = known_path(name)
        if path is None:
            close = suggest(tuple(name.split(".")))
            hint = f"did you mean {'.'.join(close)}?" if close else "`p3o-launch schema` lists every setting"
            raise UsageError(f"--factor: there is no setting {name!r}", hint=hint)
        paths.append(path)
    return (*paths, *_OF_A_FILE)


def seed_list(text: str | None) -> tuple[int, ...] | None:
    """``"42,43"`` -> (42, 43); None when no seeds are named. UsageError for anything that is no whole number."""
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and word.isascii() and len(word) < 20 for word in words):
        raise UsageError(f"--seeds {text!r} is not a list of whole numbers", hint="write --seeds 42,43,44")
    return tuple(int(word) for word in words)


def judge_pair(
    left: CheckResult, right: CheckResult, own: tuple[Path, ...], seeds: tuple[int, ...] | None = None
) -> CheckResult:
    """Findings about ``right`` as the second arm of a comparison with ``left``; both must be sound presets."""
    arms = [side.preset for side in (left, right)]
    a, b = arms
    assert a is not None
    assert b is not None
    found = [item for item in undeclared(differences(a.model_dump(), b.model_dump()), own) if item.path not in _SEEDS]
    findings = [_differs(item, left, right) for item in found]
    findings += _seed_findings(a, b, left, right, own, seeds)
    findings += _backend_findings(right, b, own)
    ordered = tuple(sorted(findings, key=lambda finding: finding.sort_key))
    result = CheckResult(right.source, b, ordered)
    result.chain = (*right.chain, *left.chain)
    return result


def _differs(item: Difference, left: CheckResult, right: CheckResult) -> LocatedFinding:
    dotted = ".".join(item.path)
    here, there = (item.right or "absent"), (item.left or "absent")
    message = f"{dotted} is {here} here and {there} in {left.source}"
    hint = f"give both arms the same value, or declare it: --factor {'.'.join(item.path[:2])}"
    return pair_finding("P3O801", _place(right, item.path), message, hint, dotted)


def _seed_findings(
    a: Preset, b: Preset, left: CheckResult, right: CheckResult, own: tuple[Path, ...], seeds: tuple[int, ...] | None
) -> Iterator[LocatedFinding]:
    values = [(preset.seed.seed, _rollout_seed(preset)) for preset in (a, b)]
    declared = {path for path in _SEEDS if any(path[: len(prefix)] == prefix for prefix in own)}
    differing = [] if seeds else [path for path, x, y in zip(_SEEDS, *values, strict=True) if x != y]
    for path in differing:
        if path in declared:
            continue
        dotted = ".".join(path)
        index = _SEEDS.index(path)
        message = f"{dotted} is {values[1][index]} here and {values[0][index]} in {left.source}"
        position = _place(right, path)
        yield pair_finding("P3O802", position, message, f"use {values[0][index]} in both", dotted)
    if not differing and len(set(seeds or (values[0][0],))) == 1:
        message = f"both arms run with one seed, {seeds[0] if seeds else values[0][0]}: seed noise cannot be told apart"
        position = _place(right, _SEEDS[0])
        yield pair_finding("P3O803", position, message, "run several and say so: --seeds 42,43,44", "seed.seed")


def _backend_findings(right: CheckResult, b: Preset, own: tuple[Path, ...]) -> Iterator[LocatedFinding]:
    path = ("model", "attention_backend")
    declared = any(path[: len(prefix)] == prefix for prefix in own)
    if b.cluster.device == "cuda" and b.model.attention_backend == "auto" and not declared:
        message = "model.attention_backend (auto) leaves each arm's attention kernel to Transformer Engine"
        hint = "set model.attention_backend: flash in both arms"
        yield pair_finding("P3O506", _place(right, path), message, hint, ".".join(path))


def _rollout_seed(preset: Preset) -> int:
    return preset.seed.seed if preset.seed.rollout_seed is None else preset.seed.rollout_seed


def _place(result: CheckResult, path: Path) -> Position:
    """Where ``path`` is written, else the key of its group, else the start of the preset."""
    if path in result.values:
        return result.values[path]
    known = next((path[:length] for length in range(len(path) - 1, 0, -1) if path[:length] in result.keys), None)
    return result.keys[known] if known else Position(result.source, 1, 1)
