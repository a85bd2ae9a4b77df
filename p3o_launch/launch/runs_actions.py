"""``p3o-launch runs stop``, ``follow`` and ``rerun``: what can be done with a recorded run."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from p3o_launch.errors import EXIT_FINDINGS, EXIT_OK, RunError, UsageError
from p3o_launch.launch.drift import drift
from p3o_launch.launch.process import is_alive
from p3o_launch.launch.record import INTERRUPTED, LOST, UNFINISHED, RunRecord, find_run
from p3o_launch.launch.run_command import run_preset, submit_preset
from p3o_launch.launch.submit import follow_job, print_now, record_end
from p3o_launch.runtime.signals import StopRequest

STOP_S = 60.0
POLL_S = 0.2


def stop_run(name: str, root: str | Path = "runs") -> int:
    """Stop a run: its job, or its process on this machine; waits for its end. Raises UsageError when there is none."""
    directory = find_run(Path(root), name).absolute()
    record = RunRecord.load(directory)
    data = record.data
    if data.get("submission_id") and record.status in (*UNFINISHED, LOST):
        from p3o_launch.runtime.workers.jobs import JobServer

        state = JobServer(str(data["ray_address"])).stop(str(data["submission_id"]))
        if not state.ended:
            raise RunError(f"the job {data['submission_id']} is still {state.status}", hint="try again")
        record_end(directory, state)
    elif record.status in UNFINISHED:
        _stop_process(data.get("process") or {}, directory.name)
    else:
        raise UsageError(f"{directory.name} does not run: it is {record.status}")
    ended = RunRecord.load(directory).status
    print_now(f"{directory.name} is {ended}\n")
    return EXIT_OK if ended == INTERRUPTED else EXIT_FINDINGS


def _stop_process(process: Mapping[str, Any], name: str) -> None:
    pid, mark = int(process.get("pid") or 0), process.get("start")
    if process.get("host") != socket.gethostname():
        raise UsageError(f"{name} runs on {process.get('host')}, process {pid}", hint="stop it there")
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_S
    while is_alive(pid, mark):
        if time.monotonic() > deadline:
            raise RunError(f"{name} has not ended {STOP_S:.0f} s after SIGTERM (process {pid})")
        time.sleep(POLL_S)


def follow_run(name: str, root: str | Path = "runs") -> int:
    """Show the output of a submitted run until it ends, and record the end; the exit code."""
    directory = find_run(Path(root), name).absolute()
    data = RunRecord.load(directory).data
    if not data.get("submission_id"):
        raise UsageError(f"{directory.name} is no job of a Ray cluster", hint=f"its logs are in {directory / 'logs'}")
    from p3o_launch.runtime.workers.jobs import JobServer

    with StopRequest() as stop:
        return follow_job(JobServer(str(data["ray_address"])), str(data["submission_id"]), directory, print_now, stop)


def rerun(name: str, root: str | Path = "runs") -> int:
    """Run the recorded configuration again, in a new directory; says first where code or packages differ."""
    directory = find_run(Path(root), name).absolute()
    record = RunRecord.load(directory)
    data = record.data
    preset = str(directory / "resolved.yaml")
    if not Path(preset).is_file():
        raise UsageError(f"{directory.name} holds no resolved.yaml: it ended before it was written")
    for line in drift(directory, data):
        sys.stderr.write(f"warning: {line}\n")
    target = str(data.get("target", "builtin"))
    cleared = bool(data.get("proxies_cleared"))
    if data.get("submission_id"):
        address = f"cluster.ray_address={_quoted(str(data['ray_address']))}"
        return submit_preset(preset, None, [address], target, clear_proxies=cleared)
    return run_preset(preset, target=target, clear_proxies=cleared)


def _quoted(text: str) -> str:
    import json

    return json.dumps(text, ensure_ascii=False)
