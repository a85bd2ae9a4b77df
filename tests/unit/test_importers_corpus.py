"""Real configurations of five frameworks: nothing crashes, the facts are those somebody read, the verdicts hold."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from p3o_launch.diagnostics import Severity
from p3o_launch.importers import LintResult, Request, lint_file, summary

CORPUS = Path(__file__).parent.parent / "data" / "corpus"
RECORDS = [json.loads(line) for line in (CORPUS / "expected.jsonl").read_text("utf-8").splitlines()]
FILES = sorted(path for kind in ("launch", "yaml") for path in (CORPUS / kind).rglob("*") if path.is_file())

# (file, fact): why the importer says something else than the record.
DISAGREEMENTS: dict[tuple[str, str], str] = {}

# Errors of configurations that are published as working: each is one.
REAL_ERRORS = {
    "launch/slime/run-glm4.7-30B-A3B-delta.args": {
        "P3O304": "47 layers on two pipeline stages without an uneven layout: Megatron refuses it"
    },
    "launch/megatron/ci_gpt_grpo_tp4_pp1_dp2_8b_throughput.args": {
        "P3O114": "a throughput test: samples up to 19 batches old, log-probs recomputed, no correction"
    },
    "launch/megatron/pretrain_llama3_8b_fp8_delayed.args": {
        "P3O018": "--split '99,1,0' reached the program with its quotes"
    },
}

# The record's condition -> how the finding says it.
CONDITIONS = {
    "P3O101": "no_rollout_logprobs",
    "P3O102": "tis_on",
    "P3O103": "per_sample_mean_loss",
    "P3O104": "critic",
    "P3O109": "on_policy_distillation",
    "P3O202": "fp8_delayed_scaling",
    "P3O204": "fully_async",
    "P3O206": "routing_replay",
    "P3O207": "routing_replay",
    "P3O020": "not_rl",
}
# Errors that the record does not count among P3O's conditions.
NOT_CONDITIONS = {
    "P3O112": "the record has it as the warning group_size_1: with one sample per prompt nothing trains",
    "P3O304": "the layout of the model, whatever the estimator",
    "P3O018": "the quoting of the command, whatever the estimator",
}
VERDICT_DISAGREEMENTS = {
    "launch/megatron/pretrain_llama3_8b_fp8_delayed.args": (
        {"no_rollout_logprobs"},
        "without rollouts there are no log-probs to miss: P3O020 says so, once",
    ),
}


def judged(record: dict[str, Any], target: str | None = None) -> LintResult:
    env = tuple(f"{name}={value}" for name, value in record.get("env", {}).items())
    gpus = record.get("gpus") if record["framework"] == "megatron" else None  # torchrun's business
    request = Request(record["framework"], env=env, gpus=gpus, target=target)
    return lint_file(str(CORPUS / record["file"]), request)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}" if path else key)
    else:
        yield path, value


def fact(record: Any, path: str) -> Any:
    """The fact at a dotted path; keys may hold dots themselves."""
    for key in sorted(record if isinstance(record, dict) else (), key=len, reverse=True):
        if path == key:
            return record[key]
        if path.startswith(f"{key}."):
            return fact(record[key], path[len(key) + 1 :])
    return "not in the summary"


def id_of(record: dict[str, Any]) -> str:
    return Path(record["file"]).name


@pytest.mark.parametrize("record", RECORDS, ids=id_of)
def test_the_facts_are_those_of_the_record(record: dict[str, Any]) -> None:
    result = judged(record)
    assert result.facts is not None
    found = json.loads(json.dumps(summary(result.facts)))
    wrong = {
        path: (value, fact(found, path))
        for path, value in leaves(record["facts"])
        if fact(found, path) != value and (record["file"], path) not in DISAGREEMENTS
    }
    assert wrong == {}


def test_explained_disagreements_stay_below_five_percent_and_are_real() -> None:
    everything = sum(1 for record in RECORDS for _ in leaves(record["facts"]))
    assert everything > 5000
    assert len(DISAGREEMENTS) < 0.05 * everything
    assert all(DISAGREEMENTS.values())


@pytest.mark.parametrize("record", RECORDS, ids=id_of)
def test_published_configurations_have_no_errors_but_real_ones(record: dict[str, Any]) -> None:
    errors = {item.code for item in judged(record).check.findings if item.severity is Severity.ERROR}
    assert errors == REAL_ERRORS.get(record["file"], {}).keys()


@pytest.mark.parametrize("record", RECORDS, ids=id_of)
def test_a_switch_to_p3o_violates_the_conditions_of_the_record(record: dict[str, Any]) -> None:
    result = judged(record, "p3o")
    violated = set()
    for item in result.check.findings:
        if item.severity is not Severity.ERROR or item.code in NOT_CONDITIONS:
            continue
        if item.code == "P3O201":
            violated |= {f"{kind}_dropout_nonzero" for kind in ("attention", "hidden") if kind in item.message}
        elif item.code == "P3O401":
            name = "top_p_not_1" if "top-p" in item.message else "top_k_active"
            violated.add(f"rollout_{name}")
        else:
            violated.add(CONDITIONS[item.code])
    expected = set(record["p3o"]["violations"])
    explained, _ = VERDICT_DISAGREEMENTS.get(record["file"], (set(), ""))
    assert violated | explained == expected
    assert (not violated) == record["p3o"]["valid"]


# A word of the record's warning -> what the finding must be.
WARNINGS = {
    "dropout_unresolved": ("P3O021", "dropout"),
    "token-mean is per micro-batch": ("P3O024", "micro-batch"),
    "group_size_1": ("P3O112", "groups of one"),
    "fp8_": ("P3O025", "keeps no history"),
    "bounded_lag_async": ("P3O025", "the window is complete"),
    "async mode but": ("P3O025", "complete before training"),
    "partial_rollout": ("P3O025", "several policy versions"),
    "speculative_rollout": ("P3O025", "speculative"),
    "custom_generate_function": ("P3O022", "--custom-generate-function-path"),
    "moe_aux_loss_nonzero": ("P3O212", "the gradient as means over micro-batches"),
    "unknown_flags": ("P3O014", "there is no flag"),
    "invalid_choice": ("P3O016", "is not among"),
    "normalize_advantages": ("P3O025", "whitened"),
    "rollout_temperature_not_1": ("P3O025", "temperature"),
    "true_on_policy": ("P3O023", "every ratio is 1"),
    "update_weights_interval>1": ("P3O025", "rollouts old"),
}


@pytest.mark.parametrize("record", RECORDS, ids=id_of)
def test_a_switch_to_p3o_warns_of_what_the_record_warns_of(record: dict[str, Any]) -> None:
    found = [(item.code, item.message) for item in judged(record, "p3o").check.findings]
    for warning in record["p3o"]["warnings"]:
        ((code, word),) = [value for key, value in WARNINGS.items() if warning.startswith(key)]
        assert any(known == code and word in message for known, message in found), warning


def test_relax_recipes_that_hide_their_temperature_say_so() -> None:
    record = next(item for item in RECORDS if "temperature_0p6" in item["file"])
    (found,) = [item for item in judged(record, "p3o").check.findings if item.code == "P3O022"]
    assert "P3O_BEHAVIOR_TEMPERATURE (0.6)" in found.message


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
@pytest.mark.parametrize("target", [None, "p3o"])
def test_no_file_crashes_and_every_finding_lies_inside_its_file(path: Path, target: str | None) -> None:
    framework = path.parent.name
    result = lint_file(str(path), Request(framework, target=target))
    assert result.check.crashes == ()
    assert result.facts is not None
    for item in result.check.findings:
        lines = Path(item.position.file).read_text("utf-8").split("\n")
        assert 1 <= item.position.line <= len(lines)
        assert 1 <= item.position.column <= len(lines[item.position.line - 1]) + 1


@pytest.mark.parametrize("record", RECORDS, ids=id_of)
def test_findings_point_at_the_argument_they_name(record: dict[str, Any]) -> None:
    """A finding whose message starts with a flag that is written stands on that flag's line, or on its value's."""
    if not record["file"].endswith(".args") or record["framework"] == "verl":
        return
    lines = (CORPUS / record["file"]).read_text("utf-8").split("\n")
    for item in judged(record, "p3o").check.findings:
        match = re.match(r"(--[a-z0-9-]+)", item.message)
        if match is None or match[1] not in lines:
            continue
        nearby = lines[max(0, item.position.line - 3) : item.position.line]
        assert match[1] in nearby, (item.message, item.position)
