"""The target ``relax``: a preset as the argument list of Relax's trainer, ``python3 -m relax.entrypoints.train``.

Order and choice of flags follow Relax's own P3O recipes, so that the two can be compared line by line. Switches are
bare flags, or their negation; never a flag with ``False`` behind it. What Relax has no word for is refused by name;
what is left unsaid stands in ``UNSAID`` with the reason. Not run here: Relax needs GPUs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

from p3o_launch.errors import PreflightError
from p3o_launch.fields import FIELDS
from p3o_launch.importers.flags import table
from p3o_launch.runtime.plan import cuda_environment
from p3o_launch.schema import Preset

MODULE = "relax.entrypoints.train"
# Stands for the run's directory, which has no name yet when the arguments are made. NUL is no part of any argument.
RUN_DIR = "\0run_dir\0"

# Relax's --rollout-temperature also scales the trainer's log-probs. Its P3O recipes therefore keep it at 1 and give the
# behaviour temperature to a generation hook of their own, by environment.
BEHAVIOUR_HOOK = "examples.algorithms.p3o.rollout.generate"
BEHAVIOUR_VARIABLE = "P3O_BEHAVIOR_TEMPERATURE"

_DEFAULT = 3  # place of the default in a row of FIELDS
_VERIFIERS = {"math": "deepscaler", "mopd": "mopd"}

UNSAID = {
    "model.max_position_embeddings": "Relax's bridge reads it from the checkpoint's config.json",
    "model.moe_router_topk": "read only with num_experts, which is refused",
    "model.moe_ffn_hidden_size": "read only with num_experts, which is refused",
    "model.moe_router_load_balancing_type": "read only with num_experts, which is refused",
    "model.moe_aux_loss_coeff": "read only with num_experts, which is refused",
    "model.moe_z_loss_coeff": "read only with num_experts, which is refused",
    "model.moe_input_jitter_eps": "read only with num_experts, which is refused",
    "model.moe_router_force_load_balancing": "read only with num_experts, which is refused",
    "model.moe_router_force_biased": "read only with num_experts, which is refused",
    "precision.params_dtype": "read only without bf16 and fp16, which is refused",
    "parallel.use_distributed_optimizer": "Relax always turns it on",
    "batch.pack_sequences": "layout of a micro-batch, not its content; Relax packs by itself",
    "rollout.engine": "Relax's engine is SGLang",
    "rollout.engine_version": "a declaration for rules",
    "rollout.logprobs_mode": "SGLang returns those of the distribution it sampled from",
    "rollout.per_sample_seed": "Relax seeds the samples of a group by itself",
    "rollout.enable_prefix_caching": "SGLang empties its cache at every weight update",
    "data.overlong_prompts": "Relax leaves prompts above --rollout-max-prompt-len out",
    "data.malformed_lines": "Relax reads the file with a JSON reader of its own",
    "cluster.gpu": "a declaration for rules",
    "cluster.threads_per_rank": "a setting of the builtin runtime's ranks",
    "cluster.env": "part of the job's runtime environment",
    "cluster.runtime_env": "part of the job's runtime environment",
    "cluster.ray_address": "where the job is submitted",
    "logging.output_root": "where the launcher makes the run directory",
    "logging.pre_command": "run by the launcher",
    "logging.post_command": "run by the launcher",
}

# The one value Relax can do, by setting.
_ONLY: dict[str, tuple[Any, str]] = {
    "algorithm.use_mis": (False, "Relax has no masked importance sampling"),
    "algorithm.use_critic": (False, "a value model needs GPUs of its own in --resource"),
    "algorithm.critic_load": (None, "a value model needs GPUs of its own in --resource"),
    "algorithm.use_opd": (False, "distillation needs a teacher, which a preset cannot name"),
    "model.num_experts": (None, "Relax's expert flags are not written by this target"),
    "model.custom_forward_hook_path": (None, "Relax has no hook on the forward"),
    "parallel.cuda_graph_scope": ("none", "not written by this target"),
    "rollout.min_p": (None, "Relax has no flag for it"),
    "rollout.top_a": (None, "Relax has no flag for it"),
    "rollout.typical_p": (None, "Relax has no flag for it"),
    "rollout.epsilon_cutoff": (None, "Relax has no flag for it"),
    "rollout.eta_cutoff": (None, "Relax has no flag for it"),
    "rollout.repetition_penalty": (None, "Relax has no flag for it"),
    "rollout.presence_penalty": (None, "Relax has no flag for it"),
    "rollout.frequency_penalty": (None, "Relax has no flag for it"),
    "rollout.logit_bias": (None, "Relax has no flag for it"),
    "rollout.extra": ({}, "Relax has no flag for it"),
    "rollout.generation_config": ("ignore", "Relax always says top-p and top-k itself"),
    "rollout.weight_quantization": ("none", "Relax cannot round the rollout weights alone"),
    "rollout.speculative_decoding": (False, "needs a draft model, which a preset cannot name"),
    "rollout.reset_prefix_cache_on_update": (True, "SGLang empties its cache at every weight update"),
    "evaluation.max_prompts": (None, "Relax evaluates whole files"),
    "cluster.device": ("cuda", "Relax needs GPUs"),
    "cluster.num_nodes": (1, "its recipes for P3O have one node"),
}


def relax_arguments(preset: Preset) -> list[str]:
    """Arguments of Relax's trainer; ``RUN_DIR`` where the run's directory belongs.

    Raises PreflightError that names every setting Relax cannot do.
    """
    refused = list(_refused(preset))
    if refused:
        shown = "\n    ".join(refused)
        raise PreflightError(f"the target relax cannot run this preset:\n    {shown}", hint="--target builtin can")
    lines = [line for line in _lines(preset) if line]
    for line in lines:
        _check_choice(*line[:2])
    return [word for line in lines for word in line]


def relax_environment(preset: Preset) -> dict[str, str]:
    """``env_vars`` of the job."""
    variables = cuda_environment(preset)
    if preset.rollout.temperature != 1:
        variables[BEHAVIOUR_VARIABLE] = _number(preset.rollout.temperature)
    own = preset.cluster.runtime_env.get("env_vars")
    return variables | (own if isinstance(own, dict) else {}) | preset.cluster.env


def value_of(preset: Preset, path: str) -> Any:
    """The setting at a dotted path."""
    group, _, name = path.partition(".")
    return getattr(getattr(preset, group), name)


def _refused(preset: Preset) -> Iterator[str]:
    for path, (only, reason) in _ONLY.items():
        if value_of(preset, path) != only:
            yield f"{path} ({json.dumps(value_of(preset, path), ensure_ascii=False)}): {reason}"
    if not preset.precision.bf16 and not preset.precision.fp16:
        yield "precision.bf16 (false): Relax trains in bf16 or fp16"
    if preset.model.hf_checkpoint.startswith("builtin:"):
        yield f"model.hf_checkpoint ({preset.model.hf_checkpoint}): a checkpoint of the builtin runtime"
    for path in ("data.prompt_data", "data.eval_prompt_data"):
        if str(value_of(preset, path)).startswith("builtin:"):
            yield f"{path} ({value_of(preset, path)}): prompts of the builtin runtime"
    if preset.algorithm.kl_mode == "exact" and preset.algorithm.advantage_estimator == "p3o":
        yield "algorithm.kl_mode (exact): Relax has proxy and proxy_safe"
    if preset.algorithm.use_kl_in_reward:
        yield "algorithm.use_kl_in_reward (true): Relax leaves kl_coef out of group-relative rewards"
    if preset.reward.type not in _VERIFIERS:
        yield f"reward.type ({preset.reward.type}): Relax has {', '.join(_VERIFIERS)}"
    if preset.rollout.logprobs is None:
        yield "rollout.logprobs (absent): Relax always asks for the sampled token's"


def _check_choice(flag: str, value: str = "") -> None:
    """A value outside a flag's choices is the preset's fault; a flag Relax does not know is ours."""
    known = table("relax").find(flag.partition("=")[0])
    assert known is not None, flag
    if known.choices and value not in known.choices:
        raise PreflightError(f"Relax's {flag} has no choice {value!r}", hint=f"use {', '.join(known.choices)}")


def _number(value: float) -> str:
    """``1e-5`` -> ``1e-05``, ``5000000.0`` -> ``5000000``, ``1.0`` -> ``1.0``: read back exactly."""
    if isinstance(value, float) and value.is_integer() and 1000 <= abs(value) < 2**53:
        return str(int(value))
    return repr(value)


def _say(flag: str, value: Any) -> list[str]:
    """A flag with its value; nothing for an absent one. A text that looks like a flag is tied to its own by ``=``."""
    if value is None:
        return []
    text = value if isinstance(value, str) else _number(value)
    return [f"{flag}={text}"] if isinstance(value, str) and text.startswith("-") else [flag, text]


def _switch(flag: str, on: bool) -> list[str]:
    return [flag] if on else []


def _flags(group: Any, **names: str) -> Iterator[list[str]]:
    """One line per field: switches for booleans, flag and value for the rest."""
    for field, flag in names.items():
        value = getattr(group, field)
        yield _switch(flag, value) if isinstance(value, bool) else _say(flag, value)


def _plain(group: Any, *fields: str) -> Iterator[list[str]]:
    """Fields whose flags are their own names."""
    yield from _flags(group, **{field: "--" + field.replace("_", "-") for field in fields})


def _lines(preset: Preset) -> Iterator[list[str]]:
    """One line per flag; empty lines where a flag stays away."""
    yield from _placement(preset)
    yield from _model(preset)
    yield from _checkpoint(preset)
    yield from _data(preset)
    yield from _rollout(preset)
    yield from _parallel(preset)
    yield from _batch(preset)
    yield from _optimizer(preset)
    yield from _algorithm(preset)
    yield from _engine(preset)
    yield from _evaluation(preset)
    yield from _numerics(preset)
    yield from _traces(preset)


def _placement(preset: Preset) -> Iterator[list[str]]:
    gpus = preset.cluster.gpus_per_node
    roles = {"actor": [1, gpus], "rollout": [1, preset.rollout.num_gpus or gpus]}
    yield ["--resource", json.dumps(roles, separators=(",", ":"))]
    yield from _plain(preset.rollout, "max_staleness", "update_weights_interval")
    yield ["--num-iters-per-train-update", "1"]
    yield ["--num-data-storage-units", "1"]
    yield from _plain(preset.rollout, "colocate", "fully_async")
    # Ten minutes is the preset's default, half an hour Relax's: said only when someone chose.
    if preset.cluster.timeout_s != FIELDS["cluster"]["timeout_s"][_DEFAULT]:
        yield ["--distributed-timeout-minutes", str(-(-preset.cluster.timeout_s // 60))]


def _model(preset: Preset) -> Iterator[list[str]]:
    model = preset.model
    yield ["--swiglu"]
    yield from _plain(model, "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads")
    if model.num_query_groups is not None:
        yield ["--group-query-attention"]
        yield from _plain(model, "num_query_groups")
    yield ["--use-rotary-position-embeddings"]
    yield ["--disable-bias-linear"]
    yield from _plain(model, "add_qkv_bias")
    yield ["--normalization", "RMSNorm"]
    yield from _plain(model, "norm_epsilon", "rotary_base", "vocab_size", "kv_channels", "qk_layernorm")
    yield from _plain(model, "untie_embeddings_and_output_weights", "mtp_num_layers", "enable_mtp_training")
    if model.lora_rank:
        yield from _plain(model, "lora_rank", "lora_dropout")
        yield ["--lora-merge-mode" if model.lora_merge_before_sync else "--lora-adapter-mode"]


def _checkpoint(preset: Preset) -> Iterator[list[str]]:
    checkpoint = preset.checkpoint
    yield from _plain(preset.model, "hf_checkpoint")
    yield ["--megatron-to-hf-mode", "bridge"]
    yield ["--warm-hf-checkpoint-page-cache"]
    # Relax saves at its interval and at the end, and both or neither.
    interval = checkpoint.save_interval or (preset.batch.num_rollout if checkpoint.save_final else None)
    if interval is not None:
        yield ["--save", f"{RUN_DIR}/checkpoints"]
        yield ["--save-interval", str(interval)]
        yield ["--max-actor-ckpt-to-keep", str(checkpoint.keep)]


def _data(preset: Preset) -> Iterator[list[str]]:
    yield from _plain(preset.data, "prompt_data", "input_key", "label_key", "apply_chat_template")
    yield ["--rm-type", _VERIFIERS[preset.reward.type]]


def _rollout(preset: Preset) -> Iterator[list[str]]:
    batch, rollout = preset.batch, preset.rollout
    yield from _plain(batch, "num_rollout", "rollout_batch_size", "n_samples_per_prompt")
    yield from _flags(rollout, max_prompt_len="--rollout-max-prompt-len", max_response_len="--rollout-max-response-len")
    yield ["--rollout-temperature", "1.0"]
    yield from _flags(rollout, top_p="--rollout-top-p", top_k="--rollout-top-k")
    yield from _plain(batch, "global_batch_size")
    yield from _plain(preset.algorithm, "use_rollout_logprobs")
    yield ["--balance-data"]
    yield ["--log-passrate"]
    yield _switch("--rollout-shuffle", preset.data.shuffle)


def _parallel(preset: Preset) -> Iterator[list[str]]:
    parallel = preset.parallel
    yield from _plain(
        parallel,
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
    )
    yield ["--expert-tensor-parallel-size", str(parallel.expert_tensor_parallel_size or 1)]
    yield from _plain(
        parallel,
        "num_layers_per_virtual_pipeline_stage",
        "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers",
        "sequence_parallel",
        "overlap_grad_reduce",
        "overlap_param_gather",
        "overlap_moe_expert_parallel_comm",
        "use_routing_replay",
        "use_rollout_routing_replay",
    )


def _batch(preset: Preset) -> Iterator[list[str]]:
    batch, parallel = preset.batch, preset.parallel
    if batch.use_dynamic_batch_size:
        yield ["--use-dynamic-batch-size"]
        yield from _plain(batch, "max_tokens_per_gpu")
    else:
        yield from _plain(batch, "micro_batch_size")
    if batch.sequence_padding_multiple > 1:
        yield ["--data-pad-size-multiplier", str(batch.sequence_padding_multiple)]
    yield from _plain(preset.algorithm, "calculate_per_token_loss")
    if parallel.recompute_granularity != "none":
        yield from _plain(parallel, "recompute_granularity", "recompute_method", "recompute_num_layers")


def _optimizer(preset: Preset) -> Iterator[list[str]]:
    optimizer = preset.optimizer
    yield from _plain(optimizer, "optimizer", "lr", "min_lr", "lr_decay_style", "lr_warmup_fraction", "weight_decay")
    yield from _plain(optimizer, "adam_beta1", "adam_beta2")
    if optimizer.adam_eps != FIELDS["optimizer"]["adam_eps"][_DEFAULT]:  # Megatron's default too
        yield from _plain(optimizer, "adam_eps")
    yield from _plain(optimizer, "clip_grad")


def _algorithm(preset: Preset) -> Iterator[list[str]]:
    algorithm = preset.algorithm
    yield from _plain(algorithm, "advantage_estimator", "kl_coef", "entropy_coef")
    if algorithm.advantage_estimator == "p3o":
        yield ["--p3o-ess-scope", algorithm.ess_scope.replace("_", "-")]
        yield from _flags(algorithm, kl_mode="--p3o-kl-mode", clip_low="--clip-low", clip_high="--clip-high")
    else:
        low = 0.4 if algorithm.eps_clip is None else algorithm.eps_clip
        yield _say("--eps-clip", low)
        yield _say("--eps-clip-high", low if algorithm.eps_clip_high is None else algorithm.eps_clip_high)
    yield _switch("--disable-grpo-std-normalization", not algorithm.normalize_advantages)
    yield from _plain(algorithm, "use_tis", "custom_tis_function_path", "get_mismatch_metrics", "use_opsm")
    yield from _plain(algorithm, "custom_pg_loss_reducer_function_path")
    if algorithm.use_kl_loss:
        yield from _plain(algorithm, "use_kl_loss", "kl_loss_coef")
    if preset.rollout.temperature != 1:
        yield ["--custom-generate-function-path", BEHAVIOUR_HOOK]


def _engine(preset: Preset) -> Iterator[list[str]]:
    rollout = preset.rollout
    yield ["--rollout-num-gpus", str(rollout.num_gpus or preset.cluster.gpus_per_node)]
    yield ["--rollout-num-gpus-per-engine", str(rollout.num_gpus_per_engine)]
    yield ["--sglang-mem-fraction-static", _number(rollout.gpu_memory_utilization)]
    yield _switch("--sglang-enable-deterministic-inference", rollout.deterministic_inference)


def _evaluation(preset: Preset) -> Iterator[list[str]]:
    evaluation = preset.evaluation
    yield _switch("--skip-eval-before-train", not evaluation.before_train)
    if evaluation.interval is None or preset.data.eval_prompt_data is None:
        return
    yield ["--eval-interval", str(evaluation.interval)]
    path = preset.data.eval_prompt_data
    name = PurePath(path).parent.name
    named = name if name and not name.startswith("-") else "eval"
    yield ["--eval-prompt-data", named, f"./{path}" if path.startswith("-") else path]
    yield ["--n-samples-per-eval-prompt", str(evaluation.n_samples_per_prompt)]
    yield from _flags(
        evaluation,
        max_response_len="--eval-max-response-len",
        temperature="--eval-temperature",
        top_p="--eval-top-p",
    )
    if evaluation.top_k != -1:
        yield _say("--eval-top-k", evaluation.top_k)


def _numerics(preset: Preset) -> Iterator[list[str]]:
    precision, model = preset.precision, preset.model
    seed = preset.seed.seed
    yield ["--seed", str(seed)]
    yield ["--rollout-seed", str(seed if preset.seed.rollout_seed is None else preset.seed.rollout_seed)]
    yield from _plain(model, "attention_dropout", "hidden_dropout")
    yield _switch("--fp16", precision.fp16)  # bf16 is Relax's own choice unless this is said
    yield from _flags(precision, fp8="--fp8-format")
    if precision.fp8 is not None:
        yield from _plain(precision, "fp8_recipe")
    yield from _plain(precision, "accumulate_allreduce_grads_in_fp32", "attention_softmax_in_fp32")
    yield from _plain(precision, "deterministic_mode", "cross_entropy_loss_fusion")
    if model.attention_backend != "auto":
        yield from _plain(model, "attention_backend")


def _traces(preset: Preset) -> Iterator[list[str]]:
    yield ["--use-health-check"]
    if preset.logging.tensorboard:
        yield ["--use-tensorboard"]
        yield ["--tb-project-name", f"P3O-{preset.algorithm.advantage_estimator}"]
        yield ["--tb-experiment-name", f"{preset.name}-seed-{preset.seed.seed}"]
    else:
        yield ["--no-use-tensorboard"]
    if preset.logging.log_rollouts:
        yield ["--rollout-result-dir", f"{RUN_DIR}/rollouts"]
