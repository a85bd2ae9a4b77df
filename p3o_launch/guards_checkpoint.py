"""What a checkpoint's own files say against the preset (403, 413, 505). Silent where the files are not on this machine.

Preflight reports files that are missing (P3O610); validate may run on a laptop that has none of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from p3o_launch.checkpoint_files import read_checkpoint_json
from p3o_launch.diagnostics import Finding, Severity
from p3o_launch.guard_tools import both, named, policy_ratio_from_rollout, shown
from p3o_launch.guards import GuardContext, guard
from p3o_launch.sampling_rules import FIELDS

if TYPE_CHECKING:
    from p3o_launch.schema import Preset

# What vLLM and SGLang take from generation_config.json when a request leaves it out.
_FILLED = ("top_p", "top_k", "min_p", "repetition_penalty")
_REPORT = "https://github.com/NVIDIA-NeMo/RL/issues/3497"


def _left_to_the_checkpoint(preset: Preset) -> list[str]:
    """Sampling fields the engine will fill from the checkpoint."""
    rollout = preset.rollout
    if rollout.generation_config != "auto" or rollout.engine == "megatron":
        return []
    return [field for field in _FILLED if getattr(rollout, field) is None]


@guard(
    "P3O403",
    "generation-config-not-neutral",
    why="The engine fills sampling values the preset leaves out from the checkpoint's generation_config.json. The "
    "model's author truncates there, so training rollouts are truncated although the preset says nothing.",
    fix="Set rollout.generation_config: ignore, or write every sampling value out.",
    source=_REPORT,
    allows="Values the preset writes itself; a generation_config.json with neutral values; the megatron engine, which "
    "reads none.",
)
def generation_config_not_neutral(context: GuardContext) -> Iterator[Finding]:
    preset = context.preset
    fields = _left_to_the_checkpoint(preset)
    if not fields or not policy_ratio_from_rollout(preset):
        return
    config = read_checkpoint_json(preset.model.hf_checkpoint, "generation_config.json") or {}
    filled = [field for field in fields if not FIELDS[field].is_neutral(config.get(field))]
    if filled:
        values = both(f"{field} {shown(config[field])}" for field in filled)
        yield Finding(
            "rollout.generation_config",
            f"rollout.generation_config (auto) fills {values} from the checkpoint's generation_config.json, which "
            f"{named(preset, 'rollout.engine')} then samples by",
            "set rollout.generation_config: ignore",
            related=("model.hf_checkpoint", "rollout.engine", *(f"rollout.{field}" for field in filled)),
        )


@guard(
    "P3O413",
    "generation-config-unread",
    Severity.WARNING,
    why="The engine fills sampling values the preset leaves out from the checkpoint's generation_config.json, and that "
    "file is not on this machine: what will be sampled is not known.",
    fix="Set rollout.generation_config: ignore, or write every sampling value out.",
    source=_REPORT,
    allows="A readable generation_config.json, and presets that leave no sampling value out.",
    ignorable=True,
)
def generation_config_unread(context: GuardContext) -> Iterator[Finding]:
    preset = context.preset
    fields = _left_to_the_checkpoint(preset)
    if fields and read_checkpoint_json(preset.model.hf_checkpoint, "generation_config.json") is None:
        yield Finding(
            "rollout.generation_config",
            f"rollout.generation_config (auto) leaves {both(fields)} to the checkpoint's generation_config.json, which "
            "cannot be read here",
            "set rollout.generation_config: ignore",
            related=("model.hf_checkpoint", "rollout.engine"),
        )


@guard(
    "P3O505",
    "model-disagrees-with-checkpoint",
    why="The model is built from the preset's figures and filled with the checkpoint's weights. Another shape fails "
    "after every rank has started; another rotary base, or tied embeddings taken for untied, trains a wrong model.",
    fix="Write the checkpoint's figures into the preset's model group.",
    source="https://github.com/THUDM/slime/issues/641",
    allows="A checkpoint that is not on this machine; fields its config.json does not hold.",
)
def model_disagrees_with_checkpoint(context: GuardContext) -> Iterator[Finding]:
    preset = context.preset
    config = read_checkpoint_json(preset.model.hf_checkpoint, "config.json")
    if config is None:
        return
    for field, found in _figures(config).items():
        path = f"model.{field}"
        written = _effective(preset, field)
        if found is not None and not _same(written, found):
            yield Finding(
                path,
                f"{path} ({shown(written)}) differs from the checkpoint's config.json ({shown(found)})",
                f"set {path}: {shown(found)}",
                related=("model.hf_checkpoint",),
            )


def _figures(config: dict[str, Any]) -> dict[str, Any]:
    """The schema's fields in a ``config.json``; None for what it does not say."""
    rope = config.get("rope_parameters")
    theta = rope.get("rope_theta") if isinstance(rope, dict) else None
    tied = config.get("tie_word_embeddings")
    figures: dict[str, Any] = {
        "num_layers": config.get("num_hidden_layers"),
        "hidden_size": config.get("hidden_size"),
        "ffn_hidden_size": config.get("intermediate_size"),
        "num_attention_heads": config.get("num_attention_heads"),
        "num_query_groups": config.get("num_key_value_heads"),
        "kv_channels": config.get("head_dim"),
        "vocab_size": config.get("vocab_size"),
        "rotary_base": config.get("rope_theta") if theta is None else theta,
        "norm_epsilon": config.get("rms_norm_eps"),
    }
    figures = {field: value for field, value in figures.items() if _is_number(value)}
    if isinstance(tied, bool):
        figures["untie_embeddings_and_output_weights"] = not tied
    if config.get("model_type") in ("qwen2", "qwen3", "llama"):
        figures["qk_layernorm"] = config["model_type"] == "qwen3"
    return figures


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _effective(preset: Preset, field: str) -> Any:
    model = preset.model
    if field == "num_query_groups":
        return model.num_query_groups or model.num_attention_heads
    if field == "kv_channels":
        return model.kv_channels or model.hidden_size // model.num_attention_heads
    return getattr(model, field)


def _same(written: Any, found: Any) -> bool:
    if isinstance(written, float) or isinstance(found, float):
        return bool(abs(written - found) <= 1e-9 * abs(found))
    return bool(written == found)
