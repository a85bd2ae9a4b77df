"""Ranks as actors on a real local Ray cluster, with a scripted class in the place of megatron."""

from __future__ import annotations

import time

import psutil
import pytest

from p3o_launch.errors import NonFiniteRatioError, RankDiedError, RankFailedError, RunInterrupted
from p3o_launch.runtime.types import GenerationRequest, SamplingParams
from p3o_launch.runtime.workers.actors import RankActors

TARGET = "rank_targets:ScriptedRank"
SAMPLING = SamplingParams(1.0, 1.0, -1, 8)


def start(plan, cluster, target=TARGET, **options):
    return RankActors.start(plan, cluster, target=target, **options)


def order(plan, *lines):
    (plan.run_dir / "orders").write_text("\n".join(lines))


@pytest.fixture
def ranks(plan, cluster):
    started = start(plan, cluster)
    yield started
    started.close()


def test_every_rank_gets_the_call_and_rank_zero_answers(plan, ranks):
    requests = [GenerationRequest(i, (1, 2), i) for i in range(3)]
    completions = ranks.generate(requests, SAMPLING)
    assert [c.request_id for c in completions] == [0, 1, 2]
    assert {c.response_ids[0] for c in completions} == {0}
    ranks.update_rollout_weights(5)
    row = ranks.train_step([])
    assert (row["rank"], row["snapshot"]) == (0, 5)


def test_output_of_each_rank_native_code_included_goes_to_its_own_log(plan, ranks):
    order(plan, "1 print")
    ranks.train_step([])
    assert "rank 0 is up" in plan.rank_log(0).read_text()
    assert "a word from native code" in plan.rank_log(1).read_text()
    assert "a word from native code" not in plan.rank_log(0).read_text()


def test_advantages_come_from_the_objective(ranks):
    assert ranks.group_advantages([1.0, 0.0, 1.0, 1.0], [0, 0, 1, 1]) == pytest.approx([0.70710578, -0.70710578, 0, 0])


def test_a_checkpoint_call_reaches_every_rank(plan, ranks):
    ranks.save_checkpoint(plan.checkpoints_dir / "x", {"next_rollout": 2})
    assert sorted(p.name for p in (plan.checkpoints_dir / "x").iterdir()) == ["rank_0", "rank_1"]


def test_close_lets_every_rank_close_and_ends_its_process(plan, cluster):
    ranks = start(plan, cluster)
    pid = int(ranks.train_step([])["pid"])
    ranks.close()
    ranks.close()
    assert {p.name for p in plan.run_dir.glob("closed_*")} == {"closed_0", "closed_1"}
    assert not alive_soon(pid)


def test_a_dead_rank_is_named_within_seconds_though_its_neighbour_hangs(plan, ranks):
    order(plan, "0 hang", "1 die")
    started = time.monotonic()
    with pytest.raises(RankDiedError, match="rank 1 died during train_step") as caught:
        ranks.train_step([])
    assert caught.value.rank == 1
    assert time.monotonic() - started < 10


def test_the_rank_that_died_is_blamed_before_the_neighbour_whose_collective_failed(plan, ranks):
    order(plan, "0 raise", "1 die")
    with pytest.raises(RankDiedError) as caught:
        ranks.train_step([])
    assert caught.value.rank == 1


def test_our_own_errors_arrive_as_themselves(plan, ranks):
    order(plan, "0 typed", "1 typed")
    with pytest.raises(NonFiniteRatioError) as caught:
        ranks.train_step([])
    assert (caught.value.step, caught.value.ranks) == (3, (0,))


@pytest.mark.parametrize(("action", "cause"), [("raise", "RuntimeError"), ("unpicklable", "Unpicklable")])
def test_foreign_and_unpicklable_errors_arrive_with_rank_class_and_log(plan, ranks, action, cause):
    order(plan, f"1 {action}")
    with pytest.raises(RankFailedError, match=f"rank 1 failed in train_step: {cause}") as caught:
        ranks.train_step([])
    assert (caught.value.rank, caught.value.cause) == (1, cause)
    assert "Traceback" in plan.rank_log(1).read_text()


def test_a_rank_that_cannot_be_set_up_stops_the_start(plan, cluster):
    order(plan, "1 setup")
    with pytest.raises(RankFailedError, match="rank 1 failed in setup: RuntimeError: this rank cannot be set up"):
        start(plan, cluster)


def test_a_stop_request_ends_a_call_that_hangs(plan, cluster):
    asked = []
    ranks = start(plan, cluster, should_stop=lambda: bool(asked))
    order(plan, "0 hang", "1 hang")
    asked.append(True)
    with pytest.raises(RunInterrupted):
        ranks.train_step([])
    ranks.kill()


def test_ranks_get_the_environment_of_the_plan(plan, cluster):
    ranks = start(plan, cluster, target="rank_targets:EnvironmentRank")
    seen = ranks.train_step([])
    ranks.close()
    assert {name: seen[name] for name in plan.env} == dict(plan.env)
    assert seen["torch"] is False


def alive_soon(pid: int) -> bool:
    """Whether the process is still there after a short wait."""
    try:
        psutil.Process(pid).wait(timeout=5)
    except psutil.NoSuchProcess:
        return False
    except psutil.TimeoutExpired:
        return True
    return False
