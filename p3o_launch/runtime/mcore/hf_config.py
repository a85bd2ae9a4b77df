"""A Hugging Face ``config.json`` against a preset's ``model`` group. No torch: it runs before any rank starts.

Supported architectures: Qwen3, Qwen2, Llama (dense) and Qwen3-MoE. A preset writes its architecture out; the checkpoint
must be of that architecture, and every field that differs is named at once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from p3o_launch.errors import PreflightError
from p3o_launch.schema import Model

MODEL_TYPES = ("qwen3", "qwen2", "llama", "qwen3_moe")


def read_hf_config(hf_dir: Path) -> dict[str, Any]:
    """``config.json`` of a checkpoint directory. Raises PreflightError when there is none, or it is not JSON."""
    path = hf_dir / "config.json"
    if not path.is_file():
        raise PreflightError(
            f"{hf_dir} is not a Hugging Face checkpoint: it has no config.json",
            hint="model.hf_checkpoint must name a directory with config.json and *.safetensors files",
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PreflightError(f"cannot read {path}: {error}") from None
    if not isinstance(config, dict):
        raise PreflightError(f"cannot read {path}: it does not hold a JSON object")
    return config


def check_hf_config(model: Model, hf_dir: Path) -> None:
    """Raises PreflightError naming every field in which the preset's model and the checkpoint differ."""
    config = read_hf_config(hf_dir)
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise PreflightError(
            f"{hf_dir} holds a model of type {kind!r}, which cannot be loaded",
            hint=f"supported: {', '.join(MODEL_TYPES)}",
        )
    unsupported = _unsupported(config)
    if unsupported:
        raise PreflightError(f"{hf_dir} uses what this runtime does not compute: {'; '.join(unsupported)}")
    differences = [
        f"model.{field} is {wanted}, the checkpoint has {found}"
        for field, wanted, found in _compare(model, config)
        if not _same(wanted, found)
    ]
    if differences:
        raise PreflightError(
            f"the preset's model and {hf_dir / 'config.json'} differ: {'; '.join(differences)}",
            hint="write the checkpoint's figures into the preset's model group",
        )


def _compare(model: Model, config: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """(field of the preset, its value, the checkpoint's value)."""
    kind, heads = config["model_type"], config.get("num_attention_heads")
    width = config.get("hidden_size")
    default_head = width // heads if isinstance(width, int) and isinstance(heads, int) and heads else None
    tied = config.get("tie_word_embeddings", False)
    return [
        ("num_layers", model.num_layers, config.get("num_hidden_layers")),
        ("hidden_size", model.hidden_size, width),
        ("ffn_hidden_size", model.ffn_hidden_size, config.get("intermediate_size")),
        ("num_attention_heads", model.num_attention_heads, heads),
        (
            "num_query_groups",
            model.num_query_groups or model.num_attention_heads,
            config.get("num_key_value_heads", heads),
        ),
        (
            "kv_channels",
            model.kv_channels or model.hidden_size // model.num_attention_heads,
            config.get("head_dim") or default_head,
        ),
        ("vocab_size", model.vocab_size, config.get("vocab_size")),
        ("rotary_base", model.rotary_base, rope_theta(config)),
        ("norm_epsilon", model.norm_epsilon, config.get("rms_norm_eps", 1e-6)),
        ("qk_layernorm", model.qk_layernorm, kind in ("qwen3", "qwen3_moe")),
        ("add_qkv_bias", model.add_qkv_bias, kind == "qwen2" or bool(config.get("attention_bias", False))),
        ("untie_embeddings_and_output_weights", model.untie_embeddings_and_output_weights, not tied),
        ("num_experts", model.num_experts, config.get("num_experts") if kind == "qwen3_moe" else None),
        *(_compare_experts(model, config) if kind == "qwen3_moe" else ()),
    ]


def _compare_experts(model: Model, config: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    width = model.moe_ffn_hidden_size or model.ffn_hidden_size
    return [
        ("moe_ffn_hidden_size", width, config.get("moe_intermediate_size")),
        ("moe_router_topk", model.moe_router_topk, config.get("num_experts_per_tok")),
    ]


def rope_theta(config: dict[str, Any]) -> float:
    """Base of the rotary angles; transformers 5 moved it below ``rope_parameters``."""
    parameters = config.get("rope_parameters") or {}
    return float(parameters.get("rope_theta", config.get("rope_theta", 10000.0)))


def _unsupported(config: dict[str, Any]) -> list[str]:
    found = []
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    if rope_type != "default":
        found.append(f"rotary scaling of type {rope_type!r}")
    if config.get("use_sliding_window"):
        found.append("sliding-window attention")
    if config.get("hidden_act", "silu") != "silu":
        found.append(f"activation {config['hidden_act']!r}")
    if config.get("mlp_bias"):
        found.append("biases in the feed-forward layers")
    if config.get("model_type") == "qwen3_moe":
        # Megatron's router takes the softmax over the chosen experts, which is Qwen3's with normalised weights.
        if not config.get("norm_topk_prob", False):
            found.append("expert weights that are not normalised over the chosen experts")
        if config.get("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers"):
            found.append("a mixture of dense and expert layers")
    # Llama's attention_bias puts one on the output projection too, which Megatron's add_qkv_bias does not.
    if config.get("attention_bias") and config.get("model_type") in ("llama", "qwen3", "qwen3_moe"):
        found.append("a bias on the attention's output projection")
    return found


def _same(wanted: Any, found: Any) -> bool:
    if isinstance(wanted, float) and isinstance(found, (int, float)):
        return abs(wanted - found) <= 1e-12 * max(abs(wanted), abs(found))
    return bool(wanted == found)
