"""``p3o-launch runs``: list the runs below an output root, and show one in ten lines."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from p3o_launch.errors import EXIT_OK, UsageError
from p3o_launch.launch.record import ENDED_EARLY, RunRecord, find_run, find_runs
from p3o_launch.launch.summary import Summary, summarize

_HEAD = ("run", "preset", "seed", "status", "steps", "reward", "started")


def list_runs(root: str | Path = "runs") -> int:
    """Print a table of the runs below ``root``, oldest first. A directory without runs is an error of usage."""
    runs = list(find_runs(Path(root)))
    if not runs:
        raise UsageError(f"there are no runs below {root}", hint="p3o-launch run --preset on_policy --profile cpu")
    rows = [_HEAD, *(_row_of(run) for run in runs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    for row in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        sys.stdout.write(f"{line}\n")
    return EXIT_OK


def _row_of(run: Path) -> tuple[str, ...]:
    """One damaged record hides no other run."""
    try:
        return _row(RunRecord.load(run))
    except UsageError:
        return (run.name, run.parents[1].name, run.parent.name.removeprefix("seed_"), "unreadable", "-", "", "")


def _row(record: RunRecord) -> tuple[str, ...]:
    data = record.data
    summary = summarize(record.directory, seconds_of(data))
    reward = "" if summary.reward_first is None else f"{summary.reward_first:.3f} -> {summary.reward_last:.3f}"
    return (
        record.directory.name,
        str(data.get("preset", "")),
        str(data.get("seed", "")),
        record.status,
        _steps(data),
        reward,
        str(data.get("started") or data.get("created") or "")[:19],
    )


def show_run(name: str, root: str | Path = "runs") -> int:
    """Print what ran, on what, how it ended and how to run it again."""
    record = RunRecord.load(find_run(Path(root), name))
    sys.stdout.write("\n".join(show_lines(record)) + "\n")
    return EXIT_OK


def show_lines(record: RunRecord) -> list[str]:
    """Ten lines."""
    data = record.data
    summary = summarize(record.directory, seconds_of(data))
    rows = {
        "run": f"{record.directory.name}  ({data.get('preset')}, {data.get('algorithm')}, seed {data.get('seed')})",
        "preset": _preset(data),
        "status": _status(data),
        "time": f"{data.get('started') or 'not started'} to {data.get('ended') or 'now'}, {summary.seconds:.0f} s",
        "steps": f"{_steps(data)}, last checkpoint {data.get('last_checkpoint') or 'none'}",
        "result": _result(summary),
        "machine": _machine(data),
        "code": _code(data),
        "files": str(record.directory),
        "run again": _again(record),
    }
    width = max(len(label) for label in rows)
    return [f"{label:<{width}}  {text}" for label, text in rows.items()]


def _again(record: RunRecord) -> str:
    directory = str(record.directory)
    rerun = shlex.join(["p3o-launch", "runs", "rerun", directory])
    if record.status not in ENDED_EARLY or record.data.get("target", "builtin") != "builtin":
        return rerun
    return f"{rerun}; go on: {shlex.join(['p3o-launch', 'run', '--resume', directory])}"


def _steps(data: Mapping[str, Any]) -> str:
    """Optimizer steps done; Relax keeps its own count."""
    return "-" if data.get("target") == "relax" else str(data.get("steps_done", 0))


def _preset(data: Mapping[str, Any]) -> str:
    parts = [str(data.get("preset_file"))]
    parts += [f"target {data['target']}"] if data.get("target", "builtin") != "builtin" else []
    parts += [f"profile {data['profile']}"] if data.get("profile") else []
    parts += [f"--set {override}" for override in data.get("overrides", ())]
    return ", ".join(parts)


def _status(data: Mapping[str, Any]) -> str:
    failure = data.get("failure")
    text = str(data["status"])
    if data.get("exit_code") is not None:
        text += f", exit code {data['exit_code']}"
    if failure:
        rank = "" if failure.get("rank") is None else f" (rank {failure['rank']})"
        text += f": {failure.get('class')}{rank}: {failure.get('message')}"
    resumed = len(data.get("earlier", ()))
    text += f"; resumed {'once' if resumed == 1 else f'{resumed} times'}" if resumed else ""
    return text.replace("\n", " ")


def _result(summary: Summary) -> str:
    return "; ".join(summary.lines()[1:]) or "no optimizer step was recorded"


def _machine(data: Mapping[str, Any]) -> str:
    machine = data.get("machine") or {}
    gpus = machine.get("gpus") or []
    if data.get("submission_id"):
        return f"job {data['submission_id']} of {data.get('ray_address')}, submitted from {machine.get('host')}"
    return f"{machine.get('host')}, {f'{len(gpus)} x {gpus[0]}' if gpus else 'no GPU'}"


def _code(data: Mapping[str, Any]) -> str:
    versions = {name: version for name, version in (data.get("versions") or {}).items() if version}
    text = ", ".join(f"{name} {version}" for name, version in versions.items())
    git = data.get("git")
    return f"{git['commit'][:12]}{' (dirty)' if git['dirty'] else ''}, {text}" if git else text


def seconds_of(data: Mapping[str, Any]) -> float:
    """Wall time of a run [s]; of an unfinished one, so far."""
    started, ended = data.get("started"), data.get("ended")
    if not started:
        return 0.0
    begin = datetime.fromisoformat(started)
    end = datetime.fromisoformat(ended) if ended else datetime.now(begin.tzinfo)
    return max(0.0, (end - begin).total_seconds())
