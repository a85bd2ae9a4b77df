"""The built-in task: sums and differences of two numbers below 100, written as ``12+7=`` with the answer ``19``.

All 20,000 problems are enumerable, so nothing is stored. One in ten is held out for evaluation, decided by a hash of
the problem's text: the pre-training script, the train prompts and the evaluation prompts agree without a file.
"""

from __future__ import annotations

import hashlib

OPERAND_LIMIT = 100
NUM_PROBLEMS = 2 * OPERAND_LIMIT * OPERAND_LIMIT
ALPHABET = "0123456789+-="
LONGEST_PROMPT = len("99+99=")
LONGEST_ANSWER = len("198")


def problem(index: int) -> tuple[str, str]:
    """Text and answer of problem ``index`` in [0, NUM_PROBLEMS): all sums first, then all differences."""
    if not 0 <= index < NUM_PROBLEMS:
        raise ValueError(f"there are {NUM_PROBLEMS} arithmetic problems, no number {index}")
    operator, operands = divmod(index, OPERAND_LIMIT * OPERAND_LIMIT)
    left, right = divmod(operands, OPERAND_LIMIT)
    return (f"{left}+{right}=", str(left + right)) if operator == 0 else (f"{left}-{right}=", str(left - right))


def is_held_out(text: str) -> bool:
    """True for the tenth of the problems that training never sees."""
    return hashlib.sha256(text.encode()).digest()[0] < 26


def problems(split: str) -> list[tuple[str, str]]:
    """(text, answer) of every problem of ``train`` or ``eval``, in the order of their numbers."""
    if split not in ("train", "eval"):
        raise ValueError(f"split must be 'train' or 'eval', got {split!r}")
    everything = map(problem, range(NUM_PROBLEMS))
    return [(text, answer) for text, answer in everything if is_held_out(text) == (split == "eval")]
