"""What a run says at its end: figures, and two curves that a terminal can show."""

from __future__ import annotations

import json
from pathlib import Path

from p3o_launch.launch.summary import curve, summarize


def test_a_curve_goes_from_the_lowest_block_to_the_highest() -> None:
    assert curve([0.0, 0.5, 1.0]) == "▁▅█"
    assert curve([2.0, 2.0]) == "▁▁"
    assert curve([float(i) for i in range(80)], width=8) == "▁▂▃▄▅▆▇█"
    assert len(curve([0.1] * 7, width=40)) == 7


def test_a_summary_reads_rewards_per_rollout_and_ess_per_step(tmp_path: Path) -> None:
    rows = [{"train/p3o/ess": 0.9 + i / 100} for i in range(8)]
    for i in range(0, 8, 2):  # a rollout's figures stand on the line of its first step
        rows[i]["rollout/reward_mean"] = i / 10
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = summarize(tmp_path, 12.0)
    assert len(result.rewards) == 4
    assert len(result.ess) == 8
    assert result.lines()[0] == "8 optimizer steps in 12 s"
    assert [line.split()[0] for line in result.curves()] == ["reward", "ess"]


def test_a_run_without_steps_has_no_curves(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    assert summarize(tmp_path, 0.0).curves() == []
