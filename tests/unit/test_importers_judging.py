"""Findings in the user's words, at the user's line; nothing rests on what the source does not say."""

from __future__ import annotations

from pathlib import Path

import pytest
from importer_lists import CLEAN, MEGATRON, NEMO, RELAX, SLIME, VERL, codes, finding, lint, without

from p3o_launch.diagnostics import Severity
from p3o_launch.errors import UsageError
from p3o_launch.guards import all_guards
from p3o_launch.importers import Request, lint_file, lint_text, summary
from p3o_launch.rules_import import IMPORT_RULES


@pytest.mark.parametrize("framework", sorted(CLEAN))
def test_a_sound_configuration_has_no_findings(framework: str) -> None:
    assert codes(lint(framework, CLEAN[framework])) == []


def test_a_sound_relax_recipe_is_sound_as_p3o() -> None:
    assert codes(lint("relax", RELAX, target="p3o")) == []


def test_flags_are_named_as_the_user_writes_them_and_pointed_at() -> None:
    text = "\n".join(("--tensor-model-parallel-size", "3", *SLIME.split()))
    found = finding(lint("slime", text), "P3O301")
    assert found.message == "--tensor-model-parallel-size (3) does not divide --actor-num-gpus-per-node (4)"
    assert (found.position.line, found.position.column) == (2, 1)
    assert found.hint == "use 1, 2 or 4"


def test_the_remedy_is_a_flag() -> None:
    absent = finding(lint("relax", without(RELAX, " --calculate-per-token-loss")), "P3O103")
    assert absent.hint == "pass --calculate-per-token-loss"
    dropout = finding(lint("relax", without(RELAX, "--attention-dropout 0.0 ", "--hidden-dropout 0.0 ")), "P3O201")
    assert dropout.hint == "pass --attention-dropout 0 and --hidden-dropout 0"
    stream = finding(lint("relax", RELAX, "--fully-async"), "P3O204")
    assert (stream.hint or "").startswith("leave out --fully-async")


def test_settings_of_yaml_are_named_by_their_keys() -> None:
    result = lint("nemo_rl", NEMO, "policy.megatron_cfg.tensor_model_parallel_size=3")
    found = finding(result, "P3O301")
    assert (
        found.message == "policy.megatron_cfg.tensor_model_parallel_size (3) does not divide cluster.gpus_per_node (4)"
    )
    assert found.position.file == "<overrides>"
    own = finding(
        lint("nemo_rl", NEMO.replace("tensor_model_parallel_size: 1", "tensor_model_parallel_size: 3")), "P3O301"
    )
    assert own.position.file == "launch.txt"
    line = NEMO.replace("tensor_model_parallel_size: 1", "tensor_model_parallel_size: 3").split("\n")[
        own.position.line - 1
    ]
    assert line[own.position.column - 1] == "3"


def test_an_absent_flag_is_reported_beside_what_makes_it_matter() -> None:
    lines = without(SLIME, "--calculate-per-token-loss").split()
    lines += ["--use-dynamic-batch-size", "--max-tokens-per-gpu", "8192"]
    found = finding(lint("slime", "\n".join(lines)), "P3O118")
    assert lines[found.position.line - 1] == "--use-dynamic-batch-size"


def test_nothing_rests_on_a_value_hidden_by_a_shell_variable() -> None:
    text = SLIME.replace("--num-layers 36", "--num-layers $LAYERS").replace("--vocab-size 151936", "--vocab-size $V")
    result = lint("slime", text, "--pipeline-model-parallel-size 4")
    assert codes(result) == []
    assert result.facts is not None
    assert {"model.num_layers", "model.vocab_size"} <= result.facts.unknown
    assert codes(lint("slime", SLIME, "--pipeline-model-parallel-size 8 --actor-num-gpus-per-node 8")) == [
        "P3O011",
        "P3O304",
    ]


def test_nothing_rests_on_the_sizes_of_a_checkpoint() -> None:
    """verl and NeMo-RL read them from config.json: TP 8 suits many models, and no placeholder may say otherwise."""
    assert (
        codes(lint("nemo_rl", NEMO, "policy.megatron_cfg.tensor_model_parallel_size=8", "cluster.gpus_per_node=8"))
        == []
    )
    size = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=8"
    assert codes(lint("verl", VERL, size)) == []


def test_the_number_of_gpus_is_asked_for_where_the_source_does_not_say_it() -> None:
    text = MEGATRON + "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 3\n"
    assert codes(lint("megatron", text, gpus=None)) == []
    assert codes(lint("megatron", text, gpus=8)) == ["P3O301"]
    command = "torchrun --nproc-per-node 8 train_rl.py " + text.replace("\n", " ")
    assert codes(lint("megatron", command, gpus=None)) == ["P3O301"]


def test_values_outside_the_range_of_their_field_are_findings_and_then_unknown() -> None:
    found = finding(lint("slime", without(SLIME, "--lr 1e-6"), "--lr -1"), "P3O015")
    assert found.message == "--lr -1.0: must be 0 or above"
    result = lint("slime", without(SLIME, "--n-samples-per-prompt 4"), "--n-samples-per-prompt 0")
    assert codes(result) == ["P3O015"]


def test_the_environment_is_part_of_the_facts() -> None:
    result = lint(
        "megatron", MEGATRON, "--deterministic-mode", env=("NCCL_ALGO=Tree", "CUBLAS_WORKSPACE_CONFIG=:4096:8")
    )
    assert codes(result) == ["P3O503", "P3O503"]
    assert any("NCCL_ALGO (Tree)" in item.message for item in result.check.findings)


def test_a_switch_to_p3o_changes_the_estimator_and_nothing_else() -> None:
    result = lint("slime", SLIME, target="p3o")
    assert codes(result, Severity.ERROR) == ["P3O101"]
    assert codes(lint("slime", SLIME, "--use-rollout-logprobs", target="p3o")) == []
    clipped = lint("slime", SLIME, "--use-rollout-logprobs --eps-clip-high 0.28", target="p3o")
    assert "P3O113" not in codes(clipped)


@pytest.mark.parametrize(
    "extra", ["--loss-type sft_loss", "--rollout-function-path slime.rollout.sft_rollout.generate"]
)
def test_fine_tuning_is_nothing_to_switch(extra: str) -> None:
    assert codes(lint("slime", SLIME, extra, target="p3o")) == ["P3O020"]
    assert codes(lint("slime", SLIME, extra)) == []


def test_pre_training_is_judged_by_what_holds_without_rollouts() -> None:
    result = lint("megatron", without(MEGATRON, "--perform-rl-step "), "--fp8-format hybrid", target="p3o")
    assert codes(result) == ["P3O202", "P3O020"] or codes(result) == ["P3O020", "P3O202"]


def test_a_custom_config_that_cannot_be_found_is_said_and_one_that_can_is_judged(tmp_path: Path) -> None:
    missing = lint("slime", SLIME, "--custom-config-path nowhere.yaml", file=str(tmp_path / "launch.args"))
    assert codes(missing) == ["P3O019"]
    (tmp_path / "custom.yaml").write_text("n_samples_per_prompt: 1\nglobal_batch_size: 16\ncolour: red\n", "utf-8")
    result = lint("slime", SLIME, "--custom-config-path custom.yaml", file=str(tmp_path / "launch.args"))
    assert codes(result) == ["P3O112", "P3O014"]
    assert {Path(item.position.file).name for item in result.check.findings} == {"custom.yaml"}


def test_the_facts_of_a_switch_are_those_of_the_source() -> None:
    facts = lint("relax", RELAX, target="p3o").facts
    assert facts is not None
    record = summary(facts)
    assert (record["advantage_estimator"], record["uses_rollout_logprobs"], record["tp"]) == ("p3o", True, 1)


@pytest.mark.parametrize(
    ("request_", "word"),
    [
        (Request("openrlhf"), "openrlhf"),
        (Request(""), "whose"),
        (Request("slime", target="grpo"), "grpo"),
        (Request("slime", overrides=("a=b",)), "overrides"),
        (Request("slime", env=("NOVALUE",)), "NOVALUE"),
        (Request("slime", gpus=0), "0"),
    ],
)
def test_a_request_that_makes_no_sense_is_a_usage_error(request_: Request, word: str) -> None:
    with pytest.raises(UsageError, match=word):
        lint_text("--lr 1", request_)


def test_files_that_cannot_be_read_are_findings(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"--tag caf\xe9\n")
    (tmp_path / "empty").write_text(" \n", "utf-8")
    for name in ("latin", "empty", "absent", "."):
        result = lint_file(str(tmp_path / name), Request("slime"))
        assert [item.code for item in result.check.findings] == ["P3O001"], name
        assert result.facts is None


def test_every_rule_of_the_importers_is_in_the_registry_and_explained() -> None:
    rules = all_guards()
    for code, rule in IMPORT_RULES.items():
        assert rules[code] is rule
        assert rule.why
        assert rule.fix
        assert rule.source


def test_codes_of_the_importers_belong_to_files() -> None:
    # 507 is about a setting that a preset does not have.
    assert [code for code in IMPORT_RULES if not code.startswith("P3O0")] == ["P3O507"]
