"""119 stops a run that would leave a setting out; only another error about the same setting may speak in its place."""

from __future__ import annotations

from typing import Any

import pytest
from guard_presets import ABSENT, CPU, GRPO, codes, findings, make

from p3o_launch import guards_runtime
from p3o_launch.check import check_text
from p3o_launch.diagnostics import Finding, Severity
from p3o_launch.guards import GuardContext, Rule, all_guards
from p3o_launch.guards_runtime import LIMITS, Limit, not_carried_out

Changes = dict[str, Any]

# How each line of the table is asked for; two lines are about params_dtype.
ASKED: dict[str, list[Changes]] = {
    "algorithm.use_rollout_logprobs": [{**GRPO, "algorithm.use_rollout_logprobs": False}],
    "algorithm.calculate_per_token_loss": [{**GRPO, "algorithm.calculate_per_token_loss": ABSENT}],
    "algorithm.use_tis": [{**GRPO, "algorithm.use_rollout_logprobs": False, "algorithm.use_tis": True}],
    "algorithm.use_mis": [{**GRPO, "algorithm.use_rollout_logprobs": False, "algorithm.use_mis": True}],
    "algorithm.custom_tis_function_path": [{**GRPO, "algorithm.custom_tis_function_path": "hooks.tis"}],
    "algorithm.use_critic": [{**GRPO, "algorithm.use_critic": True}],
    "algorithm.critic_load": [{**GRPO, "algorithm.critic_load": "/critic"}],
    "algorithm.get_mismatch_metrics": [{**GRPO, "algorithm.get_mismatch_metrics": True}],
    "algorithm.use_opsm": [{**GRPO, "algorithm.use_opsm": True}],
    "algorithm.custom_pg_loss_reducer_function_path": [
        {**GRPO, "algorithm.custom_pg_loss_reducer_function_path": "hooks.reduce"}
    ],
    "algorithm.use_opd": [{**GRPO, "algorithm.use_opd": True}],
    "algorithm.entropy_coef": [{"algorithm.entropy_coef": 0.01}],
    "algorithm.kl_loss_coef": [{"algorithm.use_kl_loss": True, "algorithm.kl_loss_coef": 0.01}],
    "algorithm.kl_coef": [{"algorithm.use_kl_in_reward": True, "algorithm.kl_coef": 0.01}],
    "model.lora_rank": [{"model.lora_rank": 8}],
    "model.custom_forward_hook_path": [{**GRPO, "model.custom_forward_hook_path": "hooks.f"}],
    "model.moe_router_force_biased": [{**GRPO, "model.num_experts": 8, "model.moe_router_force_biased": 0.1}],
    "model.enable_mtp_training": [{**GRPO, "model.enable_mtp_training": True}],
    "model.attention_backend": [{**CPU, "model.attention_backend": "flash"}],
    "precision.params_dtype": [
        {"precision.params_dtype": "float32"},
        {"precision.bf16": False, "precision.params_dtype": "float64"},
    ],
    "precision.cross_entropy_loss_fusion": [{"precision.cross_entropy_loss_fusion": True}],
    "parallel.use_distributed_optimizer": [{**CPU, "parallel.use_distributed_optimizer": True}],
    "parallel.cuda_graph_scope": [{**CPU, "parallel.cuda_graph_scope": "attn"}],
    "parallel.overlap_moe_expert_parallel_comm": [{**GRPO, "parallel.overlap_moe_expert_parallel_comm": True}],
    "parallel.use_routing_replay": [{**GRPO, "parallel.use_routing_replay": True}],
    "parallel.use_rollout_routing_replay": [{**GRPO, "parallel.use_rollout_routing_replay": True}],
    "rollout.engine": [{"rollout.engine": "vllm"}, {"rollout.engine": "sglang"}],
    "rollout.fully_async": [{**GRPO, "rollout.fully_async": True}],
    "rollout.max_staleness": [{"rollout.max_staleness": 1}],
    "rollout.colocate": [{"rollout.colocate": False}],
    "rollout.num_gpus": [{"rollout.num_gpus": 2}],
    "rollout.num_gpus_per_engine": [{"rollout.num_gpus_per_engine": 2}],
    "rollout.generation_config": [{"rollout.generation_config": "auto"}],
    "rollout.speculative_decoding": [{"rollout.speculative_decoding": True}],
    "rollout.enable_prefix_caching": [{"rollout.enable_prefix_caching": True}],
}
REQUESTS = [(path, changes) for path, requests in ASKED.items() for changes in requests]
# One fault per rule that only warns; several have a setting of the table among their causes.
WARNED: dict[str, Changes] = {
    "P3O113": {"algorithm.clip_low": 0.1},
    "P3O116": {"algorithm.kl_mode": "proxy"},
    "P3O117": {"algorithm.ess_scope": "micro_batch"},
    "P3O118": {"batch.use_dynamic_batch_size": True, "batch.max_tokens_per_gpu": 4608},
    "P3O120": {"algorithm.ess_scope": "micro_batch", "model.hidden_dropout": 0.1},
    "P3O315": {"parallel.tensor_model_parallel_size": 2, "parallel.context_parallel_size": 2}
    | {"batch.sequence_padding_multiple": 4},
    "P3O407": {"rollout.weight_quantization": "int8"},
    "P3O409": {"rollout.enable_prefix_caching": True, "rollout.reset_prefix_cache_on_update": False},
    "P3O413": {"rollout.generation_config": "auto", "rollout.top_k": None},
    "P3O415": {"evaluation.interval": 99, "evaluation.before_train": False},
    "P3O602": {"batch.micro_batch_size": 4},
    "P3O603": {"model.num_layers": 80},
    "P3O605": {"cluster.env": {"http_proxy": "http://proxy:3128", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}},
    "P3O707": {"batch.num_rollout": 1000},
}


def paths_of_119(changes: Changes) -> list[str]:
    return [finding.path for code, finding in findings(changes) if code == "P3O119"]


def errors_about(changes: Changes) -> set[str]:
    rules = all_guards()
    return {
        path
        for code, finding in findings(changes)
        if code != "P3O119" and rules[code].severity is Severity.ERROR
        for path in (finding.path, *finding.related)
    }


def test_every_line_of_the_table_is_asked_for() -> None:
    assert ASKED.keys() == {limit.path for limit in LIMITS}
    for limit in LIMITS:
        assert any(limit.asks(make(changes)) for changes in ASKED[limit.path]), limit.path


@pytest.mark.parametrize(("path", "changes"), REQUESTS, ids=[path for path, _ in REQUESTS])
def test_each_line_is_an_error_alone(path: str, changes: Changes) -> None:
    assert path in paths_of_119(changes)


@pytest.mark.parametrize("warned", WARNED, ids=str)
@pytest.mark.parametrize(("path", "changes"), REQUESTS, ids=[path for path, _ in REQUESTS])
def test_no_warning_hides_it(path: str, changes: Changes, warned: str) -> None:
    both = {**WARNED[warned], **changes}
    assert path in paths_of_119(both) or path in errors_about(both)


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.path)
@pytest.mark.parametrize("severity", [Severity.WARNING, Severity.INFO, Severity.ERROR])
def test_only_an_error_about_the_same_setting_speaks_in_its_place(
    limit: Limit, severity: Severity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever rule comes: the other rules are replaced by one that is about this line's setting."""
    changes = next(request for request in ASKED[limit.path] if limit.asks(make(request)))
    for about in (Finding(limit.path, "m"), Finding("elsewhere", "m", related=(limit.path,))):
        rule = Rule("P3O888", "n", severity, "w", "f", "s", ignorable=True, body=lambda _, f=about: iter((f,)))
        monkeypatch.setattr(guards_runtime, "all_guards", lambda rule=rule: {rule.code: rule})
        found = [finding.path for finding in not_carried_out(GuardContext(make(changes)))]
        assert (limit.path in found) is (severity is not Severity.ERROR)
        ignoring = make({**changes, "ignore": {"P3O888": "known"}})
        assert limit.path in [finding.path for finding in not_carried_out(GuardContext(ignoring))]


def test_an_ignored_error_hides_nothing() -> None:
    """601 may be ignored; without this rule the run would start on another engine."""
    text = "extends: on_policy\nschema_version: 1\nrollout: {engine: sglang}\ncluster:\n  env:\n"
    text += "    PYTORCH_ALLOC_CONF: expandable_segments:True\n"
    assert [finding.code for finding in check_text(text).findings if finding.severity is Severity.ERROR] == ["P3O601"]
    ignored = check_text(text + "ignore: {P3O601: an engine of our own}\n")
    assert [finding.code for finding in ignored.findings] == ["P3O119"]


def test_the_proxy_of_an_engine_that_is_not_built_does_not_let_the_run_start() -> None:
    changes = {"rollout.engine": "vllm", "cluster.env": {"http_proxy": "http://proxy:3128"}}
    assert codes(changes) == ["119", "605"]
