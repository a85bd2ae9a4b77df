"""Rules that read the checkpoint's own files, and rules that depend on declared versions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from guard_presets import GRPO, codes, findings

from p3o_launch.guard_tools import version_of

CONFIG = {
    "model_type": "qwen3",
    "num_hidden_layers": 28,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rope_theta": 1000000,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
AGREES: dict[str, Any] = {"model.rotary_base": 1e6, "model.qk_layernorm": True}


def checkpoint(directory: Path, **files: Any) -> dict[str, Any]:
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (directory / f"{name}.json").write_text(text, encoding="utf-8")
    return {"model.hf_checkpoint": str(directory), **AGREES}


def test_a_model_that_agrees(tmp_path: Path) -> None:
    assert codes(checkpoint(tmp_path, config=CONFIG)) == []


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"model_type": "llama4", "num_hidden_layers": None},
        {**CONFIG, "rope_theta": 5, "rope_parameters": {"rope_theta": 1e6}},
        {key: value for key, value in CONFIG.items() if key not in ("head_dim", "rms_norm_eps")},
    ],
)
def test_what_a_config_does_not_say_is_not_judged(tmp_path: Path, config: dict[str, Any]) -> None:
    assert codes(checkpoint(tmp_path, config=config)) == []


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "\x00"])
def test_an_unreadable_config_is_left_to_preflight(tmp_path: Path, text: str) -> None:
    assert codes(checkpoint(tmp_path, config=text)) == []


@pytest.mark.parametrize(
    ("key", "value", "path"),
    [
        ("num_hidden_layers", 27, "model.num_layers"),
        ("hidden_size", 1025, "model.hidden_size"),
        ("intermediate_size", 3073, "model.ffn_hidden_size"),
        ("num_attention_heads", 32, "model.num_attention_heads"),
        ("num_key_value_heads", 16, "model.num_query_groups"),
        ("head_dim", 64, "model.kv_channels"),
        ("vocab_size", 151935, "model.vocab_size"),
        ("rope_theta", 10000, "model.rotary_base"),
        ("rms_norm_eps", 1e-5, "model.norm_epsilon"),
        ("tie_word_embeddings", False, "model.untie_embeddings_and_output_weights"),
        ("model_type", "qwen2", "model.qk_layernorm"),
    ],
)
def test_each_figure_that_differs_is_named_with_the_one_to_write(
    tmp_path: Path, key: str, value: Any, path: str
) -> None:
    ((code, finding),) = findings(checkpoint(tmp_path, config={**CONFIG, key: value}))
    assert (code, finding.path) == ("P3O505", path)


VLLM: dict[str, Any] = {"rollout.engine": "vllm", "rollout.generation_config": "auto", "rollout.top_k": None}


@pytest.mark.parametrize(
    ("generation", "changes", "expected"),
    [
        ({"top_k": 20}, {}, ["403"]),
        ({"repetition_penalty": 1.05}, {}, ["403"]),
        ({"top_k": 20, "top_p": 0.8}, {"rollout.top_k": -1}, ["119"]),  # what matters is written out
        ({"top_k": -1, "top_p": 1.0, "temperature": 0.6}, {}, ["119"]),
        ({}, {}, ["119"]),
        (None, {}, ["119", "413"]),
        ({"top_k": 20}, {"rollout.generation_config": "ignore"}, ["119"]),
        ({"top_k": 20}, {"rollout.engine": "megatron"}, ["119"]),
        ({"top_k": 20}, {**GRPO, "algorithm.use_rollout_logprobs": False}, ["119", "119", "119"]),
    ],
)
def test_sampling_filled_from_the_checkpoint(
    tmp_path: Path, generation: dict[str, Any] | None, changes: dict[str, Any], expected: list[str]
) -> None:
    """119: the builtin runtime has no vllm engine and reads no generation_config.json; it says nothing else here."""
    files = {} if generation is None else {"generation_config": generation}
    found = set(codes({**checkpoint(tmp_path, **files), **VLLM, **changes}))
    assert found == set(expected)


@pytest.mark.parametrize(
    ("version", "expected"),
    [("0.11.0", "405"), ("v0.10.2+cu128", "405"), ("0.11.1", "119"), ("1.0", "119"), (None, "119")],
)
def test_speculative_decoding_by_version(version: str | None, expected: str) -> None:
    changes = {"rollout.engine": "vllm", "rollout.engine_version": version, "rollout.speculative_decoding": True}
    assert set(codes(changes)) == {expected}


@pytest.mark.parametrize(
    ("gpu", "version", "expected"),
    [
        ("A100-40GB", "0.19.1", "504"),
        ("A100-40GB", "0.20.0", "119"),
        ("A100-40GB", None, "119"),
        ("H100", "0.11.1", "119"),
        ("T4", None, "504"),
        (None, "0.11.1", "119"),
    ],
)
def test_batch_invariance_by_gpu_and_version(gpu: str | None, version: str | None, expected: str) -> None:
    changes: dict[str, object] = {"rollout.engine": "vllm", "rollout.engine_version": version, "cluster.gpu": gpu}
    changes |= {"rollout.max_response_len": 128, "precision.bf16": False, "precision.fp16": True}  # suits a T4
    assert set(codes({**changes, "cluster.env": {"VLLM_BATCH_INVARIANT": "1"}})) == {expected}
    assert set(codes({**changes, "cluster.env": {"VLLM_BATCH_INVARIANT": "0"}})) == {"119"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rollout.engine": "sglang"}, "601"),
        ({"rollout.engine": "sglang", "rollout.colocate": False}, "119"),
        ({"rollout.engine": "vllm", "rollout.engine_version": "0.20.0"}, "601"),
        ({"rollout.engine": "vllm", "rollout.engine_version": "0.20.1"}, "119"),
        ({"rollout.engine": "vllm"}, "119"),
    ],
)
def test_expandable_segments_by_engine_and_version(changes: dict[str, Any], expected: str) -> None:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        assert set(codes({**changes, "cluster.env": {name: "Expandable_Segments: True"}})) == {expected}
        assert set(codes({**changes, "cluster.env": {name: "expandable_segments:False"}})) == {"119"}


@pytest.mark.parametrize(
    ("no_proxy", "expected"),
    [
        (None, {"119", "605"}),
        ("10.0.0.0/8", {"119", "605"}),
        ("localhost", {"119", "605"}),
        ("localhost,127.0.0.1,10.0.0.0/8", {"119", "605"}),
        ("localhost, 127.0.0.1", {"119"}),
        ("localhost,127.0.0.1,node1,10.0.0.0/8", {"119"}),
        ("*", {"119"}),
    ],
)
def test_proxies(no_proxy: str | None, expected: set[str]) -> None:
    for proxy, exempt in (("http_proxy", "no_proxy"), ("HTTPS_PROXY", "NO_PROXY")):
        env = {proxy: "http://proxy:3128"} | ({} if no_proxy is None else {exempt: no_proxy})
        assert set(codes({"rollout.engine": "sglang", "cluster.env": env})) == expected


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("pkill -9 python", True),
        ("sleep 1; sudo pkill -f ray", True),
        ("killall -9 sglang", True),
        ("ray stop --force", True),
        ("kill -9 $(pgrep -f python)", True),
        ("kill `pidof python`", True),
        ("pgrep -f sglang | xargs kill -9", True),
        ("ps aux | grep sglang | awk '{print $2}' | xargs kill", True),
        ("if true; then pkill ray; fi", True),
        ("bash -c 'pkill ray'", True),
        ("ssh node1 pkill ray", True),
        ("timeout 5 pkill ray", True),
        ("kill $PID", False),
        ("kill -- -$PGID", False),
        ("kill -TERM $(cat run.pid)", False),
        ("pkill -P 1234", False),
        ("pkill -F run.pid", False),
        ("pgrep -f sglang", False),
        ("echo 'do not use pkill here'", False),
        ("ray status", False),
        ("python skill.py --pkill no", False),
    ],
)
def test_hooks_that_end_processes_by_name(command: str, expected: bool) -> None:
    assert codes({"logging.pre_command": command}) == (["709"] if expected else [])


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("0.11.1", (0, 11, 1)),
        ("v0.20", (0, 20)),
        ("0.12.0rc1", (0, 12, 0)),
        ("1.2.3+cu128", (1, 2, 3)),
        ("main", None),
        (None, None),
    ],
)
def test_versions(text: str | None, version: tuple[int, ...] | None) -> None:
    assert version_of(text) == version
