"""Facts of verl's configurations: the resolved YAML, one that builds on a trainer, or a list of Hydra overrides."""

from __future__ import annotations

from math import ceil
from typing import Any

from p3o_launch.importers.configured import FROM_CHECKPOINT, Tree, real, text, whole
from p3o_launch.importers.log_prob_cut import log_prob_cut

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
MEGATRON = f"{ACTOR}.megatron"
TRANSFORMER = f"{MEGATRON}.override_transformer_config"

_SIZES = {
    "parallel.tensor_model_parallel_size": "tensor_model_parallel_size",
    "parallel.pipeline_model_parallel_size": "pipeline_model_parallel_size",
    "parallel.context_parallel_size": "context_parallel_size",
    "parallel.expert_model_parallel_size": "expert_model_parallel_size",
    "parallel.expert_tensor_parallel_size": "expert_tensor_parallel_size",
    "parallel.use_distributed_optimizer": "use_distributed_optimizer",
}
_SAME = {
    "algorithm.kl_coef": "algorithm.kl_ctrl.kl_coef",
    "algorithm.kl_loss_coef": f"{ACTOR}.kl_loss_coef",
    "algorithm.eps_clip": f"{ACTOR}.clip_ratio_low",
    "algorithm.eps_clip_high": f"{ACTOR}.clip_ratio_high",
    "batch.n_samples_per_prompt": f"{ROLLOUT}.n",
    "batch.rollout_batch_size": "data.train_batch_size",
    "batch.max_tokens_per_gpu": f"{ACTOR}.ppo_max_token_len_per_gpu",
    "rollout.max_prompt_len": f"{ROLLOUT}.prompt_length",
    "rollout.max_response_len": f"{ROLLOUT}.response_length",
    "rollout.top_k": f"{ROLLOUT}.top_k",
    "rollout.num_gpus_per_engine": f"{ROLLOUT}.tensor_model_parallel_size",
    "cluster.num_nodes": "trainer.nnodes",
    "cluster.gpus_per_node": "trainer.n_gpus_per_node",
}
_FLOATS = {
    "rollout.temperature": f"{ROLLOUT}.temperature",
    "rollout.top_p": f"{ROLLOUT}.top_p",
    "optimizer.lr": f"{ACTOR}.optim.lr",
    "optimizer.weight_decay": f"{ACTOR}.optim.weight_decay",
    "optimizer.clip_grad": f"{ACTOR}.optim.clip_grad",
}
_SWITCHES = {
    "algorithm.use_kl_loss": f"{ACTOR}.use_kl_loss",
    "algorithm.use_kl_in_reward": "algorithm.use_kl_in_reward",
    "algorithm.normalize_advantages": "algorithm.norm_adv_by_std_in_grpo",
    "batch.use_dynamic_batch_size": f"{ACTOR}.use_dynamic_bsz",
    "rollout.enable_prefix_caching": f"{ROLLOUT}.enable_prefix_caching",
    "model.enable_mtp_training": f"{MODEL}.mtp.enable_train",
    "parallel.use_rollout_routing_replay": f"{ROLLOUT}.enable_rollout_routing_replay",
}
_NOT_GROUP_RELATIVE = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "optimal_token_baseline")
_QUANTIZATION = {"fp8": "fp8_e4m3", "torchao": "fp8_e4m3"}


def verl_facts(tree: Tree) -> None:
    """Everything a verl configuration says."""
    draft = tree.draft
    draft.inapplicable.update(
        {
            "P3O313": "a rollout is dealt to the workers by samples",
            "P3O303": "the last mini-batch of a rollout may be smaller",
        }
    )
    draft.forget(*FROM_CHECKPOINT)
    for fact, path in _SAME.items():
        tree.copy(fact, path, whole)
    for fact, path in _FLOATS.items():
        tree.copy(fact, path)
    for fact, path in _SWITCHES.items():
        tree.put(fact, tree.on(path), path)
    tree.copy("model.hf_checkpoint", f"{MODEL}.path", text)
    _estimator(tree)
    _denominator(tree)
    _backend(tree)
    _batch(tree)
    _rollout(tree)
    _lora(tree)
    _record(tree)


def _estimator(tree: Tree) -> None:
    draft, estimator = tree.draft, tree.get("algorithm.adv_estimator")
    draft.extra["estimator"], draft.extra["kind"] = estimator, "rl"
    tree.put("algorithm.advantage_estimator", "grpo", "algorithm.adv_estimator")
    enabled = tree.get("critic.enable")
    if isinstance(enabled, bool):
        tree.put("algorithm.use_critic", enabled, "critic.enable")
    else:
        tree.put("algorithm.use_critic", estimator == "gae", "algorithm.adv_estimator")
        draft.names["algorithm.use_critic"] = f"the critic of algorithm.adv_estimator={estimator}"
        draft.remedies["algorithm.use_critic"] = "set algorithm.adv_estimator=grpo"
    if estimator in _NOT_GROUP_RELATIVE:
        draft.inapplicable["P3O112"] = f"{estimator} does not compare the samples of one prompt"
    mode = str(tree.get(f"{ACTOR}.policy_loss.loss_mode", "vanilla"))
    if mode in ("reinforce", "rloo", "pg"):
        draft.inapplicable["P3O114"] = f"the loss {mode} has no policy ratio"
    average = str(tree.get(f"{ACTOR}.loss_agg_mode", "token-mean"))
    tree.put("algorithm.calculate_per_token_loss", average == "token-mean", f"{ACTOR}.loss_agg_mode")
    draft.extra["loss_reduction"] = average
    draft.extra["micro_batch_mean"] = average == "token-mean"
    draft.remedies["algorithm.calculate_per_token_loss"] = f"set {ACTOR}.loss_agg_mode=token-mean"
    tree.put("algorithm.entropy_coef", float(tree.number(f"{ACTOR}.entropy_coeff")), f"{ACTOR}.entropy_coeff")


def _denominator(tree: Tree) -> None:
    """Which log-probs divide, and what corrects for the engine."""
    draft, correction = tree.draft, "algorithm.rollout_correction"
    streaming = tree.settings.has("async_training")
    bypass = tree.on(f"{correction}.bypass_mode")
    asked = "async_training.use_rollout_log_probs" if streaming else f"{ACTOR}.use_rollout_log_probs"
    uses = tree.on(asked) or bypass
    decider = f"{correction}.bypass_mode" if bypass or not tree.settings.has(asked) else asked
    tree.put("algorithm.use_rollout_logprobs", uses, decider)
    weights, rejects = tree.get(f"{correction}.rollout_is"), tree.get(f"{correction}.rollout_rs")
    tree.put("algorithm.use_tis", weights is not None, f"{correction}.rollout_is")
    tree.put("algorithm.use_mis", rejects is not None, f"{correction}.rollout_rs")
    # The asynchronous trainer asks for them itself; elsewhere a ratio against them needs the switch.
    reported = tree.on(f"{ROLLOUT}.calculate_log_probs") or streaming or not uses
    tree.put("rollout.logprobs", 0, f"{ROLLOUT}.calculate_log_probs")
    if not reported:
        draft.values["rollout"]["logprobs"] = None
    draft.remedies["rollout.logprobs"] = f"set {ROLLOUT}.calculate_log_probs=true"
    draft.remedies["algorithm.use_rollout_logprobs"] = f"set {correction}.bypass_mode=true"
    draft.extra.update(
        {
            "behavior_logprobs": "rollout engine" if uses else "recomputed by trainer",
            "tis.level": weights,
            "tis.rejection": rejects,
            "tis.clip": tree.get(f"{correction}.rollout_is_threshold") if weights is not None else None,
            "tis.bypass_mode": bypass,
            "tis.loss_type": tree.get(f"{correction}.loss_type"),
        }
    )


def _backend(tree: Tree) -> None:
    draft, strategy = tree.draft, str(tree.get(f"{ACTOR}.strategy", "fsdp"))
    megatron = strategy == "megatron"
    draft.extra["backend"] = "megatron" if megatron else "fsdp" if strategy.startswith("fsdp") else strategy
    if megatron:
        for fact, name in _SIZES.items():
            tree.copy(fact, f"{MEGATRON}.{name}")
        requested = tree.on(f"{MEGATRON}.sequence_parallel")
        tp = draft.get("parallel.tensor_model_parallel_size")
        tree.put("parallel.sequence_parallel", requested and tp != 1, f"{MEGATRON}.sequence_parallel")
        draft.extra["sequence_parallel"] = requested
        tree.copy("seed.seed", f"{MEGATRON}.seed")
        _transformer(tree)
        stages = tree.get(f"{MEGATRON}.virtual_pipeline_model_parallel_size")
        draft.extra["vpp"] = stages
        draft.extra["cp"] = draft.get("parallel.context_parallel_size")
    else:
        draft.forget(*_SIZES, "parallel.sequence_parallel", "seed.seed")
        draft.forget("model.attention_dropout", "model.hidden_dropout")
        draft.extra["cp"] = tree.get(f"{ACTOR}.ulysses_sequence_parallel_size", 1)
        draft.extra["seed"] = tree.get(f"{ACTOR}.fsdp_config.seed")
    replay = str(tree.get(f"{ACTOR}.router_replay.mode", "disabled"))
    tree.put("parallel.use_routing_replay", replay == "R2", f"{ACTOR}.router_replay.mode")
    if replay == "R3":
        tree.put("parallel.use_rollout_routing_replay", True, f"{ACTOR}.router_replay.mode")
    draft.remedies["parallel.use_routing_replay"] = f"set {ACTOR}.router_replay.mode=disabled"
    draft.remedies["parallel.use_rollout_routing_replay"] = f"set {ACTOR}.router_replay.mode=disabled"
    draft.extra["router_replay"] = None if replay == "disabled" else replay
    precision = str(tree.get(f"{MEGATRON}.dtype" if megatron else f"{ACTOR}.fsdp_config.dtype", "bfloat16"))
    draft.put("precision.bf16", precision == "bfloat16")
    draft.put("precision.fp16", precision == "float16")
    draft.extra["precision"] = precision


def _transformer(tree: Tree) -> None:
    """Megatron settings that verl passes on beside its own."""
    draft = tree.draft
    for kind in ("attention_dropout", "hidden_dropout"):
        if tree.settings.has(f"{TRANSFORMER}.{kind}"):
            tree.copy(f"model.{kind}", f"{TRANSFORMER}.{kind}", real)
        else:
            draft.names[f"model.{kind}"] = f"{TRANSFORMER}.{kind}"
            draft.forget(f"model.{kind}")
    for fact, name in (
        ("precision.fp8", "fp8"),
        ("precision.fp8_recipe", "fp8_recipe"),
        ("parallel.recompute_granularity", "recompute_granularity"),
        ("parallel.recompute_method", "recompute_method"),
        ("parallel.recompute_num_layers", "recompute_num_layers"),
        ("parallel.overlap_moe_expert_parallel_comm", "overlap_moe_expert_parallel_comm"),
        ("model.moe_input_jitter_eps", "moe_input_jitter_eps"),
        ("precision.deterministic_mode", "deterministic_mode"),
    ):
        tree.copy(fact, f"{TRANSFORMER}.{name}")


def _batch(tree: Tree) -> None:
    """The mini-batch counts prompts; the optimizer step takes all samples of them."""
    draft = tree.draft
    prompts, samples = tree.number(f"{ACTOR}.ppo_mini_batch_size"), tree.number(f"{ROLLOUT}.n", 1)
    product = prompts * samples
    tree.put("batch.global_batch_size", whole(product) if product else None, f"{ACTOR}.ppo_mini_batch_size")
    micro = tree.get(f"{ACTOR}.ppo_micro_batch_size_per_gpu")
    tree.put("batch.micro_batch_size", whole(micro), f"{ACTOR}.ppo_micro_batch_size_per_gpu")
    if micro is None:
        draft.forget("batch.micro_batch_size")
    budgets = tree.on(f"{ACTOR}.use_dynamic_bsz") or tree.on(f"{ROLLOUT}.log_prob_use_dynamic_bsz")
    if not budgets and draft.get("algorithm.use_rollout_logprobs") is False:
        training = f"{ACTOR}.ppo_micro_batch_size_per_gpu"
        log_prob_cut(tree, f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", training)
    world = tree.number("trainer.nnodes", 1) * tree.number("trainer.n_gpus_per_node", 8)
    if draft.extra["backend"] == "fsdp" and tree.on(f"{ACTOR}.use_dynamic_bsz") and world > 1:
        draft.report(
            "P3O028",
            tree.settings.place(f"{ACTOR}.use_dynamic_bsz"),
            f"{ACTOR}.use_dynamic_bsz (true) with {ACTOR}.strategy (fsdp) on {world} GPUs: ranks may cut different "
            "numbers of micro-batches and wait for each other",
            f"set {ACTOR}.use_dynamic_bsz=false, or check that your version synchronises the number",
            "batch.use_dynamic_batch_size",
        )
    tree.copy("batch.num_rollout", "trainer.total_training_steps", whole)
    frequency = tree.number("trainer.save_freq", -1)
    tree.put("checkpoint.save_interval", whole(frequency) if frequency > 0 else None, "trainer.save_freq")
    draft.extra["micro_batch_size"] = None if tree.on(f"{ACTOR}.use_dynamic_bsz") else micro
    draft.extra["max_tokens_per_gpu"] = tree.get(f"{ACTOR}.ppo_max_token_len_per_gpu")
    draft.extra["ppo_mini_batch_size_prompts"] = tree.get(f"{ACTOR}.ppo_mini_batch_size")
    epochs = tree.number(f"{ACTOR}.ppo_epochs", 1)
    draft.extra["ppo_epochs"] = epochs
    draft.extra["steps_factor"] = int(epochs)


def _rollout(tree: Tree) -> None:
    draft, name = tree.draft, tree.get(f"{ROLLOUT}.name")
    tree.put("rollout.engine", name if name in ("vllm", "sglang") else "vllm", f"{ROLLOUT}.name")
    mode = tree.get(f"{ROLLOUT}.logprobs_mode")
    known = mode in ("processed_logprobs", "raw_logprobs")
    tree.put("rollout.logprobs_mode", mode if known else None, f"{ROLLOUT}.logprobs_mode")
    quantization = tree.get(f"{ROLLOUT}.quantization")
    rounding = _QUANTIZATION.get(str(quantization), "none")
    tree.put("rollout.weight_quantization", rounding, f"{ROLLOUT}.quantization")
    for extra in ("repetition_penalty", "min_p", "presence_penalty", "frequency_penalty"):
        tree.copy(f"rollout.{extra}", f"{ROLLOUT}.{extra}")
    streaming = tree.settings.has("async_training")
    tree.put("rollout.colocate", not streaming, "async_training" if streaming else "actor_rollout_ref.hybrid_engine")
    tree.put("rollout.fully_async", streaming, "async_training")
    draft.remedies["rollout.fully_async"] = "use the synchronous trainer"
    train = tree.number("trainer.nnodes", 1) * tree.number("trainer.n_gpus_per_node", 8)
    served = tree.number("rollout.nnodes", 0) * tree.number("rollout.n_gpus_per_node", 0) if streaming else train
    if streaming:
        interval = tree.number("async_training.trigger_parameter_sync_step", 1)
        tree.put("rollout.update_weights_interval", whole(interval), "async_training.trigger_parameter_sync_step")
        threshold = tree.get("async_training.staleness_threshold")
        bound = ceil(threshold) if isinstance(threshold, (int, float)) and 0 <= threshold < 1e6 else None
        tree.put("rollout.max_staleness", bound, "async_training.staleness_threshold")
        if not tree.on("async_training.use_rollout_log_probs") and tree.on("async_training.compute_prox_log_prob"):
            draft.inapplicable["P3O114"] = "the proximal policy's log-probs are recomputed beside the rollout's"
    draft.extra.update(
        {
            "streaming": streaming,
            "async.mode": "fully_async" if streaming else "sync",
            "async.max_staleness": tree.get("async_training.staleness_threshold"),
            "async.partial_rollout": tree.on("async_training.partial_rollout"),
            "async_window": streaming,
            "num_gpus": {
                "train": train,
                "rollout": served,
                "critic": None,
                "total": train + served if streaming else train,
            },
            "rollout.calculate_log_probs": tree.on(f"{ROLLOUT}.calculate_log_probs"),
            "rollout.logprobs_mode": mode,
            "fp8.rollout_quantization": quantization,
        }
    )
    if streaming:
        draft.extra["lag_note"] = "every optimizer step's batch is complete before training, although rollouts stream"


def _lora(tree: Tree) -> None:
    rank_path = f"{MODEL}.lora.rank" if tree.number(f"{MODEL}.lora.rank") else f"{MODEL}.lora_rank"
    rank = tree.number(rank_path)
    tree.put("model.lora_rank", whole(rank), rank_path)
    block = rank_path.startswith(f"{MODEL}.lora.")
    if block:
        tree.copy("model.lora_dropout", f"{MODEL}.lora.dropout", real)
    tree.put("model.lora_merge_before_sync", tree.on(f"{MODEL}.lora.merge"), f"{MODEL}.lora.merge")
    alpha = tree.get(f"{MODEL}.lora.alpha" if block else f"{MODEL}.lora_alpha")
    dropout = tree.get(f"{MODEL}.lora.dropout", 0.0) if block else 0.0
    tree.draft.extra["lora"] = {"rank": rank, "alpha": alpha, "dropout": dropout} if rank else None


def _record(tree: Tree) -> None:
    """Facts that only the summary shows."""
    megatron = tree.draft.extra["backend"] == "megatron"
    moe: dict[str, Any] = {"num_experts": "from HF config", "dispatcher": None, "router_dtype": None}
    if megatron:
        moe["dispatcher"] = tree.get(f"{TRANSFORMER}.moe_token_dispatcher_type")
        moe["router_dtype"] = tree.get(f"{TRANSFORMER}.moe_router_dtype")
    tree.draft.extra.update(
        {
            "dropout_explicit": megatron and tree.settings.has(f"{TRANSFORMER}.attention_dropout"),
            "moe": moe,
            "recompute.gradient_checkpointing": tree.get(f"{MODEL}.enable_gradient_checkpointing"),
            "kl.reward_coef": _where(tree, "algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef"),
            "kl.loss_coef": _where(tree, f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_coef"),
            "kl.type": tree.get(f"{ACTOR}.kl_loss_type"),
            "kl.entropy_coef": tree.get(f"{ACTOR}.entropy_coeff"),
            "eps_clip.dual": tree.get(f"{ACTOR}.clip_ratio_c"),
            "hooks": {},
            "flags_not_in_table": [],
            "repeated_flags": {},
        }
    )


def _where(tree: Tree, switch: str, weight: str) -> Any:
    """A weight, or 0 while its switch is off."""
    return tree.get(weight, 0.0) if tree.on(switch) else 0.0
