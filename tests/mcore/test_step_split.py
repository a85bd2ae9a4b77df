"""Neither the number of micro-batches nor the DP split moves N, the cap, the loss or the gradient of a step.

Real processes and Megatron's own schedule, for both objectives, dense and packed rows, fixed and dynamic micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.mcore.ranks import RankEnv, run_ranks
from tests.mcore.step_setup import gradients, run_step, step_preset, step_rank, step_samples
from tests.mcore.tiny import write_hf_checkpoint

# Relative; gradients against the norm of all of them. float64: only the order of sums is left. float32: kernels of
# another shape sum in another order, at 6e-8 per operation.
TOLERANCE = {"float64": (1e-9, 1e-8), "float32": (1e-6, 1e-5)}
GRPO = {"advantage_estimator": "grpo"}
CUTS: list[dict[str, Any]] = [
    *({"splits": splits, "packed": packed} for packed in (False, True) for splits in (1, 2, 4)),
    {"tokens": 20},
    {"tokens": 48},
]


@dataclass
class Seen:
    """One step on one rank. ``dummies``: this rank's micro-batches without a valid token."""

    tokens: float
    cap: float
    loss: float
    replay_error: float | None
    gradients: dict[str, torch.Tensor]
    micro_batches: int
    dummies: int


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf_checkpoint("qwen3", tmp_path_factory.mktemp("hf"))


def _steps(env: RankEnv, checkpoint: Path, cases: list[dict[str, Any]]) -> list[Seen]:
    seen = []
    for case in cases:
        with step_rank(env, step_preset(checkpoint, env.world_size, **case)) as rank:
            micro_batches = rank.micro_batches(step_samples())
            means = rank.step.run(micro_batches, step=1).means
            seen.append(
                Seen(
                    tokens=means["tokens"],
                    cap=means["ess"],
                    loss=means["loss"],
                    replay_error=means.get("replay_error"),
                    gradients=gradients(rank),
                    micro_batches=len(micro_batches),
                    dummies=sum(not bool(batch.mask.any()) for batch in micro_batches),
                )
            )
    return seen


def _distance(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    difference = sum(float((ours[name].double() - theirs[name].double()).square().sum()) for name in theirs)
    return (difference / sum(float(tensor.double().square().sum()) for tensor in theirs.values())) ** 0.5


def _faults(seen: Seen, reference: Seen, dtype: str) -> list[str]:
    figure, gradient = TOLERANCE[dtype]
    errors = {
        "N": (abs(seen.tokens - reference.tokens), 0.0),
        "cap": (abs(seen.cap / reference.cap - 1.0), figure),
        "loss": (abs(seen.loss / reference.loss - 1.0), figure),
        "gradient": (_distance(seen.gradients, reference.gradients), gradient),
        "replay": (seen.replay_error or 0.0, 0.0),
    }
    return [f"{name} {error:.1e}" for name, (error, limit) in errors.items() if not error <= limit]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("algorithm", [{}, GRPO], ids=["p3o", "grpo"])
def test_a_step_does_not_depend_on_how_it_is_cut(checkpoint: Path, dtype: str, algorithm: dict[str, str]) -> None:
    cases = [cut | {"dtype": dtype, "algorithm": algorithm} for cut in CUTS]
    results = {world: run_ranks(_steps, world, checkpoint, cases) for world in (1, 2)}
    reference = results[1][0][0]
    valid = sum(len(sample.response_ids) for sample in step_samples())
    assert reference.tokens == valid
    assert 0.1 < reference.cap < 0.9  # an ESS at its bounds would hide a wrong sum
    faults = {
        (world, rank, str(cut)): _faults(seen, reference, dtype)
        for world, ranks in results.items()
        for rank, steps in enumerate(ranks)
        for cut, seen in zip(CUTS, steps, strict=True)
    }
    assert not any(faults.values()), {case: wrong for case, wrong in faults.items() if wrong}
    # Both kinds of cut were really there: equal counts over DP, reached with dummies.
    by_budget = [steps[CUTS.index({"tokens": 20})] for steps in results[2]]
    assert by_budget[0].micro_batches == by_budget[1].micro_batches > 1
    assert sum(seen.dummies for ranks in results.values() for steps in ranks for seen in steps) > 0


def _pooled(env: RankEnv, checkpoint: Path, splits: int, algorithm: dict[str, str]) -> tuple[float, float, float]:
    with step_rank(env, step_preset(checkpoint, env.world_size, splits=splits, algorithm=algorithm)) as rank:
        means = run_step(rank, step_samples()).means
    return means["tokens"], means["ess"], means["loss"]


def test_the_micro_batch_scope_does_depend_on_the_cut(checkpoint: Path) -> None:
    """The figures above are no property of the model: under the other scope the same cuts give other losses."""
    scope = {"advantage_estimator": "p3o", "ess_scope": "micro_batch"}
    whole, cut = (run_ranks(_pooled, 1, checkpoint, splits, scope)[0] for splits in (1, 4))
    pooled = run_ranks(_pooled, 2, checkpoint, 1, scope)
    assert whole[0] == cut[0] == pooled[0][0]
    assert abs(whole[1] - cut[1]) > 1e-3
    assert abs(whole[2] - cut[2]) > 1e-3
    # One micro-batch per rank: pooling over DP gives back the whole step.
    assert pooled[0] == pooled[1] == pytest.approx(whole, rel=1e-9)
