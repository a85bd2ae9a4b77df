"""Progress on standard error: a live line on a terminal, one plain line per step elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import IO, Any

from p3o_launch.runtime.loop import LoopState, Row, Sink
from p3o_launch.terminal import tell

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


def _resumed(state: LoopState) -> str:
    if state == LoopState():
        return "the run ended before its first checkpoint: it begins again with step 1"
    return f"resumed after step {state.optimizer_step}"


class _Figures:
    """Remembers the reward of the rollout, which stands on the line of its first step, for the steps after it."""

    def __init__(self) -> None:
        self._reward: Row = {}

    def text(self, row: Row) -> str:
        name = "rollout/reward_mean"
        if name in row:
            self._reward = {name: row[name]}
        return step_text(self._reward | row)


class PlainProgress(Sink):
    """One line per step."""

    def __init__(self, total_steps: int, stream: IO[str] | None = None) -> None:
        self._total = total_steps
        self._stream = stream or sys.stderr
        self._figures = _Figures()

    def say(self, text: str) -> None:
        """A line about what is being done. A reader that has gone away (``| head``) does not end the run."""
        tell(self._stream, text + "\n")

    def on_resume(self, state: LoopState) -> None:
        self.say(_resumed(state))

    def on_step(self, step: int, rollout_id: int, row: Row) -> None:
        self.say(f"step {step}/{self._total}  {self._figures.text(row)}")

    def on_evaluation(self, step: int, rollout_id: int, row: Row) -> None:
        self.say(f"evaluation after step {step}: reward {row['eval/reward_mean']:.3f}")

    def on_checkpoint(self, directory: Path, state: LoopState) -> None:
        self.say(f"checkpoint {directory.name} written")


class LiveProgress(Sink):
    """A bar and, below it, the last step's figures; evaluations scroll by above."""

    def __init__(self, total_steps: int, console: Any = None) -> None:
        from rich.console import Console, Group
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.text import Text

        self._console = console or Console(stderr=True, highlight=False)
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=None), TimeRemainingColumn())
        self._bar = Progress(*columns, console=self._console, expand=True)
        self._task = self._bar.add_task("", total=total_steps)
        self._text = Text("")
        self._figures = _Figures()
        self._live = Live(Group(self._bar, self._text), console=self._console, refresh_per_second=4)
        self._started = False

    def say(self, text: str) -> None:
        """A line about what is being done."""
        self._console.print(text, markup=False)

    def on_resume(self, state: LoopState) -> None:
        self.say(_resumed(state))

    def on_step(self, step: int, rollout_id: int, row: Row) -> None:
        if not self._started:
            self._live.start()
            self._started = True
        self._bar.update(self._task, completed=step)
        self._text.plain = self._figures.text(row)

    def on_evaluation(self, step: int, rollout_id: int, row: Row) -> None:
        self.say(f"evaluation after step {step}: reward {row['eval/reward_mean']:.3f}")

    def close(self) -> None:
        if self._started:
            self._live.stop()
            self._started = False


def make_progress(total_steps: int) -> PlainProgress | LiveProgress:
    """A live display when standard error is a terminal, else plain lines."""
    return LiveProgress(total_steps) if sys.stderr.isatty() else PlainProgress(total_steps)
