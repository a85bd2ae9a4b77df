"""The same fault in another framework's words, and faults that only a default implies.

One row: the framework, what is added to (or exchanged in) a sound configuration, the codes of the errors and warnings
that must follow. Rows with ``p3o`` ask whether the configuration would be sound for P3O.
"""

from __future__ import annotations

from typing import Any

import pytest
from importer_lists import CLEAN, codes, lint, without

from p3o_launch.diagnostics import Severity

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
TRANSFORMER = f"+{ACTOR}.megatron.override_transformer_config"
BYPASS = "algorithm.rollout_correction.bypass_mode=true"
REPORTED = f"{ROLLOUT}.calculate_log_probs=true"
FP8 = "policy.megatron_cfg.fp8_cfg"
ZERO = ("policy.megatron_cfg.model_overrides.attention_dropout=0.0",)

WIDE = f"{ACTOR}.megatron.tensor_model_parallel_size=4"
NEMO_WIDE = "policy.megatron_cfg.tensor_model_parallel_size=4"

ROWS: list[tuple[str, str, tuple[str, ...], list[str]]] = [
    # dropout: written, or left to a default, in every framework's words
    ("relax", "p3o", ("--hidden-dropout 0.1",), ["P3O011", "P3O201"]),
    ("slime", "p3o", ("--use-rollout-logprobs --attention-dropout 0.05",), ["P3O011", "P3O201"]),
    ("slime", "", ("--use-rollout-logprobs --attention-dropout 0.05",), ["P3O011", "P3O124"]),
    ("slime", "", ("--use-tis --attention-dropout 0.05",), ["P3O011", "P3O120"]),
    ("megatron", "", ("--rl-inference-logprobs-is-correction --hidden-dropout 0.1",), ["P3O011", "P3O120"]),
    ("slime", "", ("--attention-dropout 0.05",), ["P3O011"]),
    ("verl", "p3o", (BYPASS, REPORTED, f"{TRANSFORMER}.attention_dropout=0.1"), ["P3O021", "P3O024", "P3O201"]),
    ("verl", "p3o", (BYPASS, REPORTED), ["P3O021", "P3O024"]),
    ("nemo_rl", "p3o", ("+policy.megatron_cfg.model_overrides.hidden_dropout=0.1",), ["P3O021", "P3O101", "P3O201"]),
    # FP8: a format without a recipe is delayed scaling
    ("relax", "p3o", ("--fp8-format e4m3",), ["P3O202"]),
    ("relax", "p3o", ("--fp8-format e4m3 --fp8-recipe blockwise",), []),
    ("verl", "p3o", (BYPASS, REPORTED, f"{TRANSFORMER}.fp8=hybrid"), ["P3O021", "P3O024", "P3O202"]),
    ("nemo_rl", "p3o", (f"+{FP8}.enabled=true", f"+{FP8}.fp8=e4m3"), ["P3O021", "P3O101", "P3O202"]),
    ("nemo_rl", "", (f"+{FP8}.enabled=true", f"+{FP8}.fp8=e4m3"), []),
    # truncated sampling beside a ratio or a correction against the engine's log-probs
    ("slime", "", ("--use-rollout-logprobs --rollout-top-k 50",), ["P3O401"]),
    ("slime", "", ("--rollout-top-k 50",), []),
    ("megatron", "", ("--rl-default-top-p 0.9 --rl-inference-logprobs-is-correction",), ["P3O401"]),
    ("megatron", "", ("--rl-default-top-p 0 --rl-inference-logprobs-is-correction",), []),
    ("megatron", "", ("--rl-default-top-p 0.9",), []),
    ("verl", "", (BYPASS, REPORTED, f"{ROLLOUT}.top_p=0.9"), ["P3O401"]),
    ("verl", "", (BYPASS, REPORTED, f"+{ROLLOUT}.repetition_penalty=1.1"), ["P3O401"]),
    ("verl", "", ("algorithm.rollout_correction.rollout_is=token", f"{ROLLOUT}.top_k=20"), ["P3O401"]),
    ("nemo_rl", "", ("loss_fn.use_importance_sampling_correction=true", "policy.generation.top_p=0.9"), []),
    ("nemo_rl", "p3o", ("policy.generation.top_p=0.9",), ["P3O021", "P3O101", "P3O401"]),
    # log-probs of another distribution
    (
        "verl",
        "",
        (BYPASS, REPORTED, f"{ROLLOUT}.temperature=0.7", f"{ROLLOUT}.logprobs_mode=raw_logprobs"),
        ["P3O402"],
    ),
    ("verl", "", (BYPASS, REPORTED, f"{ROLLOUT}.temperature=0.7"), []),
    # the denominator recomputed in micro-batches of another size
    ("verl", "", (WIDE, f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=4"), ["P3O507"]),
    ("verl", "", (WIDE, f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=1"), []),
    ("verl", "", (WIDE, f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=4", BYPASS, REPORTED), []),
    (
        "verl",
        "",
        (WIDE, f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=4", f"{ROLLOUT}.log_prob_use_dynamic_bsz=true"),
        [],
    ),
    ("verl", "", (f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=4",), []),
    ("nemo_rl", "", (NEMO_WIDE, "policy.logprob_batch_size=4"), ["P3O507"]),
    ("nemo_rl", "", (NEMO_WIDE, "policy.logprob_batch_size=1"), []),
    ("nemo_rl", "", (NEMO_WIDE, "policy.logprob_batch_size=4", "loss_fn.force_on_policy_ratio=true"), []),
    ("nemo_rl", "", (NEMO_WIDE, "policy.logprob_batch_size=4", "policy.sequence_packing.enabled=true"), []),
    ("nemo_rl", "", ("policy.logprob_batch_size=4",), []),
    # two corrections of one mismatch
    ("slime", "", ("--use-rollout-logprobs --use-tis",), ["P3O102"]),
    ("verl", "", (BYPASS, REPORTED, "algorithm.rollout_correction.rollout_is=token"), ["P3O102"]),
    ("verl", "", (BYPASS, REPORTED, "algorithm.rollout_correction.rollout_rs=token_k1"), ["P3O102"]),
    # a group of one
    ("megatron", "", ("--grpo-group-size 1 --global-batch-size 16",), ["P3O011", "P3O011", "P3O112"]),
    ("nemo_rl", "", ("grpo.num_generations_per_prompt=1", "policy.train_global_batch_size=16"), ["P3O112"]),
    ("verl", "", (f"{ROLLOUT}.n=1",), ["P3O011", "P3O112"]),
    ("verl", "", (f"{ROLLOUT}.n=1", "algorithm.adv_estimator=gae"), ["P3O011", "P3O011"]),
    # the reference KL: a weight without its switch, or two terms
    ("slime", "", ("--kl-loss-coef 0.01",), ["P3O110"]),
    ("slime", "", ("--kl-loss-coef 0.01 --use-kl-loss",), []),
    ("relax", "", ("--kl-coef 0.01",), ["P3O110"]),
    ("verl", "", ("algorithm.kl_ctrl.kl_coef=0.1",), []),
    ("nemo_rl", "", ("loss_fn.reference_policy_kl_penalty=0.01", "+loss_fn.use_kl_in_reward=true"), []),
    # stale rollouts taken for fresh ones
    ("slime", "", ("--update-weights-interval 3",), ["P3O114"]),
    ("slime", "", ("--update-weights-interval 3 --use-rollout-logprobs",), []),
    ("slime", "", ("--update-weights-interval 3 --use-tis",), []),
    ("relax", "p3o", ("--update-weights-interval 3",), []),
    ("nemo_rl", "", ("grpo.async_grpo.enabled=true",), ["P3O114"]),
    ("nemo_rl", "", ("grpo.async_grpo.enabled=true", "loss_fn.use_importance_sampling_correction=true"), []),
    ("nemo_rl", "", ("grpo.async_grpo.enabled=true", "+loss_fn.disable_ppo_ratio=true"), []),
    ("megatron", "", ("--rl-partial-rollouts --rl-generation-lag 4",), ["P3O114"]),
    ("megatron", "", ("--rl-partial-rollouts --rl-generation-lag 0",), []),
    ("relax", "p3o", ("--fully-async",), ["P3O023", "P3O204"]),
    # adapters, routing, multi-token prediction
    ("relax", "p3o", ("--lora-rank 8 --lora-dropout 0.1",), ["P3O203"]),
    ("relax", "p3o", ("--lora-rank 8",), []),
    ("relax", "p3o", ("--enable-mtp-training",), ["P3O205"]),
    ("relax", "p3o", ("--mtp-num-layers 1",), []),
    ("relax", "p3o", ("--use-routing-replay",), ["P3O206"]),
    ("relax", "p3o", ("--use-rollout-routing-replay",), ["P3O206", "P3O207"]),
    ("relax", "p3o", ("--overlap-moe-expert-parallel-comm",), ["P3O208"]),
    ("relax", "p3o", ("--cuda-graph-impl full_iteration",), ["P3O209"]),
    ("relax", "p3o", ("--cuda-graph-impl local",), []),
    ("relax", "p3o", ("--num-experts 8 --moe-input-jitter-eps 0.01",), ["P3O210"]),
    ("relax", "p3o", ("--moe-input-jitter-eps 0.01",), []),
    ("relax", "p3o", ("--custom-megatron-before-train-step-hook-path my.hook",), ["P3O210"]),
    # what Relax's own validator refuses
    ("relax", "p3o", ("--get-mismatch-metrics",), ["P3O106"]),
    ("relax", "p3o", ("--use-opsm",), ["P3O107"]),
    ("relax", "p3o", ("--custom-pg-loss-reducer-function-path my.reducer",), ["P3O108"]),
    ("relax", "p3o", ("--critic-load /ckpt",), ["P3O104"]),
    ("relax", "", ("--clip-low 0.1",), ["P3O113"]),
    ("relax", "p3o", ("--rm-type mopd",), []),
    # a last step that is smaller, in the words of forks: the flag is not in the table, and it is no error
    ("slime", "", ("--global-batch-size 48",), ["P3O011", "P3O303"]),
    ("slime", "", ("--global-batch-size 48 --allow-partial-train-step",), ["P3O011", "P3O014"]),
    ("slime", "", ("--global-batch-size 48 --disable-rollout-trim-samples",), ["P3O011", "P3O014"]),
    ("relax", "", ("--global-batch-size 48 --allow-partial-train-step",), ["P3O011", "P3O014"]),
    # whole numbers
    ("slime", "", ("--num-steps-per-rollout 2",), ["P3O015"]),
    ("nemo_rl", "", ("policy.train_global_batch_size=60",), ["P3O303"]),
    ("megatron", "", ("--num-virtual-stages-per-pipeline-rank 5 --pipeline-model-parallel-size 2",), ["P3O015"]),
    ("slime", "", ("--deterministic-mode",), ["P3O503"]),
]


def id_of(row: tuple[str, str, tuple[str, ...], list[str]]) -> str:
    return f"{row[0]}{' as p3o' if row[1] else ''}: {' '.join(row[2])}"[:90]


@pytest.mark.parametrize("row", ROWS, ids=id_of)
def test_a_fault_is_found_in_whatever_words_it_is_written(row: tuple[str, str, tuple[str, ...], list[str]]) -> None:
    framework, target, extra, expected = row
    result = lint(framework, CLEAN[framework], *extra, target=target or None)
    found = [item.code for item in result.check.findings if item.severity is not Severity.INFO]
    assert sorted(found) == expected, [f"{item.code} {item.message}" for item in result.check.findings]


PPO = CLEAN["slime"].replace("--advantage-estimator grpo", "--advantage-estimator ppo")
RPP = CLEAN["relax"].replace("--advantage-estimator p3o", "--advantage-estimator reinforce_plus_plus")
RELAX_GRPO = CLEAN["relax"].replace("--advantage-estimator p3o", "--advantage-estimator grpo")
PRE_TRAIN = without(CLEAN["megatron"], "--perform-rl-step ", "--lr-decay-style constant ")
FSDP = CLEAN["verl"].replace("ppo_megatron_trainer", "ppo_trainer")
BOTH_KL = "--kl-coef 0.01 --use-kl-loss --kl-loss-coef 0.01"
BUDGET = "--use-dynamic-batch-size --max-tokens-per-gpu 65536"
SEGMENTS = "expandable_segments:True"
KEY = "0123456789abcdef0123456789abcdef01234567"


def submitted(text: str, runtime_env: str) -> str:
    return f"ray job submit --runtime-env-json={runtime_env} -- python3 train.py " + text.replace("\n", " ")


NO_DROPOUT = ("--attention-dropout 0.0 ", "--hidden-dropout 0.0 ")
# The number of the report, its sibling's framework and text, what is added, the machine, the codes that must follow.
SIBLINGS: list[tuple[int, str, str, tuple[str, ...], dict[str, Any], list[str]]] = [
    (1, "slime", without(CLEAN["slime"], *NO_DROPOUT), ("--use-rollout-logprobs",), {}, ["P3O124"]),
    (1, "relax", without(RELAX_GRPO, *NO_DROPOUT), (), {}, ["P3O124"]),
    (1, "slime", without(CLEAN["slime"], *NO_DROPOUT), (), {}, []),
    (8, "slime", PPO, (BOTH_KL,), {}, ["P3O111"]),
    (8, "relax", RPP, (BOTH_KL,), {}, ["P3O111"]),
    (11, "relax", CLEAN["relax"], ("--train-backend fsdp",), {}, ["P3O026"]),
    (13, "relax", without(RELAX_GRPO, " --calculate-per-token-loss"), (BUDGET,), {}, ["P3O118"]),
    (
        14,
        "megatron",
        PRE_TRAIN,
        ("--lr-decay-style cosine --train-iters 1000 --lr-warmup-iters 100 --lr-decay-iters 900",),
        {},
        ["P3O027"],
    ),
    (
        15,
        "relax",
        CLEAN["relax"],
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 5",),
        {},
        ["P3O304"],
    ),
    (21, "slime", CLEAN["slime"], ("--sglang-quantization fp8",), {}, ["P3O407"]),
    (21, "verl", CLEAN["verl"], (f"{ROLLOUT}.quantization=fp8",), {}, ["P3O407"]),
    (21, "verl", CLEAN["verl"], (BYPASS, REPORTED, f"{ROLLOUT}.quantization=fp8"), {}, []),
    (
        28,
        "verl",
        CLEAN["verl"],
        (f"{TRANSFORMER}.fp8=hybrid", f"{TRANSFORMER}.fp8_recipe=tensorwise"),
        {"gpu": "A100-80GB"},
        ["P3O501"],
    ),
    (
        28,
        "nemo_rl",
        CLEAN["nemo_rl"],
        (f"+{FP8}.enabled=true", f"+{FP8}.fp8=e4m3", f"+{FP8}.fp8_recipe=blockwise"),
        {"gpu": "A100-80GB"},
        ["P3O501"],
    ),
    (28, "relax", CLEAN["relax"], ("--fp8-format e4m3 --fp8-recipe tensorwise",), {"gpu": "A100-40GB"}, ["P3O501"]),
    (30, "relax", CLEAN["relax"], (), {"env": ("HTTPS_PROXY=http://proxy:1",)}, ["P3O605"]),
    (30, "verl", CLEAN["verl"], (), {"env": ("http_proxy=http://proxy:1", "NO_PROXY=localhost")}, ["P3O605"]),
    (
        30,
        "slime",
        submitted(CLEAN["slime"], '\'{"env_vars":{"http_proxy":"http://proxy:1"}}\''),
        (),
        {},
        ["P3O605"],
    ),
    (32, "verl", FSDP, (f"{ACTOR}.strategy=fsdp2", f"{ACTOR}.use_dynamic_bsz=true"), {}, ["P3O028"]),
    (32, "verl", CLEAN["verl"], (f"{ACTOR}.use_dynamic_bsz=true",), {}, []),
    (36, "relax", CLEAN["relax"], (BUDGET,), {"gpu": "A100-80GB"}, ["P3O602"]),
    (37, "slime", CLEAN["slime"], (), {"env": (f"PYTORCH_ALLOC_CONF=max_split_size_mb:64,{SEGMENTS}",)}, ["P3O601"]),
    (37, "relax", CLEAN["relax"], (), {"env": (f"PYTORCH_CUDA_ALLOC_CONF={SEGMENTS}",)}, ["P3O601"]),
    (
        37,
        "slime",
        CLEAN["slime"],
        (f'--train-env-vars \'{{"PYTORCH_CUDA_ALLOC_CONF": "{SEGMENTS}"}}\'',),
        {},
        ["P3O601"],
    ),
    (
        37,
        "slime",
        without(CLEAN["slime"], "--colocate "),
        ("--rollout-num-gpus 4",),
        {"env": (f"PYTORCH_CUDA_ALLOC_CONF={SEGMENTS}",)},
        [],
    ),
    (45, "relax", CLEAN["relax"].replace('"actor"', "actor").replace('"rollout"', "rollout"), (), {}, ["P3O018"]),
    (45, "slime", submitted(CLEAN["slime"], "{env_vars:{A:b}}"), (), {}, ["P3O018"]),
    (50, "relax", CLEAN["relax"], (f"--wandb-key {KEY}",), {}, ["P3O705"]),
    (50, "slime", CLEAN["slime"], (), {"env": (f"WANDB_API_KEY={KEY}",)}, ["P3O705"]),
    (50, "slime", CLEAN["slime"], ("--wandb-key ${WANDB_API_KEY}",), {}, []),
    (53, "verl", "algorithm: {adv_estimator: grpo, adv_estimator: reinforce_plus_plus}\n", (), {}, ["P3O003"]),
    (54, "nemo_rl", CLEAN["nemo_rl"] + "training: {temprature: 1}\n", (), {}, ["P3O014"]),
    (54, "verl", "training: {quantizaton: 4bit}\nalgorithm: {adv_estimator: rloo}\n", (), {}, ["P3O014", "P3O112"]),
    (54, "slime", CLEAN["slime"], ("--rollout-temprature 0.9",), {}, ["P3O014"]),
    (56, "megatron", CLEAN["megatron"], ("--sequence-parallel False",), {}, ["P3O017"]),
    (56, "relax", CLEAN["relax"], ("--use-kl-loss=False",), {}, ["P3O015"]),
]


@pytest.mark.parametrize(
    ("report", "framework", "text", "extra", "machine", "expected"),
    SIBLINGS,
    ids=[f"{row[0]} {row[1]} {' '.join(row[3])}"[:80] for row in SIBLINGS],
)
def test_a_reported_fault_is_found_in_another_frameworks_words(
    report: int, framework: str, text: str, extra: tuple[str, ...], machine: dict[str, Any], expected: list[str]
) -> None:
    result = lint(framework, text, *extra, **machine)
    found = [item.code for item in result.check.findings if item.severity is not Severity.INFO]
    assert sorted(found) == expected, [f"{item.code} {item.message}" for item in result.check.findings]


def test_relax_p3o_defaults_are_its_own() -> None:
    """Its plain KL proxy, and one ESS per micro-batch."""
    text = CLEAN["relax"].replace("--p3o-ess-scope step --p3o-kl-mode proxy_safe ", "")
    assert sorted(codes(lint("relax", text))) == ["P3O116", "P3O117"]
