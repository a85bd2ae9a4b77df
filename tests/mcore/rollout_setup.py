"""A preset of the tiny model, one rank's engine around it, and the requests the tests send. Not a test."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from p3o_launch.runtime.mcore.engine import MegatronEngine
from p3o_launch.runtime.mcore.groups import ParallelGroups, ParallelSizes, init_distributed
from p3o_launch.runtime.mcore.logprobs import token_log_probs
from p3o_launch.runtime.mcore.model import build_model, unwrap
from p3o_launch.runtime.mcore.rng import seed_rank
from p3o_launch.runtime.mcore.weights_hf import load_hf
from p3o_launch.runtime.types import Completion, GenerationRequest, SamplingParams
from p3o_launch.schema import Preset
from tests.mcore.ranks import RankEnv
from tests.mcore.tiny import tiny_model

EOS = (31,)
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "one rank": (1, {}),
    "dp2": (2, {}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "pp2 vpp2": (2, {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1}),
    "cp2": (2, {"context_parallel_size": 2}),
}
"""Name -> (ranks, the preset's parallel group)."""


def make_preset(
    parallel: dict[str, object] | None = None, params_dtype: str | None = None, **rollout: object
) -> Preset:
    """A preset of the tiny model; ``parallel``, ``precision.params_dtype`` and ``rollout`` override those fields."""
    batch = {"num_rollout": 1, "rollout_batch_size": 4, "n_samples_per_prompt": 4, "global_batch_size": 16}
    return Preset.model_validate(
        {
            "schema_version": 1,
            "name": "tiny",
            "algorithm": {"advantage_estimator": "p3o"},
            "model": tiny_model().model_dump(),
            "precision": {"params_dtype": params_dtype},
            "parallel": parallel or {},
            "batch": batch,
            "optimizer": {"lr": 1e-3},
            "rollout": {"max_response_len": 8} | rollout,
            "data": {"prompt_data": "builtin:arithmetic"},
            "cluster": {"device": "cpu", "gpus_per_node": 1},
        }
    )


@dataclass
class Rank:
    """What a test needs of one rank."""

    preset: Preset
    groups: ParallelGroups
    chunks: list[torch.nn.Module]
    engine: MegatronEngine


@contextmanager
def engine_rank(env: RankEnv, checkpoint: Path, preset: Preset, eos_ids: Sequence[int] = EOS) -> Iterator[Rank]:
    """Join the group, build trainer and engine, and leave the group at the end. The engine holds snapshot 0."""
    groups = init_distributed(
        ParallelSizes.from_preset(preset),
        rank=env.rank,
        world_size=env.world_size,
        init_method=env.new_init_method(),
        timeout_s=60,
    )
    try:
        seed_rank(11, groups)
        chunks = build_model(preset.model, preset.parallel, preset.precision, groups)
        load_hf(chunks, checkpoint, groups)
        engine = MegatronEngine(chunks, groups, preset, eos_ids)
        engine.update_weights(0)
        yield Rank(preset, groups, chunks, engine)
    finally:
        groups.destroy()


def requests(count: int = 12, first_seed: int = 100) -> list[GenerationRequest]:
    """Prompts of 1 to 9 tokens, never the end of sequence."""
    stream = torch.Generator().manual_seed(5)
    lengths = [1 + (7 * i) % 9 for i in range(count)]
    prompts = [torch.randint(0, EOS[0], (n,), generator=stream).tolist() for n in lengths]
    return [GenerationRequest(900 + i, tuple(prompt), first_seed + i) for i, prompt in enumerate(prompts)]


def sampling(temperature: float = 1.0, top_p: float = 1.0, top_k: int = -1, max_new_tokens: int = 8) -> SamplingParams:
    return SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, max_new_tokens=max_new_tokens)


@torch.no_grad()
def teacher_logits(chunks: Sequence[torch.nn.Module], prompt: Sequence[int], response: Sequence[int]) -> Tensor:
    """Logits [r, v/tp] that predict each of the r response tokens: one forward over the whole text, without a cache.

    For layouts without pipeline stages.
    """
    model = unwrap(chunks[0])
    model.eval()
    tokens = torch.tensor([[*prompt, *response]])
    positions = torch.arange(tokens.shape[1])[None]
    logits: Tensor = model(tokens, positions, None)
    return logits[0, len(prompt) - 1 : -1]


def teacher_log_probs(rank: Rank, request: GenerationRequest, completion: Completion, temperature: float) -> Tensor:
    """What the trainer says the response's tokens had, at ``temperature``; [r]."""
    logits = teacher_logits(rank.chunks, request.prompt_ids, completion.response_ids)
    targets = torch.tensor([completion.response_ids])
    return token_log_probs(logits[None], targets, rank.groups.tp, temperature)[0]
