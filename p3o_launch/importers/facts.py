"""The neutral facts about a configuration, whatever framework it is written for.

What the guards need has the shape of a preset, so that the rules which judge presets judge these facts too. What a
preset has no field for (the estimator's name, the kind of an importance correction, the backend) is in ``extra``.
A fact the source does not hold (hidden sizes that come from a checkpoint) is *unknown*: a placeholder stands for it,
and no finding may rest on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from p3o_launch.diagnostics import LocatedFinding, Position
from p3o_launch.importers.words import shorten
from p3o_launch.rules_import import import_finding
from p3o_launch.schema import SCHEMA_VERSION, Preset

# Divisible by every size that occurs, so that a placeholder breaks no relation and narrows no hint.
_HIGHLY_DIVISIBLE = 2**7 * 3**2 * 5 * 7
_PLACEHOLDERS: dict[str, Any] = {
    "algorithm.advantage_estimator": "grpo",
    "model.hf_checkpoint": "unknown",
    "model.num_layers": _HIGHLY_DIVISIBLE,
    "model.hidden_size": _HIGHLY_DIVISIBLE,
    "model.ffn_hidden_size": _HIGHLY_DIVISIBLE,
    "model.num_attention_heads": _HIGHLY_DIVISIBLE,
    "model.vocab_size": _HIGHLY_DIVISIBLE,
    "batch.num_rollout": 1,
    "batch.rollout_batch_size": _HIGHLY_DIVISIBLE,
    "batch.n_samples_per_prompt": _HIGHLY_DIVISIBLE,
    "batch.global_batch_size": _HIGHLY_DIVISIBLE,
    "optimizer.lr": 1e-6,
    "rollout.max_prompt_len": 1,
    "rollout.max_response_len": 1,
    "data.prompt_data": "unknown",
}
# A rule about one of these names it, so a finding that rests on it is dropped by its path.
_NAMED_BY_RULES = (
    *("num_query_groups", "kv_channels", "moe_router_topk", "moe_ffn_hidden_size", "rotary_base", "norm_epsilon"),
    *(
        "attention_dropout",
        "hidden_dropout",
        "qk_layernorm",
        "add_qkv_bias",
        "untie_embeddings_and_output_weights",
        "max_position_embeddings",
    ),
)
# Reading these while they are unknown does not taint a rule: their placeholders are neutral by construction.
_NEUTRAL = frozenset(_PLACEHOLDERS) | {
    "cluster.num_nodes",
    "cluster.gpus_per_node",
    "batch.sequence_padding_multiple",
    "batch.micro_batch_size",
    *(f"model.{name}" for name in _NAMED_BY_RULES),
}


@dataclass(frozen=True)
class Facts:
    """One configuration, read. ``places`` and ``names``: where, and under which name, the user sets a preset path.

    ``start``: the place of a finding that belongs to no argument. ``style``: how a setting is written, ``"flag"``,
    ``"override"`` (Hydra) or ``"yaml"``. ``inapplicable``: codes that do not hold for the framework, each with the
    reason. ``remedies``: what to do about a path, or a code, that the framework has no setting for. ``additions``:
    names that an override has to add with ``+``. ``extra``: facts beyond the preset, by dotted name of the summary.
    """

    framework: str
    file: str
    preset: Preset
    places: Mapping[str, Position]
    names: Mapping[str, str]
    style: str
    start: Position
    unknown: frozenset[str]
    inapplicable: Mapping[str, str]
    remedies: Mapping[str, str]
    additions: frozenset[str]
    extra: Mapping[str, Any]
    findings: tuple[LocatedFinding, ...]

    @property
    def opaque(self) -> frozenset[str]:
        """Unknown paths whose placeholder could mislead a rule that reads it."""
        return self.unknown - _NEUTRAL

    def place(self, *paths: str) -> Position:
        """Where the first of ``paths`` that is written stands; a mapping's entry counts as its mapping."""
        for path in paths:
            while path:
                if path in self.places:
                    return self.places[path]
                path = path.rpartition(".")[0]
        return self.places.get("algorithm.advantage_estimator", self.start)


@dataclass(slots=True)
class Draft:
    """Facts while they are collected."""

    framework: str
    file: str
    style: str
    start: Position
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    places: dict[str, Position] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)
    inapplicable: dict[str, str] = field(default_factory=dict)
    remedies: dict[str, str] = field(default_factory=dict)
    additions: set[str] = field(default_factory=set)
    extra: dict[str, Any] = field(default_factory=dict)
    findings: list[LocatedFinding] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.inapplicable["P3O119"] = "it is about what P3O Launch's own runtime carries out"
        for code in ("P3O414", "P3O415"):
            self.inapplicable[code] = "evaluation sets and schedules are not among the facts that are read"
        self.inapplicable["P3O122"] = "templates of other frameworks write what is off"
        self.inapplicable["P3O321"] = "whether the softmax comes before the choice is not among the facts that are read"
        self.inapplicable["P3O708"] = "what is set before the command belongs to the launching shell"

    def put(self, path: str, value: Any, name: str = "", place: Position | None = None) -> None:
        """Record a fact. None means that it is not written: only its name and place are kept."""
        if name:
            self.names[path] = name
        if place is not None:
            self.places[path] = place
        if value is not None:
            group, _, key = path.partition(".")
            self.values.setdefault(group, {})[key] = value
            self.unknown.discard(path)

    def get(self, path: str) -> Any:
        """A fact recorded so far, or None."""
        group, _, key = path.partition(".")
        return self.values.get(group, {}).get(key)

    def forget(self, *paths: str) -> None:
        """Mark facts as unknown."""
        for path in paths:
            group, _, key = path.partition(".")
            self.values.get(group, {}).pop(key, None)
            self.unknown.add(path)

    def report(self, code: str, place: Position | None, message: str, hint: str | None = None, path: str = "") -> None:
        """A finding of the importer itself."""
        self.findings.append(import_finding(code, place or self.start, message, hint, path))

    def finish(self) -> Facts:
        """Fill what is missing with placeholders; a value outside its field's range becomes a finding."""
        if not self.get("cluster.gpus_per_node"):
            self.forget("cluster.gpus_per_node", "cluster.num_nodes")
            self.values.setdefault("cluster", {}).update(num_nodes=1, gpus_per_node=_smallest_world(self))
        preset = self._validated()
        places = {path: place for path, place in self.places.items() if path not in self.unknown}
        return Facts(
            self.framework,
            self.file,
            preset,
            places,
            self.names,
            self.style,
            self.start,
            frozenset(self.unknown),
            self.inapplicable,
            self.remedies,
            frozenset(self.additions),
            self.extra,
            tuple(self.findings),
        )

    def _validated(self) -> Preset:
        for _ in range(8):
            data: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "name": "imported", **self._filled()}
            try:
                return Preset.model_validate(data)
            except ValidationError as error:
                for fault in error.errors(include_url=False):
                    self._refuse(fault)
        raise AssertionError("placeholders must make a valid preset")

    def _filled(self) -> dict[str, dict[str, Any]]:
        filled = {group: dict(values) for group, values in self.values.items()}
        for path, value in _PLACEHOLDERS.items():
            group, _, key = path.partition(".")
            if key not in filled.setdefault(group, {}):
                self.unknown.add(path)
                filled[group][key] = value
        return filled

    def _refuse(self, fault: Any) -> None:
        """A value its field does not take: report it where it was written, and forget it."""
        path = ".".join(str(part) for part in fault["loc"][:2])
        written = self.get(path)
        where = self.places.get(path)
        self.forget(path)
        if where is not None:
            name = self.names.get(path, path)
            message = f"{name} {shorten(str(written))}: {_reason(fault)}"
            self.report("P3O015", where, message, None, path)


def _reason(fault: Any) -> str:
    context = fault.get("ctx", {})
    kind = fault["type"]
    limits = {
        "greater_than_equal": ("ge", "must be {} or above"),
        "greater_than": ("gt", "must be above {}"),
        "less_than_equal": ("le", "must be {} or below"),
    }
    if kind in limits:
        key, text = limits[kind]
        return text.format(f"{context[key]:g}")
    if kind == "finite_number":
        return "must be finite"
    return str(fault["msg"])[:1].lower() + str(fault["msg"])[1:]


def _smallest_world(draft: Draft) -> int:
    """The fewest GPUs the parallel sizes allow; any real number of GPUs is a multiple of it."""
    from math import lcm

    def size(name: str) -> int:
        value = draft.get(f"parallel.{name}")
        return value if isinstance(value, int) and 0 < value < 10**6 else 1

    tp, pp = size("tensor_model_parallel_size"), size("pipeline_model_parallel_size")
    expert = size("expert_model_parallel_size") * (draft.get("parallel.expert_tensor_parallel_size") or tp)
    dense = tp * pp * size("context_parallel_size")
    return lcm(dense, pp * expert) if isinstance(expert, int) and 0 < expert < 10**6 else dense
