"""Two real gloo processes: the sums of a step, the verdict every rank shares, and how many collectives that takes."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from p3o_launch.errors import NonFiniteRatioError
from p3o_launch.runtime.collectives import broadcast_moments, sum_moments
from p3o_launch.runtime.objective import ess_moments, step_context

GOLDEN = Path(__file__).parents[1] / "data" / "p3o_golden.json"


def golden_case() -> dict[str, Any]:
    cases = json.loads(GOLDEN.read_text())["cases"]
    return next(case for case in cases if case["name"] == "stats_two_ranks_two_microbatches")


def moments_of(block: dict[str, Any]) -> Tensor:
    names = ("log_probs", "behavior_log_probs", "mask")
    p, b, mask = (torch.tensor(block[name]["data"], dtype=torch.float32) for name in names)
    return ess_moments(p, b, mask.bool())


def in_two_ranks(rank: int, store: str, results: str) -> None:
    """One rank: local moments of its micro-batches, then what the step does with them."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    try:
        both = dist.new_group([0, 1])
        alone = [dist.new_group([0]), dist.new_group([1])][rank]
        local = [moments_of(block) for block in golden_case()["inputs"]["ranks"][rank]]
        with (
            patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduced,
            patch.object(dist, "broadcast", wraps=dist.broadcast) as sent,
        ):
            total = sum_moments(torch.stack(local).sum(0), both)
            per_index = [sum_moments(moments.clone(), both) for moments in local]
            untouched = sum_moments(local[0].clone(), None), sum_moments(local[0].clone(), alone)
            from_last = broadcast_moments(total if rank == 1 else torch.full((4,), -1.0, dtype=torch.float64), 1, both)
            calls = (reduced.call_count, sent.call_count, reduced.call_args_list[0].args[0].numel())
        # Only rank 1 sees the nan; both must raise.
        poisoned = local[0].clone() if rank == 0 else torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64)
        try:
            step_context(sum_moments(poisoned, both))
            verdict = "passed"
        except NonFiniteRatioError:
            verdict = "raised"
        report = {
            "total": total.tolist(),
            "per_index": [moments.tolist() for moments in per_index],
            "untouched": all(torch.equal(moments, local[0]) for moments in untouched),
            "from_last": from_last.tolist(),
            "calls": calls,
            "verdict": verdict,
        }
        Path(results, f"{rank}.json").write_text(json.dumps(report))
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    directory = tmp_path_factory.mktemp("ranks")
    mp.spawn(in_two_ranks, args=(str(directory / "store"), str(directory)), nprocs=2)
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(2)]


def test_a_step_is_one_all_reduce_of_four_numbers_and_one_broadcast(reports: list[dict[str, Any]]) -> None:
    # One for the step, two for the micro-batch scope's two indices; groups of one and None take none.
    assert [report["calls"] for report in reports] == [[3, 1, 4], [3, 1, 4]]
    assert all(report["untouched"] for report in reports)


def test_both_ranks_hold_the_golden_sums_of_the_whole_step(reports: list[dict[str, Any]]) -> None:
    expected = golden_case()["expected"]["relax"]["whole_step"]
    assert reports[0]["total"] == reports[1]["total"]
    assert reports[0]["total"][:2] == pytest.approx([expected["sum_ratio"], expected["sum_ratio_sq"]], rel=2e-7)
    assert reports[0]["total"][2:] == [expected["valid_token_count"], 0.0]
    context = step_context(torch.tensor(reports[0]["total"], dtype=torch.float64))
    assert context.ess == pytest.approx(expected["normalized_ess"], abs=1e-7)


def test_micro_batch_scope_pools_the_same_index_over_the_ranks(reports: list[dict[str, Any]]) -> None:
    expected = golden_case()["expected"]["relax"]["per_microbatch_index_allreduced"]
    for moments, one in zip(reports[0]["per_index"], expected, strict=True):
        context = step_context(torch.tensor(moments, dtype=torch.float64))
        assert context.ess == pytest.approx(one["ess"], abs=1e-7)
        assert context.valid_tokens == one["valid_token_count"]


def test_the_other_stage_receives_what_the_last_one_summed(reports: list[dict[str, Any]]) -> None:
    assert reports[0]["from_last"] == reports[1]["from_last"] == reports[1]["total"]


def test_a_bad_token_on_one_rank_raises_on_both(reports: list[dict[str, Any]]) -> None:
    assert [report["verdict"] for report in reports] == ["raised", "raised"]


@pytest.mark.parametrize("moments", [torch.zeros(4), torch.zeros(3, dtype=torch.float64)])
def test_anything_but_four_doubles_is_refused_before_a_collective(moments: Tensor) -> None:
    with pytest.raises(ValueError, match="float64 of shape"):
        sum_moments(moments, None)
    with pytest.raises(ValueError, match="float64 of shape"):
        broadcast_moments(moments, 0, None)
