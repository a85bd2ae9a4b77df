"""Launch scripts: the command that trains, its arrays and variables, and what the text does not hold."""

from __future__ import annotations

import pytest
from importer_lists import SLIME, codes, finding, lint

from p3o_launch.importers import Request, lint_text
from p3o_launch.importers.script import training_command
from p3o_launch.importers.words import split

SCRIPT = """#!/bin/bash
# it's a comment
pkill -9 sglang
set -ex
DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
BASE=/models
GPUS=4
if [ "$GPUS" -gt 2 ]; then
    NVLINK=1
fi
cat <<EOF > /dev/null
it's a note with a (bracket
EOF
python3 tools/convert.py --hf-checkpoint ${BASE}/x --save a b c d e f g h i j k l m n o p q r s t u v w x y z
MODEL_ARGS=(
   --num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 --num-attention-heads 32   # Qwen3-4B
   #--num-layers 28
   --vocab-size 151936 --attention-dropout 0.0 --hidden-dropout 0.0
)
CKPT_ARGS=(--hf-checkpoint ${BASE}/Qwen3-4B --load "${BASE}/Qwen3-4B_slime/")
ROLLOUT_ARGS=(
   --prompt-data $BASE/train.jsonl --num-rollout 20 --save-interval 10
   --rollout-batch-size 16
   --n-samples-per-prompt 4
   --rollout-max-response-len ${LENGTH:-1024} --global-batch-size 64
)
OPTIMIZER="--lr 1e-6 --optimizer adam"
GRPO_ARGS=(--advantage-estimator grpo)
GRPO_ARGS+=(
   --kl-coef 0.01
   --calculate-per-token-loss
)
RUNTIME_ENV_JSON="{\\"env_vars\\": {\\"NCCL_ALGO\\": \\"Ring\\", \\"NVLINK\\": \\"${NVLINK}\\"}}"
ray job submit --address="http://127.0.0.1:8265" --runtime-env-json="${RUNTIME_ENV_JSON}" \\
   -- python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node ${GPUS} --colocate \\
   ${MODEL_ARGS[@]} ${CKPT_ARGS[@]} "${ROLLOUT_ARGS[@]}" $OPTIMIZER ${GRPO_ARGS[@]} 2>&1 | tee log.txt
"""


def texts(text: str) -> list[str]:
    return [word.text for word in training_command(split(text, "f"), "f").words]


def test_arrays_and_variables_are_put_in_and_findings_stand_where_they_were_written() -> None:
    result = lint_text(SCRIPT, Request("slime"), "run.sh")
    found = finding(result, "P3O110")
    assert codes(result) == ["P3O110"]
    line = SCRIPT.split("\n")[found.position.line - 1]
    assert line[found.position.column - 1 :] == "0.01"
    assert found.hint == "pass --kl-coef 0, or pass --use-kl-loss with --kl-loss-coef for a KL in the loss"
    assert result.facts is not None
    preset = result.facts.preset
    assert (preset.model.num_layers, preset.model.hf_checkpoint) == (36, "/models/Qwen3-4B")
    assert (preset.rollout.max_response_len, preset.cluster.gpus_per_node) == (1024, 4)
    assert preset.cluster.env == {"NCCL_ALGO": "Ring", "NVLINK": "1"}
    assert preset.optimizer.lr == 1e-6


def test_a_list_that_is_set_elsewhere_is_said_and_nothing_is_concluded_from_absence() -> None:
    start = SCRIPT.index("MODEL_ARGS=(")
    text = SCRIPT[:start] + "source models/qwen3-4B.sh\n" + SCRIPT[SCRIPT.index("CKPT_ARGS=(") :]
    result = lint_text(text, Request("slime"), "run.sh")
    assert codes(result) == ["P3O110", "P3O029"]
    assert result.facts is not None
    assert {"model.num_layers", "model.attention_dropout"} <= result.facts.unknown
    as_p3o = lint_text(text, Request("slime", target="p3o"), "run.sh")
    assert "P3O201" not in codes(as_p3o)
    assert "P3O101" in codes(as_p3o)


def test_any_flag_may_be_in_a_list_without_a_telling_name() -> None:
    text = SCRIPT.replace("${GRPO_ARGS[@]} 2>&1", "${GRPO_ARGS[@]} ${EXTRA[@]} 2>&1")
    result = lint_text(text, Request("slime", target="p3o"), "run.sh")
    assert codes(result) == ["P3O029"]


@pytest.mark.parametrize(
    "text",
    [
        "cd /x && NCCL_ALGO=Ring python3 train.py --lr 1e-6 --seed 1 2>&1 | tee log.txt",
        "python3 train.py --lr 1e-6 --seed 1 > log.txt",
        "python3 train.py --lr 1e-6 --seed 1 >> log.txt 2>&1 &",
        "torchrun --standalone train.py --lr 1e-6 --seed 1 || exit 1",
        "python3 train.py --lr 1e-6 --seed 1; echo done",
    ],
)
def test_what_stands_around_the_command_is_no_argument(text: str) -> None:
    result = lint("slime", text)
    assert not {"P3O017", "P3O014", "P3O018"} & set(codes(result))
    assert result.facts is not None
    assert (result.facts.preset.optimizer.lr, result.facts.preset.seed.seed) == (1e-6, 1)


def test_quoted_signs_are_values() -> None:
    assert texts("python3 train.py --tag '|' --note '>' --lr 1e-6")[-6:] == [
        "--tag",
        "|",
        "--note",
        ">",
        "--lr",
        "1e-6",
    ]


def test_a_bare_list_over_several_lines_is_one_command() -> None:
    assert texts("--lr 1e-6\n--seed 1\n") == ["--lr", "1e-6", "--seed", "1"]
    assert codes(lint("slime", SLIME)) == []


def test_a_list_that_holds_itself_ends() -> None:
    text = "A=(--lr 1e-6 ${B[@]})\nB=(--seed 1 ${A[@]})\npython3 train.py ${A[@]}\n"
    words = texts(text)
    assert words[:2] == ["python3", "train.py"]
    assert "--seed" in words


def test_a_list_that_never_ends_is_read_to_the_end() -> None:
    assert codes(lint_text("A=(--lr 1e-6\n--seed 1\n", Request("slime"), "f")) != ["P3O901"]


def test_verl_scripts_are_read_too() -> None:
    text = """#!/bin/bash
N=8
python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer \\
    algorithm.adv_estimator=grpo \\
    actor_rollout_ref.rollout.n=$N \\
    trainer.n_gpus_per_node=${GPUS} $@
"""
    result = lint_text(text, Request("verl"), "run.sh")
    assert codes(result) == []
    assert result.facts is not None
    assert result.facts.extra["estimator"] == "grpo"
