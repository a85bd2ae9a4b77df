"""A hint is the smallest change that mends the fault: what it offers is tried out here."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
from guard_presets import codes, findings

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
