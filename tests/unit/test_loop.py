"""Order, ages, cadences and figures of the training loop."""

from __future__ import annotations

import pytest
from run_support import TEXTS, Clock, Prompts, Ranks, Recorder, tiny_plan

from p3o_launch.errors import NonFiniteRatioError, RunInterrupted
from p3o_launch.runtime.loop import Loop, LoopState, request_seed

AGE = "train/p3o/rollout_policy_age_rollouts"
SNAPSHOT_STEP = "train/rollout_policy_snapshot_step"


def run(ranks=None, should_stop=lambda: False, state=None, **groups):
    ranks = ranks or Ranks()
    recorder = Recorder()
    loop = Loop(
        tiny_plan(**groups), ranks, Prompts(), TEXTS, [recorder], Prompts(3), should_stop, Clock(), state or LoopState()
    )
    return loop.run(), ranks, recorder


def test_one_rollout_after_the_other_with_a_refresh_between():
    state, ranks, _ = run(batch={"num_rollout": 2})
    assert ranks.events == [
        "sync 0",
        "generate",
        "step 1",
        "sync 1",
        "generate",
        "step 2",
        "sync 2",
        "save rollout_000002 2",
    ]
    assert state == LoopState(next_rollout=2, optimizer_step=2, snapshot_id=2, snapshot_step=2)


@pytest.mark.parametrize(
    ("interval", "ages", "snapshots"),
    [
        (1, [0, 0, 0, 0, 0, 0, 0], [0, 1, 2, 3, 4, 5, 6]),
        (3, [0, 1, 2, 0, 1, 2, 0], [0, 0, 0, 3, 3, 3, 6]),
        (10, [0, 1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 0, 0, 0]),
    ],
)
def test_age_counts_rollouts_since_the_snapshot_and_a_refresh_counts_from_the_next(interval, ages, snapshots):
    _, ranks, recorder = run(batch={"num_rollout": 7}, rollout={"update_weights_interval": interval})
    assert [row[AGE] for _, _, row in recorder.rows] == ages
    assert [{s.snapshot_id for s in samples} for samples in ranks.samples] == [{i} for i in snapshots]
    assert [row[SNAPSHOT_STEP] for _, _, row in recorder.rows] == snapshots
    assert [{r["snapshot_id"] for r in records} for _, records in recorder.rollouts] == [{i} for i in snapshots]


def test_snapshot_step_counts_optimizer_steps_and_not_rollouts():
    batch = {"num_rollout": 3, "global_batch_size": 2}
    _, ranks, recorder = run(batch=batch, rollout={"update_weights_interval": 2})
    assert [(step, rollout) for step, rollout, _ in recorder.rows] == [(1, 0), (2, 0), (3, 1), (4, 1), (5, 2), (6, 2)]
    assert [row[SNAPSHOT_STEP] for _, _, row in recorder.rows] == [0, 0, 0, 0, 4, 4]
    assert [row[AGE] for _, _, row in recorder.rows] == [0, 0, 1, 1, 0, 0]
    assert [len(samples) for samples in ranks.samples] == [2] * 6


def test_a_rollouts_figures_stand_on_the_line_of_its_first_step_only():
    _, _, recorder = run(batch={"num_rollout": 1, "global_batch_size": 2})
    assert ["rollout/reward_mean" in row for _, _, row in recorder.rows] == [True, False]
    assert ["perf/rollout_s" in row for _, _, row in recorder.rows] == [True, False]


def test_reward_figures_and_groups_without_variance():
    _, _, recorder = run(batch={"num_rollout": 1})
    row = recorder.rows[0][2]
    assert row["rollout/reward_mean"] == 0.5  # group 0 always 0, group 1 always 1
    assert row["rollout/reward_std"] == 0.5
    assert row["rollout/zero_variance_groups"] == 2
    assert row["rollout/response_length_mean"] == 2
    assert row["train/p3o/ess"] == 0.5


def test_samples_carry_what_was_sampled_and_their_group():
    _, ranks, recorder = run(batch={"num_rollout": 2})
    second = ranks.samples[1]
    assert [s.sample_id for s in second] == [4, 5, 6, 7]
    assert [s.group_id for s in second] == [0, 0, 1, 1]
    assert [s.prompt_ids for s in second] == [(1, 0), (1, 0), (1, 1), (1, 1)]
    assert {s.behavior_log_probs for s in second} == {(-0.5, -0.25)}
    assert [s.advantage for s in second] == [-0.5, -0.5, 0.5, 0.5]
    assert recorder.rollouts[1][1][0]["behavior_log_prob_sum"] == -0.75


def test_every_sample_has_a_random_stream_of_its_own_that_repeats_with_the_seed():
    _, first, _ = run()
    _, again, _ = run()
    _, other, _ = run(seed={"seed": 43})
    seeds = [[r.seed for r in requests] for requests, _ in first.requests]
    assert seeds == [[r.seed for r in requests] for requests, _ in again.requests]
    flat = [seed for rollout in seeds for seed in rollout]
    assert len(set(flat)) == len(flat) == 16
    assert not set(flat) & {r.seed for requests, _ in other.requests for r in requests}
    assert all(0 <= seed < 2**63 for seed in flat)


def test_rollout_seed_moves_the_sampling_streams_only_through_itself():
    assert request_seed(1, "train", 2, 3) != request_seed(1, "eval", 2, 3)
    _, own, _ = run(seed={"seed": 43, "rollout_seed": 42})
    _, plain, _ = run(seed={"seed": 42})
    assert [r.seed for r in own.requests[0][0]] == [r.seed for r in plain.requests[0][0]]


def test_evaluation_before_training_and_at_its_interval_on_the_same_prompts():
    evaluation = {"interval": 2, "n_samples_per_prompt": 2, "top_p": 0.9, "max_prompts": 2}
    _, ranks, recorder = run(batch={"num_rollout": 4}, evaluation=evaluation)
    assert [(step, rollout) for step, rollout, _ in recorder.evaluations] == [(0, 0), (2, 2), (4, 4)]
    asked = [(requests, sampling) for requests, sampling in ranks.requests if sampling.top_p == 0.9]
    assert [{r.prompt_ids for r in requests} for requests, _ in asked] == [{(0, 0), (0, 1)}] * 3
    assert [len(requests) for requests, _ in asked] == [4, 4, 4]
    assert recorder.evaluations[0][2]["eval/reward_mean"] == 0.5
    assert not [row for _, _, row in recorder.rows if "eval/reward_mean" in row]


@pytest.mark.parametrize(
    ("checkpoint", "saved"),
    [
        ({}, ["rollout_000004"]),
        ({"save_final": False}, []),
        ({"save_interval": 2}, ["rollout_000002", "rollout_000004"]),
        ({"save_interval": 3}, ["rollout_000003", "rollout_000004"]),
        ({"save_interval": 3, "save_final": False}, ["rollout_000003"]),
    ],
)
def test_checkpoints_at_their_interval_and_at_the_end(checkpoint, saved):
    _, _, recorder = run(checkpoint=checkpoint)
    assert [name for name, _ in recorder.checkpoints] == saved


def test_a_resumed_loop_goes_on_where_it_stood_and_keeps_its_snapshot():
    state = LoopState(next_rollout=2, optimizer_step=2, snapshot_id=0, snapshot_step=0)
    _, ranks, recorder = run(state=state, rollout={"update_weights_interval": 3})
    assert ranks.events[:4] == ["generate", "step 1", "sync 3", "generate"]
    assert [(step, rollout, row[AGE]) for step, rollout, row in recorder.rows] == [(3, 2, 2), (4, 3, 0)]


def test_a_non_finite_ratio_names_the_step_and_leaves_no_line():
    ranks = Ranks(bad_step=2)
    recorder = Recorder()
    loop = Loop(tiny_plan(), ranks, Prompts(), TEXTS, [recorder])
    with pytest.raises(NonFiniteRatioError) as caught:
        loop.run()
    assert caught.value.step == 2
    assert [step for step, _, _ in recorder.rows] == [1]
    assert loop.state.optimizer_step == 1


def test_a_stop_request_ends_the_loop_between_two_calls():
    ranks = Ranks()
    with pytest.raises(RunInterrupted):
        run(ranks, should_stop=lambda: ranks.steps >= 2)
    assert ranks.events[-1] == "step 2"
