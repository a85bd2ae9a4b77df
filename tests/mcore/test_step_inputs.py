"""Both passes feed the model the same tensors, from one builder; and what a pass must not be asked to do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from p3o_launch.errors import RunError
from p3o_launch.runtime.mcore import step as step_module
from p3o_launch.runtime.mcore.batch import ForwardInputs, MicroBatch, forward_inputs
from p3o_launch.runtime.mcore.trainer import MegatronRank
from p3o_launch.runtime.mcore.weights_hf import gathered
from tests.mcore.ranks import RankEnv, run_ranks
from tests.mcore.step_setup import step_preset, step_rank, step_samples
from tests.mcore.tiny import write_hf_checkpoint

FORMS: dict[int, list[dict[str, Any]]] = {
    1: [{"splits": 4}, {"packed": True, "splits": 4}, {"tokens": 20}],
    2: [
        {"tokens": 20},
        {"cp": 2, "splits": 2},
        {"cp": 2, "packed": True, "splits": 2},
        {"pp": 2, "vpp_layers": 1, "splits": 4},
        {"tp": 2, "sp": True, "splits": 2},
    ],
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf_checkpoint("qwen3", tmp_path_factory.mktemp("hf"))


Call = tuple[int, dict[str, Any]]
"""Which model chunk, and what it was called with."""


class Recorder:
    """Every call of a model chunk and of the input builder, each pass for itself."""

    def __init__(self, rank: MegatronRank) -> None:
        self.calls: dict[bool, list[Call]] = {False: [], True: []}
        self.built: dict[bool, list[tuple[MicroBatch, ForwardInputs]]] = {False: [], True: []}
        for number, chunk in enumerate(rank.chunks):
            chunk.register_forward_pre_hook(self._hook(number), with_kwargs=True)
        step_module.forward_inputs = self._build  # type: ignore[attr-defined]

    def _hook(self, number: int) -> Any:
        def record(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            assert not args, "inputs go by name"
            self.calls[torch.is_grad_enabled()].append((number, dict(kwargs)))

        return record

    def _build(self, micro_batch: MicroBatch, group: Any) -> ForwardInputs:
        inputs = forward_inputs(micro_batch, group)
        self.built[torch.is_grad_enabled()].append((micro_batch, inputs))
        return inputs


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if hasattr(one, "cu_seqlens_q"):
        return type(one) is type(other) and all(_same(vars(one)[key], vars(other)[key]) for key in vars(one))
    return bool(one is other or one == other)


def _differences(statistics: list[Call], training: list[Call]) -> list[str]:
    """What the second pass fed otherwise than the first: per chunk and call, by name of the input."""
    found = [] if len(statistics) == len(training) else [f"{len(statistics)} and {len(training)} calls"]
    for chunk in sorted({number for number, _ in statistics + training}):
        first = [kwargs for number, kwargs in statistics if number == chunk]
        second = [kwargs for number, kwargs in training if number == chunk]
        for index, (one, other) in enumerate(zip(first, second, strict=False)):
            names = sorted(one.keys() | other.keys())
            found += [
                f"chunk {chunk} call {index} {name}" for name in names if not _same(one.get(name), other.get(name))
            ]
    return found


@dataclass
class Passes:
    differences: list[str]
    calls: int
    micro_batches: int
    chunks: int
    same_batches: bool
    loss_inputs_same: bool
    all_from_builder: bool


def _record(env: RankEnv, checkpoint: Path, cases: list[dict[str, Any]]) -> list[Passes]:
    seen = []
    for case in cases:
        with step_rank(env, step_preset(checkpoint, env.world_size, **case)) as rank:
            micro_batches, recorder = rank.micro_batches(step_samples()), Recorder(rank)
            rank.step.run(micro_batches, step=1)
        statistics, training = recorder.built[False], recorder.built[True]
        built = {id(value) for _, inputs in statistics + training for value in inputs.model_kwargs.values()}
        given = [value for calls in recorder.calls.values() for _, kwargs in calls for value in kwargs.values()]
        seen.append(
            Passes(
                differences=_differences(recorder.calls[False], recorder.calls[True]),
                calls=len(recorder.calls[False]),
                micro_batches=len(micro_batches),
                chunks=len(rank.chunks),
                # Virtual stages take turns, in another order when there is a backward: as sets of objects, per chunk.
                same_batches=sorted(id(batch) for batch, _ in statistics) == sorted(id(batch) for batch, _ in training)
                and {id(batch) for batch, _ in statistics} == set(map(id, micro_batches)),
                loss_inputs_same=all(_loss_inputs_equal(a, b) for a, b in _paired(statistics, training)),
                all_from_builder=all(id(value) in built for value in given),
            )
        )
    return seen


def _paired(first: list[Any], second: list[Any]) -> list[tuple[ForwardInputs, ForwardInputs]]:
    by_batch = {id(batch): inputs for batch, inputs in second}
    return [(inputs, by_batch[id(batch)]) for batch, inputs in first]


def _loss_inputs_equal(one: ForwardInputs, other: ForwardInputs) -> bool:
    names = ("targets", "mask", "behavior_log_probs", "advantages")
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in names)


def test_both_passes_feed_the_model_the_same(checkpoint: Path) -> None:
    for world, cases in FORMS.items():
        for rank, results in enumerate(run_ranks(_record, world, checkpoint, cases)):
            for case, passes in zip(cases, results, strict=True):
                where = (world, rank, case)
                assert passes.differences == [], where
                assert passes.calls == passes.micro_batches * passes.chunks > 0, where
                assert passes.same_batches, where
                assert passes.loss_inputs_same, where
                assert passes.all_from_builder, where


def _record_two_builders(env: RankEnv, checkpoint: Path, what: str) -> list[str]:
    """The training pass is given another builder, whose inputs differ a little."""
    with step_rank(env, step_preset(checkpoint, env.world_size, splits=2, packed=True)) as rank:
        recorder = Recorder(rank)

        def other(micro_batch: MicroBatch, group: Any) -> ForwardInputs:
            inputs = recorder._build(micro_batch, group)
            if not torch.is_grad_enabled():
                return inputs
            kwargs = dict(inputs.model_kwargs)
            if what == "packed_seq_params":
                kwargs[what] = replace(kwargs[what], max_seqlen_q=99)
            elif what == "position_ids":
                kwargs[what] = kwargs[what] + 1
            else:
                kwargs[what] = kwargs[what].clone().clamp(max=30)
            return replace(inputs, model_kwargs=kwargs)

        step_module.forward_inputs = other  # type: ignore[attr-defined]
        rank.step.run(rank.micro_batches(step_samples()), step=1)
        return _differences(recorder.calls[False], recorder.calls[True])


@pytest.mark.parametrize("what", ["input_ids", "position_ids", "packed_seq_params"])
def test_the_comparison_sees_another_builder(checkpoint: Path, what: str) -> None:
    """A control: the test above fails when the passes see different inputs."""
    differences = run_ranks(_record_two_builders, 1, checkpoint, what)[0]
    assert differences
    assert all(line.endswith(f" {what}") for line in differences)


def _dynamic_groups(env: RankEnv, checkpoint: Path, mixed: bool) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """A step whose rows come whole and are split by the step, or every other of them over a group of the rank alone."""
    import torch.distributed as dist

    preset = step_preset(checkpoint, env.world_size, cp=2, splits=4, packed=True)
    with step_rank(env, preset) as rank:
        alone = [dist.new_group([member]) for member in range(env.world_size)][env.rank]
        micro_batches = rank.micro_batches(step_samples())
        if mixed:
            # Two rows that would be split over both ranks are dealt out whole instead, one to each.
            whole = [replace(micro_batches[index], cp_group=alone) for index in (1, 3)]
            micro_batches = [micro_batches[0], whole[rank.groups.cp_rank], micro_batches[2]]
        shapes = {tuple(batch.tokens.shape) for batch in micro_batches}
        means = rank.step.run(micro_batches, step=1).means
        assert {tuple(batch.tokens.shape) for batch in micro_batches} == shapes  # unsplit tokens stay unsplit
        return means, {name: gradient.clone() for name, gradient in gathered(rank.chunks, rank.groups, gradients=True)}


def test_rows_may_name_their_own_context_parallel_group(checkpoint: Path) -> None:
    """Unsplit tokens plus a group per micro-batch: the same N, cap, loss and gradient, and an exact replay."""
    usual, mixed = (run_ranks(_dynamic_groups, 2, checkpoint, mix) for mix in (False, True))
    for (means, gradients), (expected, reference) in zip(mixed, usual, strict=True):
        assert means["tokens"] == expected["tokens"] == sum(len(s.response_ids) for s in step_samples())
        assert means["replay_error"] == 0.0
        assert means["ess"] == pytest.approx(expected["ess"], rel=1e-9)
        assert means["loss"] == pytest.approx(expected["loss"], rel=1e-9)
        norm = sum(float(tensor.square().sum()) for tensor in reference.values())
        difference = sum(float((gradients[name] - reference[name]).square().sum()) for name in reference)
        assert (difference / norm) ** 0.5 < 1e-8


def _ask_for_a_plan(env: RankEnv, checkpoint: Path) -> tuple[str, str | None, int, list[int]]:
    """Run the step under a schedule that asks for a schedule plan, as Megatron's combined 1F1B does."""
    from megatron.core.pipeline_parallel import schedules

    with step_rank(env, step_preset(checkpoint, env.world_size, splits=2)) as rank:
        calls = []

        def combined(*, forward_step_func: Any, data_iterator: Any, model: Any, **_: Any) -> None:
            calls.append(1)
            forward_step_func(data_iterator, model, return_schedule_plan=True)

        ordinary = schedules.get_forward_backward_func
        schedules.get_forward_backward_func = lambda *_: combined
        try:
            with pytest.raises(RunError) as caught:
                rank.step.run(rank.micro_batches(step_samples()), step=1)
        finally:
            schedules.get_forward_backward_func = ordinary
        means = rank.step.run(rank.micro_batches(step_samples()), step=2).means  # nothing is left behind
        return caught.value.message, caught.value.hint, len(calls), [int(means["tokens"])]


def test_a_schedule_plan_is_refused(checkpoint: Path) -> None:
    message, hint, calls, tokens = run_ranks(_ask_for_a_plan, 1, checkpoint)[0]
    assert "schedule plan" in message
    assert hint is not None
    assert "overlap_moe_expert_parallel_comm" in hint
    assert calls == 1  # refused in the first pass
    assert tokens == [sum(len(sample.response_ids) for sample in step_samples())]
