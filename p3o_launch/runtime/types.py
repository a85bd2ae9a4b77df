"""What the loop, the engines, the trainer and the record pass to each other. Plain data: no torch, no ray, no megatron.

Everything here is picklable and small enough to travel between processes as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem. ``token_ids``: prompt tokens, chat template applied. ``label``: the reference answer."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    label: str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one call samples. ``top_k`` -1 is off. ``max_new_tokens`` [tokens]. Truncation is for evaluation only."""

    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to sample. ``seed`` fixes its random stream, whichever rank and batch it lands in."""

    request_id: int
    prompt_ids: tuple[int, ...]
    seed: int


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled response.

    ``response_ids``: tokens, end-of-sequence included when it was sampled. ``log_probs``: natural log of the
    probability each had under the distribution that was sampled (temperature applied, float32 values).
    ``truncated``: the cap was reached before the end of sequence.
    """

    request_id: int
    response_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    truncated: bool


@dataclass(frozen=True, slots=True)
class Sample:
    """A completion with what the objective needs. ``group_id``: its prompt within the rollout."""

    sample_id: int
    group_id: int
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    behavior_log_probs: tuple[float, ...]
    reward: float
    advantage: float
    truncated: bool
    snapshot_id: int


class RolloutEngine(Protocol):
    """Samples responses. In SPMD engines every rank calls every method, and each holds the same requests.

    ``generate`` returns the completions in the order of the requests, on every rank of the engine.
    ``update_weights`` makes the trainer's present weights the rollout policy and names that snapshot.
    """

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> list[Completion]: ...

    def update_weights(self, snapshot_id: int) -> None: ...

    @property
    def snapshot_id(self) -> int: ...


class Trainer(Protocol):
    """One optimizer step over exactly ``global_batch_size`` samples. SPMD: every rank gets the whole list."""

    def train_step(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Two-pass step (p3o, step scope) or single-pass step; returns metrics, named as in ``docs/metrics.md``."""
        ...

    def save_checkpoint(self, directory: Path) -> None: ...

    def load_checkpoint(self, directory: Path) -> None: ...
