"""A preset's model, parallel and precision groups as Megatron's ``TransformerConfig``.

Everything that decides numbers is written out here rather than left to Megatron's defaults; dropout alone keeps
Megatron's default (0.1) when the preset leaves it out, as the launcher's other targets do, and guard 201 reports it.
"""

from __future__ import annotations

from typing import Any

import torch

from p3o_launch.errors import PreflightError
from p3o_launch.runtime.mcore.compat import filter_arguments, quiet_import
from p3o_launch.schema import Model, Parallel, Precision

MEGATRON_DROPOUT = 0.1


def params_dtype(precision: Precision) -> torch.dtype:
    """The type of the model's weights."""
    if precision.bf16:
        return torch.bfloat16
    if precision.fp16:
        return torch.float16
    return torch.float64 if precision.params_dtype == "float64" else torch.float32


def transformer_config(model: Model, parallel: Parallel, precision: Precision, device: str) -> Any:
    """Megatron's ``TransformerConfig`` for one run.

    ``device``: "cpu" or "cuda". Fused kernels are switched on only on a GPU. ``calculate_per_token_loss`` is always on:
    the loss functions return token sums, and ``finalize_grads`` divides by the step's token count.
    Raises PreflightError for what the device cannot do.
    """
    _check_device(precision, device)
    arguments = (
        _architecture(model)
        | _parallelism(model, parallel, params_dtype(precision))
        | _numbers(model, precision, device)
        | _recompute(parallel)
        | _cuda_graphs(parallel, device)
    )
    if model.num_experts is not None:
        arguments |= _mixture_of_experts(model, precision)
    config_class = quiet_import("megatron.core.transformer.transformer_config").TransformerConfig
    return config_class(**filter_arguments(config_class, arguments))


def _check_device(precision: Precision, device: str) -> None:
    if device != "cpu":
        return
    if precision.bf16 or precision.fp16 or precision.fp8:
        raise PreflightError(
            "the CPU backend trains in float32 or float64 only",
            hint="set precision.bf16, fp16 and fp8 off (the profile `cpu` does)",
        )


def _architecture(model: Model) -> dict[str, Any]:
    return {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.num_query_groups or model.num_attention_heads,
        "kv_channels": model.kv_channels or model.hidden_size // model.num_attention_heads,
        "normalization": "RMSNorm",
        "layernorm_epsilon": model.norm_epsilon,
        "qk_layernorm": model.qk_layernorm,
        "add_bias_linear": False,
        "add_qkv_bias": model.add_qkv_bias,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "attention_dropout": MEGATRON_DROPOUT if model.attention_dropout is None else model.attention_dropout,
        "hidden_dropout": MEGATRON_DROPOUT if model.hidden_dropout is None else model.hidden_dropout,
    }


def _parallelism(model: Model, parallel: Parallel, dtype: torch.dtype) -> dict[str, Any]:
    pp, stage_layers = parallel.pipeline_model_parallel_size, parallel.num_layers_per_virtual_pipeline_stage
    vpp = None if stage_layers is None else model.num_layers // (pp * stage_layers)
    return {
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": vpp,
        "context_parallel_size": parallel.context_parallel_size,
        "expert_model_parallel_size": parallel.expert_model_parallel_size,
        "expert_tensor_parallel_size": parallel.expert_tensor_parallel_size,
        "num_layers_in_first_pipeline_stage": parallel.decoder_first_pipeline_num_layers,
        "num_layers_in_last_pipeline_stage": parallel.decoder_last_pipeline_num_layers,
        "sequence_parallel": parallel.sequence_parallel,
        "overlap_moe_expert_parallel_comm": parallel.overlap_moe_expert_parallel_comm,
        "pipeline_dtype": dtype,
        # Micro-batches of one step differ in length: the stages tell each other the shape.
        "variable_seq_lengths": pp > 1,
        # Also for dense models: Megatron refuses the default dispatcher together with variable lengths.
        "moe_token_dispatcher_type": "alltoall",
        # Under virtual stages two pipeline ranks exchange both directions at once; batched, their messages would be
        # told apart by order alone, and two ranks disagree on it.
        "batch_p2p_comm": vpp is None,
        "overlap_p2p_comm": vpp is not None,
    }


def _numbers(model: Model, precision: Precision, device: str) -> dict[str, Any]:
    gpu = device != "cpu"
    return {
        "params_dtype": params_dtype(precision),
        "bf16": precision.bf16,
        "fp16": precision.fp16,
        "fp8": precision.fp8,
        "fp8_recipe": precision.fp8_recipe or "delayed",
        "attention_softmax_in_fp32": precision.attention_softmax_in_fp32,
        # Virtual stages do not wait for what they send: on a GPU the stream keeps the memory until then, gloo does not.
        "deallocate_pipeline_outputs": gpu,
        "deterministic_mode": precision.deterministic_mode and gpu,
        "calculate_per_token_loss": True,
        "attention_backend": quiet_import("megatron.core.transformer.enums").AttnBackend[model.attention_backend],
        # The weights come from a checkpoint, but perform_initialization also marks which of them are tensor-parallel:
        # without the marks, gradient norms count shards wrongly. On the CPU the initialisation must say so as well.
        "perform_initialization": True,
        "use_cpu_initialization": not gpu,
        "masked_softmax_fusion": gpu,
        "bias_activation_fusion": gpu,
        "bias_dropout_fusion": gpu,
        "apply_rope_fusion": False,
        # Needs Apex's extension; Transformer Engine's layers fuse the accumulation themselves.
        "gradient_accumulation_fusion": False,
        "cross_entropy_loss_fusion": False,
    }


def _recompute(parallel: Parallel) -> dict[str, Any]:
    if parallel.recompute_granularity == "none":
        return {}
    return {
        "recompute_granularity": parallel.recompute_granularity,
        "recompute_method": parallel.recompute_method,
        "recompute_num_layers": parallel.recompute_num_layers,
    }


def _cuda_graphs(parallel: Parallel, device: str) -> dict[str, Any]:
    if parallel.cuda_graph_scope == "none" or device == "cpu":
        return {"cuda_graph_scope": []}
    return {"cuda_graph_impl": "local", "cuda_graph_scope": [parallel.cuda_graph_scope]}


def _mixture_of_experts(model: Model, precision: Precision) -> dict[str, Any]:
    exact = params_dtype(precision) is torch.float64
    return {
        "num_moe_experts": model.num_experts,
        "moe_ffn_hidden_size": model.moe_ffn_hidden_size or model.ffn_hidden_size,
        "moe_router_topk": model.moe_router_topk,
        "moe_router_load_balancing_type": model.moe_router_load_balancing_type,
        "moe_aux_loss_coeff": model.moe_aux_loss_coeff,
        "moe_z_loss_coeff": model.moe_z_loss_coeff,
        "moe_input_jitter_eps": model.moe_input_jitter_eps,
        "moe_router_force_load_balancing": model.moe_router_force_load_balancing,
        "moe_router_dtype": "fp64" if exact else "fp32",
        "moe_grouped_gemm": False,
    }
