"""Progress is for whoever still reads it; a run does not end because nobody does."""

from __future__ import annotations

import os
from pathlib import Path

from p3o_launch.launch.progress import PlainProgress
from p3o_launch.runtime.loop import LoopState


def test_a_reader_that_has_gone_away_does_not_end_the_run():
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        progress = PlainProgress(4, stream)
        progress.say("before")
        os.close(reading)
        progress.on_step(1, 0, {"train/loss": 1.0})
        progress.on_checkpoint(Path("rollout_000001"), LoopState(1, 1))
    # Closing flushed without an error: what was left went nowhere.


def test_a_run_that_begins_again_says_so(capsys):
    PlainProgress(4).on_resume(LoopState())
    PlainProgress(4).on_resume(LoopState(2, 2))
    said = capsys.readouterr().err.splitlines()
    assert said == ["the run ended before its first checkpoint: it begins again with step 1", "resumed after step 2"]
