"""What each rule must and must not say, at the two sides of its boundary. The accepted half is the important one."""

from __future__ import annotations

import math
from typing import Any

import pytest
from guard_presets import ABSENT, CPU, GRPO, MICRO, codes, findings

Changes = dict[str, Any]

ENV = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
RING = {"NCCL_ALGO": "Ring", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
DETERMINISTIC = {"precision.deterministic_mode": True}
DYNAMIC = {"batch.use_dynamic_batch_size": True, "batch.max_tokens_per_gpu": 4608}
FP8 = {"precision.fp8": "hybrid", "precision.fp8_recipe": "tensorwise", "cluster.gpu": "H100-80GB"}
EP2 = {"parallel.expert_model_parallel_size": 2}
SP2 = {
    "parallel.tensor_model_parallel_size": 2,
    "parallel.sequence_parallel": True,
    "batch.sequence_padding_multiple": 2,
}
ETP4 = {"parallel.expert_tensor_parallel_size": 4}
TOP1_SINKHORN = {"model.moe_router_topk": 1, "model.moe_router_load_balancing_type": "sinkhorn"}
ODD_WIDTH = {"model.ffn_hidden_size": 3075}
TP2 = {"parallel.tensor_model_parallel_size": 2}
PP2 = {"parallel.pipeline_model_parallel_size": 2}
HALF = {"precision.bf16": False, "precision.fp16": True}
SHORT = {"rollout.max_response_len": 128}
MOE = {"model.num_experts": 8, "model.moe_ffn_hidden_size": 384}

ACCEPTED: list[tuple[str, Changes]] = [
    ("nothing changed", {}),
    ("grpo twin", GRPO),
    ("grpo twin with p3o's own settings left in", {**GRPO, "algorithm.kl_mode": "proxy", "algorithm.clip_low": 0.3}),
    ("engine returns the sampled token's log-prob", {"rollout.logprobs": 0}),
    ("engine returns more log-probs", {"rollout.logprobs": 5}),
    ("corrections written as off", {"algorithm.use_tis": False, "algorithm.use_mis": False}),
    ("reward named mopd", {"reward.type": "mopd"}),
    (
        "two KL weights, both switches written off",
        {
            "algorithm.kl_coef": 0.01,
            "algorithm.use_kl_in_reward": False,
            "algorithm.kl_loss_coef": 0.001,
            "algorithm.use_kl_loss": False,
        },
    ),
    ("groups of two", {"batch.n_samples_per_prompt": 2, "batch.global_batch_size": 24}),
    ("monitoring band written at its default", {"algorithm.clip_low": 0.2, "algorithm.clip_high": 0.2}),
    ("grpo clips", {**GRPO, "algorithm.eps_clip": 0.2, "algorithm.eps_clip_high": 0.28}),
    ("grpo, stale, against rollout log-probs", {**GRPO, "rollout.update_weights_interval": 3}),
    ("micro-batch scope, one micro-batch", MICRO),
    ("grpo, per token, token budget", {**GRPO, **DYNAMIC}),
    ("dropout of an adapter of rank 0", {"model.lora_rank": 0, "model.lora_dropout": 0.1}),
    ("current FP8 scaling on Hopper", FP8),
    ("block scaling on Hopper", {**FP8, "precision.fp8_recipe": "blockwise"}),
    ("MXFP8 on Blackwell", {**FP8, "precision.fp8_recipe": "mxfp8", "cluster.gpu": "B200"}),
    ("per-tensor FP8 on 8.9", {**FP8, "cluster.gpu": "L40S"}),
    ("FP8 rollout weights on an A100", {"rollout.weight_quantization": "fp8_e4m3"}),
    ("GPU not declared", {**FP8, "cluster.gpu": ABSENT}),
    ("GPU not declared, on Volta's format", {"precision.bf16": False, "precision.fp16": True, "cluster.gpu": ABSENT}),
    ("the name of a GPU in a CPU run", {**CPU, "cluster.gpu": "Ponte Vecchio"}),
    ("a GPU by its bare number", {"cluster.gpu": "4090", "rollout.max_response_len": 1024}),
    ("periodic sync", {"rollout.update_weights_interval": 3}),
    ("MTP layers present, not trained", {"model.mtp_num_layers": 1}),
    ("graphs of attention alone", {"parallel.cuda_graph_scope": "attn"}),
    (
        "router settings of a model written as dense",
        {"model.num_experts": None, "model.moe_input_jitter_eps": 0.1, "model.moe_aux_loss_coeff": 0.01},
    ),
    ("sinkhorn on a dense model", {"model.num_experts": None, "model.moe_router_load_balancing_type": "sinkhorn"}),
    ("TP 4", {"parallel.tensor_model_parallel_size": 4}),
    ("TP 2 and PP 2", {"parallel.tensor_model_parallel_size": 2, "parallel.pipeline_model_parallel_size": 2}),
    (
        "batches that DP divides and the number of GPUs does not",
        {
            "parallel.tensor_model_parallel_size": 2,
            "batch.rollout_batch_size": 14,
            "batch.n_samples_per_prompt": 3,
            "batch.global_batch_size": 42,
        },
    ),
    ("several steps per rollout", {"batch.global_batch_size": 12}),
    (
        "uneven stages that add up",
        {"parallel.pipeline_model_parallel_size": 4, "parallel.decoder_first_pipeline_num_layers": 4},
    ),
    (
        "two uneven stages",
        {
            "parallel.pipeline_model_parallel_size": 2,
            "parallel.decoder_first_pipeline_num_layers": 13,
            "parallel.decoder_last_pipeline_num_layers": 15,
        },
    ),
    ("TP a multiple of the query groups", {"model.num_query_groups": 2, "parallel.tensor_model_parallel_size": 4}),
    ("one query group", {"model.num_query_groups": 1, "parallel.tensor_model_parallel_size": 4}),
    ("query groups left out", {"model.num_query_groups": ABSENT, "parallel.tensor_model_parallel_size": 4}),
    (
        "padding a multiple of what is needed",
        {"parallel.context_parallel_size": 2, "batch.sequence_padding_multiple": 12},
    ),
    (
        "interleaved schedule, micro-batches a multiple of PP",
        {"parallel.pipeline_model_parallel_size": 2, "parallel.num_layers_per_virtual_pipeline_stage": 7},
    ),
    (
        "interleaved schedule under a token budget",
        {"parallel.pipeline_model_parallel_size": 4, "parallel.num_layers_per_virtual_pipeline_stage": 7, **DYNAMIC},
    ),
    ("budget of exactly the longest sample", DYNAMIC),
    (
        "budget made up by context parallelism",
        {
            **DYNAMIC,
            "batch.max_tokens_per_gpu": 2304,
            "batch.sequence_padding_multiple": 4,
            "parallel.context_parallel_size": 2,
        },
    ),
    ("a budget that is not in use", {"batch.use_dynamic_batch_size": False, "batch.max_tokens_per_gpu": 1}),
    ("all GPUs roll out", {"rollout.num_gpus": 4}),
    ("evaluation truncates", {"evaluation.interval": 5, "evaluation.top_p": 0.6, "evaluation.top_k": 20}),
    ("greedy evaluation", {"evaluation.interval": 5, "evaluation.temperature": 0.0}),
    (
        "odd evaluation that never runs",
        {"evaluation.interval": None, "evaluation.temperature": -1.0, "evaluation.top_p": 0.0},
    ),
    ("top_k 0", {"rollout.top_k": 0}),
    ("top_k as large as the vocabulary", {"rollout.top_k": 151936}),
    ("sampling left out", {"rollout.top_p": ABSENT, "rollout.top_k": ABSENT}),
    (
        "every knob written as off",
        {
            "rollout.min_p": 0,
            "rollout.top_a": 0,
            "rollout.typical_p": 1,
            "rollout.epsilon_cutoff": 0,
            "rollout.eta_cutoff": 0,
            "rollout.repetition_penalty": 1,
            "rollout.presence_penalty": 0,
            "rollout.frequency_penalty": 0,
            "rollout.logit_bias": {"100": 0.0},
            "rollout.extra": {"top_p": 1, "topK": -1, "num_beams": 1, "bad_words": [], "min_tokens": 0},
        },
    ),
    ("raw log-probs at temperature 1", {"rollout.logprobs_mode": "raw_logprobs"}),
    ("temperature 0.6", {"rollout.temperature": 0.6}),
    ("temperature 1.2", {"rollout.temperature": 1.2}),
    ("the same temperature twice", {"rollout.temperature": 0.6, "rollout.extra": {"temperature": 0.6}}),
    ("deterministic with seeds", {"rollout.engine": "megatron", "rollout.deterministic_inference": True}),
    ("quantized rollout, grpo against rollout log-probs", {**GRPO, "rollout.weight_quantization": "int8"}),
    ("quantized rollout, p3o", {"rollout.weight_quantization": "int4"}),
    ("prompt and response fill the positions", {"model.max_position_embeddings": 4608}),
    ("fp16", {"precision.bf16": False, "precision.fp16": True}),
    ("deterministic, flash attention", {**DETERMINISTIC, "cluster.env": RING, "model.attention_backend": "flash"}),
    ("deterministic by the runtime environment", {**DETERMINISTIC, "cluster.runtime_env": {"env_vars": RING}}),
    ("deterministic, tree excluded", {**DETERMINISTIC, "cluster.env": {**RING, "NCCL_ALGO": "^Tree,NVLS"}}),
    ("deterministic, per function", {**DETERMINISTIC, "cluster.env": {**RING, "NCCL_ALGO": "allreduce:ring"}}),
    ("deterministic, small workspace", {**DETERMINISTIC, "cluster.env": {**RING, "CUBLAS_WORKSPACE_CONFIG": ":16:8"}}),
    ("deterministic on the CPU", {**DETERMINISTIC, **CPU}),
    ("half the memory for logits", {"batch.micro_batch_size": 2}),
    ("more logits on a larger GPU", {"batch.micro_batch_size": 4, "cluster.gpu": "A100-SXM4-80GB"}),
    ("more logits on a GPU of unknown size", {"batch.micro_batch_size": 12, "cluster.gpu": "H100"}),
    ("evaluation before training only", {"evaluation.interval": 12, "evaluation.before_train": True}),
    ("evaluation at the end", {"evaluation.interval": 11, "evaluation.before_train": False}),
    ("constant rate", {"optimizer.lr": 1e-5, "optimizer.min_lr": 1e-5}),
    ("heads of a width of their own", {"model.hidden_size": 1000}),
    ("flash on the CPU is another matter", {**CPU, "model.attention_backend": "local"}),
    ("auto attention in float32", {"precision.bf16": False}),
    ("TP 2 on Blackwell", {"parallel.tensor_model_parallel_size": 2, "cluster.gpu": "B200", "cluster.env": {}}),
    ("TP 2 on a GPU not declared", {"parallel.tensor_model_parallel_size": 2, "cluster.gpu": None, "cluster.env": {}}),
    ("PP 2 needs no single queue", {"parallel.pipeline_model_parallel_size": 2, "cluster.env": {}}),
    (
        "one queue by the runtime environment",
        {
            "parallel.tensor_model_parallel_size": 2,
            "cluster.env": {},
            "cluster.runtime_env": {"env_vars": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}},
        },
    ),
    ("every expert for every token", {**GRPO, **MOE, "model.moe_router_topk": 8}),
    ("router settings of a dense model, out of range", {"model.num_experts": None, "model.moe_router_topk": 64}),
    ("experts over ranks and cut", {**GRPO, **MOE, **EP2, "parallel.expert_tensor_parallel_size": 2}),
    ("router losses without a replay", {**GRPO, **MOE, "model.moe_z_loss_coeff": 0.1}),
    ("experts, TP and sequence parallel", {**GRPO, **MOE, **SP2}),
    ("experts whose width TP divides, beside a dense width it does not", {**GRPO, **MOE, **SP2, **ODD_WIDTH}),
    ("experts that stay whole on the CPU", {**GRPO, **MOE, **SP2, **CPU, "parallel.expert_tensor_parallel_size": 1}),
    ("TP 2 on the CPU", {"parallel.tensor_model_parallel_size": 2, "cluster.env": {}, **CPU}),
    ("float64 on the CPU", {**CPU, "precision.params_dtype": "float64"}),
    ("the GPU named in a CPU run decides nothing", {**CPU, "cluster.gpu": "A100-40GB", "batch.micro_batch_size": 12}),
]

REFUSED: list[tuple[str, list[str], Changes]] = [
    # (what, codes, changes): one code per fault and nothing beside it.
    ("rollout log-probs absent", ["101"], {"algorithm.use_rollout_logprobs": ABSENT}),
    ("per-token loss absent", ["103"], {"algorithm.calculate_per_token_loss": ABSENT}),
    (
        "both absent",
        ["101", "103"],
        {"algorithm.use_rollout_logprobs": ABSENT, "algorithm.calculate_per_token_loss": ABSENT},
    ),
    (
        "stale and no log-probs is one fault",
        ["101"],
        {"algorithm.use_rollout_logprobs": False, "rollout.update_weights_interval": 3},
    ),
    ("a custom correction alone", ["102"], {"algorithm.custom_tis_function_path": "hooks.tis"}),
    ("masked correction", ["102"], {"algorithm.use_mis": True}),
    ("grpo, correction on top of rollout log-probs", ["102"], {**GRPO, "algorithm.use_tis": True}),
    (
        "grpo, custom correction: allowed by the objective, unknown to the runtime",
        ["119", "119"],
        {**GRPO, "algorithm.use_tis": True, "algorithm.custom_tis_function_path": "hooks.tis"},
    ),
    (
        "grpo, stale, corrected",
        ["119", "119"],
        {
            **GRPO,
            "algorithm.use_rollout_logprobs": False,
            "algorithm.use_tis": True,
            "rollout.update_weights_interval": 3,
        },
    ),
    (
        "kl_coef with a KL loss: only the runtime objects",
        ["119"],
        {"algorithm.kl_coef": 0.01, "algorithm.use_kl_loss": True, "algorithm.kl_loss_coef": 0.001},
    ),
    (
        "one KL switched off",
        ["119"],
        {
            **GRPO,
            "algorithm.kl_coef": 0.01,
            "algorithm.use_kl_in_reward": False,
            "algorithm.use_kl_loss": True,
            "algorithm.kl_loss_coef": 0.001,
        },
    ),
    (
        "KL loss with weight 0 does not apply kl_coef",
        ["110"],
        {"algorithm.kl_coef": 0.01, "algorithm.use_kl_loss": True},
    ),
    ("clip_low below 0 is not tuned as well", ["115"], {"algorithm.clip_low": -0.1}),
    ("both widths negative", ["115", "115"], {"algorithm.clip_low": -0.1, "algorithm.clip_high": -0.1}),
    ("width 0", ["113"], {"algorithm.clip_low": 0.0}),
    ("eps_clip 0", ["113"], {"algorithm.eps_clip": 0.0}),
    ("two micro-batches in micro-batch scope", ["117"], {**MICRO, "batch.micro_batch_size": 6}),
    (
        "grpo per sample with a token budget, which the runtime does not carry out",
        ["118", "119"],
        {**GRPO, **DYNAMIC, "algorithm.calculate_per_token_loss": ABSENT},
    ),
    ("grpo per sample, fixed micro-batches", ["119"], {**GRPO, "algorithm.calculate_per_token_loss": False}),
    ("dropout left to Megatron", ["201"], {"model.attention_dropout": ABSENT, "model.hidden_dropout": ABSENT}),
    ("one absent, one positive", ["201", "201"], {"model.attention_dropout": ABSENT, "model.hidden_dropout": 0.1}),
    ("the least dropout", ["201"], {"model.hidden_dropout": 1e-9}),
    (
        "grpo, dropout left to Megatron",
        ["124"],
        {**GRPO, "model.attention_dropout": ABSENT, "model.hidden_dropout": ABSENT},
    ),
    ("micro-batch scope, dropout", ["120"], {**MICRO, "model.attention_dropout": 0.1}),
    ("FP8 without a recipe", ["202"], {**FP8, "precision.fp8_recipe": ABSENT}),
    (
        "delayed FP8 on an A100 is two faults",
        ["202", "501"],
        {**FP8, "precision.fp8_recipe": "delayed", "cluster.gpu": "A100-80GB"},
    ),
    ("adapter with dropout", ["203"], {"model.lora_rank": 1, "model.lora_dropout": 0.1}),
    ("adapter without dropout", ["119"], {"model.lora_rank": 1}),
    ("streaming", ["204"], {"rollout.fully_async": True, "rollout.max_staleness": 2}),
    ("streaming in micro-batch scope", ["119", "410"], {**MICRO, "rollout.fully_async": True}),
    (
        "bounded streaming in micro-batch scope",
        ["119"],
        {**MICRO, "rollout.fully_async": True, "rollout.max_staleness": 0},
    ),
    ("router jitter", ["210"], {**MOE, "model.moe_input_jitter_eps": 0.01}),
    ("sinkhorn", ["210"], {**MOE, "model.moe_router_load_balancing_type": "sinkhorn"}),
    ("forced balance", ["210"], {**MOE, "model.moe_router_force_load_balancing": True}),
    ("random bias", ["210"], {**MOE, "model.moe_router_force_biased": 0.1}),
    (
        "auxiliary and z loss",
        ["211", "212"],
        {
            **MOE,
            "model.moe_router_load_balancing_type": "aux_loss",
            "model.moe_aux_loss_coeff": 0.001,
            "model.moe_z_loss_coeff": 0.001,
        },
    ),
    ("an auxiliary loss that nothing reads", ["122", "211"], {**MOE, "model.moe_aux_loss_coeff": 0.1}),
    ("z loss in micro-batch scope", [], {**MICRO, **MOE, "model.moe_z_loss_coeff": 0.1}),
    ("more experts per token than there are", ["320"], {**MOE, "model.moe_router_topk": 9}),
    ("one expert", ["320"], {**MOE, "model.num_experts": 1}),
    ("one expert of one", ["321"], {**MOE, "model.num_experts": 1, "model.moe_router_topk": 1}),
    ("one expert per token", ["321"], {**MOE, "model.moe_router_topk": 1}),
    ("one expert per token by sinkhorn is sinkhorn's fault", ["210"], {**MOE, **TOP1_SINKHORN}),
    ("one expert per token by sinkhorn without a replay", [], {**GRPO, **MOE, **TOP1_SINKHORN}),
    ("sinkhorn with an auxiliary loss", ["320"], {**GRPO, **MOE, **TOP1_SINKHORN, "model.moe_aux_loss_coeff": 0.1}),
    ("random bias without a replay", ["119"], {**GRPO, **MOE, "model.moe_router_force_biased": 0.1}),
    ("experts and TP", ["319"], {**MOE, "parallel.tensor_model_parallel_size": 2}),
    ("experts that EP does not divide", ["311"], {**MOE, "model.num_experts": 9, **EP2}),
    ("experts cut over 3 of 4 ranks", ["311"], {**MOE, "parallel.expert_tensor_parallel_size": 3}),
    ("a dense model cut over 3 of 4 ranks", ["311"], {"parallel.expert_tensor_parallel_size": 3}),
    ("experts narrower than cut", ["316"], {**MOE, **ETP4, "model.moe_ffn_hidden_size": 386}),
    ("experts cut by TP on the CPU", ["322"], {**MOE, **SP2, **CPU}),
    ("experts cut by themselves on the CPU", ["322"], {**MOE, **ETP4, **CPU}),
    ("routing replay", ["206"], {**MOE, "parallel.use_routing_replay": True}),
    ("a hook is not about experts", ["210", "211"], {**MOE, "model.custom_forward_hook_path": "hooks.f"}),
    ("jitter of 0", ["211"], {**MOE, "model.moe_input_jitter_eps": 0.0, "model.moe_router_force_biased": 0.0}),
    # 3xx: a size that must change anyway hides what depends on it.
    ("TP 3", ["301"], {"parallel.tensor_model_parallel_size": 3, "cluster.env": {}}),
    (
        "TP 5 with sequence parallel and a short batch",
        ["301"],
        {"parallel.tensor_model_parallel_size": 5, "parallel.sequence_parallel": True},
    ),
    ("more ranks than GPUs", ["301"], {"parallel.context_parallel_size": 8}),
    ("global batch off by one", ["302"], {"batch.global_batch_size": 47}),
    ("global batch above the rollout", ["303"], {"batch.global_batch_size": 52}),
    ("micro-batch too large", ["302"], {"batch.micro_batch_size": 24, "cluster.gpu": ABSENT}),
    ("rollout off by one", ["303"], {"batch.rollout_batch_size": 13}),
    ("prompts not divisible, samples are", ["313"], {"batch.rollout_batch_size": 6, "batch.n_samples_per_prompt": 8}),
    ("29 layers on 2 stages", ["304"], {"model.num_layers": 29, "parallel.pipeline_model_parallel_size": 2}),
    (
        "chunks that leave layers over",
        ["304"],
        {"parallel.pipeline_model_parallel_size": 2, "parallel.num_layers_per_virtual_pipeline_stage": 3},
    ),
    (
        "first stage takes all",
        ["304"],
        {"parallel.pipeline_model_parallel_size": 2, "parallel.decoder_first_pipeline_num_layers": 28},
    ),
    (
        "first and last take all of three stages",
        ["304"],
        {
            "cluster.gpus_per_node": 6,
            "parallel.pipeline_model_parallel_size": 3,
            "parallel.decoder_first_pipeline_num_layers": 14,
            "parallel.decoder_last_pipeline_num_layers": 14,
        },
    ),
    ("stages laid out without a pipeline", ["305"], {"parallel.decoder_first_pipeline_num_layers": 4}),
    (
        "heads",
        ["306"],
        {"model.num_attention_heads": 18, "model.num_query_groups": 6, "parallel.tensor_model_parallel_size": 4},
    ),
    (
        "heads and groups is one fault",
        ["306"],
        {"model.num_attention_heads": 18, "model.num_query_groups": 9, "parallel.tensor_model_parallel_size": 4},
    ),
    (
        "groups",
        ["307"],
        {"model.num_attention_heads": 24, "model.num_query_groups": 6, "parallel.tensor_model_parallel_size": 4},
    ),
    ("CP 2 with odd lengths", ["308"], {"parallel.context_parallel_size": 2}),
    ("CP 2 with lengths of 2", ["308"], {"parallel.context_parallel_size": 2, "batch.sequence_padding_multiple": 2}),
    ("sequence parallel, TP 1", ["309"], {"parallel.sequence_parallel": True}),
    ("experts over ranks, dense", ["311"], {"parallel.expert_model_parallel_size": 2}),
    ("budget one short", ["312"], {**DYNAMIC, "batch.max_tokens_per_gpu": 4607}),
    ("budget absent", ["312"], {**DYNAMIC, "batch.max_tokens_per_gpu": ABSENT}),
    ("budget in reach, padded out of it", ["312"], {**DYNAMIC, "batch.sequence_padding_multiple": 7}),
    ("one word too many for TP 2", ["316"], {"model.vocab_size": 151937, "parallel.tensor_model_parallel_size": 2}),
    (
        "rollout off by one, whatever the layout",
        ["301", "303"],
        {"parallel.tensor_model_parallel_size": 3, "batch.rollout_batch_size": 13},
    ),
    ("heads of no whole width", ["306"], {"model.hidden_size": 1000, "model.kv_channels": ABSENT}),
    (
        "full recomputation, half said",
        ["317"],
        {"parallel.recompute_granularity": "full", "parallel.recompute_method": "block"},
    ),
    ("a number of layers for none", ["317"], {"parallel.recompute_num_layers": 1}),
    (
        "overlapped gather, distributed optimizer alone",
        ["318"],
        {"parallel.overlap_param_gather": True, "parallel.use_distributed_optimizer": True},
    ),
    ("min_lr just above lr", ["121"], {"optimizer.lr": 1e-5, "optimizer.min_lr": 1.0001e-5}),
    # 4xx
    ("top_p just below 1", ["401"], {"rollout.top_p": 0.999999}),
    ("top_p above 1", ["401"], {"rollout.top_p": 1.5}),
    ("top_p 0", ["401"], {"rollout.top_p": 0.0}),
    ("top_k one below the vocabulary", ["401"], {"rollout.top_k": 151935}),
    ("top_k 1", ["401"], {"rollout.top_k": 1}),
    ("top_k -2 is not off", ["401"], {"rollout.top_k": -2}),
    ("penalty below 1", ["401"], {"rollout.repetition_penalty": 0.9}),
    ("negative presence penalty", ["401"], {"rollout.presence_penalty": -0.1}),
    ("top_p hidden", ["401"], {"rollout.extra": {"top_p": 0.9}}),
    ("top_p hidden as text", ["401"], {"rollout.extra": {"top_p": "0.9"}}),
    ("top_p hidden, other spellings", ["401"] * 3, {"rollout.extra": {"topP": 0.9, "TOP-K": 5, "Min_P": 0.1}}),
    ("hidden deeper", ["401"], {"rollout.extra": {"a": {"b": {"typical_p": 0.9}}}}),
    ("grammar", ["401"], {"rollout.extra": {"guided_regex": "[0-9]+"}}),
    ("logit processors", ["401"], {"rollout.extra": {"logits_processors": ["hooks.ban"]}}),
    ("grpo, truncated against rollout log-probs", ["401"], {**GRPO, "rollout.top_p": 0.9}),
    (
        "grpo, truncated against recomputed log-probs: only the runtime objects",
        ["119"],
        {**GRPO, "algorithm.use_rollout_logprobs": False, "rollout.top_p": 0.9},
    ),
    ("raw log-probs at 0.6", ["402"], {"rollout.temperature": 0.6, "rollout.logprobs_mode": "raw_logprobs"}),
    (
        "no log-probs, raw",
        ["101"],
        {"rollout.logprobs": None, "rollout.temperature": 0.6, "rollout.logprobs_mode": "raw_logprobs"},
    ),
    ("same seed per group, builtin engine", ["404"], {"rollout.per_sample_seed": False}),
    (
        "same seed per group, another engine that draws its own",
        ["119"],
        {"rollout.engine": "vllm", "rollout.per_sample_seed": False},
    ),
    (
        "one sample and one seed: groups of one is the fault",
        ["112"],
        {"rollout.per_sample_seed": False, "batch.n_samples_per_prompt": 1, "batch.global_batch_size": 12},
    ),
    ("hidden seed", ["404"], {"rollout.extra": {"sampling_seed": 1}}),
    (
        "adapter that servers never see",
        ["406"],
        {"model.lora_rank": 8, "model.lora_merge_before_sync": False, "rollout.colocate": False},
    ),
    ("adapter merged", ["119", "119"], {"model.lora_rank": 8, "rollout.colocate": False}),
    ("temperature 0", ["408"], {"rollout.temperature": 0}),
    (
        "temperature nan, raw log-probs",
        ["408"],
        {"rollout.temperature": math.nan, "rollout.logprobs_mode": "raw_logprobs"},
    ),
    ("temperature inf", ["408"], {"rollout.temperature": math.inf}),
    ("two temperatures", ["408"], {"rollout.extra": {"temperature": 0.5}}),
    (
        "stale cache, and the runtime has none",
        ["119", "409"],
        {"rollout.enable_prefix_caching": True, "rollout.reset_prefix_cache_on_update": False},
    ),
    ("evaluation top_p 0", ["411"], {"evaluation.interval": 1, "evaluation.top_p": 0.0}),
    ("longer than the model: what that needs is moot", ["412"], {"rollout.max_response_len": 40000}),
    ("longer than the model and the budget", ["412"], {**DYNAMIC, "rollout.max_response_len": 40000}),
    ("longer than any memory", ["412"], {**DYNAMIC, "rollout.max_response_len": 10**6}),
    (
        "longer than the model, which is ignored, and than the memory",
        ["412", "602"],
        {"rollout.max_response_len": 40000, "ignore": {"P3O412": "rope is scaled"}},
    ),
    ("a number of heads that nothing fits", ["307"], {"model.num_attention_heads": 100}),
    ("a number of groups that nothing fits", ["307"], {"model.num_query_groups": 100}),
    ("one head for 8 groups and TP 2", ["307"], {"model.num_attention_heads": 1} | TP2),
    ("a stage of 100 layers", ["304"], {**PP2, "parallel.decoder_first_pipeline_num_layers": 100}),
    ("5 GPUs", ["302"], {"cluster.gpus_per_node": 5}),
    ("5 experts' ranks", ["311"], {**MOE, "parallel.expert_tensor_parallel_size": 5}),
    ("100 experts per token of 8", ["320"], {**MOE, "model.moe_router_topk": 100}),
    ("one expert and TP", ["320"], {**MOE, **TP2, "model.num_experts": 1}),
    ("float64 beside bf16 on a GPU", ["119"], {"precision.params_dtype": "float64"}),
    ("two formats on the CPU", ["508"], {**FP8, **CPU, "precision.bf16": True}),
    ("one position short", ["412"], {"model.max_position_embeddings": 4607}),
    # 5xx
    ("FP8 on an A100", ["501"], {**FP8, "cluster.gpu": "NVIDIA A100-SXM4-80GB"}),
    ("block scaling on 8.9", ["501"], {**FP8, "precision.fp8_recipe": "blockwise", "cluster.gpu": "L40S"}),
    ("MXFP8 on Hopper", ["501"], {**FP8, "precision.fp8_recipe": "mxfp8"}),
    ("both halves", ["502"], {"precision.fp16": True}),
    ("deterministic without environment", ["503"], DETERMINISTIC),
    ("deterministic, tree", ["503"], {**DETERMINISTIC, "cluster.env": {**RING, "NCCL_ALGO": "Tree"}}),
    ("deterministic, ring or tree", ["503"], {**DETERMINISTIC, "cluster.env": {**RING, "NCCL_ALGO": "Ring,Tree"}}),
    (
        "deterministic, NVLS excluded leaves tree",
        ["503"],
        {**DETERMINISTIC, "cluster.env": {**RING, "NCCL_ALGO": "^NVLS"}},
    ),
    (
        "deterministic, fused loss",
        ["503"],
        {**DETERMINISTIC, "cluster.env": RING, "precision.cross_entropy_loss_fusion": True},
    ),
    ("fused loss alone", ["119"], {"precision.cross_entropy_loss_fusion": True}),
    ("bf16 on the CPU", ["508"], {**CPU, "precision.bf16": True}),
    ("FP8 on the CPU", ["508"], {**CPU, "precision.fp8": "hybrid", "precision.fp8_recipe": "tensorwise"}),
    ("flash in float32", ["509"], {"precision.bf16": False, "model.attention_backend": "flash"}),
    (
        "flash on a T4",
        ["509"],
        {**HALF, "model.attention_backend": "flash", "cluster.gpu": "T4", "rollout.max_response_len": 128},
    ),
    ("bf16 on a T4", ["510"], {"cluster.gpu": "T4", "rollout.max_response_len": 128}),
    ("both halves on a T4", ["502", "510"], {"precision.fp16": True, "cluster.gpu": "T4"} | SHORT),
    ("GPU not known: nothing else is judged", ["511"], {**FP8, "cluster.gpu": "Ponte Vecchio"}),
    ("GPU misspelt", ["511"], {"cluster.gpu": "H1000-80GB"}),
    (
        "float64 on a GPU",
        ["119"],
        {"precision.bf16": False, "precision.params_dtype": "float64", "rollout.max_response_len": 128},
    ),
    # A lower bound on memory is no reason to refuse; without the split of Adam's state this one does not fit.
    ("a large model", ["603"], {"model.num_layers": 80}),
    ("evaluation without prompts", ["414"], {"evaluation.interval": 5, "data.eval_prompt_data": None}),
    ("evaluation after the end", ["415"], {"evaluation.interval": 12, "evaluation.before_train": False}),
    # 6xx
    ("three samples of logits", ["602"], {"batch.micro_batch_size": 3, "cluster.gpu": "A100-40GB"}),
    ("TP 2 without the variable", ["606"], {"parallel.tensor_model_parallel_size": 2, "cluster.env": {}}),
    (
        "CP 2 with two queues",
        ["606"],
        {
            "parallel.context_parallel_size": 2,
            "batch.sequence_padding_multiple": 4,
            "cluster.env": {"CUDA_DEVICE_MAX_CONNECTIONS": "2"},
        },
    ),
]


@pytest.mark.parametrize(("what", "changes"), ACCEPTED, ids=[what for what, _ in ACCEPTED])
def test_accepted(what: str, changes: Changes) -> None:
    assert [(code, finding.message) for code, finding in findings(changes)] == []


@pytest.mark.parametrize(("what", "expected", "changes"), REFUSED, ids=[what for what, _, _ in REFUSED])
def test_refused_for_one_reason_per_fault(what: str, expected: list[str], changes: Changes) -> None:
    assert sorted(codes(changes)) == expected


REPLAY_FAULTS: list[Changes] = [
    {"model.attention_dropout": 0.1, "model.hidden_dropout": 0.1},
    {"precision.fp8": "hybrid", "cluster.gpu": "H100-80GB"},
    {"model.lora_rank": 8, "model.lora_dropout": 0.1},
    {"rollout.fully_async": True},
    {"model.enable_mtp_training": True},
    {"parallel.use_routing_replay": True},
    {"parallel.use_rollout_routing_replay": True},
    {"parallel.overlap_moe_expert_parallel_comm": True},
    {"parallel.cuda_graph_scope": "full_iteration"},
    {"model.custom_forward_hook_path": "hooks.record"},
    {"model.num_experts": 8, "model.moe_input_jitter_eps": 0.1},
]


@pytest.mark.parametrize("fault", REPLAY_FAULTS, ids=lambda fault: next(iter(fault)))
def test_the_replay_rules_speak_in_step_scope_and_nowhere_else(fault: Changes) -> None:
    def replay_codes(changes: Changes) -> list[str]:
        return [code for code in codes(changes) if code.startswith("2")]

    assert replay_codes(fault)
    assert replay_codes({**MICRO, **fault}) == []
    assert replay_codes({**GRPO, **fault}) == []
