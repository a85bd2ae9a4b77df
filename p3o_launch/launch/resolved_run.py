"""``p3o-launch run-resolved``: what a generated script, or a Ray job, launches in the run directory it has made."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from p3o_launch.check import CheckResult, check_text
from p3o_launch.errors import EXIT_FINDINGS, UsageError
from p3o_launch.launch.arguments import data_of
from p3o_launch.launch.preflight import Request, machine_findings, require_packages
from p3o_launch.launch.preset_run import PresetRun
from p3o_launch.launch.record import CREATED, RunRecord
from p3o_launch.launch.record_file import RECORD
from p3o_launch.launch.resume import recorded_data
from p3o_launch.launch.rundir import absolute
from p3o_launch.report import format_text


def run_resolved(directory: str, arguments: Sequence[str]) -> int:
    """Run the settings ``arguments`` in ``directory``; the exit code.

    A record there is taken over when its run has not started; without one, the directory is made and recorded here.
    Raises UsageError when the record is of another run, or its preset is not what the arguments say.
    """
    run_dir = absolute(Path(directory))
    data = data_of(arguments)
    adopt = (run_dir / RECORD).is_file()
    if adopt:
        _same_run(run_dir, data)
    result = check_text(yaml.safe_dump(data, sort_keys=False, allow_unicode=True), file=str(run_dir / "resolved.yaml"))
    if result.crashed:
        raise RuntimeError("\n".join(result.crashes))
    found = result.findings if result.has_errors else ()
    if not found and result.preset is not None:
        found = tuple(machine_findings(result, result.preset, Request(str(run_dir / "resolved.yaml"))))
    if found or result.preset is None:
        sys.stdout.write(format_text([CheckResult(result.source, None, tuple(found))], sys.stdout.isatty()))
        return EXIT_FINDINGS
    require_packages()
    return PresetRun(result, result.preset, run_dir=run_dir, adopt=adopt).execute()


def _same_run(run_dir: Path, data: dict[str, object]) -> None:
    record = RunRecord.load(run_dir)
    if record.status != CREATED:
        raise UsageError(f"{run_dir} holds a run that is {record.status}", hint="run the script: it makes a new one")
    if recorded_data(run_dir) != data:
        raise UsageError(
            f"the arguments are not what {run_dir / 'resolved.yaml'} says",
            hint="a script holds both: change the setting in both, or generate the script again",
        )
