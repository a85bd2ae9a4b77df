"""Verifiers: equal mathematics is rewarded, anything else is not, and nothing a model writes stops a run."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from p3o_launch.errors import RunError
from p3o_launch.runtime.rollout.math_worker import MathWorker
from p3o_launch.runtime.rollout.rewards import VERIFIERS, boxed_answer, exact, math, require_verifier, score
from p3o_launch.schema import Reward


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [("19", "19", 1.0), (" 19\n", "19", 1.0), ("019", "19", 0.0), ("", "19", 0.0), ("19 ", "-19", 0.0)],
)
def test_exact_compares_the_text(response: str, label: str, reward: float) -> None:
    assert exact(response, label) == reward


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1} then \boxed{\frac{1}{2}", "1"),
        (r"\boxed{", None),
        ("42", None),
    ],
)
def test_the_last_closed_box_is_the_answer(response: str, answer: str | None) -> None:
    assert boxed_answer(response) == answer


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"\boxed{1{,}000}", "1000", 1.0),
        (r"\boxed{x+1}", "1+x", 1.0),
        (r"\boxed{3}", "4", 0.0),
        (r"\boxed{}", "4", 0.0),
        ("the answer is 4", "4", 0.0),
        (r"\boxed{4}", r"\boxed{4}", 1.0),
        (r"\boxed{" + "1+" * 5000 + "1}", "5001", 0.0),
    ],
)
def test_maths_answers_are_compared_as_mathematics(response: str, label: str, reward: float) -> None:
    assert math(response, label) == reward


def test_maths_answers_can_be_scored_outside_the_main_thread() -> None:
    rewards: list[float] = []
    thread = threading.Thread(target=lambda: rewards.append(math(r"\boxed{\frac{2}{4}}", r"\frac{1}{2}")))
    thread.start()
    thread.join()
    assert rewards == [1.0]


def test_an_endless_answer_is_wrong_and_the_next_one_is_judged() -> None:
    worker = MathWorker(deadline_s=2.0)
    try:
        assert worker.equal("2", "2.0")
        started = time.monotonic()
        assert not worker.equal("9^{9^{9}}", "3")
        assert time.monotonic() - started < 20
        assert worker.equal(r"\sqrt{4}", "2")
    finally:
        worker.close()


def test_a_comparison_process_that_does_not_start_is_an_error_and_not_a_wrong_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    worker = MathWorker()
    with pytest.raises(RunError, match="did not start"):
        worker.equal("2", "2.0")


def test_several_threads_get_their_own_answers() -> None:
    worker, answers = MathWorker(), {}
    try:
        threads = [
            threading.Thread(target=lambda n=n: answers.update({n: worker.equal(f"{n}", f"{n % 2}.0")}))
            for n in range(12)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        worker.close()
    assert answers == {n: n < 2 for n in range(12)}


@pytest.mark.parametrize("kind", ["exact", "math"])
def test_a_verifier_can_be_tried_before_the_run(kind: str) -> None:
    require_verifier(Reward(type=kind))  # type: ignore[arg-type]


def test_every_verifier_of_the_schema_exists() -> None:
    names = Reward.model_fields["type"].annotation.__args__  # type: ignore[union-attr]
    assert set(names) == set(VERIFIERS)
    assert score(Reward(type="exact"), "1", "1") == 1.0
