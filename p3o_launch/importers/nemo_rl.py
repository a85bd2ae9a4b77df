"""Facts of NeMo-RL's configurations: YAML with parents."""

from __future__ import annotations

from typing import Any

from p3o_launch.importers.configured import FROM_CHECKPOINT, Tree, real, text, whole
from p3o_launch.importers.log_prob_cut import log_prob_cut

MEGATRON = "policy.megatron_cfg"
DTENSOR = "policy.dtensor_cfg"
LOSS = "loss_fn"
GENERATION = "policy.generation"
ASYNC = "grpo.async_grpo"

_SIZES = {
    "parallel.tensor_model_parallel_size": "tensor_model_parallel_size",
    "parallel.pipeline_model_parallel_size": "pipeline_model_parallel_size",
    "parallel.context_parallel_size": "context_parallel_size",
    "parallel.expert_model_parallel_size": "expert_model_parallel_size",
    "parallel.expert_tensor_parallel_size": "expert_tensor_parallel_size",
    "parallel.decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "parallel.decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
}
_SAME = {
    "batch.n_samples_per_prompt": "grpo.num_generations_per_prompt",
    "batch.rollout_batch_size": "grpo.num_prompts_per_step",
    "batch.num_rollout": "grpo.max_num_steps",
    "batch.global_batch_size": "policy.train_global_batch_size",
    "batch.micro_batch_size": "policy.train_micro_batch_size",
    "algorithm.eps_clip": f"{LOSS}.ratio_clip_min",
    "algorithm.eps_clip_high": f"{LOSS}.ratio_clip_max",
    "rollout.max_response_len": f"{GENERATION}.max_new_tokens",
    "rollout.top_k": f"{GENERATION}.top_k",
    "rollout.num_gpus_per_engine": f"{GENERATION}.vllm_cfg.tensor_parallel_size",
    "seed.seed": "grpo.seed",
}
_FLOATS = {
    "rollout.temperature": f"{GENERATION}.temperature",
    "rollout.top_p": f"{GENERATION}.top_p",
    "optimizer.clip_grad": "policy.max_grad_norm",
}
_NOT_GROUP_RELATIVE = ("reinforce_plus_plus", "gae")
_SAMPLING = ("top_p", "top_k", "repetition_penalty")


def nemo_facts(tree: Tree) -> None:
    """Everything a NeMo-RL configuration says."""
    draft = tree.draft
    draft.extra["kind"] = "rl" if tree.settings.has("grpo") or tree.settings.has("ppo") else "sft"
    draft.inapplicable.update(
        {
            "P3O313": "a rollout is dealt to the workers by samples",
            "P3O312": "the token budget is a multiple of the longest sequence",
            "P3O401": "top-p and top-k are applied to the trainer's log-probs too",
            "P3O412": "one length bounds prompt and response together",
        }
    )
    draft.forget(*FROM_CHECKPOINT)
    for fact, path in _SAME.items():
        tree.copy(fact, path, whole)
    for fact, path in _FLOATS.items():
        tree.copy(fact, path, real)
    tree.copy("model.hf_checkpoint", "policy.model_name", text)
    saves = tree.on("checkpointing.enabled")
    interval = tree.get("checkpointing.save_period") if saves else None
    tree.put("checkpoint.save_interval", whole(interval), f"checkpointing.{'save_period' if saves else 'enabled'}")
    draft.names["checkpoint.save_interval"] = "checkpointing.save_period"
    if not saves:
        draft.remedies["checkpoint.save_interval"] = "set checkpointing.enabled: true"
    _objective(tree)
    _backend(tree)
    _batch(tree)
    _generation(tree)
    _placement(tree)
    _record(tree)


def _objective(tree: Tree) -> None:
    draft = tree.draft
    estimator = str(tree.get("grpo.adv_estimator.name", "grpo"))
    cispo, sequence = tree.on(f"{LOSS}.use_cispo"), tree.on(f"{LOSS}.sequence_level_importance_ratios")
    suffix = "+cispo loss" if cispo else "+gspo ratio" if sequence else ""
    draft.extra["estimator"] = estimator + suffix
    tree.put("algorithm.advantage_estimator", "grpo", "grpo.adv_estimator.name")
    if "algorithm.advantage_estimator" not in draft.places and (place := tree.settings.place("grpo")):
        draft.places["algorithm.advantage_estimator"] = place
    baseline = tree.on("grpo.adv_estimator.minus_baseline")
    if estimator in _NOT_GROUP_RELATIVE and not baseline:
        draft.inapplicable["P3O112"] = f"{estimator} does not compare the samples of one prompt"
    tree.put("algorithm.use_critic", tree.settings.has("value") or tree.settings.has("ppo"), "value")
    draft.remedies["algorithm.use_critic"] = "write a grpo block in place of ppo and value"
    average = tree.on(f"{LOSS}.token_level_loss")
    tree.put("algorithm.calculate_per_token_loss", average, f"{LOSS}.token_level_loss")
    # The global count divides the per-sequence means too, so the token budget moves nothing.
    draft.inapplicable["P3O118"] = "sequence means are averaged over the whole batch"
    _penalty(tree)
    corrects = tree.on(f"{LOSS}.use_importance_sampling_correction")
    tree.put("algorithm.use_tis", corrects, f"{LOSS}.use_importance_sampling_correction")
    draft.put("algorithm.use_rollout_logprobs", False, "the use of generation log-probs as denominator")
    draft.remedies["algorithm.use_rollout_logprobs"] = f"set {LOSS}.use_importance_sampling_correction: true"
    if tree.on(f"{LOSS}.disable_ppo_ratio"):
        draft.inapplicable["P3O114"] = "the loss has no policy ratio"
    if tree.get("on_policy_distillation") is not None or tree.settings.has("distillation"):
        block = "on_policy_distillation" if tree.settings.has("on_policy_distillation") else "distillation"
        tree.put("algorithm.use_opd", True, block)
        draft.inapplicable["P3O114"] = "a distillation loss has no policy ratio"
    forced = tree.on(f"{LOSS}.force_on_policy_ratio")
    draft.extra["true_on_policy_mode"] = forced
    place = tree.settings.place(f"{LOSS}.force_on_policy_ratio")
    draft.extra["ratio_forced"] = (f"{LOSS}.force_on_policy_ratio", place) if forced else None
    kind = tree.get(f"{LOSS}.truncated_importance_sampling_type")
    draft.extra.update(
        {
            "behavior_logprobs": "current policy detached (force_on_policy_ratio)"
            if forced
            else "recomputed by trainer (prev_logprobs)",
            "tis.type": kind if corrects else None,
            "tis.clip": tree.get(f"{LOSS}.truncated_importance_sampling_ratio") if corrects else None,
            "tis.clip_low": tree.get(f"{LOSS}.truncated_importance_sampling_ratio_min") if corrects else None,
            "loss_reduction": "global valid tokens"
            if average
            else "mean over sequences of per-sequence token mean (global)",
        }
    )


def _penalty(tree: Tree) -> None:
    weight, in_reward = float(tree.number(f"{LOSS}.reference_policy_kl_penalty")), tree.on(f"{LOSS}.use_kl_in_reward")
    path = f"{LOSS}.reference_policy_kl_penalty"
    tree.put("algorithm.kl_coef", weight if in_reward else 0.0, path)
    tree.put("algorithm.use_kl_in_reward", in_reward, f"{LOSS}.use_kl_in_reward")
    tree.put("algorithm.kl_loss_coef", 0.0 if in_reward else weight, path)
    tree.put("algorithm.use_kl_loss", weight > 0 and not in_reward, path)


def _backend(tree: Tree) -> None:
    draft = tree.draft
    megatron = tree.on(f"{MEGATRON}.enabled")
    draft.extra["backend"] = "megatron" if megatron else "dtensor/automodel"
    if megatron:
        for fact, name in _SIZES.items():
            tree.copy(fact, f"{MEGATRON}.{name}")
        requested = tree.on(f"{MEGATRON}.sequence_parallel")
        tree.put("parallel.sequence_parallel", requested, f"{MEGATRON}.sequence_parallel")
        _megatron(tree)
    else:
        draft.forget(*_SIZES, "parallel.sequence_parallel")
        size = tree.number(f"{DTENSOR}.tensor_parallel_size", 1)
        tree.put("parallel.tensor_model_parallel_size", whole(size), f"{DTENSOR}.tensor_parallel_size")
        tree.copy("parallel.context_parallel_size", f"{DTENSOR}.context_parallel_size")
        draft.extra["sequence_parallel"] = tree.on(f"{DTENSOR}.sequence_parallel")
        tree.copy("optimizer.lr", "policy.optimizer.kwargs.lr")
    recompute = tree.on(f"{MEGATRON if megatron else DTENSOR}.activation_checkpointing")
    granularity = tree.get(f"{MEGATRON}.recompute_granularity", "full") if megatron else "full"
    draft.extra["recompute"] = {"granularity": granularity if recompute else None}
    precision = str(tree.get("policy.precision", "bfloat16"))
    draft.put("precision.bf16", precision == "bfloat16")
    draft.put("precision.fp16", precision == "float16")
    draft.extra["precision"] = precision
    draft.forget("model.attention_dropout", "model.hidden_dropout")
    for kind in ("attention_dropout", "hidden_dropout"):
        path = f"{MEGATRON}.model_overrides.{kind}"
        draft.names[f"model.{kind}"] = path
        if megatron and tree.settings.has(path):
            tree.put(f"model.{kind}", float(tree.number(path)), path)
    _lora(tree, megatron)


def _megatron(tree: Tree) -> None:
    draft = tree.draft
    if tree.on(f"{MEGATRON}.fp8_cfg.enabled"):
        tree.copy("precision.fp8", f"{MEGATRON}.fp8_cfg.fp8")
        tree.copy("precision.fp8_recipe", f"{MEGATRON}.fp8_cfg.fp8_recipe")
        draft.extra["fp8.param_gather"] = tree.on(f"{MEGATRON}.fp8_cfg.fp8_param")
    else:
        draft.names["precision.fp8"] = f"{MEGATRON}.fp8_cfg.enabled"
    for fact, name in (
        ("optimizer.lr", "optimizer.lr"),
        ("optimizer.min_lr", "optimizer.min_lr"),
        ("optimizer.weight_decay", "optimizer.weight_decay"),
        ("model.moe_router_load_balancing_type", "moe_router_load_balancing_type"),
    ):
        tree.copy(fact, f"{MEGATRON}.{name}")
    mtp = tree.number(f"{MEGATRON}.mtp_num_layers")
    scale = tree.number(f"{MEGATRON}.mtp_loss_scaling_factor")
    tree.put("model.mtp_num_layers", whole(mtp) or None, f"{MEGATRON}.mtp_num_layers")
    tree.put("model.enable_mtp_training", bool(mtp and scale), f"{MEGATRON}.mtp_loss_scaling_factor")
    whole_step = tree.get(f"{MEGATRON}.cuda_graph_impl") == "full_iteration"
    tree.put("parallel.cuda_graph_scope", "full_iteration" if whole_step else "none", f"{MEGATRON}.cuda_graph_impl")
    tree.put("parallel.use_routing_replay", tree.on("policy.router_replay.enabled"), "policy.router_replay.enabled")
    draft.names["cluster.env"] = f"{MEGATRON}.env_vars"
    variables = tree.get(f"{MEGATRON}.env_vars")
    if isinstance(variables, dict):
        env = {str(name): str(value) for name, value in variables.items() if isinstance(value, (str, int, float))}
        draft.put("cluster.env", env, f"{MEGATRON}.env_vars", tree.settings.place(f"{MEGATRON}.env_vars"))


def _lora(tree: Tree, megatron: bool) -> None:
    block = f"{MEGATRON}.peft" if megatron else f"{DTENSOR}.lora_cfg"
    on = tree.on(f"{block}.enabled")
    rank = tree.number(f"{block}.dim") if on else 0
    tree.put("model.lora_rank", whole(rank), f"{block}.dim")
    tree.put("model.lora_dropout", float(tree.number(f"{block}.dropout")), f"{block}.dropout")
    tree.draft.inapplicable["P3O406"] = "adapters are merged into the weights that are sent"
    dropout = tree.get(f"{block}.dropout", 0.0)
    tree.draft.extra["lora"] = {"rank": rank, "alpha": tree.get(f"{block}.alpha"), "dropout": dropout} if on else None


def _batch(tree: Tree) -> None:
    draft = tree.draft
    dynamic, packed = tree.on("policy.dynamic_batching.enabled"), tree.on("policy.sequence_packing.enabled")
    tree.put(
        "batch.use_dynamic_batch_size",
        dynamic or packed,
        "policy.dynamic_batching.enabled" if dynamic else "policy.sequence_packing.enabled",
    )
    tree.copy("batch.max_tokens_per_gpu", "policy.sequence_packing.train_mb_tokens", whole)
    if not (dynamic or packed or tree.draft.extra["true_on_policy_mode"]):
        log_prob_cut(tree, "policy.logprob_batch_size", "policy.train_micro_batch_size")
    draft.extra.update(
        {
            "sequence_packing": packed,
            "micro_batch_size": tree.get("policy.train_micro_batch_size"),
            "max_tokens_per_gpu": None,
        }
    )


def _generation(tree: Tree) -> None:
    draft, backend = tree.draft, tree.get(f"{GENERATION}.backend", "vllm")
    engine = backend if backend in ("vllm", "sglang", "megatron") else "vllm"
    tree.put("rollout.engine", engine, f"{GENERATION}.backend")
    tree.copy("rollout.logprobs_mode", f"{GENERATION}.vllm_cfg.logprobs_mode", _mode)
    precision = str(tree.get(f"{GENERATION}.vllm_cfg.precision", ""))
    rounding = "fp8_e4m3" if precision.startswith("fp8") else "none"
    tree.put("rollout.weight_quantization", rounding, f"{GENERATION}.vllm_cfg.precision")
    draft.extra["fp8.rollout_quantization"] = precision if rounding != "none" else None
    unset = [name for name in _SAMPLING if not tree.settings.has(f"{GENERATION}.{name}")]
    written = tree.get(f"{GENERATION}.vllm_kwargs.generation_config")
    asked = written in (None, "auto") and "top_p" in unset
    tree.put("rollout.generation_config", "auto" if asked else "ignore", f"{GENERATION}.vllm_kwargs.generation_config")
    draft.remedies["rollout.generation_config"] = f"set {GENERATION}.vllm_kwargs.generation_config: vllm"
    enabled = tree.on(f"{ASYNC}.enabled")
    tree.put("rollout.fully_async", enabled, f"{ASYNC}.enabled")
    age = tree.number(f"{ASYNC}.max_trajectory_age_steps") if enabled else 0
    tree.put("rollout.max_staleness", whole(age), f"{ASYNC}.max_trajectory_age_steps")
    # Asynchronous, but every optimizer step's window is complete before it starts.
    draft.extra.update(
        {
            "streaming": False,
            "async.mode": "async_lagged" if enabled else "sync",
            "async.max_staleness": age,
            "async.partial_rollout": enabled and tree.on(f"{ASYNC}.in_flight_weight_updates"),
        }
    )
    if enabled:
        draft.extra["lag_note"] = "rollouts lag behind the trainer by a bounded number of steps; the window is complete"


def _mode(value: Any) -> Any:
    return value if value in ("processed_logprobs", "raw_logprobs") else None


def _placement(tree: Tree) -> None:
    draft = tree.draft
    nodes, per_node = tree.number("cluster.num_nodes", 1), tree.number("cluster.gpus_per_node", 1)
    colocated = tree.get(f"{GENERATION}.colocated.enabled", True) is not False
    tree.put("rollout.colocate", colocated, f"{GENERATION}.colocated.enabled")
    total = nodes * per_node
    served, train_nodes, train_per_node = total, nodes, per_node
    if not colocated:
        resources = f"{GENERATION}.colocated.resources"
        own_nodes = tree.number(f"{resources}.num_nodes", 1)
        own_gpus = tree.number(f"{resources}.gpus_per_node", per_node)
        served = own_nodes * own_gpus
        if nodes > 1:
            train_nodes = max(nodes - own_nodes, 1)
        else:
            train_per_node = max(per_node - own_gpus, 1)
    tree.put("cluster.num_nodes", whole(train_nodes), "cluster.num_nodes")
    tree.put("cluster.gpus_per_node", whole(train_per_node), "cluster.gpus_per_node")
    train = train_nodes * train_per_node
    draft.extra["num_gpus"] = {"train": train, "rollout": served, "critic": None, "total": total}
    if colocated:
        tree.put("rollout.num_gpus", whole(served), "cluster.gpus_per_node")


def _record(tree: Tree) -> None:
    """Facts that only the summary shows."""
    megatron = tree.draft.extra["backend"] == "megatron"
    names = {
        "freeze_router": "freeze_moe_router",
        "load_balancing": "moe_router_load_balancing_type",
        "dispatcher": "moe_token_dispatcher_type",
        "router_dtype": "moe_router_dtype",
    }
    moe: dict[str, Any] = {"num_experts": "from HF config"}
    moe |= {key: tree.get(f"{MEGATRON}.{name}") if megatron else None for key, name in names.items()}
    tree.draft.extra.update(
        {
            "dropout_explicit": megatron and tree.settings.has(f"{MEGATRON}.model_overrides.attention_dropout"),
            "moe": moe,
            "mtp.num_layers": tree.get(f"{MEGATRON}.mtp_num_layers"),
            "kl.type": tree.get(f"{LOSS}.reference_policy_kl_type"),
            "eps_clip.dual": tree.get(f"{LOSS}.ratio_clip_c"),
            "normalize_advantages": None,
            "fp8.param_gather": tree.draft.extra.get("fp8.param_gather", False),
            "hooks": {},
            "flags_not_in_table": [],
            "repeated_flags": {},
        }
    )
