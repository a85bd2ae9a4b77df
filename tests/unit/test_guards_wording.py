"""One layer is no "1 layers", and at most one is no "1 or less"."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from guard_presets import CPU, GRPO, codes, findings
from hint_changes import ways

ERR = Path(__file__).parents[1] / "data" / "err"
COUNTED = "layers|GPUs|ranks|samples|stages|tokens|micro-batches|chunks|prompts|experts|steps|rollouts|heads|codes|keys"
WRONG = re.compile(
    rf"(?<![\d.,])1 (?:{COUNTED})\b|(?<![\d.,])[01] or (?:less|fewer)\b|\b(?:use|or|and),|\b(?:use|or) $"
)

Changes = dict[str, Any]
PP2 = {"parallel.pipeline_model_parallel_size": 2}
MOE = {"model.num_experts": 8, "model.moe_ffn_hidden_size": 384}
# Faults whose numbers are 1, where a plural would be wrong.
ONES: list[tuple[str, Changes]] = [
    ("304", {**PP2, "model.num_layers": 29}),
    ("304", {**PP2, "model.num_layers": 2, "parallel.num_layers_per_virtual_pipeline_stage": 2}),
    ("304", {**PP2, "model.num_layers": 3, "parallel.decoder_first_pipeline_num_layers": 3}),
    (
        "310",
        {**PP2, "batch.micro_batch_size": 24, "cluster.gpu": None, "parallel.num_layers_per_virtual_pipeline_stage": 7},
    ),
    ("311", {**MOE, "cluster.gpus_per_node": 1, "parallel.expert_model_parallel_size": 2}),
    ("311", {**MOE, "cluster.gpus_per_node": 1, "parallel.expert_tensor_parallel_size": 2}),
    ("314", {"cluster.gpus_per_node": 1, "rollout.num_gpus": 2}),
    ("320", {**MOE, **GRPO, "model.num_experts": 2, "model.moe_router_topk": 3}),
    ("412", {"model.max_position_embeddings": 513, "rollout.max_response_len": 512}),
    ("412", {"model.max_position_embeddings": 513, "rollout.max_response_len": 600, "rollout.max_prompt_len": 512}),
    ("415", {"batch.num_rollout": 1, "evaluation.interval": 2, "evaluation.before_train": False}),
    ("602", {"batch.micro_batch_size": 3}),
    ("602", {"batch.use_dynamic_batch_size": True, "batch.max_tokens_per_gpu": 20000}),
]


@pytest.mark.parametrize(("code", "changes"), ONES, ids=[f"{code}-{i}" for i, (code, _) in enumerate(ONES)])
def test_one_of_a_thing_is_singular(code: str, changes: Changes) -> None:
    found = [finding for known, finding in findings(changes) if known == f"P3O{code}"]
    assert found, findings(changes)
    for finding in found:
        assert not WRONG.search(finding.message), finding.message
        assert not WRONG.search(finding.hint or ""), finding.hint


@pytest.mark.parametrize("path", sorted(ERR.glob("*.out")), ids=lambda path: path.stem)
def test_no_report_counts_one_in_the_plural(path: Path) -> None:
    assert WRONG.findall(path.read_text("utf-8")) == []


def test_engines_are_offered_every_number_of_gpus_that_divides() -> None:
    changes = {"cluster.gpus_per_node": 24, "cluster.gpu": None, "rollout.num_gpus_per_engine": 5}
    for engine, hint in (("vllm", "use 1, 2, 3, 4, 6, 8, 12 or 24"), ("megatron", "use 1")):
        found = findings({**changes, "rollout.engine": engine})
        assert [finding.hint for code, finding in found if code == "P3O314"] == [hint]


def test_no_hint_offers_what_the_cpu_refuses() -> None:
    for code, changes in (
        ("P3O209", {"parallel.cuda_graph_scope": "full_iteration"}),
        ("P3O318", {"parallel.overlap_param_gather": True}),
        ("P3O311", {**MOE, "parallel.expert_tensor_parallel_size": 3}),
    ):
        ((found, finding),) = findings({**CPU, **changes})
        assert found == code
        for way in ways(finding.hint or "", finding.path):
            assert codes({**CPU, **changes, **dict(way)}) in ([], ["211"]), finding.hint


def test_what_replaces_sinkhorn_has_an_effect() -> None:
    sinkhorn = {**MOE, "model.moe_router_load_balancing_type": "sinkhorn"}
    ((_, finding),) = findings(sinkhorn)
    assert finding.hint == "use none"
    ((_, finding),) = findings({**sinkhorn, "model.moe_aux_loss_coeff": 0.01})
    assert finding.hint == "use aux_loss, seq_aux_loss, global_aux_loss or none"
