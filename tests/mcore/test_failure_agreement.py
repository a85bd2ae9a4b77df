"""A figure that is not finite on one rank, in one micro-batch: every rank raises the same error and training goes on.

In every layout, for every objective, in each pass. Compared bit by bit with ranks that never saw the failure.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from p3o_launch.errors import NonFiniteRatioError
from p3o_launch.runtime.mcore.batch import MicroBatch, forward_inputs
from p3o_launch.runtime.mcore.rng import rng_state
from p3o_launch.runtime.mcore.step import Objective
from p3o_launch.runtime.mcore.trainer import MegatronRank
from p3o_launch.schema import Model
from tests.mcore.ranks import RankEnv, run_ranks
from tests.mcore.step_setup import step_preset, step_rank, step_samples, weights
from tests.mcore.tiny import model_of, write_hf_checkpoint

LIMIT_S = 10.0
OBJECTIVES = (Objective("p3o"), Objective("p3o", ess_scope="micro_batch"), Objective("grpo"))
SOME: dict[int, list[dict[str, Any]]] = {
    1: [{"splits": 2}],
    2: [
        {"splits": 2},
        {"tp": 2, "sp": True, "splits": 2},
        {"pp": 2, "vpp_layers": 1, "splits": 2},
        {"cp": 2, "packed": True, "splits": 2},
    ],
    4: [{"tp": 2, "pp": 2, "splits": 2}],
}
EVERY: dict[int, list[dict[str, Any]]] = {
    2: [
        {"packed": True, "splits": 4},
        {"tokens": 24},
        {"tp": 2, "splits": 2},
        {"pp": 2, "splits": 4},
        {"cp": 2, "splits": 2},
        {"ep": 2, "splits": 2},
    ],
    4: [
        {"splits": 2},
        {"tokens": 16},
        {"tp": 2, "splits": 2},
        {"pp": 2, "splits": 2},
        {"pp": 2, "vpp_layers": 1, "splits": 2},
        {"pp": 4, "splits": 4},
        {"cp": 4, "splits": 2},
        {"cp": 2, "splits": 2},
        {"cp": 2, "tp": 2, "splits": 2},
        {"cp": 2, "pp": 2, "splits": 2},
        {"ep": 2, "splits": 2},
    ],
}


@dataclasses.dataclass
class Failure:
    """One failing call on one rank. ``saw``: whether the fault was put into this rank's own figures."""

    what: str
    error: str
    step: int | None
    ranks: tuple[int, ...]
    saw: bool
    seconds: float
    untouched: bool


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A dense model and one with experts."""
    directory = tmp_path_factory.mktemp("hf")
    dense = write_hf_checkpoint("qwen3", directory / "dense")
    return {"dense": dense, "moe": write_hf_checkpoint("qwen3_moe", directory / "moe", tied=False)}


def _preset(checkpoints: dict[str, Path], env: RankEnv, case: dict[str, Any], **changes: Any) -> Any:
    moe = "ep" in case
    model: Model | None = model_of("qwen3_moe", tied=False) if moe else None
    extra = {"etp": 1} if moe else {}
    checkpoint = checkpoints["moe" if moe else "dense"]
    return step_preset(checkpoint, env.world_size, model=model, **(case | extra | changes))


def _with_bad_log_prob(rank: MegatronRank, value: float) -> tuple[list[MicroBatch], bool]:
    """The step's micro-batches, one behaviour log-prob of one sample replaced; whether this rank computes with it."""
    samples = step_samples()
    victim = max(samples, key=lambda sample: len(sample.response_ids))
    log_probs = (*victim.behavior_log_probs[:-1], value)
    samples[samples.index(victim)] = dataclasses.replace(victim, behavior_log_probs=log_probs)
    micro_batches = rank.micro_batches(samples)
    inputs = [forward_inputs(batch, rank.groups.cp) for batch in micro_batches]
    mine = any(not bool(torch.isfinite(i.behavior_log_probs[i.mask]).all()) for i in inputs)
    return micro_batches, mine and rank.groups.is_last_stage


@contextmanager
def _bad_logit(rank: MegatronRank, pass_: str, micro_batch: MicroBatch) -> Iterator[bool]:
    """NaN in one logit of each token of ``micro_batch``, the second, on the last stage's last TP rank of DP rank 0.

    On the CP ranks that hold a valid token of it: one may hold nothing but prompt and padding. Gives whether this
    rank's log-probs are spoilt: those of the TP replicas are, through the softmax's sum.
    """
    groups, calls = rank.groups, [0, 0]
    valid = bool(forward_inputs(micro_batch, groups.cp).mask.any())
    here = groups.is_last_stage and groups.dp_rank == 0 and valid

    def spoil(module: Any, args: Any, logits: torch.Tensor) -> torch.Tensor:
        training = torch.is_grad_enabled()
        calls[training] += 1
        if calls[training] != 2 or (pass_ == "statistics") == training:
            return logits
        flags = torch.zeros_like(logits)
        flags[..., 0] = float("nan")
        return logits + flags

    bad = here and groups.tp_rank == groups.tp_size - 1
    handle = rank.chunks[-1].register_forward_hook(spoil) if bad else None
    try:
        yield here
    finally:
        if handle is not None:
            handle.remove()


def _attempt(rank: MegatronRank, what: str, objective: Objective) -> Failure:
    rank.step.objective = objective
    spoiler: Any = nullcontext(False)
    micro_batches, saw = rank.micro_batches(step_samples()), False
    if what in ("nan", "inf"):
        micro_batches, saw = _with_bad_log_prob(rank, float(what))
    else:
        spoiler = _bad_logit(rank, what, micro_batches[1])
    before, random_before = weights(rank), rng_state()
    error: NonFiniteRatioError | None = None
    started = time.perf_counter()
    with spoiler as spoilt:
        try:
            rank.step.run(micro_batches, step=7)
        except NonFiniteRatioError as raised:
            error = raised
    seconds = time.perf_counter() - started
    return Failure(
        what=f"{objective.estimator} {objective.ess_scope}: {what}",
        error="" if error is None else error.message,
        step=None if error is None else error.step,
        ranks=() if error is None else error.ranks,
        saw=saw or bool(spoilt),
        seconds=seconds,
        untouched=_equal(before, weights(rank)) and _equal_random(random_before) and rank.step.context is None,
    )


def _equal(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def _same(ours: Any, theirs: Any) -> bool:
    return ours == theirs if isinstance(ours, str) else _equal(ours, theirs)


def _equal_random(before: dict[str, Any]) -> bool:
    now = rng_state()
    return torch.equal(now["cpu"], before["cpu"]) and all(
        torch.equal(now["tracker"][name], state) for name, state in before["tracker"].items()
    )


def _whats(objective: Objective) -> tuple[str, ...]:
    return ("nan", "inf", "statistics", "training") if objective.two_pass else ("nan", "inf", "training")


def _with_and_without(
    env: RankEnv, checkpoints: dict[str, Path], cases: list[dict[str, Any]]
) -> list[tuple[list[Failure], list[str]]]:
    """Per layout: the failures, and what the good steps between them left different from a run without failures."""
    return [_one_layout(env, checkpoints, case) for case in cases]


def _one_layout(env: RankEnv, checkpoints: dict[str, Path], case: dict[str, Any]) -> tuple[list[Failure], list[str]]:
    failures: list[Failure] = []
    runs: list[dict[str, Any]] = []
    for failing in (True, False):
        with step_rank(env, _preset(checkpoints, env, case)) as rank:
            figures: dict[str, Any] = {}
            for objective in OBJECTIVES:
                rank.step.objective = objective
                name = f"{objective.estimator} {objective.ess_scope}"
                figures[f"{name} before"] = repr(rank.step.run(rank.micro_batches(step_samples()), step=1).means)
                if failing:
                    failures += [_attempt(rank, what, objective) for what in _whats(objective)]
                rank.step.objective = objective
                after = rank.step.run(rank.micro_batches(step_samples(seed=1)), step=2)
                figures[f"{name} after"] = repr((after.means, after.grad_norm))
                figures[f"{name} weights"] = weights(rank)
            runs.append(figures)
            if env.world_size > 1:
                dist.barrier()
    return failures, [name for name, value in runs[0].items() if not _same(value, runs[1][name])]


def _assert_agreement(checkpoints: dict[str, Path], layouts: dict[int, list[dict[str, Any]]]) -> None:
    for world, cases in layouts.items():
        ranks = run_ranks(_with_and_without, world, checkpoints, cases, timeout=300.0)
        for index, case in enumerate(cases):
            where = f"{world} ranks, {case}"
            for seen in zip(*(failures for failures, _ in (results[index] for results in ranks)), strict=True):
                _assert_same_error(seen, where)
            assert [changed for _, changed in (results[index] for results in ranks)] == [[]] * world, where


def _assert_same_error(seen: Sequence[Failure], where: str) -> None:
    where = f"{where}, {seen[0].what}"
    sources = tuple(rank for rank, failure in enumerate(seen) if failure.saw)
    assert sources, where
    for failure in seen:
        assert failure.error.startswith("optimizer step 7: "), where
        assert failure.step == 7, where
        assert failure.error == seen[0].error, where
        assert failure.ranks == sources, (where, failure.ranks, sources)
        assert all(str(rank) in failure.error for rank in sources), where
        assert failure.seconds < LIMIT_S, where
        assert failure.untouched, where


def test_all_ranks_raise_alike_and_go_on_as_if_nothing_had_been(checkpoints: dict[str, Path]) -> None:
    _assert_agreement(checkpoints, SOME)


@pytest.mark.slow
def test_all_ranks_raise_alike_in_every_layout(checkpoints: dict[str, Path]) -> None:
    _assert_agreement(checkpoints, EVERY)
