"""What a run's metrics say, in a few lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from p3o_launch.runtime.metrics import read_jsonl

WINDOW = 5
CURVE_WIDTH = 40
_BLOCKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of one run. ``None`` where the run has none. ``window``: rollouts the two reward means are taken over.

    ``rewards``: per rollout; ``ess``: per optimizer step.
    """

    steps: int
    reward_first: float | None
    reward_last: float | None
    window: int
    ess_min: float | None
    ess_max: float | None
    seconds: float
    rewards: tuple[float, ...] = ()
    ess: tuple[float, ...] = ()

    def lines(self) -> list[str]:
        """For people."""
        shown = [f"{self.steps} optimizer steps in {self.seconds:.0f} s"]
        if self.reward_first is not None and self.reward_last is not None:
            over = f"mean of {self.window} rollouts" if self.window > 1 else "one rollout"
            change = self.reward_last - self.reward_first
            ends = f"{self.reward_first:.3f} -> {self.reward_last:.3f}"
            shown.append(f"reward {ends} ({change:+.3f}; {over} at each end)")
        if self.ess_min is not None and self.ess_max is not None:
            shown.append(f"ess {self.ess_min:.4f} .. {self.ess_max:.4f}")
        return shown

    def curves(self) -> list[str]:
        """Reward and ESS over the run as one line of blocks each, from the lowest value seen to the highest."""
        named = (("reward", self.rewards), ("ess", self.ess))
        return [f"{name:<6}  {curve(values)}" for name, values in named if len(values) > 1]


def summarize(run_dir: Path, seconds: float) -> Summary:
    """Read ``metrics.jsonl``; ``seconds``: wall time of the run."""
    rows = read_jsonl(run_dir / "metrics.jsonl")
    rewards = _numbers(rows, "rollout/reward_mean")
    ess = _numbers(rows, "train/p3o/ess") or _numbers(rows, "train/grpo/ess")
    window = max(1, min(WINDOW, len(rewards) // 2))
    return Summary(
        steps=len(rows),
        reward_first=_mean(rewards[:window]),
        reward_last=_mean(rewards[-window:]),
        window=window,
        ess_min=min(ess, default=None),
        ess_max=max(ess, default=None),
        seconds=seconds,
        rewards=tuple(rewards),
        ess=tuple(ess),
    )


def curve(values: Sequence[float], width: int = CURVE_WIDTH) -> str:
    """``values`` as at most ``width`` blocks, each the mean of its share; the lowest block is the lowest mean."""
    count = min(width, len(values))
    edges = [index * len(values) // count for index in range(count + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    levels = [round((mean - low) / span * (len(_BLOCKS) - 1)) if span > 0 else 0 for mean in means]
    return "".join(_BLOCKS[level] for level in levels)


def _numbers(rows: Sequence[dict[str, Any]], name: str) -> list[float]:
    return [float(row[name]) for row in rows if isinstance(row.get(name), int | float)]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
