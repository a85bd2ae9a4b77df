"""A hint is the smallest change that mends the fault: what it offers is tried out here."""

from __future__ import annotations

import random
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from guard_presets import codes, findings
from hint_changes import applied, ways

from p3o_launch.check import CheckResult, check_file, check_text
from p3o_launch.diagnostics import LocatedFinding

Changes = dict[str, Any]

_OFFER = re.compile(r"(?:use|set|or) (?P<path>[a-z]+\.[a-z_]+)?:? ?(?P<values>\d+(?:(?:, | or )\d+)*)")
# Faults whose hint offers numbers for one setting.
_OFFERING = ("P3O301", "P3O302", "P3O303", "P3O306", "P3O307", "P3O308", "P3O310", "P3O313", "P3O316")


def offers(path: str, hint: str) -> list[tuple[str, int]]:
    """Every (path, value) a hint offers; a value without a path is meant for the finding's own."""
    found = []
    if hint.startswith("choose"):
        return []
    for match in _OFFER.finditer(hint):
        found += [(match["path"] or path, int(value)) for value in re.findall(r"\d+", match["values"])]
    return found


FAULTS: list[Changes] = [
    {"parallel.tensor_model_parallel_size": 3},
    {"parallel.tensor_model_parallel_size": 6, "cluster.gpus_per_node": 8},
    {"parallel.tensor_model_parallel_size": 2, "parallel.pipeline_model_parallel_size": 4},
    {"parallel.pipeline_model_parallel_size": 3},
    {"batch.global_batch_size": 47},
    {"batch.global_batch_size": 50},
    {"batch.micro_batch_size": 7, "cluster.gpu": None},
    {"batch.global_batch_size": 96},
    {"batch.global_batch_size": 36},
    {"batch.rollout_batch_size": 13},
    {"batch.rollout_batch_size": 16},
    {"batch.rollout_batch_size": 1},
    {"batch.rollout_batch_size": 6, "batch.n_samples_per_prompt": 8},
    {"model.num_attention_heads": 18, "model.num_query_groups": 6, "parallel.tensor_model_parallel_size": 4},
    {"model.num_attention_heads": 24, "model.num_query_groups": 6, "parallel.tensor_model_parallel_size": 4},
    {"model.num_query_groups": 6},
    {"parallel.context_parallel_size": 2},
    {"parallel.context_parallel_size": 2, "batch.sequence_padding_multiple": 6},
    {"model.vocab_size": 151937, "parallel.tensor_model_parallel_size": 2},
    {"model.num_layers": 30, "parallel.pipeline_model_parallel_size": 4},
    {"parallel.pipeline_model_parallel_size": 2, "parallel.num_layers_per_virtual_pipeline_stage": 4},
    {"parallel.pipeline_model_parallel_size": 4, "parallel.decoder_first_pipeline_num_layers": 5},
    {"parallel.pipeline_model_parallel_size": 4, "parallel.decoder_first_pipeline_num_layers": 27},
    {
        "batch.micro_batch_size": 8,
        "cluster.gpu": None,
        "parallel.pipeline_model_parallel_size": 2,
        "parallel.num_layers_per_virtual_pipeline_stage": 7,
    },
    {"batch.use_dynamic_batch_size": True, "batch.max_tokens_per_gpu": 100},
    {"batch.micro_batch_size": 4},
    {"rollout.num_gpus_per_engine": 3},
    {"model.max_position_embeddings": 4100},
]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_every_value_a_hint_offers_mends_the_fault(fault: Changes) -> None:
    (found,) = findings(fault)
    code, finding = found
    assert finding.hint is not None
    offered = offers(finding.path, finding.hint)
    assert offered
    for path, value in offered:
        left = codes({**fault, path: value})
        assert code.removeprefix("P3O") not in left, (path, value, finding.hint)
        assert not [other for other in left if other.startswith("3")], (path, value, left)


def test_one_broken_size_is_one_finding_of_its_family() -> None:
    """Random layouts: a report of the 3xx family names each deciding setting once, and its hints do what they say."""
    rng = random.Random(20)
    seen = set()
    for _ in range(600):
        changes: Changes = {
            "cluster.gpu": None,
            "cluster.gpus_per_node": rng.choice([1, 2, 4, 6, 8]),
            "parallel.tensor_model_parallel_size": rng.choice([1, 1, 2, 3, 4, 8]),
            "parallel.pipeline_model_parallel_size": rng.choice([1, 1, 2, 3, 4]),
            "parallel.context_parallel_size": rng.choice([1, 1, 2, 3]),
            "batch.sequence_padding_multiple": rng.choice([1, 4, 24]),
            "batch.rollout_batch_size": rng.choice([6, 8, 12, 16, 24]),
            "batch.n_samples_per_prompt": rng.choice([2, 3, 4, 8]),
            "batch.global_batch_size": rng.choice([12, 24, 32, 47, 48, 64, 96]),
            "batch.micro_batch_size": rng.choice([1, 1, 2, 3]),
            "model.num_layers": rng.choice([24, 28, 30]),
        }
        found = [(code, finding) for code, finding in findings(changes) if code.startswith("P3O3")]
        assert len({finding.path for _, finding in found}) == len(found), found
        for code, finding in found:
            seen.add(code)
            if code in _OFFERING and finding.hint is not None:
                for path, value in offers(finding.path, finding.hint):
                    assert code.removeprefix("P3O") not in codes({**changes, path: value}), (changes, finding, value)
    assert {"P3O301", "P3O302", "P3O303", "P3O304", "P3O308", "P3O313"} <= seen


ERR = Path(__file__).parents[1] / "data" / "err"
GOLDEN = sorted(path for family in ("P3O00[67]", "P3O010", "P3O[1-7]") for path in ERR.glob(f"{family}*.yaml"))
# Hints that are prose on purpose: what to do lies outside the preset, or only its author can know the value.
PROSE = {"P3O006", "P3O007", "P3O113", "P3O211", "P3O306", "P3O601", "P3O603", "P3O605", "P3O705", "P3O708", "P3O709"}
# Their hint is another name for the key.
KEYS = {"P3O006", "P3O607"}
# The builtin runtime lacks the feature either way, which the first refusal hides; and what a wrong size hides:
# its ranks cannot be counted.
HIDDEN = {"P3O119"}
HIDDEN_BEHIND = {"P3O301": {"P3O308", "P3O315", "P3O606"}, "P3O602": {"P3O603"}}


def judged(path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckResult | None:
    """A golden file with its arguments; None for the second arm of a comparison."""
    monkeypatch.chdir(ERR)
    words = shlex.split(path.read_text("utf-8").partition("\n")[0].partition("# args:")[2])
    pairs = list(zip(words[::2], words[1::2], strict=True))
    options = dict(pairs)
    if "--paired" in options:
        return None
    overrides = [value for option, value in pairs if option == "--set"]
    return check_file(path.name, overrides=overrides, profile=options.get("--profile"), recipe=options.get("--recipe"))


def told(finding: LocatedFinding) -> tuple[str, str]:
    return finding.code, finding.path


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_a_golden_fault_is_mended_by_its_own_hint(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Applied as it is written, every alternative takes the finding away and brings no other."""
    result = judged(path, monkeypatch)
    for finding in result.findings if result else ():
        changes = ways(finding.hint or "", finding.path, finding.code in KEYS)
        refused: list[bool] = []
        assert changes or finding.code in PROSE or "ignore P3O" in (finding.hint or ""), finding.hint
        for way in changes:
            assert result is not None
            left = check_text(yaml.safe_dump(applied(result.resolved, way)), file=path.name).findings
            before = {told(item) for item in result.findings}
            hidden = HIDDEN | HIDDEN_BEHIND.get(finding.code, set())
            new = [item for item in left if told(item) not in before and item.code not in hidden]
            if finding.code == "P3O007":  # what the value means was not known, so no rule has judged it
                new = [item for item in new if item.code.startswith("P3O0")]
            assert told(finding) not in {told(item) for item in left}, (finding.hint, way)
            offered = {change.path for change in way}
            refused.append(any(item.code == "P3O119" and item.path in offered for item in left))
            assert new == [], (finding.hint, way)
        assert not refused or not all(refused), (finding.hint, "the builtin runtime carries out nothing of it")
