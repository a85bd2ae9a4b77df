"""``p3o-launch`` with ranks that need no process, everything else as it is. Run as a program."""

from __future__ import annotations

from functools import partial

from run_support import TEXTS, Prompts, Ranks

from p3o_launch import cli
from p3o_launch.launch import resolved_run, run_command
from p3o_launch.launch.preset_run import PresetRun
from p3o_launch.runtime.driver import Inputs


class Cluster:
    job_id = "job-1"

    def close(self):
        pass

    def kill(self):
        pass


def main() -> None:
    fake = partial(
        PresetRun,
        load=lambda preset: Inputs(Prompts(), TEXTS, Prompts(2)),
        start_cluster=lambda plan: Cluster(),
        start_ranks=lambda plan, cluster, stop: Ranks(),
    )
    run_command.PresetRun = fake
    resolved_run.PresetRun = fake
    cli.main()


if __name__ == "__main__":
    main()
