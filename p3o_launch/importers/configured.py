"""What verl's and NeMo-RL's importers share: carrying settings of a tree over into a draft."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from p3o_launch.importers.facts import Draft
from p3o_launch.importers.settings import UNKNOWN, Settings

# The model's sizes come from the checkpoint's config.json, which is not part of the configuration.
FROM_CHECKPOINT = (
    "model.num_layers",
    "model.num_query_groups",
    "model.kv_channels",
    "model.num_experts",
    "model.moe_router_topk",
    "model.moe_ffn_hidden_size",
    "model.max_position_embeddings",
    "model.rotary_base",
    "model.norm_epsilon",
    "model.qk_layernorm",
    "model.add_qkv_bias",
    "model.untie_embeddings_and_output_weights",
    "batch.sequence_padding_multiple",
)


class Tree:
    """Reads settings; remembers the key and the place that decide each fact."""

    def __init__(self, settings: Settings, draft: Draft) -> None:
        self.settings, self.draft = settings, draft

    def get(self, path: str, default: Any = None) -> Any:
        """The value, or ``default`` where it is absent, null or unknown."""
        value = self.settings.get(path)
        return default if value is None or value is UNKNOWN else value

    def number(self, path: str, default: int | float = 0) -> Any:
        """The value where it is a number that sums and products can hold."""
        value = self.get(path)
        usable = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e12
        return value if usable else default

    def on(self, path: str) -> bool:
        """Is the switch on?"""
        return self.get(path) is True

    def put(self, fact: str, value: Any, path: str) -> None:
        """Record ``value``, which the setting ``path`` decides."""
        if self.settings.get(path) is UNKNOWN:
            self.draft.names[fact] = path
            self.draft.forget(fact)
            return
        self.draft.put(fact, value, path, self.settings.place(path))

    def copy(self, fact: str, path: str, change: Callable[[Any], Any] | None = None) -> None:
        """Record the value of ``path``; a whole number where the fact is one."""
        value = self.get(path)
        if change is not None and value is not None:
            value = change(value)
        self.put(fact, value, path)


def whole(value: Any) -> Any:
    """``8.0`` -> 8; anything else as it is, for the schema to judge."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else value


def text(value: Any) -> Any:
    """A path or name as text; empty ones are absent."""
    usable = isinstance(value, (str, int, float)) and not isinstance(value, bool) and value != ""
    return str(value)[:4096] if usable else None


def real(value: Any) -> Any:
    """``0`` -> ``0.0``; anything else as it is, for the schema to judge."""
    return float(value) if type(value) is int and abs(value) < 1e15 else value
