"""Partition invariance on real processes, and controls: each fault that would hide in a plausible curve is caught."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from p3o_launch.check import check_file
from p3o_launch.presets import resolve_name
from p3o_launch.runtime.verify import Layout, Verdict, default_layouts, judge_all
from p3o_launch.schema import Preset
from tests.mcore.ranks import RankEnv, run_ranks

BY_NAME = {layout.name: layout for layout in default_layouts(4)}
DEFAULT = (
    "reference",
    "split 4",
    "dp2 split 2",
    "dp2 dynamic",
    "tp2 sp",
    "pp2 virtual",
    "cp2 packed",
    "tp2 dp2",
    "tp2 pp2",
    "cp2 dp2",
    "moe reference",
    "moe dp2 ep2",
    "float32 reference",
    "float32 tp2 pp2",
)


def base() -> Preset:
    preset = check_file(resolve_name("on_policy"), profile="cpu").preset
    assert preset is not None
    return preset


def measured(layouts: Sequence[Layout], fault: str | None = None) -> list[Verdict]:
    from p3o_launch.runtime.mcore.probe import combine

    world = max(layout.ranks for layout in layouts)
    ranks = run_ranks(_probe, world, base(), list(layouts), fault, timeout=400.0)
    return judge_all(layouts, [combine([results[i] for results in ranks]) for i in range(len(layouts))])


def _probe(env: RankEnv, preset: Preset, layouts: list[Layout], fault: str | None) -> list[Any]:
    from p3o_launch.runtime.mcore import probe

    if fault is not None:
        _FAULTS[fault]()
    return probe.probe_layouts(env, preset, layouts, env.directory)


def _sum_over_all_ranks() -> None:
    """The moments over the world: replicas of the log-probs on TP ranks count twice."""
    import torch
    import torch.distributed as dist

    from p3o_launch.runtime.mcore import step

    def over_the_world(moments: torch.Tensor, group: object) -> torch.Tensor:
        if dist.get_world_size() > 1:
            dist.all_reduce(moments)
        return moments

    step.sum_moments = over_the_world  # type: ignore[assignment]


def _keep_key_gradients() -> None:
    """The backward of the gathered keys without the sum over context-parallel ranks."""
    from p3o_launch.runtime.mcore import attention

    def own_part(ctx: Any, grad: Any) -> tuple[Any, None]:
        return grad.chunk(ctx.group.size())[ctx.group.rank()].contiguous(), None

    attention._GatherSequence.backward = staticmethod(own_part)  # type: ignore[method-assign, assignment]


def _means_of_micro_batches() -> None:
    """The loss as a mean of micro-batch means, scaled to the step's size."""
    from p3o_launch.runtime.mcore.step import PolicyStep

    whole = PolicyStep._p3o_loss

    def mean(self: PolicyStep, sums: Any, failed: Any, inputs: Any, logits: Any) -> Any:
        loss, count, extra = whole(self, sums, failed, inputs, logits)
        return loss / count.clamp(min=1) * 55 / 4, count, extra

    PolicyStep._p3o_loss = mean  # type: ignore[method-assign]


def _cap_of_the_rank() -> None:
    """Each DP rank caps by its own tokens: the all-reduce is left out."""
    from p3o_launch.runtime.mcore import step

    step.sum_moments = lambda moments, group: moments  # type: ignore[assignment]


_FAULTS = {
    "sum over all ranks": _sum_over_all_ranks,
    "keep key gradients": _keep_key_gradients,
    "means of micro-batches": _means_of_micro_batches,
    "cap of the rank": _cap_of_the_rank,
}


def test_layouts_agree_and_the_ess_costs_32_bytes() -> None:
    verdicts = measured([BY_NAME[name] for name in DEFAULT])
    assert [f"{v.layout.name}: {fault}" for v in verdicts for fault in v.faults] == []
    for verdict in verdicts:
        layout, figures = verdict.layout, verdict.measured
        # One all-reduce where there are DP x CP ranks, one broadcast where there are stages.
        expected = (layout.dp * layout.cp > 1) + (layout.pp > 1)
        assert (figures.ess_collectives, figures.ess_bytes) == (expected, 32 * expected), layout.name


@pytest.mark.slow
def test_the_whole_matrix_agrees() -> None:
    verdicts = measured(default_layouts(4))
    assert len(verdicts) >= 24
    assert [f"{v.layout.name}: {fault}" for v in verdicts for fault in v.faults] == []


def test_tensor_parallel_replicas_counted_twice_hide_in_the_ess_and_show_in_n() -> None:
    verdict = measured([BY_NAME["reference"], BY_NAME["tp2"]], "sum over all ranks")[1]
    assert verdict.cap_error < 1e-7
    assert verdict.measured.tokens == 110
    assert any(fault.startswith("N is 110") for fault in verdict.faults)


def test_keys_without_their_gradient_reduction_are_caught() -> None:
    verdict = measured([BY_NAME["reference"], BY_NAME["cp2"]], "keep key gradients")[1]
    assert verdict.cap_error < 1e-9
    assert verdict.measured.gradient_error > 1e-3


def test_a_mean_of_micro_batch_means_is_another_objective() -> None:
    verdict = measured([BY_NAME["reference"], BY_NAME["split 4"]], "means of micro-batches")[1]
    assert verdict.measured.gradient_error > 1e-3


def test_a_cap_of_one_rank_is_caught() -> None:
    verdict = measured([BY_NAME["reference"], BY_NAME["dp2"]], "cap of the rank")[1]
    assert verdict.faults


def test_the_command_prints_a_verdict_and_ends_well() -> None:
    command = [sys.executable, "-m", "p3o_launch", "verify", "--world", "2", "--layouts", "dp2", "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["agrees"] is True
    assert [layout["name"] for layout in report["layouts"]] == ["reference", "dp2"]
