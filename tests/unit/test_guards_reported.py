"""Configurations that real runs got wrong, and some that a guard must not refuse, in this schema's words.

The number is that of the collection of public reports; what the schema cannot express (other frameworks' switches,
the state of a directory or of a git tree) is tried where it can be: in the importers' and the run directory's tests.

A reported warning about a feature that the builtin runtime does not have is judged where the feature exists: by lint of
the framework, in ``test_reported_configs.py``. Here the warning stands with its reason, and P3O119 stops the run.
"""

from __future__ import annotations

from typing import Any

import pytest
from guard_presets import ABSENT, GRPO, findings

from p3o_launch.diagnostics import Severity
from p3o_launch.guards import all_guards

Changes = dict[str, Any]

ENV = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
H100 = {"cluster.gpu": "H100-80GB"}
RECOMPUTED = {**GRPO, "algorithm.use_rollout_logprobs": False}

REPORTED: list[tuple[int, str, str, Changes]] = [
    (1, "error", "201", {"model.attention_dropout": ABSENT, "model.hidden_dropout": ABSENT}),
    (3, "error", "102", {**GRPO, "algorithm.use_tis": True, "algorithm.custom_tis_function_path": None}),
    (3, "error", "102", {"algorithm.use_tis": True}),
    (4, "error", "401", {"rollout.top_p": 0.95}),
    (4, "error", "401", {"rollout.top_k": 20}),
    (4, "error", "401", {"rollout.min_p": 0.05}),
    (6, "warning", "413", {"rollout.engine": "vllm", "rollout.generation_config": "auto", "rollout.top_p": None}),
    (
        7,
        "error",
        "110",
        {**GRPO, "algorithm.kl_coef": 0.01, "algorithm.use_kl_loss": False, "algorithm.kl_loss_coef": 0},
    ),
    (
        8,
        "error",
        "111",
        {
            **GRPO,
            "algorithm.use_kl_in_reward": True,
            "algorithm.kl_coef": 0.001,
            "algorithm.use_kl_loss": True,
            "algorithm.kl_loss_coef": 0.001,
        },
    ),
    (10, "error", "112", {**GRPO, "batch.n_samples_per_prompt": 1}),
    (10, "error", "112", {"batch.n_samples_per_prompt": 1}),
    (
        13,
        "warning",
        "118",
        {
            **GRPO,
            "algorithm.calculate_per_token_loss": False,
            "batch.use_dynamic_batch_size": True,
            "batch.max_tokens_per_gpu": 8192,
        },
    ),
    (13, "error", "103", {"algorithm.calculate_per_token_loss": False}),
    (
        15,
        "error",
        "304",
        {
            "model.num_layers": 80,
            "cluster.gpus_per_node": 16,
            "batch.rollout_batch_size": 16,
            "batch.global_batch_size": 64,
            "parallel.pipeline_model_parallel_size": 16,
            "parallel.num_layers_per_virtual_pipeline_stage": 2,
        },
    ),
    (17, "error", "406", {"model.lora_rank": 8, "rollout.colocate": False, "model.lora_merge_before_sync": False}),
    (19, "error", "101", {"algorithm.use_rollout_logprobs": False}),
    (19, "error", "109", {"algorithm.use_opd": True}),
    (19, "error", "401", {"rollout.epsilon_cutoff": 3e-4}),
    (20, "error", "202", {**H100, "precision.fp8": "hybrid", "precision.fp8_recipe": "delayed"}),
    (21, "warning", "407", {**RECOMPUTED, "rollout.weight_quantization": "fp8_e4m3"}),
    (
        25,
        "error",
        "310",
        {
            "cluster.gpus_per_node": 6,
            "model.num_layers": 24,
            "batch.micro_batch_size": 16,
            "cluster.gpu": None,
            "parallel.pipeline_model_parallel_size": 6,
            "parallel.num_layers_per_virtual_pipeline_stage": 2,
        },
    ),
    (28, "error", "501", {"precision.fp8": "e4m3", "precision.fp8_recipe": "tensorwise"}),
    (
        30,
        "warning",
        "605",
        {"rollout.engine": "sglang", "cluster.env": {"http_proxy": "p:1", "no_proxy": "10.0.0.0/8"}},
    ),
    (34, "error", "313", {"batch.rollout_batch_size": 6, "batch.n_samples_per_prompt": 8}),
    (
        36,
        "warning",
        "602",
        {
            "cluster.gpu": "H100-80GB",
            "model.vocab_size": 248320,
            "batch.use_dynamic_batch_size": True,
            "batch.max_tokens_per_gpu": 65536,
        },
    ),
    (
        37,
        "error",
        "601",
        {"rollout.engine": "sglang", "cluster.env": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}},
    ),
    (49, "error", "709", {"logging.pre_command": "pkill -9 -f python; ray stop --force"}),
    (50, "error", "705", {"cluster.env": {"WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567"}}),
]

ACCEPTED: list[tuple[int, Changes]] = [
    (
        19,
        {
            "rollout.temperature": 1.2,
            "rollout.update_weights_interval": 3,
            "algorithm.kl_mode": "proxy_safe",
            "rollout.top_p": 1.0,
            "rollout.top_k": -1,
        },
    ),
    (59, {"evaluation.interval": 1, "evaluation.temperature": 0.6, "evaluation.top_p": 0.95}),
    (62, {**H100, "precision.fp8": "hybrid", "precision.fp8_recipe": "tensorwise"}),
    (62, {**H100, "precision.fp8": "e4m3", "precision.fp8_recipe": "blockwise"}),
    (62, {"cluster.gpu": "B200", "precision.fp8": "e4m3", "precision.fp8_recipe": "mxfp8"}),
    (63, {"model.lora_rank": 0, "model.lora_dropout": 0.1}),
    (70, {"model.num_query_groups": 2, "parallel.tensor_model_parallel_size": 4}),
    (
        71,
        {
            "precision.deterministic_mode": True,
            "model.attention_backend": "flash",
            "cluster.env": {
                "NCCL_ALGO": "Ring",
                "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
                "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            },
        },
    ),
    (73, {"cluster.gpu": "L40S", "precision.fp8": "hybrid", "precision.fp8_recipe": "tensorwise"}),
    (73, {"cluster.gpu": "RTX 4090", "precision.fp8": "hybrid", "precision.fp8_recipe": "tensorwise"}),
]

# Accepted by every rule about the objective; the builtin runtime has no such feature and says so (P3O119).
ACCEPTED_ELSEWHERE: list[tuple[int, Changes]] = [
    (64, {**GRPO, "algorithm.use_kl_loss": True, "algorithm.kl_loss_coef": 0.01, "algorithm.kl_coef": 0.01}),
    (60, {**RECOMPUTED, "rollout.top_p": 0.95, "rollout.top_k": 20}),
    (
        74,
        {
            "rollout.engine": "vllm",
            "rollout.engine_version": "0.20.1",
            "cluster.env": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        },
    ),
]


# Warnings about what a framework with the feature would do. `run` must not start without it.
_WITHOUT_THE_FEATURE = (6, 13, 21, 30)


@pytest.mark.parametrize(("case", "verdict", "code", "changes"), REPORTED, ids=[f"{r[0]}-{r[2]}" for r in REPORTED])
def test_a_reported_fault_has_the_stated_verdict_for_the_stated_reason(
    case: int, verdict: str, code: str, changes: Changes
) -> None:
    found = {found for found, _ in findings(changes)}
    runtime = {"P3O119"} if verdict == "warning" and case in _WITHOUT_THE_FEATURE else set()
    assert found == {f"P3O{code}"} | runtime
    assert all_guards()[f"P3O{code}"].severity is Severity(verdict)


@pytest.mark.parametrize(("case", "changes"), ACCEPTED, ids=[str(case) for case, _ in ACCEPTED])
def test_a_case_to_accept_gives_no_finding(case: int, changes: Changes) -> None:
    assert findings(changes) == []


@pytest.mark.parametrize(("case", "changes"), ACCEPTED_ELSEWHERE, ids=[str(case) for case, _ in ACCEPTED_ELSEWHERE])
def test_a_case_to_accept_is_refused_for_no_other_reason_than_the_runtime(case: int, changes: Changes) -> None:
    assert {code for code, _ in findings(changes)} == {"P3O119"}


def test_auxiliary_losses_are_recorded_and_not_refused() -> None:
    """Case 67: warnings, which let the run start."""
    changes = {
        "model.num_experts": 8,
        "model.moe_ffn_hidden_size": 384,
        "model.moe_router_load_balancing_type": "aux_loss",
        "model.moe_aux_loss_coeff": 0.001,
        "model.moe_z_loss_coeff": 0.001,
        "parallel.expert_model_parallel_size": 2,
    }
    assert {code for code, _ in findings(changes)} == {"P3O211", "P3O212"}
