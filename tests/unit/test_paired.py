"""Two arms of one comparison: every shipped P3O/GRPO pair differs in the objective alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from p3o_launch.check import CheckResult, check_file, check_text
from p3o_launch.errors import UsageError
from p3o_launch.paired import factors, judge_pair, seed_list
from p3o_launch.presets import names, shipped

BASE = Path(__file__).parents[1] / "data" / "arm.yaml"
ARMS = [name for name in names() if f"grpo_{name}" in names()]


def arm(name: str, **options: str) -> CheckResult:
    path = shipped(name)
    assert path is not None
    return check_file(path, **options)  # type: ignore[arg-type]


def codes(left: CheckResult, right: CheckResult, *named: str, seeds: str | None = None) -> list[str]:
    return [finding.code for finding in judge_pair(left, right, factors(named), seed_list(seeds)).findings]


def test_every_shipped_preset_has_its_counterpart() -> None:
    assert len(ARMS) >= 5
    assert sorted([*ARMS, *(f"grpo_{name}" for name in ARMS)]) == names()


@pytest.mark.parametrize("profile", [None, "cpu"])
@pytest.mark.parametrize("name", ARMS)
def test_every_shipped_pair_differs_in_the_objective_alone(name: str, profile: str | None) -> None:
    options = {"profile": profile} if profile else {}
    sides = arm(name, **options), arm(f"grpo_{name}", **options)
    assert codes(*sides, seeds="42,43") == []
    assert codes(*sides) == ["P3O803"]


def test_two_scenarios_are_no_pair_unless_the_factor_is_declared() -> None:
    sides = arm("temp_0p6"), arm("temp_1p2")
    assert codes(*sides, seeds="1,2") == ["P3O801"]
    assert codes(*sides, "rollout.temperature", seeds="1,2") == []
    assert codes(*sides, "rollout", seeds="1,2") == []


def test_a_declared_factor_replaces_the_algorithm() -> None:
    found = judge_pair(arm("temp_0p6"), arm("grpo_temp_1p2"), factors(["rollout.temperature"]), (1, 2)).findings
    assert {finding.path for finding in found} == {
        "algorithm.advantage_estimator",
        "algorithm.eps_clip",
        "algorithm.eps_clip_high",
    }


def test_seeds_are_a_fault_of_their_own() -> None:
    left = check_text(f"extends: {BASE}\n")
    other = check_text(f"extends: {BASE}\nseed: {{seed: 7}}\n")
    assert codes(left, other) == ["P3O802", "P3O802"]
    assert codes(left, other, seeds="1,2") == []
    assert codes(left, other, "seed") == []
    assert codes(left, left, seeds="7") == ["P3O803"]
    assert codes(left, left, seeds="7,7") == ["P3O803"]


@pytest.mark.parametrize("text", ["", "1,,2", "a", "-1", "1.5", "٣", "9" * 30])
def test_seeds_that_are_no_whole_numbers_are_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError):
        seed_list(text)


def test_an_unknown_factor_is_a_usage_error_with_the_nearest_name() -> None:
    with pytest.raises(UsageError) as caught:
        factors(["rollout.temprature"])
    assert caught.value.hint == "did you mean rollout.temperature?"
