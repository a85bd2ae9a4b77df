"""122: a line that nothing reads is named; one that came along, or that is switched off on purpose, is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from guard_presets import GRPO, codes, findings, make

from p3o_launch.check import check_text
from p3o_launch.guard_tools import value_at
from p3o_launch.guards_unused import GROUPS, _default

Changes = dict[str, Any]
MOE = {"model.num_experts": 8}
AUX = {"model.moe_router_load_balancing_type": "aux_loss"}
KL = {"algorithm.kl_coef": 0.1}

# path -> (a value, what makes it read). The path with the value alone must be named.
CASES: dict[str, tuple[Any, Changes]] = {
    "batch.max_tokens_per_gpu": (8192, {"batch.use_dynamic_batch_size": True}),
    "batch.micro_batch_size": (2, {"batch.use_dynamic_batch_size": False}),
    "model.moe_router_topk": (4, MOE),
    "model.moe_ffn_hidden_size": (384, MOE),
    "model.moe_router_load_balancing_type": ("aux_loss", {**MOE, "model.moe_aux_loss_coeff": 0.1}),
    "model.moe_aux_loss_coeff": (0.1, {**MOE, **AUX}),
    "model.moe_z_loss_coeff": (0.1, MOE),
    "model.moe_input_jitter_eps": (0.1, MOE),
    "model.moe_router_force_load_balancing": (True, MOE),
    "model.moe_router_force_biased": (0.1, MOE),
    "parallel.expert_tensor_parallel_size": (2, MOE),
    "precision.fp8_recipe": ("tensorwise", {"precision.fp8": "hybrid"}),
    "parallel.recompute_method": ("uniform", {"parallel.recompute_granularity": "full"}),
    "optimizer.min_lr": (1e-6, {"optimizer.lr_decay_style": "linear"}),
    "algorithm.use_kl_loss": (True, {"algorithm.kl_loss_coef": 0.1}),
    "algorithm.use_kl_in_reward": (True, KL),
    "evaluation.before_train": (False, {"evaluation.interval": 5}),
    "evaluation.n_samples_per_prompt": (4, {"evaluation.interval": 5}),
    "evaluation.temperature": (0.6, {"evaluation.interval": 5}),
    "evaluation.top_p": (0.9, {"evaluation.interval": 5}),
    "evaluation.top_k": (20, {"evaluation.interval": 5}),
    "evaluation.max_response_len": (64, {"evaluation.interval": 5}),
    "evaluation.max_prompts": (64, {"evaluation.interval": 5}),
    "rollout.engine_version": ("0.20", {"rollout.engine": "vllm"}),
    "rollout.deterministic_inference": (True, {"rollout.engine": "sglang"}),
    "rollout.gpu_memory_utilization": (0.5, {"rollout.engine": "vllm"}),
    "rollout.reset_prefix_cache_on_update": (False, {"rollout.enable_prefix_caching": True}),
    "checkpoint.keep": (5, {"checkpoint.save_interval": 5}),
}
# Where the default is no "off", what takes the setting's place.
INSTEAD: dict[str, Changes] = {
    "batch.micro_batch_size": {"batch.use_dynamic_batch_size": True, "batch.max_tokens_per_gpu": 8192},
    "optimizer.min_lr": {"optimizer.lr_decay_style": "constant"},
}


def unused(changes: Changes) -> list[str]:
    found = []
    for code, finding in findings(changes):
        if code == "P3O122":
            found += [finding.path, *finding.related[:-1]]
    return found


def test_every_path_of_the_table_has_a_case() -> None:
    assert {path for group in GROUPS for path in group.paths} == CASES.keys()
    for group in GROUPS:
        value_at(make(), group.decides)
    for path, (value, _) in CASES.items():
        assert value != _default(path)


@pytest.mark.parametrize("path", CASES)
def test_each_path_is_named_where_nothing_reads_it_and_nowhere_else(path: str) -> None:
    value, on = CASES[path]
    off = {path: value, **INSTEAD.get(path, {})}
    assert path in unused(off)
    assert path not in unused({**off, **on})
    assert unused({path: _default(path), **INSTEAD.get(path, {})}) == []


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: f"{group.decides} {group.paths[0]}")
def test_what_is_switched_off_by_name_is_left_over_on_purpose(group: Any) -> None:
    path = group.paths[0]
    value = CASES[path][0]
    written = {group.decides: _default(group.decides)}
    if group.decides.startswith("model.moe_"):
        written |= MOE
    assert (path in unused({path: value, **INSTEAD.get(path, written)})) is group.instead


def test_one_switch_is_one_finding() -> None:
    changes = {"evaluation.temperature": 0.6, "evaluation.top_p": 0.9, "evaluation.top_k": 20}
    ((code, finding),) = findings(changes)
    assert code == "P3O122"
    assert finding.message.startswith(
        "evaluation.temperature (0.6), evaluation.top_p (0.9) and evaluation.top_k (20) have"
    )


def test_a_setting_that_is_refused_is_not_left_over_as_well() -> None:
    assert codes({**GRPO, "parallel.expert_tensor_parallel_size": 3}) == ["311"]
    assert codes({"algorithm.kl_coef": 0.01, "algorithm.use_kl_loss": True}) == ["110"]


def test_an_adapter_of_rank_0_is_left_alone() -> None:
    assert codes({"model.lora_dropout": 0.1, "model.lora_merge_before_sync": False}) == []


def test_a_rate_of_0_learns_nothing() -> None:
    assert codes({"optimizer.lr": 0.0}) == ["123"]
    assert codes({"optimizer.lr": 1e-12}) == []
    assert codes({"optimizer.lr": 0.0, "optimizer.min_lr": 1e-6}) == ["121"]


BASE = "batch:\n  max_tokens_per_gpu: 8192\n"


def found(text: str, *overrides: str, recipe: str | None = None) -> list[str]:
    return [item.code for item in check_text(text, overrides=overrides, recipe=recipe).findings]


def test_only_what_the_author_wrote_is_named(tmp_path: Path) -> None:
    parent = tmp_path / "parent.yaml"
    parent.write_text(f"extends: on_policy\nschema_version: 1\n{BASE}", "utf-8")
    assert found(parent.read_text("utf-8")) == ["P3O122"]
    inherited = f"extends: {parent}\nschema_version: 1\n"
    assert found(inherited) == []
    assert found(inherited, "batch.max_tokens_per_gpu=4608") == ["P3O122"]
    assert found("extends: on_policy\nschema_version: 1\n", "batch.max_tokens_per_gpu=4608") == ["P3O122"]


def test_what_is_turned_off_for_one_run_is_not_left_over() -> None:
    text = "extends: on_policy\nschema_version: 1\nevaluation:\n  top_p: 0.9\n"
    assert found(text) == []
    assert found(text, "evaluation.interval=null") == []
    assert found(text, recipe="smoke") == []
    assert found(text + "  interval: null\n") == []
    lines = (
        "extends: on_policy\nschema_version: 1\nbatch:\n  use_dynamic_batch_size: true\n  max_tokens_per_gpu: 8192\n"
    )
    assert found(lines, "batch.use_dynamic_batch_size=false") == []


def test_the_place_is_the_line_to_remove() -> None:
    (item,) = check_text(f"extends: on_policy\nschema_version: 1\n{BASE}").findings
    assert (item.position.line, item.position.column) == (4, 23)
