"""A preset without findings, and changes to it by dotted path: what the guard tests judge."""

from __future__ import annotations

import copy
from typing import Any

from p3o_launch.diagnostics import Finding
from p3o_launch.guards import GuardContext, all_guards
from p3o_launch.schema import Preset

CLEAN: dict[str, Any] = {
    "schema_version": 1,
    "name": "clean",
    "algorithm": {
        "advantage_estimator": "p3o",
        "ess_scope": "step",
        "use_rollout_logprobs": True,
        "calculate_per_token_loss": True,
    },
    "model": {
        "hf_checkpoint": "/models/Qwen3-0.6B",
        "num_layers": 28,
        "hidden_size": 1024,
        "ffn_hidden_size": 3072,
        "num_attention_heads": 16,
        "num_query_groups": 8,
        "kv_channels": 128,
        "vocab_size": 151936,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    },
    "precision": {"bf16": True},
    "parallel": {},
    "batch": {"num_rollout": 11, "rollout_batch_size": 12, "n_samples_per_prompt": 4, "global_batch_size": 48},
    "optimizer": {"lr": 1e-5},
    "rollout": {"max_prompt_len": 512, "max_response_len": 4096, "top_p": 1.0, "top_k": -1},
    "evaluation": {},
    "data": {"prompt_data": "/data/train.jsonl", "eval_prompt_data": "/data/test.jsonl"},
    "reward": {},
    "logging": {},
    "checkpoint": {},
    "cluster": {
        "gpus_per_node": 4,
        "gpu": "A100-40GB",
        "env": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    },
}
GRPO = {"algorithm.advantage_estimator": "grpo"}
MICRO = {"algorithm.ess_scope": "micro_batch", "batch.micro_batch_size": 12, "rollout.max_response_len": 128}
CPU = {"cluster.device": "cpu", "cluster.gpu": None, "precision.bf16": False}
ABSENT = object()


def make(changes: dict[str, Any] | None = None) -> Preset:
    """The clean preset with ``changes`` by dotted path of two parts; ``ABSENT`` removes a setting."""
    data = copy.deepcopy(CLEAN)
    for path, value in (changes or {}).items():
        group, _, field = path.partition(".")
        if not field:
            data[group] = value
        elif value is ABSENT:
            data[group].pop(field, None)
        else:
            data[group][field] = value
    return Preset.model_validate(data)


def findings(changes: dict[str, Any] | None = None) -> list[tuple[str, Finding]]:
    """(code, finding) of every guard, by code."""
    context = GuardContext(make(changes))
    return [
        (rule.code, finding)
        for rule in all_guards().values()
        if rule.body is not None
        for finding in rule.body(context)
    ]


def codes(changes: dict[str, Any] | None = None) -> list[str]:
    """Codes of every finding, without ``P3O``; a code appears once per finding."""
    return [code.removeprefix("P3O") for code, _ in findings(changes)]
