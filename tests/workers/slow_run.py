"""A real run whose ranks only wait: real signals, record, cluster and actors, no model. Run as a program.

Usage: slow_run.py DIRECTORY [RAY_ADDRESS]. Prints what ``p3o-launch run`` prints.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import yaml

from p3o_launch.check import check_text
from p3o_launch.cli import guarded
from p3o_launch.launch.preset_run import PresetRun
from p3o_launch.runtime.driver import Inputs
from p3o_launch.runtime.loop import Texts
from p3o_launch.runtime.types import Prompt

HERE = Path(__file__).parent


class Prompts:
    def __len__(self):
        return 8

    def batch(self, rollout_id, count):
        return [Prompt(i, "p", (1, 2), "1") for i in range(count)]


def start_ranks(plan, cluster, should_stop):
    from p3o_launch.runtime.workers.actors import RankActors

    return RankActors.start(plan, cluster, should_stop, target="rank_targets:SlowRank")


def main() -> None:
    data = yaml.safe_load((HERE.parent / "data" / "run" / "tiny.yaml").read_text())
    data["batch"]["num_rollout"] = 10_000
    data["logging"] = {"output_root": sys.argv[1], "tensorboard": False, "log_rollouts": False}
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    data["cluster"]["env"] = {"PYTHONPATH": path}
    if len(sys.argv) > 2:
        data["cluster"]["ray_address"] = sys.argv[2]
    result = check_text(yaml.safe_dump(data))
    assert result.preset is not None, result.findings
    texts = Texts(decode=str, score=lambda text, label: 0.0)
    run = PresetRun(result, result.preset, load=lambda preset: Inputs(Prompts(), texts), start_ranks=start_ranks)
    sys.exit(guarded(lambda: sys.exit(run.execute())))


if __name__ == "__main__":
    main()
