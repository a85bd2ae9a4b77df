"""What other frameworks call our settings: a misspelt key is often another tool's word for one of ours.

Only the meaning counts here, not the spelling: ``presets.nearest`` finds misprints.
"""

from __future__ import annotations

import re

# Our setting -> how slime, Relax, Megatron-LM, verl, NeMo-RL, TRL, OpenRLHF and Hugging Face name the same thing.
_NAMES: dict[str, str] = {
    "algorithm.advantage_estimator": "adv_estimator estimator advantage_type algo rl_algorithm",
    "algorithm.ess_scope": "p3o_ess_scope",
    "algorithm.kl_mode": "p3o_kl_mode",
    "algorithm.eps_clip": "clip_ratio clip_ratio_low clip_range cliprange clip_eps clip_epsilon epsilon ratio_clip "
    "ratio_clip_min grpo_clamp_eps_lower ppo_clip",
    "algorithm.eps_clip_high": "clip_ratio_high ratio_clip_max epsilon_high eps_clip_higher grpo_clamp_eps_upper",
    "algorithm.use_rollout_logprobs": "use_rollout_log_probs rollout_logprobs rollout_log_probs bypass_mode",
    "algorithm.calculate_per_token_loss": "loss_agg_mode token_level_loss per_token_loss token_mean",
    "algorithm.normalize_advantages": "norm_adv_by_std_in_grpo scale_rewards normalize_rewards advantage_normalization "
    "whiten_advantages grpo_std_normalization",
    "algorithm.entropy_coef": "entropy_coeff ent_coef entropy_weight entropy_bonus grpo_entropy_term_weight",
    "algorithm.use_tis": "use_importance_sampling_correction rollout_is tis vllm_importance_sampling_correction",
    "algorithm.use_critic": "critic use_value_model",
    "algorithm.kl_coef": "kl_coeff init_kl_coef kl_penalty_coef kl_reward_coef",
    "algorithm.kl_loss_coef": "kl_loss_coeff kl_beta grpo_kl_beta beta reference_policy_kl_penalty",
    "algorithm.use_kl_loss": "kl_loss",
    "model.hf_checkpoint": "model_name model_name_or_path model_path pretrain hf_model hf_model_path checkpoint_path",
    "model.num_layers": "num_hidden_layers n_layers n_layer",
    "model.ffn_hidden_size": "intermediate_size",
    "model.num_attention_heads": "n_heads num_heads n_head",
    "model.num_query_groups": "num_key_value_heads n_kv_heads num_kv_heads",
    "model.kv_channels": "head_dim",
    "model.max_position_embeddings": "max_model_len max_sequence_length max_total_sequence_length max_seq_len "
    "seq_length model_max_length context_length",
    "model.rotary_base": "rope_theta rope_base",
    "model.norm_epsilon": "rms_norm_eps layernorm_epsilon layer_norm_eps",
    "model.qk_layernorm": "qk_norm use_qk_norm",
    "model.add_qkv_bias": "attention_bias qkv_bias",
    "model.untie_embeddings_and_output_weights": "tie_word_embeddings tie_embeddings untie_embeddings",
    "model.attention_dropout": "attn_dropout attn_pdrop",
    "model.hidden_dropout": "dropout resid_pdrop",
    "model.attention_backend": "attn_implementation attn_backend use_flash_attn flash_attn",
    "model.lora_rank": "lora_r lora_dim",
    "model.num_experts": "num_moe_experts num_local_experts n_routed_experts",
    "model.moe_router_topk": "num_experts_per_tok moe_topk",
    "model.moe_ffn_hidden_size": "moe_intermediate_size",
    "model.moe_aux_loss_coeff": "router_aux_loss_coef moe_aux_loss_coef aux_loss_coef",
    "model.moe_z_loss_coeff": "router_z_loss_coef moe_z_loss_coef",
    "precision.bf16": "mixed_precision use_bf16 bfloat16",
    "precision.fp16": "use_fp16 float16 half",
    "precision.params_dtype": "dtype torch_dtype param_dtype model_dtype",
    "precision.fp8": "fp8_format",
    "precision.deterministic_mode": "deterministic full_determinism use_deterministic_algorithms",
    "parallel.tensor_model_parallel_size": "tp tp_size tensor_parallel_size tensor_parallel tensor_model_parallel",
    "parallel.pipeline_model_parallel_size": "pp pp_size pipeline_parallel_size pipeline_parallel "
    "pipeline_model_parallel",
    "parallel.context_parallel_size": "cp cp_size context_parallel ulysses_sequence_parallel_size ring_attn_size",
    "parallel.expert_model_parallel_size": "ep ep_size expert_parallel_size expert_parallel expert_model_parallel",
    "parallel.expert_tensor_parallel_size": "etp etp_size expert_tensor_parallel",
    "parallel.recompute_granularity": "gradient_checkpointing enable_gradient_checkpointing activation_checkpointing",
    "batch.num_rollout": "total_training_steps max_num_steps max_steps num_steps train_iters num_rollouts",
    "batch.rollout_batch_size": "train_batch_size num_prompts_per_step prompts_per_step grpo_prompts_per_step "
    "num_prompts",
    "batch.n_samples_per_prompt": "rollout_n n num_generations num_generations_per_prompt grpo_group_size group_size "
    "n_samples num_samples_per_prompt samples_per_prompt num_return_sequences",
    "batch.global_batch_size": "ppo_mini_batch_size mini_batch_size train_global_batch_size",
    "batch.micro_batch_size": "ppo_micro_batch_size_per_gpu ppo_micro_batch_size micro_batch_size_per_gpu "
    "train_micro_batch_size micro_train_batch_size per_device_train_batch_size mbs",
    "batch.use_dynamic_batch_size": "use_dynamic_bsz dynamic_batching dynamic_batch_size",
    "batch.max_tokens_per_gpu": "ppo_max_token_len_per_gpu max_token_len_per_gpu max_tokens_per_mb train_mb_tokens",
    "batch.pack_sequences": "sequence_packing use_sequence_packing packing use_remove_padding packing_samples",
    "optimizer.lr": "learning_rate actor_learning_rate actor_lr max_lr",
    "optimizer.min_lr": "min_learning_rate lr_min",
    "optimizer.lr_decay_style": "lr_scheduler lr_scheduler_type lr_schedule warmup_style",
    "optimizer.lr_warmup_fraction": "warmup_ratio lr_warmup_ratio lr_warmup_steps_ratio lr_warmup",
    "optimizer.adam_beta1": "beta1",
    "optimizer.adam_beta2": "beta2",
    "optimizer.adam_eps": "adam_epsilon",
    "optimizer.clip_grad": "max_grad_norm grad_clip gradient_clip gradient_clipping clip_grad_norm max_norm",
    "rollout.engine": "rollout_engine rollout_backend inference_engine generation_backend backend",
    "rollout.max_prompt_len": "max_prompt_length prompt_length prompt_max_len max_input_len rollout_max_prompt_len",
    "rollout.max_response_len": "max_new_tokens max_response_length response_length max_completion_length "
    "max_gen_len max_tokens generate_max_len max_output_len rollout_max_response_len",
    "rollout.temperature": "rollout_temperature sampling_temperature rl_default_temperature",
    "rollout.top_p": "rollout_top_p rl_default_top_p",
    "rollout.top_k": "rollout_top_k rl_default_top_k",
    "rollout.weight_quantization": "quantization rollout_quantization",
    "rollout.max_staleness": "staleness staleness_threshold max_trajectory_age_steps rl_generation_lag "
    "off_policy_steps",
    "rollout.update_weights_interval": "trigger_parameter_sync_step sync_interval weight_sync_interval",
    "rollout.gpu_memory_utilization": "mem_fraction_static gpu_memory_fraction sglang_mem_fraction_static "
    "vllm_gpu_memory_utilization",
    "rollout.num_gpus": "rollout_num_gpus",
    "rollout.num_gpus_per_engine": "rollout_num_gpus_per_engine",
    "evaluation.interval": "test_freq eval_freq eval_steps eval_interval eval_every val_period val_interval",
    "evaluation.before_train": "val_before_train eval_before_train val_at_start",
    "evaluation.n_samples_per_prompt": "n_samples_per_eval_prompt eval_n_samples",
    "evaluation.temperature": "eval_temperature",
    "evaluation.max_response_len": "eval_max_response_len",
    "data.prompt_data": "train_files train_file train_data train_path train_dataset dataset prompt_file prompts "
    "data_path",
    "data.eval_prompt_data": "val_files val_data test_files test_data eval_data eval_dataset validation_files",
    "data.input_key": "prompt_key question_key",
    "data.label_key": "answer_key target_key solution_key",
    "data.shuffle": "rollout_shuffle shuffle_data",
    "data.overlong_prompts": "filter_overlong_prompts",
    "reward.type": "rm_type reward_type reward_fn reward_function reward_model",
    "cluster.num_nodes": "nnodes n_nodes actor_num_nodes num_machines",
    "cluster.gpus_per_node": "n_gpus_per_node num_gpus_per_node nproc_per_node actor_num_gpus_per_node gpus "
    "devices_per_node",
    "cluster.gpu": "gpu_type gpu_name accelerator",
    "cluster.env": "environment env_vars environment_variables train_env_vars",
    "cluster.timeout_s": "timeout distributed_timeout nccl_timeout",
    "checkpoint.save_interval": "save_freq save_steps save_period save_every checkpoint_interval checkpoint_freq",
    "checkpoint.keep": "save_total_limit keep_last max_ckpt_to_keep max_actor_ckpt_to_keep keep_top_k",
    "logging.output_root": "output_dir output_path save_dir default_local_dir log_dir run_dir ckpt_dir",
    "logging.tensorboard": "use_tensorboard tensorboard_dir",
    "seed.seed": "random_seed manual_seed global_seed",
}
# Where the other name counts or means something else than ours.
_NOTES = {
    "ppo_mini_batch_size": "which counts samples, not prompts",
    "mini_batch_size": "which counts samples, not prompts",
    "loss_agg_mode": "which is true for token-mean",
    "tie_word_embeddings": "which says the opposite",
    "tie_embeddings": "which says the opposite",
    "gradient_checkpointing": "which is none, selective or full",
    "enable_gradient_checkpointing": "which is none, selective or full",
    "activation_checkpointing": "which is none, selective or full",
    "mixed_precision": "which is true or false",
    "filter_overlong_prompts": "which is error or skip",
}
SYNONYMS = {name: path for path, names in _NAMES.items() for name in names.split()}


def plain(name: str) -> str:
    """``--Max-New-Tokens`` and ``maxNewTokens`` as ``max_new_tokens``."""
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.lstrip("-+"))
    return name.replace("-", "_").lower()


def synonym(name: str) -> tuple[str, str] | None:
    """Our setting for another framework's name."""
    path = SYNONYMS.get(plain(name))
    if path is None:
        return None
    group, _, field = path.partition(".")
    return group, field


def note(name: str) -> str:
    """What to know before a value is carried over; empty where it means the same."""
    text = _NOTES.get(plain(name), "")
    return f", {text}" if text else ""
