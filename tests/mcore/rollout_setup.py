"""A tiny random Qwen3 that any layout can load, its preset, and one rank's engine around it. Not a test."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
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

VOCAB, HIDDEN, LAYERS, HEADS, GROUPS, HEAD, FFN = 32, 64, 4, 4, 2, 16, 96
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


def make_preset(parallel: dict[str, object] | None = None, **rollout: object) -> Preset:
    """A preset of the tiny model; ``parallel`` and ``rollout`` override those groups."""
    model = {
        "hf_checkpoint": "tiny",
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "ffn_hidden_size": FFN,
        "num_attention_heads": HEADS,
        "num_query_groups": GROUPS,
        "kv_channels": HEAD,
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
        "qk_layernorm": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    batch = {"num_rollout": 1, "rollout_batch_size": 4, "n_samples_per_prompt": 4, "global_batch_size": 16}
    return Preset.model_validate(
        {
            "schema_version": 1,
            "name": "tiny",
            "algorithm": {"advantage_estimator": "p3o"},
            "model": model,
            "parallel": parallel or {},
            "batch": batch,
            "optimizer": {"lr": 1e-3},
            "rollout": {"max_response_len": 8} | rollout,
            "data": {"prompt_data": "builtin:arithmetic"},
            "cluster": {"device": "cpu", "gpus_per_node": 1},
        }
    )


def write_checkpoint(directory: Path) -> Path:
    """Random weights in Hugging Face's names and layout; large enough that the distributions are far from uniform."""
    stream = torch.Generator().manual_seed(0)

    def matrix(out: int, inputs: int, gain: float) -> Tensor:
        return torch.randn(out, inputs, generator=stream) * gain / inputs**0.5

    def norm(width: int) -> Tensor:
        return 1 + 0.2 * torch.randn(width, generator=stream)

    weights = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN, 2.0), "model.norm.weight": norm(HIDDEN)}
    for layer in range(LAYERS):
        weights |= {
            f"model.layers.{layer}.{name}": value
            for name, value in {
                "self_attn.q_proj.weight": matrix(HEADS * HEAD, HIDDEN, 1.5),
                "self_attn.k_proj.weight": matrix(GROUPS * HEAD, HIDDEN, 1.5),
                "self_attn.v_proj.weight": matrix(GROUPS * HEAD, HIDDEN, 1.5),
                "self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD, 1.0),
                "self_attn.q_norm.weight": norm(HEAD),
                "self_attn.k_norm.weight": norm(HEAD),
                "mlp.gate_proj.weight": matrix(FFN, HIDDEN, 1.5),
                "mlp.up_proj.weight": matrix(FFN, HIDDEN, 1.5),
                "mlp.down_proj.weight": matrix(HIDDEN, FFN, 1.0),
                "input_layernorm.weight": norm(HIDDEN),
                "post_attention_layernorm.weight": norm(HIDDEN),
            }.items()
        }
    save_file(weights, directory / "model.safetensors")
    return directory


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
    prompts = [torch.randint(0, VOCAB - 1, (n,), generator=stream).tolist() for n in lengths]
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
