"""Start, run and close of a run's parts, by the list of events they leave."""

from __future__ import annotations

import pytest
from run_support import TEXTS, Prompts, Ranks, Recorder, tiny_plan

from p3o_launch.errors import NonFiniteRatioError, RankDiedError, RunError, RunInterrupted
from p3o_launch.runtime.driver import Driver, Inputs, failure_facts


class FakeCluster:
    job_id = "job-1"

    def __init__(self, events, fails=False):
        self.events = events
        self.fails = fails

    def close(self):
        self.events.append("cluster closed")
        if self.fails:
            raise OSError("the cluster cannot be closed")

    def kill(self):
        self.events.append("cluster killed")


def driver(events, ranks=None, cluster=None, **options):
    def start_cluster(plan):
        events.append("cluster started")
        return cluster or FakeCluster(events)

    def start_ranks(plan, where, should_stop):
        events.append("ranks started")
        if isinstance(ranks, Exception):
            raise ranks
        return ranks or Ranks(events)

    return Driver(
        plan=tiny_plan(batch={"num_rollout": 1}),
        inputs=Inputs(Prompts(), TEXTS),
        sinks=[Recorder(events)],
        start_cluster=start_cluster,
        start_ranks=start_ranks,
        on_started=lambda job_id: events.append(f"running as {job_id}"),
        **options,
    )


def test_parts_start_in_order_and_close_in_reverse():
    events = []
    state = driver(events).run()
    assert state.optimizer_step == 1
    assert events[:4] == ["cluster started", "ranks started", "running as job-1", "sync 0"]
    assert events[-3:] == ["ranks closed", "cluster closed", "sink closed"]


def test_closing_again_does_nothing():
    events = []
    made = driver(events)
    made.close()
    made.run()
    done = list(events)
    made.close()
    assert events == done


def test_after_a_failure_ranks_are_killed_and_the_rest_is_closed():
    events = []
    with pytest.raises(NonFiniteRatioError):
        driver(events, Ranks(events, bad_step=1)).run()
    assert events[-3:] == ["ranks killed", "cluster closed", "sink closed"]
    assert "ranks closed" not in events


def test_ranks_that_do_not_start_leave_no_cluster():
    events = []
    with pytest.raises(RunError, match="no room"):
        driver(events, RunError("no room")).run()
    assert events == ["cluster started", "ranks started", "cluster closed", "sink closed"]


def test_the_failure_of_the_run_is_shown_before_the_failure_to_close():
    events = []
    broken = FakeCluster(events, fails=True)
    with pytest.raises(NonFiniteRatioError):
        driver(events, Ranks(events, bad_step=1), broken).run()
    assert events[-1] == "sink closed"


def test_a_failure_to_close_a_good_run_is_not_hidden():
    events = []
    with pytest.raises(OSError, match="cannot be closed"):
        driver(events, cluster=FakeCluster(events, fails=True)).run()
    assert events[-1] == "sink closed"


def test_a_stop_before_the_ranks_start_starts_none():
    events = []
    with pytest.raises(RunInterrupted):
        driver(events, should_stop=lambda: "cluster started" in events).run()
    assert events == ["cluster started", "cluster closed", "sink closed"]


def test_force_ends_the_cluster_without_asking():
    events = []
    made = driver(events)
    made.force()
    assert events == []
    made.run()
    made.force()
    assert events[-1] == "cluster killed"


@pytest.mark.parametrize(
    ("error", "facts"),
    [
        (RankDiedError("gone", rank=1), {"class": "RankDiedError", "message": "gone", "rank": 1}),
        (NonFiniteRatioError("inf", ranks=(2, 3)), {"class": "NonFiniteRatioError", "message": "inf", "rank": 2}),
        (ValueError("odd"), {"class": "ValueError", "message": "odd", "rank": None}),
    ],
)
def test_a_failure_is_recorded_with_class_message_and_rank(error, facts):
    assert failure_facts(error) == facts
