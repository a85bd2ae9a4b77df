"""Tiny models shared by the tests of this directory: preset groups and Hugging Face checkpoints. Not a test."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from p3o_launch.schema import Model, Parallel, Precision

FLOAT32 = Precision()
FLOAT64 = Precision(params_dtype="float64")


def tiny_model(**changes: Any) -> Model:
    """A four-layer Qwen3 that every layout on four processes divides."""
    settings: dict[str, Any] = {
        "hf_checkpoint": "tiny",
        "num_layers": 4,
        "hidden_size": 64,
        "ffn_hidden_size": 96,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 16,
        "vocab_size": 32,
        "max_position_embeddings": 128,
        "norm_epsilon": 1e-6,
        "qk_layernorm": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    return Model(**(settings | changes))


def parallel(**sizes: Any) -> Parallel:
    """``parallel(tp=2, pp=2, vpp_layers=1, sp=True)``."""
    names = {
        "tp": "tensor_model_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "cp": "context_parallel_size",
        "ep": "expert_model_parallel_size",
        "etp": "expert_tensor_parallel_size",
        "vpp_layers": "num_layers_per_virtual_pipeline_stage",
        "sp": "sequence_parallel",
    }
    return Parallel(**{names.get(name, name): value for name, value in sizes.items()})


def write_hf_checkpoint(kind: str, directory: Path, *, seed: int = 0, tied: bool = True) -> Path:
    """A random model of ``kind``, of ``tiny_model``'s size, in float32, as transformers saves it.

    Weights are scaled up from the usual 0.02, and norms and biases moved off their initial values: with those, a wrong
    mapping of a layer would hardly show in the logits.
    """
    import torch

    torch.manual_seed(seed)
    model = reference_class(kind)(reference_config(kind, tied))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.15)
    model.save_pretrained(directory)
    return directory


def reference_class(kind: str) -> Any:
    import transformers

    return {
        "qwen3": transformers.Qwen3ForCausalLM,
        "qwen2": transformers.Qwen2ForCausalLM,
        "llama": transformers.LlamaForCausalLM,
        "qwen3_moe": transformers.Qwen3MoeForCausalLM,
    }[kind]


@functools.lru_cache
def reference_config(kind: str, tied: bool) -> Any:
    import transformers

    config_class = {
        "qwen3": transformers.Qwen3Config,
        "qwen2": transformers.Qwen2Config,
        "llama": transformers.LlamaConfig,
        "qwen3_moe": transformers.Qwen3MoeConfig,
    }[kind]
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
    return config_class(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        rms_norm_eps=1e-6,
        tie_word_embeddings=tied,
        attn_implementation="eager",
        pad_token_id=0,
        **(experts if kind == "qwen3_moe" else {}),
    )


def model_of(kind: str, tied: bool = True) -> Model:
    """The preset's model group for a checkpoint of ``write_hf_checkpoint``."""
    experts = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24}
    return tiny_model(
        **(experts if kind == "qwen3_moe" else {}),
        qk_layernorm=kind in ("qwen3", "qwen3_moe"),
        add_qkv_bias=kind == "qwen2",
        untie_embeddings_and_output_weights=not tied,
    )
