"""Argument lists and YAML without findings, and changes to them: what the importers' tests judge."""

from __future__ import annotations

from typing import Any

from p3o_launch.diagnostics import LocatedFinding, Severity
from p3o_launch.importers import LintResult, Request, lint_text

MODEL = """
--num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 --num-attention-heads 32 --group-query-attention
--num-query-groups 8 --kv-channels 128 --vocab-size 151936 --rotary-base 1000000
--attention-dropout 0.0 --hidden-dropout 0.0 --seed 42
"""
SLIME = f"""{MODEL}
--actor-num-nodes 1 --actor-num-gpus-per-node 4 --colocate --hf-checkpoint /models/Qwen3-4B
--prompt-data /data/train.jsonl --num-rollout 20 --save-interval 10 --rollout-batch-size 16 --n-samples-per-prompt 4
--rollout-max-response-len 1024 --global-batch-size 64 --micro-batch-size 1 --lr 1e-6
--advantage-estimator grpo --eps-clip 0.2 --calculate-per-token-loss
"""
RELAX = (
    SLIME.replace("--advantage-estimator grpo --eps-clip 0.2", "--advantage-estimator p3o").replace(
        "--actor-num-nodes 1 --actor-num-gpus-per-node 4", '--resource \'{"actor":[1,4],"rollout":[1,4]}\''
    )
    + "--use-rollout-logprobs --p3o-ess-scope step --p3o-kl-mode proxy_safe --rollout-top-p 1.0 --rollout-top-k -1\n"
)
MEGATRON = f"""{MODEL}
--perform-rl-step --calculate-per-token-loss --bf16 --micro-batch-size 1 --global-batch-size 64 --lr 1e-6
--lr-decay-style constant --grpo-prompts-per-step 16 --grpo-group-size 4 --grpo-iterations 1 --grpo-kl-beta 0.0
--inference-max-seq-length 2048
"""
VERL = """--config-name=ppo_megatron_trainer
algorithm.adv_estimator=grpo
actor_rollout_ref.rollout.n=4
actor_rollout_ref.rollout.name=vllm
data.train_batch_size=64
actor_rollout_ref.actor.ppo_mini_batch_size=16
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1
"""
NEMO = """
grpo: {num_prompts_per_step: 16, num_generations_per_prompt: 4, max_num_steps: 20, seed: 42,
  async_grpo: {enabled: false}}
loss_fn: {reference_policy_kl_penalty: 0.0, ratio_clip_min: 0.2, ratio_clip_max: 0.2, token_level_loss: true,
  use_importance_sampling_correction: false}
checkpointing: {enabled: true, save_period: 10}
policy:
  model_name: Qwen/Qwen3-4B
  train_global_batch_size: 64
  train_micro_batch_size: 1
  max_total_sequence_length: 2048
  megatron_cfg: {enabled: true, tensor_model_parallel_size: 1, pipeline_model_parallel_size: 1}
  generation: {backend: vllm, max_new_tokens: 2048, temperature: 1.0, top_p: 1.0, top_k: null}
cluster: {gpus_per_node: 4, num_nodes: 1}
"""
CLEAN = {"slime": SLIME, "relax": RELAX, "megatron": MEGATRON, "verl": VERL, "nemo_rl": NEMO}


def without(text: str, *words: str) -> str:
    """The list without these words."""
    for word in words:
        assert word in text, word
        text = text.replace(word, "")
    return text


def lint(framework: str, text: str, *extra: str, file: str = "launch.txt", **request: Any) -> LintResult:
    """Judge a list with ``extra`` arguments behind it; for YAML, ``extra`` are overrides."""
    if framework == "nemo_rl":
        request["overrides"] = extra
    else:
        text = text + "\n".join(extra) + "\n"
    request.setdefault("gpus", 8 if framework == "megatron" else None)
    return lint_text(text, Request(framework, **request), file)


def codes(result: LintResult, severity: Severity | None = None) -> list[str]:
    """Codes of a result's findings, of one severity or of all."""
    return [finding.code for finding in result.check.findings if severity in (None, finding.severity)]


def finding(result: LintResult, code: str) -> LocatedFinding:
    """The only finding of ``code``."""
    (found,) = [item for item in result.check.findings if item.code == code]
    return found
