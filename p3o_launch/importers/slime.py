"""Facts of slime's and Relax's argument lists. Relax is a fork of slime: one reading, with Relax's own flags on top.

Both overwrite some values after parsing (``forced_after_parse`` in their flag tables); that is applied here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from p3o_launch.importers.arguments import UNKNOWN
from p3o_launch.importers.flags import MILES
from p3o_launch.importers.megatron import Reader, environment, megatron_facts

_SAME = {
    "algorithm.use_tis": "use_tis",
    "algorithm.custom_tis_function_path": "custom_tis_function_path",
    "algorithm.get_mismatch_metrics": "get_mismatch_metrics",
    "algorithm.use_opsm": "use_opsm",
    "algorithm.custom_pg_loss_reducer_function_path": "custom_pg_loss_reducer_function_path",
    "algorithm.use_opd": "use_opd",
    "algorithm.kl_coef": "kl_coef",
    "algorithm.kl_loss_coef": "kl_loss_coef",
    "algorithm.entropy_coef": "entropy_coef",
    "algorithm.normalize_advantages": "normalize_advantages",
    "algorithm.critic_load": "critic_load",
    "model.hf_checkpoint": "hf_checkpoint",
    "model.lora_dropout": "lora_dropout",
    "model.lora_rank": "lora_rank",
    "model.enable_mtp_training": "enable_mtp_training",
    "parallel.use_rollout_routing_replay": "use_rollout_routing_replay",
    "batch.num_rollout": "num_rollout",
    "batch.rollout_batch_size": "rollout_batch_size",
    "batch.n_samples_per_prompt": "n_samples_per_prompt",
    "batch.use_dynamic_batch_size": "use_dynamic_batch_size",
    "batch.max_tokens_per_gpu": "max_tokens_per_gpu",
    "rollout.max_prompt_len": "rollout_max_prompt_len",
    "rollout.max_response_len": "rollout_max_response_len",
    "rollout.temperature": "rollout_temperature",
    "rollout.top_p": "rollout_top_p",
    "rollout.top_k": "rollout_top_k",
    "rollout.update_weights_interval": "update_weights_interval",
    "rollout.num_gpus_per_engine": "rollout_num_gpus_per_engine",
    "evaluation.interval": "eval_interval",
    "evaluation.n_samples_per_prompt": "n_samples_per_eval_prompt",
    "evaluation.temperature": "eval_temperature",
    "evaluation.top_p": "eval_top_p",
    "evaluation.top_k": "eval_top_k",
    "evaluation.max_response_len": "eval_max_response_len",
    "data.prompt_data": "prompt_data",
    "data.input_key": "input_key",
    "data.label_key": "label_key",
    "data.apply_chat_template": "apply_chat_template",
    "data.shuffle": "rollout_shuffle",
    "seed.rollout_seed": "rollout_seed",
}
# Kept absent unless written: the guards tell an absent value from a written one.
_ONLY_IF_GIVEN = {
    "algorithm.use_rollout_logprobs": "use_rollout_logprobs",
    "algorithm.calculate_per_token_loss": "calculate_per_token_loss",
    "algorithm.use_kl_loss": "use_kl_loss",
    "algorithm.eps_clip": "eps_clip",
    "algorithm.eps_clip_high": "eps_clip_high",
}
_RELAX = {
    "algorithm.clip_low": "clip_low",
    "algorithm.clip_high": "clip_high",
    "rollout.fully_async": "fully_async",
    "rollout.max_staleness": "max_staleness",
}
# Estimators whose returns contain kl_coef; the group-relative ones leave it out.
_KL_IN_REWARD = ("ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
_NOT_GROUP_RELATIVE = ("ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
_SAMPLING_HOOKS = ("custom_generate_function_path",)
_HOOKS = (
    "custom_generate_function_path",
    "custom_reward_post_process_path",
    "custom_advantage_function_path",
    "custom_loss_function_path",
    "custom_megatron_before_log_prob_hook_path",
    "custom_megatron_before_train_step_hook_path",
    "custom_megatron_init_path",
    "dynamic_sampling_filter_path",
    "rollout_data_postprocess_path",
    "rollout_sample_filter_path",
)
_QUANTIZATION = {
    "fp8": "fp8_e4m3",
    "w8a8_fp8": "fp8_e4m3",
    "blockwise_int8": "int8",
    "w8a8_int8": "int8",
    "awq": "int4",
    "awq_marlin": "int4",
    "gptq": "int4",
    "gptq_marlin": "int4",
}


def slime_facts(read: Reader, relax: bool = False) -> None:
    """Everything an argument list of slime, or of Relax, says."""
    megatron_facts(read)
    for path, dest in _SAME.items():
        read.copy(path, dest)
    for path, dest in _ONLY_IF_GIVEN.items():
        read.copy(path, dest, always=False)
    _forced(read)
    _estimator(read)
    _kind(read)
    _hooks(read)
    _batch(read)
    _engine(read)
    if relax:
        _relax(read)
    _placement(read, relax)
    _record(read, relax)


def _forced(read: Reader) -> None:
    """What the framework sets after parsing, whatever the flags say."""
    draft = read.draft
    draft.put("parallel.use_distributed_optimizer", True)
    if not read.get("fp16"):
        draft.put("precision.bf16", True)
    elif not read.given("bf16"):
        draft.put("precision.bf16", False)
    replay = bool(read.get("use_routing_replay") or read.get("use_rollout_routing_replay"))
    dest = "use_routing_replay" if read.given("use_routing_replay") else "use_rollout_routing_replay"
    read.value("parallel.use_routing_replay", replay, dest)
    if read.get("critic_load") or read.get("critic_train_only"):
        read.value("algorithm.use_critic", True, "critic_load" if read.get("critic_load") else "critic_train_only")


def _estimator(read: Reader) -> None:
    draft, estimator = read.draft, read.get("advantage_estimator")
    draft.extra["estimator"], draft.extra["whitened"] = estimator, bool(read.get("normalize_advantages"))
    read.value("algorithm.advantage_estimator", "p3o" if estimator == "p3o" else "grpo", "advantage_estimator")
    if estimator == "ppo":
        read.value("algorithm.use_critic", True, "advantage_estimator")
        draft.names["algorithm.use_critic"] = "the critic of --advantage-estimator ppo"
        draft.remedies["algorithm.use_critic"] = "pass another --advantage-estimator"
    if estimator in _KL_IN_REWARD and read.get("kl_coef"):
        read.value("algorithm.use_kl_in_reward", True, "kl_coef")
    if estimator in _NOT_GROUP_RELATIVE:
        draft.inapplicable["P3O112"] = f"{estimator} does not compare the samples of one prompt"
    backend = read.arguments.use("train_backend")
    if backend and backend.value not in ("megatron", UNKNOWN) and read.get("calculate_per_token_loss"):
        draft.report(
            "P3O026",
            backend.place,
            f"--train-backend {backend.value} with --calculate-per-token-loss: only the Megatron backend divides the "
            "summed loss by its token count",
            "use --train-backend megatron",
            "algorithm.calculate_per_token_loss",
        )
    # These rules speak about how P3O Launch cuts a rollout; slime deals samples to ranks, not prompts.
    draft.inapplicable["P3O313"] = "samples are dealt to the ranks, not prompts"
    draft.inapplicable["P3O312"] = "a sample above the token budget gets a micro-batch of its own"
    keeps_rest = read.get("disable_rollout_trim_samples") or not MILES.isdisjoint(read.arguments.unknown)
    if read.get("use_dynamic_global_batch_size") or keeps_rest:
        draft.inapplicable["P3O303"] = "the last step of a rollout may be smaller, by its true sample count"


def _kind(read: Reader) -> None:
    loss, function = read.get("loss_type"), str(read.get("rollout_function_path") or "")
    sft = str(loss).startswith("sft") or "sft_rollout" in function
    read.draft.extra["kind"] = "sft" if sft else "rl"
    if sft:
        read.draft.extra["estimator"] = None
        read.draft.extra["async.window_complete_before_train"] = None
        read.draft.inapplicable["P3O112"] = "there are no groups without rollouts"


def _hooks(read: Reader) -> None:
    hooks = {}
    for dest in _HOOKS:
        use = read.arguments.use(dest)
        if use is not None:
            hooks[use.flag] = use.raw
    function = read.arguments.use("rollout_function_path")
    if function is not None and function.raw != read.arguments.table.defaults.get("rollout_function_path"):
        hooks[function.flag] = function.raw
    read.draft.extra["hooks"] = hooks
    for dest in ("custom_megatron_before_log_prob_hook_path", "custom_megatron_before_train_step_hook_path"):
        if read.given(dest):
            read.value("model.custom_forward_hook_path", read.get(dest), dest)
    sampler = next((read.arguments.use(dest) for dest in _SAMPLING_HOOKS if read.given(dest)), None)
    read.draft.extra["sampling_hook"] = (sampler.flag, sampler.raw, sampler.place) if sampler else None


def _batch(read: Reader) -> None:
    draft = read.draft
    steps = read.get("num_steps_per_rollout")
    prompts, samples = draft.get("batch.rollout_batch_size"), draft.get("batch.n_samples_per_prompt")
    known = all(isinstance(value, int) and value > 0 for value in (steps, prompts, samples))
    whole = draft.get("batch.global_batch_size")
    if known and whole is None:
        read.value("batch.global_batch_size", prompts * samples // steps, "num_steps_per_rollout")
    elif known and whole != prompts * samples // steps:
        use = read.arguments.use("num_steps_per_rollout")
        draft.report(
            "P3O015",
            use.place if use else None,
            f"--num-steps-per-rollout {steps} means a global batch of {prompts * samples // steps}, but "
            f"--global-batch-size is {whole}",
            f"remove one of the two, or use --global-batch-size {prompts * samples // steps}",
            "batch.global_batch_size",
        )
    if draft.get("batch.use_dynamic_batch_size"):
        draft.put("batch.micro_batch_size", 1)
        draft.places.pop("batch.micro_batch_size", None)


def _engine(read: Reader) -> None:
    draft = read.draft
    draft.put("rollout.engine", "sglang")
    draft.put("rollout.logprobs", 0)  # slime always asks for the sampled token's log-prob
    draft.put("rollout.logprobs_mode", "processed_logprobs")
    for path, dest in (
        ("rollout.deterministic_inference", "sglang_enable_deterministic_inference"),
        ("rollout.speculative_decoding", "sglang_speculative_algorithm"),
    ):
        read.copy(path, dest, lambda value: bool(value), always=False)
    read.copy("rollout.weight_quantization", "sglang_quantization", lambda name: _QUANTIZATION.get(str(name), "none"))
    read.copy("rollout.gpu_memory_utilization", "sglang_mem_fraction_static", _fraction)
    draft.extra["rollout.speculative"] = read.get("sglang_speculative_algorithm")
    draft.extra["deterministic.rollout"] = bool(read.get("sglang_enable_deterministic_inference"))
    variables = read.get("train_env_vars")
    if isinstance(variables, str):
        variables = {}
    use = read.arguments.use("train_env_vars")
    if isinstance(variables, Mapping):
        for name, value in variables.items():
            environment(draft, str(name), str(value), use.place if use else None)


def _fraction(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _relax(read: Reader) -> None:
    draft = read.draft
    for path, dest in _RELAX.items():
        read.copy(path, dest)
    scope = read.get("p3o_ess_scope")
    read.value("algorithm.ess_scope", "step" if scope == "step" else "micro_batch", "p3o_ess_scope")
    read.copy("algorithm.kl_mode", "p3o_kl_mode")
    read.copy("model.lora_merge_before_sync", "lora_merge_mode")
    if not read.get("lora_adapter_mode"):
        draft.put("model.lora_merge_before_sync", True)
    else:  # adapters alone are sent, which reaches separate servers too
        draft.inapplicable["P3O406"] = "--lora-adapter-mode sends the adapter"
    if read.get("hybrid"):
        read.value("rollout.fully_async", True, "hybrid")
        read.value("rollout.colocate", True, "hybrid")
    draft.extra["streaming"] = bool(draft.get("rollout.fully_async"))
    _true_on_policy(read)


def _true_on_policy(read: Reader) -> None:
    """Relax turns it on by itself when a fully asynchronous step takes exactly one rollout."""
    draft = read.draft
    sizes = [draft.get(f"batch.{name}") for name in ("rollout_batch_size", "n_samples_per_prompt", "global_batch_size")]
    automatic = bool(draft.get("rollout.fully_async")) and None not in sizes and sizes[0] * sizes[1] == sizes[2]
    draft.extra["true_on_policy_mode"] = bool(read.get("true_on_policy_mode")) or automatic
    use = read.arguments.use("true_on_policy_mode") or read.arguments.use("fully_async")
    cause = f"--fully-async with --rollout-batch-size x --n-samples-per-prompt = --global-batch-size ({sizes[2]})"
    if read.get("true_on_policy_mode"):
        cause = "--true-on-policy-mode"
    draft.extra["ratio_forced"] = (cause, use.place if use else None) if draft.extra["true_on_policy_mode"] else None


def _placement(read: Reader, relax: bool) -> None:
    draft = read.draft
    colocate = bool(read.get("colocate")) or bool(draft.get("rollout.colocate"))
    read.value("rollout.colocate", colocate, "colocate")
    nodes, per_node = read.get("actor_num_nodes"), read.get("actor_num_gpus_per_node")
    path = "cluster.gpus_per_node"
    read.value(path, per_node, "actor_num_gpus_per_node")
    read.value("cluster.num_nodes", nodes, "actor_num_nodes")
    roles = _roles(read.get("resource")) if relax else {}
    if "actor" in roles:
        read.value(path, roles["actor"][1], "resource")
        read.value("cluster.num_nodes", roles["actor"][0], "resource")
    train = (draft.get("cluster.num_nodes") or 0) * (draft.get(path) or 0)
    rollout = roles["rollout"][0] * roles["rollout"][1] if "rollout" in roles else read.get("rollout_num_gpus")
    if colocate and "rollout" not in roles:
        rollout = train
    if read.get("debug_train_only"):
        rollout = 0
    read.value("rollout.num_gpus", rollout or None, "resource" if "rollout" in roles else "rollout_num_gpus")
    total = max(train, rollout or 0) if colocate else train + (rollout or 0)
    if roles.get("critic", (0, 0))[1]:
        read.value("algorithm.use_critic", True, "resource")
    gpus: dict[str, Any] = {"train": train, "rollout": rollout, "critic": 0, "total": total}
    if roles:
        gpus["roles"] = {name: list(shape) for name, shape in roles.items()}
    draft.extra["num_gpus"] = gpus
    if not colocate and (rollout or 0) > train:
        draft.forget("rollout.num_gpus")  # GPUs of their own, not a part of the trainer's


def _roles(resource: Any) -> dict[str, tuple[int, int]]:
    """Relax's ``--resource``: role -> (serves, GPUs of one)."""
    if not isinstance(resource, Mapping):
        return {}
    roles = {}
    for name, shape in resource.items():
        whole = isinstance(shape, list) and len(shape) == 2 and all(type(part) is int for part in shape)
        if whole and 0 < shape[0] < 10**6 and 0 <= shape[1] < 10**6:
            roles[str(name)] = (shape[0], shape[1])
    return roles


def _record(read: Reader, relax: bool) -> None:
    """Facts that only the summary shows."""
    draft = read.draft
    tis = bool(read.get("use_tis"))
    fully_async = bool(draft.get("rollout.fully_async"))
    draft.extra.update(
        {
            "tis.clip": read.get("tis_clip") if tis else None,
            "behavior_logprobs": "rollout engine" if read.get("use_rollout_logprobs") else "recomputed by trainer",
            "rollout.seed": read.get("rollout_seed"),
            "kl.type": read.get("kl_loss_type"),
            "eps_clip.low": read.get("eps_clip"),
            "eps_clip.high": read.get("eps_clip") if read.get("eps_clip_high") is None else read.get("eps_clip_high"),
            "eps_clip.dual": read.get("eps_clip_c"),
            "async.mode": "fully_async" if fully_async else "sync",
            "async.partial_rollout": bool(read.get("partial_rollout")),
            "async.mask_offpolicy": bool(read.get("mask_offpolicy_in_partial_rollout")),
        }
    )
    draft.extra.setdefault("async.window_complete_before_train", not fully_async)
    if relax:
        draft.extra["async.max_staleness"] = read.get("max_staleness")
        draft.extra["async.num_iters_per_train_update"] = read.get("num_iters_per_train_update")
        rank = read.get("lora_rank")
        mode = "adapter" if read.get("lora_adapter_mode") else "merge"
        draft.extra["lora"] = (
            {"rank": rank, "alpha": read.get("lora_alpha"), "dropout": read.get("lora_dropout"), "mode": mode}
            if rank
            else None
        )
        p3o = {key: read.get(dest) for key, dest in _P3O.items()} if draft.extra["estimator"] == "p3o" else None
        draft.extra["p3o"] = p3o


_P3O = {"ess_scope": "p3o_ess_scope", "kl_mode": "p3o_kl_mode", "clip_low": "clip_low", "clip_high": "clip_high"}
