"""Rule-based verifiers: a response's text and the reference answer -> reward in {0, 1}."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec

from p3o_launch.errors import MissingExtraError
from p3o_launch.runtime.rollout.math_worker import MathWorker
from p3o_launch.schema import Reward

Verifier = Callable[[str, str], float]

MAX_ANSWER_CHARACTERS = 1000
"""A boxed answer longer than this is wrong without being parsed: symbolic comparison time grows with its length."""


def exact(response: str, label: str) -> float:
    """1 when the response, without surrounding space, is the label."""
    return float(response.strip() == label.strip())


def math(response: str, label: str) -> float:
    """1 when the last boxed answer of the response equals the label mathematically (math-verify)."""
    answer = boxed_answer(response)
    if answer is None or len(answer) > MAX_ANSWER_CHARACTERS:
        return 0.0
    if answer.strip() == label.strip():
        return 1.0
    return float(_math_worker().equal(answer, label))


def boxed_answer(response: str) -> str | None:
    r"""Contents of the last ``\boxed{...}`` whose braces close, or None."""
    end = len(response)
    while (start := response.rfind("\\boxed{", 0, end)) >= 0:
        depth = 0
        for position in range(start + len("\\boxed"), len(response)):
            depth += {"{": 1, "}": -1}.get(response[position], 0)
            if depth == 0:
                return response[start + len("\\boxed{") : position]
        end = start
    return None


@lru_cache(maxsize=1)
def _math_worker() -> MathWorker:
    if find_spec("math_verify") is None:
        raise MissingExtraError("math-verify", "runtime")
    return MathWorker()


VERIFIERS: dict[str, Verifier] = {"exact": exact, "math": math, "mopd": math}
"""``mopd`` is the name Relax's smoke recipe uses for a boxed maths answer; no distillation is meant."""


def require_verifier(reward: Reward) -> None:
    """Start what the verifier needs, so that what is missing is said before any actor starts.

    Raises MissingExtraError without math-verify, RunError when its process does not start.
    """
    if VERIFIERS[reward.type] is math:
        _math_worker().equal("1", "1.0")


def score(reward: Reward, response: str, label: str) -> float:
    """Reward of one response under the preset's verifier."""
    return VERIFIERS[reward.type](response, label)
