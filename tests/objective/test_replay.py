"""A guarded pass leaves no trace: positions and random streams are where they were, whatever happened."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from p3o_launch.runtime.replay import ReplayWindow, replay_guard, undo_on_error, unique_iterators


class PassFailed(Exception):
    pass


def test_a_window_hands_out_each_micro_batch_once_and_can_go_back() -> None:
    window = ReplayWindow(["a", "b", "c"])
    assert [next(window), next(window)] == ["a", "b"]
    assert (window.position, len(window)) == (2, 3)
    window.restore(1)
    assert list(window) == ["b", "c"]
    with pytest.raises(StopIteration):
        next(window)
    assert window.position == 3


@pytest.mark.parametrize("position", [-1, 4])
def test_a_position_outside_the_window_is_refused(position: int) -> None:
    window = ReplayWindow(["a", "b", "c"])
    with pytest.raises(ValueError, match=f"position {position} is outside the window of 3"):
        window.restore(position)
    assert window.position == 0


def test_a_window_does_not_follow_later_changes_of_its_list() -> None:
    micro_batches = ["a"]
    window = ReplayWindow(micro_batches)
    micro_batches.append("b")
    assert list(window) == ["a"]


def test_iterators_are_told_apart_by_identity() -> None:
    one, twin = ReplayWindow(["a"]), ReplayWindow(["a"])
    assert unique_iterators([one, one, None, twin, one]) == [one, twin]
    assert unique_iterators((one, one)) == [one]
    assert unique_iterators(one) == [one]
    assert unique_iterators(None) == unique_iterators([None, None]) == []


@pytest.mark.parametrize("fails", [False, True])
def test_positions_and_streams_are_put_back(fails: bool) -> None:
    first, second = ReplayWindow(range(4)), ReplayWindow(range(4))
    next(first)
    tracker = {"state": 1}
    states: list[Any] = [(lambda: tracker["state"], lambda state: tracker.update(state=state))]
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    try:
        with replay_guard([first, second, first], states):
            torch.rand(100)
            list(first), next(second)
            tracker["state"] = 2
            if fails:
                raise PassFailed
    except PassFailed:
        assert fails
    assert (first.position, second.position, tracker["state"]) == (1, 0, 1)
    assert torch.equal(torch.rand(4), expected)


def test_one_restore_that_fails_does_not_keep_the_others_from_running() -> None:
    window = ReplayWindow(range(4))

    def refuse(_: object) -> None:
        raise PassFailed

    torch.manual_seed(3)
    before = torch.get_rng_state()
    guard = replay_guard(window, [(lambda: None, refuse)])
    guard.__enter__()
    next(window)
    torch.rand(1)
    with pytest.raises(PassFailed):
        guard.__exit__(None, None, None)
    assert window.position == 0
    assert torch.equal(torch.get_rng_state(), before)


def test_an_iterator_that_cannot_go_back_is_refused_before_the_pass() -> None:
    ran = False
    with pytest.raises(TypeError, match="list_iterator cannot report and restore"), replay_guard([iter([1, 2])]):
        ran = True
    assert not ran


def test_a_rewound_pass_sees_the_same_tokens_and_the_same_dropout() -> None:
    window = ReplayWindow([torch.ones(50) for _ in range(3)])
    torch.manual_seed(0)
    with replay_guard(window):
        stats_pass = [torch.dropout(x, 0.5, train=True) for x in window]
    train_pass = [torch.dropout(x, 0.5, train=True) for x in window]
    assert all(map(torch.equal, stats_pass, train_pass))


def test_undo_on_error_puts_streams_back_only_when_the_body_raises() -> None:
    extra = {"state": 1}
    pair = (lambda: extra["state"], lambda state: extra.update(state=state))
    before = torch.get_rng_state()

    def draw() -> None:
        torch.rand(3)
        extra["state"] = 2

    def fail() -> None:
        with undo_on_error([pair]):
            draw()
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        fail()
    assert torch.equal(torch.get_rng_state(), before)
    assert extra == {"state": 1}
    with undo_on_error([pair]):
        draw()
    assert not torch.equal(torch.get_rng_state(), before)
    assert extra == {"state": 2}
