"""What a failed step leaves behind: nothing. Weights, Adam's moments, schedule, counters and random streams stay put.

Through the trainer of a rank, as the loop calls it; ``test_failure_agreement.py`` has the layouts and the error.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from p3o_launch.errors import NonFiniteRatioError
from p3o_launch.runtime.mcore.batch import forward_inputs
from p3o_launch.runtime.mcore.rng import rng_state
from p3o_launch.runtime.mcore.trainer import MegatronRank
from p3o_launch.runtime.types import Sample
from tests.mcore.ranks import RankEnv, run_ranks
from tests.mcore.step_setup import step_preset, step_rank, step_samples, weights
from tests.mcore.tiny import tiny_model, write_hf_checkpoint

LIMIT_S = 10.0
STEP_SCOPE = {"advantage_estimator": "p3o"}
MICRO_BATCH_SCOPE = {"advantage_estimator": "p3o", "ess_scope": "micro_batch"}
GRPO = {"advantage_estimator": "grpo"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf_checkpoint("qwen3", tmp_path_factory.mktemp("hf"))


@dataclass
class Failure:
    """What one rank saw of a step that failed, and of the good step after it. ``guilty``: it held the bad figure."""

    step: int | None
    ranks: tuple[int, ...]
    message: str
    guilty: bool
    seconds: float
    unmoved: bool
    as_without: bool


def _with_nan(samples: list[Sample], index: int) -> list[Sample]:
    """The same samples, with one behaviour log-prob of sample ``index`` that is not a number."""
    bad = samples[index]
    log_probs = (*bad.behavior_log_probs[:-1], math.nan)
    return [*samples[:index], replace(bad, behavior_log_probs=log_probs), *samples[index + 1 :]]


def _holds_nan(rank: MegatronRank, samples: list[Sample]) -> bool:
    """Whether this rank computes a ratio from the bad figure: last stage, and its part of the tokens."""
    ready = [forward_inputs(batch, rank.groups.cp) for batch in rank.micro_batches(samples)]
    return rank.groups.is_last_stage and any(bool(r.behavior_log_probs[r.mask].isnan().any()) for r in ready)


@contextmanager
def _nan_weights(rank: MegatronRank) -> Iterator[None]:
    """The first parameter of this rank, all nan for as long as the block lasts."""
    parameter = next(rank.chunks[0].parameters())
    kept = parameter.detach().clone()
    try:
        with torch.no_grad():
            parameter.fill_(math.nan)
        yield
    finally:
        with torch.no_grad():
            parameter.copy_(kept)


def _state(rank: MegatronRank) -> tuple[list[torch.Tensor], Any]:
    """Everything a step moves: weights, Adam's moments, schedule and random streams."""
    inner = [value for state in rank.optimizer.optimizer.state.values() for value in state.values()]
    random = rng_state()
    tensors = [*weights(rank), *(value.clone() for value in inner if isinstance(value, torch.Tensor))]
    tensors += [random["cpu"], *random["tracker"].values()]
    return tensors, (
        rank.optimizer_step,
        rank.scheduler.num_steps,
        rank.scheduler.get_lr(rank.optimizer.param_groups[0]),
    )


def _equal(ours: tuple[list[torch.Tensor], Any], theirs: tuple[list[torch.Tensor], Any]) -> bool:
    same = (torch.equal(a, b) for a, b in zip(ours[0], theirs[0], strict=True))
    return len(ours[0]) == len(theirs[0]) and ours[1] == theirs[1] and all(same)


def _train(rank: MegatronRank) -> tuple[list[torch.Tensor], Any]:
    rank.train_step(step_samples())
    return _state(rank)


def _failures(env: RankEnv, checkpoint: Path, cases: list[dict[str, Any]], faults: list[str]) -> list[list[Failure]]:
    return [[_failure(env, checkpoint, case, fault) for fault in faults] for case in cases]


def _failure(env: RankEnv, checkpoint: Path, case: dict[str, Any], fault: str) -> Failure:
    """A good step, a failing one, a good one; and the good ones alone."""
    preset = step_preset(checkpoint, env.world_size, **case)
    with step_rank(env, preset) as rank:
        rank.train_step(step_samples(seed=1))
        without = _train(rank)
    samples, poison = step_samples(seed=2), _POISON[fault]
    with step_rank(env, preset) as rank:
        rank.train_step(step_samples(seed=1))
        bad_weights = fault == "weights" and env.rank == env.world_size - 1
        if poison is not None:
            samples = _with_nan(samples, poison)
        before = _state(rank)
        started = time.perf_counter()
        block: AbstractContextManager[None] = _nan_weights(rank) if bad_weights else nullcontext()
        with block, pytest.raises(NonFiniteRatioError) as caught:
            rank.train_step(samples)
        seconds = time.perf_counter() - started
        error, after = caught.value, _state(rank)
        return Failure(
            step=error.step,
            ranks=error.ranks,
            message=error.message,
            guilty=_holds_nan(rank, samples) if poison is not None else bad_weights and rank.groups.is_last_stage,
            seconds=seconds,
            unmoved=_equal(before, after) and rank.step.context is None,
            as_without=_equal(_train(rank), without),
        )


# Index of the sample with the bad figure: it lies in the first and in the last micro-batch of its rank.
_POISON = {"first micro-batch": 1, "last micro-batch": 15, "weights": None}


DROPOUT = tiny_model(attention_dropout=0.1, hidden_dropout=0.1)
CASES: list[dict[str, Any]] = [
    {"algorithm": STEP_SCOPE, "pp": 2},
    {"algorithm": MICRO_BATCH_SCOPE, "tp": 2},
    {"algorithm": GRPO, "cp": 2},
    # Single-pass objectives may use dropout: a failed step leaves its streams alone, too.
    {"algorithm": MICRO_BATCH_SCOPE, "model": DROPOUT},
    {"algorithm": GRPO, "model": DROPOUT, "tp": 2},
]


def test_a_failed_step_moves_nothing_and_the_next_is_as_without_it(checkpoint: Path) -> None:
    faults, cases = list(_POISON), [case | {"splits": 2} for case in CASES]
    ranks = run_ranks(_failures, 2, checkpoint, cases, faults)
    for c, case in enumerate(CASES):
        for f, fault in enumerate(faults):
            _check([rank[c][f] for rank in ranks], (case, fault))


def _check(seen: list[Failure], where: Any) -> None:
    assert {failure.step for failure in seen} == {2}, where
    assert len({failure.ranks for failure in seen}) == len({failure.message for failure in seen}) == 1, where
    guilty = tuple(rank for rank, failure in enumerate(seen) if failure.guilty)
    if where[1] == "weights":  # the ranks that share a token's computation see it too
        assert set(guilty) <= set(seen[0].ranks), where
        assert len(seen[0].ranks) > 0, where
    else:
        assert seen[0].ranks == guilty, where
        assert len(guilty) > 0, where
    named = ", ".join(map(str, seen[0].ranks))
    assert "optimizer step 2: " in seen[0].message, where
    assert seen[0].message.endswith(f"(seen on rank{'s' * (len(seen[0].ranks) > 1)} {named})"), where
    assert max(failure.seconds for failure in seen) < LIMIT_S, where
    assert all(failure.unmoved for failure in seen), where
    assert all(failure.as_without for failure in seen), where
