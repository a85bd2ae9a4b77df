"""Progress on standard error: a live line on a terminal, one plain line per step elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import IO, Any

from p3o_launch.runtime.loop import LoopState, Row, Sink

_COLUMNS = (
    ("reward", "rollout/reward_mean", ".3f"),
    ("ess", "train/p3o/ess", ".4f"),
    ("cap_fraction", "train/p3o/cap_fraction", ".3f"),
    ("clip_fraction", "train/grpo/clip_fraction", ".3f"),
    ("loss", "train/loss", "+.4f"),
    ("grad_norm", "train/grad_norm", ".3f"),
    ("tok/s", "perf/tokens_per_s", ",.0f"),
)


def step_text(row: Row) -> str:
    """The figures of one step that a reader follows; those the step does not have are left out."""
    return "  ".join(f"{label} {row[name]:{form}}" for label, name, form in _COLUMNS if name in row)


class PlainProgress(Sink):
    """One line per step."""

    def __init__(self, total_steps: int, stream: IO[str] | None = None) -> None:
        self._total = total_steps
        self._stream = stream or sys.stderr

    def say(self, text: str) -> None:
        """A line about what is being done."""
        print(text, file=self._stream, flush=True)

    def on_resume(self, state: LoopState) -> None:
        self.say(f"resumed after step {state.optimizer_step}")

    def on_step(self, step: int, rollout_id: int, row: Row) -> None:
        self.say(f"step {step}/{self._total}  {step_text(row)}")

    def on_evaluation(self, step: int, rollout_id: int, row: Row) -> None:
        self.say(f"evaluation after step {step}: reward {row['eval/reward_mean']:.3f}")

    def on_checkpoint(self, directory: Path, state: LoopState) -> None:
        self.say(f"checkpoint {directory.name} written")


class LiveProgress(Sink):
    """A progress bar with the last step's figures; evaluations and checkpoints scroll by above it."""

    def __init__(self, total_steps: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._console = Console(stderr=True, highlight=False)
        self._progress: Any = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=self._console,
        )
        self._task = self._progress.add_task("", total=total_steps)
        self._started = False

    def say(self, text: str) -> None:
        """A line about what is being done."""
        self._console.print(text, markup=False)

    def on_resume(self, state: LoopState) -> None:
        self.say(f"resumed after step {state.optimizer_step}")

    def on_step(self, step: int, rollout_id: int, row: Row) -> None:
        if not self._started:
            self._progress.start()
            self._started = True
        self._progress.update(self._task, completed=step, description=step_text(row))

    def on_evaluation(self, step: int, rollout_id: int, row: Row) -> None:
        self.say(f"evaluation after step {step}: reward {row['eval/reward_mean']:.3f}")

    def close(self) -> None:
        if self._started:
            self._progress.stop()
            self._started = False


def make_progress(total_steps: int) -> PlainProgress | LiveProgress:
    """A live display when standard error is a terminal, else plain lines."""
    return LiveProgress(total_steps) if sys.stderr.isatty() else PlainProgress(total_steps)
