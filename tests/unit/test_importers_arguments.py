"""Words and a framework's flags into values: what argparse would hold, and what it would refuse."""

from __future__ import annotations

import json

import pytest

from p3o_launch.importers.arguments import UNKNOWN, Arguments, parse
from p3o_launch.importers.flags import table
from p3o_launch.importers.words import split


def read(text: str, framework: str = "slime") -> Arguments:
    return parse(split(text, "f"), table(framework), "f", framework == "megatron")


def said(text: str, framework: str = "slime") -> list[tuple[str, int, int]]:
    return [(item.code, item.position.line, item.position.column) for item in read(text, framework).findings]


def test_values_have_the_type_of_their_flag() -> None:
    found = read("--lr 1e-6 --seed=7 --colocate --hf-checkpoint /m --eval-prompt-data a b --no-offload-train")
    values = [found.get(dest) for dest in ("lr", "seed", "colocate", "hf_checkpoint", "eval_prompt_data")]
    assert values == [1e-6, 7, True, "/m", ["a", "b"]]
    assert found.get("offload_train") is False
    assert found.findings == []


def test_defaults_are_the_frameworks_own() -> None:
    assert read("--colocate").get("lr") == 1e-6
    assert read("--bf16", "megatron").get("lr") is None
    assert read("--colocate").get("rollout_top_k") == -1
    assert read("--bf16", "megatron").get("grpo_group_size") == 2
    assert read("--colocate").get("attention_dropout") == 0.1


def test_negative_numbers_are_values() -> None:
    found = read("--rollout-top-k -1 --tis-clip -1e-3")
    assert (found.get("rollout_top_k"), found.get("tis_clip"), found.findings) == (-1, -0.001, [])


def test_the_last_occurrence_decides_and_an_earlier_other_value_is_reported() -> None:
    found = read("--seed 1 \\\n--lr 1e-6 \\\n--seed 2")
    assert found.get("seed") == 2
    (item,) = found.findings
    assert (item.code, item.position.line, item.position.column) == ("P3O011", 1, 1)
    assert "line 3 sets --seed 2" in item.message
    assert found.repeated() == {"--seed": ["1", "2"]}


def test_the_same_value_twice_is_silent_but_recorded() -> None:
    found = read("--seed 1 --seed 1 --colocate --colocate")
    assert found.findings == []
    assert found.repeated() == {"--seed": ["1", "1"], "--colocate": ["", ""]}


def test_a_switch_and_its_twin_disagree() -> None:
    assert said("--offload-train --no-offload-train") == [("P3O011", 1, 1)]


@pytest.mark.parametrize(
    ("text", "code", "column"),
    [
        ("--lr fast", "P3O015", 6),
        ("--seed 1.5", "P3O015", 8),
        ("--lr", "P3O015", 1),
        ("--lr --seed 1", "P3O015", 1),
        ("--kl-loss-type k9", "P3O015", 16),
        ("--kl-loss-type=k9", "P3O015", 16),
        ("--colocate=False", "P3O015", 1),
        ("--colocate False", "P3O017", 12),
        ("--rampup-batch-size 1 2", "P3O015", 21),
        ("--lr 1e-6 stray", "P3O017", 11),
        ("--train-env-vars '{A: 1}'", "P3O018", 18),
        ("--train-env-vars '{\"A\":'", "P3O015", 18),
        ("--learning-rate 1e-6", "P3O014", 1),
    ],
)
def test_what_argparse_would_refuse_or_drop_is_found_at_its_place(text: str, code: str, column: int) -> None:
    assert said(text) == [(code, 1, column)]


def test_a_bool_flag_that_takes_text_is_true_for_false() -> None:
    (item,) = read("--polling-mode False", "relax").findings
    assert item.code == "P3O015"
    assert "turns it on" in item.message


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("--tensor_model_parallel_size 2", "--tensor-model-parallel-size"),
        ("--calculate-per-token-los", "--calculate-per-token-loss"),
        ("--use-rollout-logprob", "--use-rollout-logprobs"),
        ("--rollout-topp 0.9", "--rollout-top-p"),
        ("--attention-drop-out 0", "--attention-dropout"),
    ],
)
def test_an_unknown_flag_gets_the_nearest_name_and_swallows_its_value(wrong: str, right: str) -> None:
    found = read(f"{wrong} --seed 3")
    (item,) = found.findings
    assert item.hint == f"did you mean {right}?"
    assert found.get("seed") == 3


def test_a_flag_of_the_other_fork_is_named_as_such() -> None:
    assert read("--use-gated-attention", "relax").findings[0].hint == "slime has it; check the version you run"
    assert read("--fully-async", "slime").findings[0].hint == "relax has it; check the version you run"


def test_the_message_says_what_the_framework_does_with_an_unknown_flag() -> None:
    assert "dropped without a word" in read("--colour red").findings[0].message
    assert "the program stops" in read("--colour red", "megatron").findings[0].message


def test_flags_of_the_engines_are_accepted_with_any_values() -> None:
    found = read("--sglang-cuda-graph-bs 1 2 4 --sglang-enable-dp-attention --router-policy x --seed 3")
    assert found.findings == []
    assert found.get("seed") == 3


def test_an_estimator_of_another_branch_is_a_warning_and_keeps_its_value() -> None:
    found = read("--advantage-estimator rloo", "relax")
    assert [item.code for item in found.findings] == ["P3O016"]
    assert found.get("advantage_estimator") == "rloo"
    assert found.invalid == {"--advantage-estimator": "rloo"}


def test_a_shell_variable_is_unknown_and_not_wrong() -> None:
    found = read("--lr $LR --global-batch-size ${GBS} --seed 1")
    assert found.findings == []
    assert found.hidden("lr")
    assert found.use("lr").value is UNKNOWN
    assert found.get("global_batch_size") is None


def test_the_command_in_front_is_skipped_and_read() -> None:
    env = json.dumps({"env_vars": {"NCCL_ALGO": "Ring", "HIDDEN": "${X}"}})
    found = read(
        f"CUDA_DEVICE_MAX_CONNECTIONS=1 ray job submit --runtime-env-json='{env}' -- \\\n"
        "  torchrun --nproc-per-node 8 --nnodes=2 train.py \\\n  --seed 3"
    )
    assert found.findings == []
    assert found.get("seed") == 3
    assert {name: value for name, (value, _) in found.env.items()} == {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "NCCL_ALGO": "Ring",
    }
    assert (found.nodes, found.gpus_per_node) == (2, 8)


def test_a_module_entry_is_skipped_and_a_launcher_module_is_not_the_entry() -> None:
    for text in (
        "python3 -m relax.entrypoints.train --seed 3",
        "python -m torch.distributed.run --nproc_per_node 4 pretrain.py --seed 3",
    ):
        found = read(text)
        assert found.findings == []
        assert found.get("seed") == 3


def test_a_value_that_ends_in_py_is_no_entry() -> None:
    assert read("--rm-type x --custom-rm-path reward.py --seed 3").get("seed") == 3


def test_tables_hold_every_flag_of_their_framework_and_of_megatron() -> None:
    megatron, slime, relax = (table(name).flags for name in ("megatron", "slime", "relax"))
    assert (len(megatron), megatron.keys() < slime.keys(), megatron.keys() < relax.keys()) == (878, True, True)
    assert relax["--p3o-ess-scope"].choices == ("micro-batch", "step")
    assert {"p3o", "cispo"} <= set(relax["--advantage-estimator"].choices)
    assert slime["--no-offload-train"].sets is False
    assert megatron["--fp8-recipe"].default == "delayed"
