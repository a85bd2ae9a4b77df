"""Facts that Megatron's own flags hold; slime and Relax add theirs. Also Megatron-LM's RL entry point.

A dropout that is not written stays absent in the facts, because the guards name the default (0.1) themselves; with
``--use-checkpoint-args`` the checkpoint decides it, and it is unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from p3o_launch.importers.arguments import Arguments
from p3o_launch.importers.facts import Draft

# preset path -> Megatron destination, where the value carries over as it is.
_SAME = {
    "model.num_layers": "num_layers",
    "model.hidden_size": "hidden_size",
    "model.ffn_hidden_size": "ffn_hidden_size",
    "model.num_attention_heads": "num_attention_heads",
    "model.kv_channels": "kv_channels",
    "model.vocab_size": "vocab_size",
    "model.rotary_base": "rotary_base",
    "model.norm_epsilon": "layernorm_epsilon",
    "model.qk_layernorm": "qk_layernorm",
    "model.add_qkv_bias": "add_qkv_bias",
    "model.untie_embeddings_and_output_weights": "untie_embeddings_and_output_weights",
    "model.attention_backend": "attention_backend",
    "model.num_experts": "num_experts",
    "model.moe_router_topk": "moe_router_topk",
    "model.moe_ffn_hidden_size": "moe_ffn_hidden_size",
    "model.moe_z_loss_coeff": "moe_z_loss_coeff",
    "model.moe_input_jitter_eps": "moe_input_jitter_eps",
    "model.moe_router_force_load_balancing": "moe_router_force_load_balancing",
    "model.moe_router_force_biased": "moe_router_force_biased",
    "model.mtp_num_layers": "mtp_num_layers",
    "precision.fp16": "fp16",
    "precision.bf16": "bf16",
    "precision.fp8": "fp8",
    "precision.accumulate_allreduce_grads_in_fp32": "accumulate_allreduce_grads_in_fp32",
    "precision.attention_softmax_in_fp32": "attention_softmax_in_fp32",
    "precision.deterministic_mode": "deterministic_mode",
    "precision.cross_entropy_loss_fusion": "cross_entropy_loss_fusion",
    "parallel.tensor_model_parallel_size": "tensor_model_parallel_size",
    "parallel.pipeline_model_parallel_size": "pipeline_model_parallel_size",
    "parallel.context_parallel_size": "context_parallel_size",
    "parallel.expert_model_parallel_size": "expert_model_parallel_size",
    "parallel.expert_tensor_parallel_size": "expert_tensor_parallel_size",
    "parallel.num_layers_per_virtual_pipeline_stage": "num_layers_per_virtual_pipeline_stage",
    "parallel.decoder_first_pipeline_num_layers": "decoder_first_pipeline_num_layers",
    "parallel.decoder_last_pipeline_num_layers": "decoder_last_pipeline_num_layers",
    "parallel.use_distributed_optimizer": "use_distributed_optimizer",
    "parallel.overlap_grad_reduce": "overlap_grad_reduce",
    "parallel.overlap_param_gather": "overlap_param_gather",
    "parallel.overlap_moe_expert_parallel_comm": "overlap_moe_expert_parallel_comm",
    "parallel.recompute_granularity": "recompute_granularity",
    "parallel.recompute_method": "recompute_method",
    "parallel.recompute_num_layers": "recompute_num_layers",
    "batch.micro_batch_size": "micro_batch_size",
    "batch.global_batch_size": "global_batch_size",
    "optimizer.lr": "lr",
    "optimizer.min_lr": "min_lr",
    "optimizer.lr_warmup_fraction": "lr_warmup_fraction",
    "optimizer.weight_decay": "weight_decay",
    "optimizer.adam_beta1": "adam_beta1",
    "optimizer.adam_beta2": "adam_beta2",
    "optimizer.adam_eps": "adam_eps",
    "optimizer.clip_grad": "clip_grad",
    "seed.seed": "seed",
    "checkpoint.save_interval": "save_interval",
}
# A stage layout that the facts have no words for: layer counts are then not judged.
_OTHER_LAYOUTS = (
    "pipeline_model_parallel_layout",
    "heterogeneous_layers_config_path",
    "heterogeneous_layers_config_encoded_json",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "hybrid_layer_pattern",
)
_STYLES = ("constant", "linear", "cosine")
_BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none")
_RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")
_PADS_ITSELF = "the framework pads sequences itself"


def single(value: Any) -> Any:
    """The value of a flag that may take several, when it has one."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


class Reader:
    """Carries destinations over into a draft, with the flag and the place that decide each."""

    def __init__(self, arguments: Arguments, draft: Draft) -> None:
        self.arguments, self.draft = arguments, draft

    def get(self, dest: str) -> Any:
        """The value of a destination, the framework's default applied."""
        return self.arguments.get(dest)

    def given(self, dest: str) -> bool:
        """Is it written?"""
        return self.arguments.given(dest)

    def value(self, path: str, value: Any, dest: str, *, always: bool = True) -> None:
        """Record ``value``, which ``dest`` decides. Without ``always`` only where the flag is written."""
        use = self.arguments.use(dest)
        name = use.flag if use else self.arguments.table.flag_of(dest)
        partial = self.arguments.partial
        elsewhere = use is None and (partial == "all" or (partial == "model" and path.startswith("model.")))
        if self.arguments.hidden(dest) or elsewhere:
            self.draft.names[path] = name
            self.draft.forget(path)
            return
        self.draft.put(path, value if use or always else None, name, use.place if use else None)

    def copy(self, path: str, dest: str, change: Callable[[Any], Any] | None = None, *, always: bool = True) -> None:
        """Record the value of ``dest``, changed by ``change``."""
        value = self.arguments.get(dest)
        self.value(path, change(value) if change and value is not None else value, dest, always=always)


def megatron_facts(read: Reader) -> None:
    """Everything Megatron's parser decides."""
    for path, dest in _SAME.items():
        read.copy(path, dest)
    _model(read)
    _precision(read)
    _parallel(read)
    read.copy("algorithm.calculate_per_token_loss", "calculate_per_token_loss", always=False)
    read.copy("optimizer.lr_decay_style", "lr_decay_style", lambda style: style if style in _STYLES else None)
    read.draft.forget("batch.sequence_padding_multiple")
    _cluster(read)
    _learning_rate(read)


def _model(read: Reader) -> None:
    draft = read.draft
    grouped = read.get("num_query_groups") if read.get("group_query_attention") else None
    read.value("model.num_query_groups", grouped, "num_query_groups")
    if read.given("max_position_embeddings"):
        read.copy("model.max_position_embeddings", "max_position_embeddings")
    else:
        draft.forget("model.max_position_embeddings")
    if read.get("use_checkpoint_args"):  # the checkpoint brings what is not written
        absent = [dest for dest in ("num_experts", "num_query_groups", "num_layers") if not read.given(dest)]
        draft.forget(*(f"model.{dest}" for dest in absent))
    for kind in ("attention_dropout", "hidden_dropout"):
        read.copy(f"model.{kind}", kind, always=False)
        if read.get("use_checkpoint_args"):
            draft.extra[kind], draft.extra["dropout_source"] = read.get(kind), "the checkpoint (--use-checkpoint-args)"
            draft.forget(f"model.{kind}")
    draft.extra["dropout_explicit"] = read.given("attention_dropout") and read.given("hidden_dropout")
    balancing = single(read.get("moe_router_load_balancing_type"))
    read.value("model.moe_router_load_balancing_type", balancing, "moe_router_load_balancing_type")
    if balancing not in _BALANCING:
        draft.forget("model.moe_router_load_balancing_type")
    coefficient = read.get("moe_aux_loss_coeff")
    if isinstance(coefficient, list):
        coefficient = sum(coefficient)
    read.value("model.moe_aux_loss_coeff", coefficient, "moe_aux_loss_coeff")
    if not draft.get("model.ffn_hidden_size") and isinstance(hidden := draft.get("model.hidden_size"), int):
        wide = int(4 * hidden * 2 / 3 / 64) * 64 if read.get("swiglu") else 4 * hidden
        draft.put("model.ffn_hidden_size", wide or None)
    if any(read.get(layout) for layout in _OTHER_LAYOUTS):
        draft.forget("model.num_layers")


def _precision(read: Reader) -> None:
    recipe = read.get("fp8_recipe")
    if read.get("fp8"):
        read.value("precision.fp8_recipe", recipe, "fp8_recipe", always=False)
        if recipe not in _RECIPES:
            read.draft.forget("precision.fp8_recipe")
    else:
        read.value("precision.fp8_recipe", None, "fp8_recipe")


def _parallel(read: Reader) -> None:
    draft = read.draft
    tp = read.get("tensor_model_parallel_size")
    # Megatron's argument validation turns it off with one tensor-parallel rank.
    effective = bool(read.get("sequence_parallel")) and tp != 1
    read.value("parallel.sequence_parallel", effective, "sequence_parallel")
    draft.extra["sequence_parallel"] = bool(read.get("sequence_parallel"))
    stages = read.get("num_virtual_stages_per_pipeline_rank")
    layers, pp = draft.get("model.num_layers"), read.get("pipeline_model_parallel_size")
    if isinstance(stages, int) and stages > 0 and isinstance(layers, int) and isinstance(pp, int) and pp > 0:
        _virtual_stages(read, layers, pp, stages)
    modules = read.get("cuda_graph_modules") or read.get("cuda_graph_scope_deprecated") or []
    whole = read.get("cuda_graph_impl") == "full_iteration" or "full_iteration" in modules
    dest = "cuda_graph_impl" if read.get("cuda_graph_impl") == "full_iteration" else "cuda_graph_scope_deprecated"
    read.value("parallel.cuda_graph_scope", "full_iteration" if whole else "none", dest)
    draft.remedies["P3O209"] = "pass --cuda-graph-impl local" if "impl" in dest else "leave out full_iteration"
    if read.get("recompute_activations") and not read.get("recompute_granularity"):
        read.value("parallel.recompute_granularity", "selective", "recompute_activations")
    if read.get("moe_enable_routing_replay"):
        read.value("parallel.use_routing_replay", True, "moe_enable_routing_replay")


def _virtual_stages(read: Reader, layers: int, pp: int, stages: int) -> None:
    """Chunks per stage, as layers per chunk."""
    dest, path = "num_virtual_stages_per_pipeline_rank", "parallel.num_layers_per_virtual_pipeline_stage"
    use = read.arguments.use(dest)
    if layers % (pp * stages) == 0:
        read.value(path, layers // (pp * stages), dest)
        flag = f"--{dest.replace('_', '-')}"
        read.draft.names[path] = f"the layers of a virtual stage by {flag}"
        read.draft.remedies[path] = f"remove {flag}"
    elif use is not None and layers % pp == 0:
        message = f"{use.flag} {stages} does not divide the {layers // pp} layers of a pipeline stage"
        read.draft.report("P3O015", use.place, message, "use a divisor of them", path)


def _cluster(read: Reader) -> None:
    arguments, draft = read.arguments, read.draft
    if arguments.gpus_per_node:
        draft.put("cluster.gpus_per_node", arguments.gpus_per_node)
        draft.put("cluster.num_nodes", arguments.nodes or 1)
    for name, (value, place) in arguments.env.items():
        environment(draft, name, value, place)
    key = arguments.use("wandb_key")
    if key is not None and isinstance(key.value, str):
        environment(draft, "WANDB_API_KEY", key.value, key.place)
        draft.names["cluster.env.WANDB_API_KEY"] = key.flag


def environment(draft: Draft, name: str, value: str, place: Any = None) -> None:
    """Record an environment variable of the actors."""
    draft.values.setdefault("cluster", {}).setdefault("env", {})[name] = value
    draft.names[f"cluster.env.{name}"] = name
    if place is not None:
        draft.places[f"cluster.env.{name}"] = place


def _learning_rate(read: Reader) -> None:
    """The decay length is an absolute end point; shortened by the warm-up it ends early."""
    if read.get("lr_decay_style") == "constant":
        return
    for unit in ("samples", "iters"):
        length, decay = read.get(f"train_{unit}"), read.get(f"lr_decay_{unit}")
        warmup = read.get(f"lr_warmup_{unit}")
        if not (isinstance(length, int) and isinstance(decay, int) and isinstance(warmup, int)):
            continue
        if warmup > 0 and abs(length - warmup - decay) <= max(2, length // 10**6) and decay < length:
            use = read.arguments.use(f"lr_decay_{unit}")
            flag = f"--lr-decay-{unit}"
            read.draft.report(
                "P3O027",
                use.place if use else None,
                f"{flag} ({decay}) is --train-{unit} ({length}) less the warm-up ({warmup}): the rate stays at its "
                f"floor for the last {length - decay} {unit}",
                f"use {flag} {length}",
            )


def megatron_rl(read: Reader) -> None:
    """Megatron-LM's ``train_rl.py``: GRPO with log-probs that the trainer recomputes."""
    draft = read.draft
    megatron_facts(read)
    rl = bool(read.get("perform_rl_step"))
    draft.extra["kind"] = "rl" if rl else "pretrain"
    draft.extra["estimator"] = "grpo" if rl else None
    draft.put("algorithm.advantage_estimator", "grpo", "--perform-rl-step")
    use = read.arguments.use("perform_rl_step")
    if use:
        draft.places["algorithm.advantage_estimator"] = use.place
    draft.extra["use_checkpoint_args"] = bool(read.get("use_checkpoint_args"))
    draft.extra["normalize_advantages"] = None
    environments = read.arguments.use("langrl_env_config")
    draft.extra["hooks"] = {environments.flag: environments.raw} if environments else {}
    if not rl:
        draft.extra.update({"rollout": None, "async": None, "kl": None, "eps_clip": None, "grpo_iterations": None})
        return
    _grpo(read)
    _megatron_sampling(read)
    _lag(read)


def _grpo(read: Reader) -> None:
    draft = read.draft
    read.copy("batch.n_samples_per_prompt", "grpo_group_size")
    read.copy("batch.rollout_batch_size", "grpo_prompts_per_step")
    read.copy("batch.use_dynamic_batch_size", "rl_use_sequence_packing")
    read.copy("batch.max_tokens_per_gpu", "seq_length")
    read.copy("algorithm.eps_clip", "grpo_clamp_eps_lower")
    read.copy("algorithm.eps_clip_high", "grpo_clamp_eps_upper")
    beta = read.get("grpo_kl_beta") or 0.0
    read.value("algorithm.kl_loss_coef", beta, "grpo_kl_beta")
    read.value("algorithm.use_kl_loss", beta > 0, "grpo_kl_beta")
    read.copy("algorithm.entropy_coef", "grpo_entropy_term_weight")
    read.value("algorithm.use_rollout_logprobs", False, "use_rollout_logprobs")
    path = "algorithm.use_rollout_logprobs"
    draft.names[path] = "the use of rollout log-probs as denominator"
    draft.remedies[path] = "pass --rl-inference-logprobs-is-correction; this loss has no other denominator"
    read.copy("algorithm.use_tis", "rl_inference_logprobs_is_correction")
    corrected = bool(read.get("rl_inference_logprobs_is_correction"))
    iterations = read.get("grpo_iterations")
    draft.extra.update(
        {
            "behavior_logprobs": "recomputed by trainer (old_logprobs); inference log-probs only used as importance "
            "correction",
            "tis.clip": read.get("rl_importance_sampling_truncation_coef") if corrected else None,
            "kl.type": "k3",
            "micro_batch_size": read.get("micro_batch_size"),
            "max_tokens_per_gpu": None,
            "grpo_iterations": iterations,
            "steps_factor": iterations if isinstance(iterations, int) else 1,
        }
    )
    draft.inapplicable["P3O312"] = "a sample is at most as long as the packed sequence"
    draft.inapplicable["P3O303"] = "iterations over one collected batch are cut into steps by the loader"


def _megatron_sampling(read: Reader) -> None:
    draft = read.draft
    draft.put("rollout.engine", "megatron")
    read.copy("rollout.temperature", "rl_default_temperature")
    top_p = read.get("rl_default_top_p")
    read.value("rollout.top_p", 1.0 if top_p == 0 else top_p, "rl_default_top_p")
    read.copy("rollout.top_k", "rl_default_top_k")
    draft.extra["rollout.top_p"], draft.extra["rollout.top_p_effective"] = top_p, 1.0 if top_p == 0 else top_p
    # One length bounds prompt and response together.
    read.copy("rollout.max_response_len", "inference_max_seq_length")
    read.copy("rollout.logprobs_mode", "inference_dynamic_batching_logprobs_mode")
    read.copy("rollout.enable_prefix_caching", "inference_dynamic_batching_enable_prefix_caching")
    draft.inapplicable["P3O412"] = "one length bounds prompt and response together"


def _lag(read: Reader) -> None:
    draft = read.draft
    lag, partial = read.get("rl_generation_lag"), bool(read.get("rl_partial_rollouts"))
    # Without a lag of 0 partial rollouts generate ahead of the trainer, by a lag tuned at run time.
    asynchronous = partial and lag != 0
    read.value("rollout.fully_async", asynchronous, "rl_partial_rollouts")
    bound = int(lag) if isinstance(lag, float) and 0 <= lag < 10**6 else None
    read.value("rollout.max_staleness", bound, "rl_generation_lag")
    if asynchronous:
        draft.extra["lag_note"] = "rollouts lag the trainer by a bounded number of batches; the window is complete"
    elif partial:
        draft.extra["lag_note"] = "partial rollouts: one sample may span several policy versions"
    draft.extra.update(
        {
            "streaming": False,
            "async.mode": "partial_rollouts(async)" if asynchronous else "sync",
            "async.max_staleness": int(lag) if isinstance(lag, float) and abs(lag) < 10**6 else None,
            "async.partial_rollout": partial,
        }
    )
