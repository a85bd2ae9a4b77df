"""Samples, presets and ranks for tests of the two-pass step on the tiny model. Not a test.

Presets are built past the guards on purpose: some tests need what the guards refuse.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from p3o_launch.runtime.mcore.batch import MicroBatch
from p3o_launch.runtime.mcore.step import StepOutcome
from p3o_launch.runtime.mcore.trainer import MegatronRank
from p3o_launch.runtime.mcore.weights_hf import gathered
from p3o_launch.runtime.plan import make_plan
from p3o_launch.runtime.types import Sample
from p3o_launch.schema import Model, Preset
from tests.mcore.ranks import RankEnv
from tests.mcore.tiny import parallel, tiny_model

SAMPLES = 16
VOCAB = 32


def step_samples(count: int = SAMPLES, seed: int = 0) -> list[Sample]:
    """Random texts of unequal length, with behaviour log-probs that put the ESS of the tiny model near one half."""
    source = random.Random(seed)
    made = []
    for index in range(count):
        prompt = tuple(source.randrange(VOCAB) for _ in range(source.randint(3, 9)))
        response = tuple(source.randrange(VOCAB) for _ in range(source.randint(1, 8)))
        made.append(
            Sample(
                sample_id=index,
                group_id=index // 4,
                prompt_ids=prompt,
                response_ids=response,
                behavior_log_probs=tuple(-3.4 + source.gauss(0.0, 0.7) for _ in response),
                reward=0.0,
                advantage=source.gauss(0.0, 1.0),
                truncated=False,
                snapshot_id=0,
            )
        )
    return made


def step_preset(
    checkpoint: Path,
    ranks: int = 1,
    *,
    splits: int = 1,
    tokens: int | None = None,
    packed: bool = False,
    dtype: str = "float64",
    algorithm: dict[str, Any] | None = None,
    model: Model | None = None,
    optimizer: dict[str, Any] | None = None,
    samples: int = SAMPLES,
    **sizes: Any,
) -> Preset:
    """One optimizer step of ``samples`` samples. ``splits``: micro-batches per DP rank; ``tokens``: dynamic budget.

    ``sizes``: as for ``tiny.parallel``, such as ``tp=2, vpp_layers=1, sp=True``.
    """
    shape = {name: sizes.get(name, 1) for name in ("tp", "pp", "cp")}
    dp = ranks // (shape["tp"] * shape["pp"] * shape["cp"])
    chosen = (model or tiny_model()).model_copy(update={"hf_checkpoint": str(checkpoint)})
    multiple = (2 * shape["cp"] if shape["cp"] > 1 else 1) * (shape["tp"] if sizes.get("sp") else 1)
    return Preset.model_validate(
        {
            "schema_version": 1,
            "name": "tiny",
            "algorithm": {"advantage_estimator": "p3o"} | (algorithm or {}),
            "model": chosen.model_dump(),
            "precision": {"params_dtype": dtype},
            "parallel": parallel(**sizes).model_dump(),
            "batch": {
                "num_rollout": 100,
                "rollout_batch_size": samples // 4,
                "n_samples_per_prompt": 4,
                "global_batch_size": samples,
                "micro_batch_size": samples // (dp * splits),
                "use_dynamic_batch_size": tokens is not None,
                "max_tokens_per_gpu": tokens,
                "sequence_padding_multiple": multiple,
                "pack_sequences": packed,
            },
            "optimizer": {"lr": 1e-3, "clip_grad": 0.0, "lr_decay_style": "constant"} | (optimizer or {}),
            "rollout": {"max_response_len": 8},
            "data": {"prompt_data": "builtin:arithmetic"},
            "cluster": {"device": "cpu", "gpus_per_node": ranks, "timeout_s": 60},
        }
    )


@contextmanager
def step_rank(env: RankEnv, preset: Preset) -> Iterator[MegatronRank]:
    """This process as one rank of ``preset``, without a rollout engine; leaves the group at the end."""
    rank = MegatronRank(make_plan(preset, env.directory), env.rank, env.new_init_method())
    try:
        rank.setup(rollout=False)
        yield rank
    finally:
        rank.close()


def run_step(rank: MegatronRank, samples: list[Sample], step: int = 1) -> StepOutcome:
    """One optimizer step over ``samples``."""
    return rank.step.run(rank.micro_batches(samples), step=step)


def weights(rank: MegatronRank) -> list[torch.Tensor]:
    """A copy of this rank's own parameters."""
    return [parameter.detach().clone() for chunk in rank.chunks for parameter in chunk.parameters()]


def gradients(rank: MegatronRank) -> dict[str, torch.Tensor]:
    """Whole gradients of this rank's pipeline stage, by Hugging Face name."""
    return {name: gradient.clone() for name, gradient in gathered(rank.chunks, rank.groups, gradients=True)}


def shapes(micro_batches: list[MicroBatch]) -> list[tuple[int, ...]]:
    """Of the token tensors."""
    return [tuple(batch.tokens.shape) for batch in micro_batches]
