"""Facts -> one plain record, the same for every framework: what ``lint --facts`` prints.

A value is None when the framework has no such setting, when it is off, or when the source does not hold it.
"""

from __future__ import annotations

import json
from typing import Any

from p3o_launch.importers.facts import Facts
from p3o_launch.topology import topology

MEGATRON_DROPOUT = 0.1
_PER_TOKEN = "global token sum / token count"
_PER_SAMPLE = "mean over samples of per-sample token mean, per micro-batch"
_DETERMINISM = ("NCCL_ALGO", "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "CUBLAS_WORKSPACE_CONFIG")


def summary(facts: Facts) -> dict[str, Any]:
    """The record. Facts of the importer (``extra``, by dotted name) are laid over those of the preset."""
    record = {
        "framework": facts.framework,
        "kind": facts.extra.get("kind", "rl"),
        "advantage_estimator": facts.extra.get("estimator"),
        **_objective(facts),
        **_trainer(facts),
        **_batch(facts),
        "parallel_check": _parallel_check(facts),
    }
    for path, value in facts.extra.items():
        _lay(record, path.split("."), value)
    return record


def facts_text(facts: Facts) -> str:
    """The record as JSON text."""
    return json.dumps(summary(facts), indent=2, ensure_ascii=False, default=str) + "\n"


def _known(facts: Facts, path: str) -> Any:
    if path in facts.unknown:
        return None
    group, _, key = path.partition(".")
    return getattr(getattr(facts.preset, group), key)


def _lay(record: dict[str, Any], path: list[str], value: Any) -> None:
    """Lay one extra fact over the record; names that the record does not have are the importer's own business."""
    if path[0] not in record and path[0] not in _EXTRA_KEYS:
        return
    below = record
    for key in path[:-1]:
        below = below.setdefault(key, {}) if below.get(key) is not None else {}
    below[path[-1]] = value


_EXTRA_KEYS = frozenset(
    (
        "backend",
        "behavior_logprobs",
        "dropout_explicit",
        "flags_not_in_table",
        "grpo_iterations",
        "hooks",
        "invalid_choices",
        "lora",
        "num_gpus",
        "p3o",
        "ppo_epochs",
        "ppo_mini_batch_size_prompts",
        "repeated_flags",
        "router_replay",
        "sequence_packing",
        "true_on_policy_mode",
        "use_checkpoint_args",
    )
)


def _objective(facts: Facts) -> dict[str, Any]:
    a = facts.preset.algorithm
    per_token = a.calculate_per_token_loss is True
    corrected = a.use_tis or a.use_mis or a.custom_tis_function_path is not None
    return {
        "critic": a.use_critic,
        "uses_rollout_logprobs": a.use_rollout_logprobs is True,
        "behavior_logprobs": None,
        "tis": {"on": corrected, "clip": None, "custom": a.custom_tis_function_path},
        "per_token_loss": per_token,
        "loss_reduction": _PER_TOKEN if per_token else _PER_SAMPLE,
        "kl": {
            "reward_coef": a.kl_coef,
            "loss_coef": a.kl_loss_coef,
            "use_kl_loss": a.use_kl_loss,
            "type": None,
            "entropy_coef": a.entropy_coef,
        },
        "eps_clip": {"low": a.eps_clip, "high": a.eps_clip_high, "dual": None},
        "normalize_advantages": _known(facts, "algorithm.normalize_advantages"),
        "opd": a.use_opd,
    }


def _dropout(facts: Facts, kind: str) -> Any:
    value = getattr(facts.preset.model, kind)
    if value is None and facts.style == "flag":
        return MEGATRON_DROPOUT
    return _known(facts, f"model.{kind}") if facts.style != "flag" else value


def _trainer(facts: Facts) -> dict[str, Any]:
    m, p, x = facts.preset.model, facts.preset.precision, facts.preset.parallel
    recompute = None if x.recompute_granularity == "none" else x.recompute_granularity
    return {
        "attention_dropout": _dropout(facts, "attention_dropout"),
        "hidden_dropout": _dropout(facts, "hidden_dropout"),
        "precision": "bf16" if p.bf16 else "fp16" if p.fp16 else "fp32",
        "fp8": {"format": p.fp8, "recipe": (p.fp8_recipe or "delayed") if p.fp8 else None},
        "tp": _known(facts, "parallel.tensor_model_parallel_size"),
        "pp": _known(facts, "parallel.pipeline_model_parallel_size"),
        "cp": _known(facts, "parallel.context_parallel_size"),
        "ep": _known(facts, "parallel.expert_model_parallel_size"),
        "etp": _known(facts, "parallel.expert_tensor_parallel_size"),
        "sequence_parallel": _known(facts, "parallel.sequence_parallel"),
        "vpp": topology(facts.preset).vpp,
        "moe": {},
        "recompute": {
            "granularity": recompute,
            "method": x.recompute_method,
            "num_layers": x.recompute_num_layers,
        },
        "mtp": {"training": m.enable_mtp_training},
        "seed": _known(facts, "seed.seed"),
        "lora": None,
        "router_replay": None,
        "deterministic": {
            "trainer": p.deterministic_mode,
            "batch_invariant": False,
            "rollout": facts.preset.rollout.deterministic_inference,
            "env": {name: value for name, value in facts.preset.cluster.env.items() if name in _DETERMINISM},
        },
    }


def _batch(facts: Facts) -> dict[str, Any]:
    b, r = facts.preset.batch, facts.preset.rollout
    samples = b.rollout_batch_size * b.n_samples_per_prompt
    batches = ("batch.rollout_batch_size", "batch.n_samples_per_prompt", "batch.global_batch_size")
    known = not facts.unknown.intersection(batches)
    steps = samples * facts.extra.get("steps_factor", 1) // b.global_batch_size if known else None
    dynamic = b.use_dynamic_batch_size
    return {
        "rollout": {
            "temperature": r.temperature,
            "top_p": _known(facts, "rollout.top_p"),
            "top_k": _known(facts, "rollout.top_k"),
            "max_response_len": _known(facts, "rollout.max_response_len"),
            "seed": None,
            "speculative": None,
        },
        "n_samples": _known(facts, "batch.n_samples_per_prompt"),
        "rollout_batch_size": _known(facts, "batch.rollout_batch_size"),
        "global_batch_size": _known(facts, "batch.global_batch_size"),
        "dynamic_batch": dynamic,
        "micro_batch_size": None if dynamic else _known(facts, "batch.micro_batch_size"),
        "max_tokens_per_gpu": b.max_tokens_per_gpu if dynamic else None,
        "dynamic_global_batch": False,
        "samples_per_rollout": samples if known else None,
        "optimizer_steps_per_rollout": steps,
        "num_gpus": _gpus(facts),
        "async": {
            "mode": "sync",
            "colocate": r.colocate,
            "max_staleness": None,
            "partial_rollout": False,
            "mask_offpolicy": False,
            "update_weights_interval": r.update_weights_interval,
            "window_complete_before_train": True,
        },
    }


def _gpus(facts: Facts) -> dict[str, Any]:
    """One pool of GPUs for everything, unless the importer knows better."""
    cluster = facts.preset.cluster
    world = None if "cluster.gpus_per_node" in facts.unknown else cluster.num_nodes * cluster.gpus_per_node
    return {"train": world, "rollout": world, "critic": 0, "total": world}


def _parallel_check(facts: Facts) -> dict[str, Any] | None:
    if "parallel.tensor_model_parallel_size" in facts.unknown:
        return None
    sizes, x = topology(facts.preset), facts.preset.parallel
    model = sizes.tp * sizes.pp * sizes.cp
    expert = x.expert_model_parallel_size * (x.expert_tensor_parallel_size or sizes.tp) * sizes.pp
    batch = facts.preset.batch.global_batch_size
    return {
        "model_parallel": model,
        "dp": sizes.dp,
        "divides": sizes.dp is not None,
        "expert_divides": sizes.world_size % expert == 0,
        "global_batch_divisible_by_dp": sizes.dp is not None and batch % sizes.dp == 0,
    }
