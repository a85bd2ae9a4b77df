"""The policy: megatron-core's own ``GPTModel``, one per model chunk of this rank, and its gradient buffers.

On a GPU with Transformer Engine the layers are Megatron's Transformer Engine spec (written for A100, not run here);
else Megatron's local spec, with the core attention of ``attention.py`` and a root mean square norm that knows
sequence parallelism. ``forward`` returns logits [b, s, v/tp] on the last stage, hidden states [s, b, h] on the others.

What is float64 when the preset asks for it: weights, norms, rotary tables, attention, router, logits, gradients and
their norm, Adam's moments. Megatron alone would keep rotary tables, gradient norm and token-count division in float32.
"""

from __future__ import annotations

from typing import Any

import torch

from p3o_launch.errors import PreflightError
from p3o_launch.runtime.mcore.attention import MicroBatchGroupSelfAttention, TorchCoreAttention
from p3o_launch.runtime.mcore.compat import have_transformer_engine, quiet_import
from p3o_launch.runtime.mcore.config import params_dtype, transformer_config
from p3o_launch.runtime.mcore.cpu_backend import device_backend
from p3o_launch.runtime.mcore.groups import ParallelGroups
from p3o_launch.schema import Model, Parallel, Precision


class SpecRMSNorm:
    """Builds ``torch.nn.RMSNorm`` in the weights' type; calling it yields the module, as layer specs expect."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-6, **_: object) -> torch.nn.RMSNorm:  # type: ignore[misc]
        norm = torch.nn.RMSNorm(hidden_size, eps=eps, dtype=config.params_dtype)
        # Each rank sees a slice of the tokens: Megatron sums the gradients of weights marked so over TP.
        norm.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


def build_model(
    model: Model, parallel: Parallel, precision: Precision, groups: ParallelGroups
) -> list[torch.nn.Module]:
    """One ``GPTModel`` per virtual stage of this rank (a single one without virtual stages), randomly initialised.

    Raises PreflightError when the sizes do not fit the layout.
    """
    _check_layout(model, groups)
    config = transformer_config(model, parallel, precision, groups.device)
    with device_backend(groups.device):
        chunks = [_build_chunk(model, config, groups, stage) for stage in _virtual_stages(groups)]
        if groups.device != "cpu":
            chunks = [chunk.cuda(torch.cuda.current_device()) for chunk in chunks]
    if precision.bf16 or precision.fp16:
        wrapper = quiet_import("megatron.core.transformer.module").Float16Module
        chunks = [wrapper(config, chunk) for chunk in chunks]
    return chunks


def _check_layout(model: Model, groups: ParallelGroups) -> None:
    if model.vocab_size % groups.tp_size:
        raise PreflightError(
            f"a vocabulary of {model.vocab_size} cannot be split over {groups.tp_size} tensor-parallel ranks",
            hint="choose a tensor_model_parallel_size that divides the vocabulary",
        )
    if model.num_experts is not None and groups.device == "cpu" and groups.etp_size > 1:
        raise PreflightError(
            "experts cannot be split over tensor-parallel ranks on the CPU: gloo gathers no pieces of unequal size",
            hint="set parallel.expert_tensor_parallel_size to 1; expert parallelism itself works",
        )
    chunks = groups.pp_size * (groups.vpp or 1)
    if model.num_layers < chunks:
        raise PreflightError(f"{model.num_layers} layers cannot fill {chunks} pipeline stages")


def _virtual_stages(groups: ParallelGroups) -> list[int | None]:
    return [None] if groups.vpp is None else list(range(groups.vpp))


def _build_chunk(model: Model, config: Any, groups: ParallelGroups, vp_stage: int | None) -> torch.nn.Module:
    gpt = quiet_import("megatron.core.models.gpt.gpt_model").GPTModel
    last_chunk = (groups.vpp or 1) - 1
    chunk = gpt(
        config=config,
        transformer_layer_spec=block_spec(config, groups, vp_stage),
        vocab_size=model.vocab_size,
        max_sequence_length=model.max_position_embeddings,
        pre_process=groups.is_first_stage and vp_stage in (None, 0),
        post_process=groups.is_last_stage and vp_stage in (None, last_chunk),
        parallel_output=True,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        position_embedding_type="rope",
        rotary_base=model.rotary_base,
        vp_stage=vp_stage,
    )
    if config.params_dtype is torch.float64:
        _use_float64_rotary(chunk, model)
    result: torch.nn.Module = chunk
    return result


def block_spec(config: Any, groups: ParallelGroups, vp_stage: int | None) -> Any:
    """The layers of one chunk, with their norms and attention."""
    specs = quiet_import("megatron.core.models.gpt.gpt_layer_specs")
    if groups.device != "cpu" and have_transformer_engine():
        layer = specs.get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm
        )
        layer.submodules.self_attention.module = MicroBatchGroupSelfAttention
        return layer
    layer = specs.get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    layer.submodules.input_layernorm = SpecRMSNorm
    layer.submodules.pre_mlp_layernorm = SpecRMSNorm
    layer.submodules.self_attention.module = MicroBatchGroupSelfAttention
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = TorchCoreAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = SpecRMSNorm
    block = quiet_import("megatron.core.transformer.transformer_block")
    layers = block.get_num_layers_to_build(config, vp_stage, groups.pp_rank)
    return block.TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=SpecRMSNorm)


def _use_float64_rotary(chunk: Any, model: Model) -> None:
    """Megatron computes rotary angles in float32 whatever the weights are; here they follow the weights.

    A float32 table would not depend on the layout, but its cosines may in the last bit: vectorised and remainder
    elements of a slice take different code paths.
    """
    head = model.kv_channels or model.hidden_size // model.num_attention_heads
    exponent = torch.arange(0, head, 2, dtype=torch.float64) / head
    chunk.rotary_pos_emb.inv_freq = 1.0 / (model.rotary_base**exponent)


def wrap_ddp(
    chunks: list[torch.nn.Module], parallel: Parallel, precision: Precision, groups: ParallelGroups
) -> list[torch.nn.Module]:
    """Each chunk inside Megatron's ``DistributedDataParallel``, and the config's gradient hooks set.

    Gradients are summed, never averaged, over DP x CP: ``finalize_grads`` divides by the step's token count.
    """
    distributed = quiet_import("megatron.core.distributed")
    config: Any = chunks[0].config
    wide = precision.accumulate_allreduce_grads_in_fp32 and params_dtype(precision) is not torch.float64
    settings = distributed.DistributedDataParallelConfig(
        grad_reduce_in_fp32=wide,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        use_distributed_optimizer=parallel.use_distributed_optimizer and groups.device != "cpu",
        average_in_collective=False,
        check_for_nan_in_grad=False,
    )
    with device_backend(groups.device):
        wrapped = [
            distributed.DistributedDataParallel(config, settings, chunk, disable_bucketing=index > 0)
            for index, chunk in enumerate(chunks)
        ]
    config.finalize_model_grads_func = finalize_grads
    if parallel.overlap_grad_reduce:
        syncs = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = syncs if len(syncs) > 1 else syncs[0]
    return wrapped


def finalize_grads(chunks: list[torch.nn.Module], num_tokens: torch.Tensor | None = None, **arguments: Any) -> None:
    """Megatron's ``finalize_model_grads``: reduce over DP x CP, TP and tied embeddings, divide by the token count.

    Megatron counts tokens in an int tensor, whose reciprocal is float32: the division would cost float64 gradients
    half their digits. A float64 count is exact and leaves float32 gradients as they were.
    """
    finalize = quiet_import("megatron.core.distributed").finalize_model_grads
    finalize(chunks, None if num_tokens is None else num_tokens.double(), **arguments)


def unwrap(chunk: torch.nn.Module) -> torch.nn.Module:
    """The ``GPTModel`` inside the gradient and half-precision wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module  # type: ignore[assignment]
    return chunk
