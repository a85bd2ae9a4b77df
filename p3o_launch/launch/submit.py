"""``p3o-launch submit`` and ``run --target relax``: a run as a job of a Ray cluster, followed and recorded from here.

The run directory is made here and must be reachable under the same path on the cluster. The builtin runtime records
its steps and its end itself, as a driver inside the job; what it leaves unsaid, and a Relax job, is recorded here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p3o_launch.check import CheckResult
from p3o_launch.diagnostics import LocatedFinding, Severity
from p3o_launch.errors import EXIT_FINDINGS, EXIT_INTERRUPTED, EXIT_OK, PreflightError, RunInterrupted, UsageError
from p3o_launch.launch import record_file as status
from p3o_launch.launch.hooks import after_run, before_run
from p3o_launch.launch.job import Job
from p3o_launch.launch.preflight import place_of
from p3o_launch.launch.record import RunRecord
from p3o_launch.launch.recorder import change
from p3o_launch.launch.relax import MODULE
from p3o_launch.launch.run_files import write_run_dir
from p3o_launch.launch.rundir import create_run_dir
from p3o_launch.runtime.packaging import (
    JOBS_LIMIT_BYTES,
    LIMIT_BYTES,
    excludes,
    local_directory,
    packed_env,
    packed_size,
)
from p3o_launch.runtime.signals import StopRequest

# Ray gives a job three seconds to end before it kills it: too few for checkpoints and actors.
STOP_WAIT_S = 45


def jobs_address(preset_address: str | None) -> str:
    """Where to submit: the preset's cluster, else ``RAY_ADDRESS``. UsageError without either."""
    address = preset_address or os.environ.get("RAY_ADDRESS")
    if not address:
        raise UsageError(
            "no Ray cluster is named", hint="--ray-address http://HOST:8265, or RAY_ADDRESS; that is its Jobs server"
        )
    return address


def package_findings(
    result: CheckResult, runtime_env: Mapping[str, Any], output_root: str, as_job: bool
) -> list[LocatedFinding]:
    """P3O608 when the working directory is too large for the way it takes (``as_job``: through the Jobs server).

    Raises PreflightError when it is not there.
    """
    directory = local_directory(runtime_env)
    if directory is None:
        return []
    path = "cluster.runtime_env.working_dir"
    if not directory.is_dir():
        raise PreflightError(f"{path} ({directory}) is not a directory")
    total, largest = packed_size(directory, excludes(runtime_env, output_root))
    limit, receiver = (JOBS_LIMIT_BYTES, "Ray's Jobs server") if as_job else (LIMIT_BYTES, "Ray")
    if total < limit:
        return []
    shown = ", ".join(f"{name} ({size // 2**20} MiB)" for name, size in largest)
    message = f"{path} ({directory}) holds {total // 2**20} MiB; {receiver} takes less than {limit // 2**20} MiB"
    hint = f"list what the job does not need in cluster.runtime_env.excludes; the largest files: {shown}"
    position = place_of(result, path)
    return [LocatedFinding(position, Severity.ERROR, "P3O608", "working-dir-too-large", message, hint, path)]


def print_now(text: str) -> None:
    """To standard error, at once."""
    sys.stderr.write(text)
    sys.stderr.flush()


@dataclass
class Submission:
    """One job of a Ray cluster. ``address``: its Jobs server. ``wait``: follow it to its end."""

    job: Job
    address: str
    wait: bool = True
    write: Callable[[str], None] = print_now

    def execute(self) -> int:
        """Submit, follow and record; the exit code. Raises RunInterrupted after a signal has stopped the job."""
        from p3o_launch.runtime.workers.jobs import JobServer

        with StopRequest() as stop:
            server = JobServer(self.address)
            preset = self.job.preset
            directory = create_run_dir(Path(preset.logging.output_root), preset.name, preset.seed.seed)
            name = f"p3o-{directory.name}"
            job = self.job
            write_run_dir(directory, job, ray_address=self.address, submission_id=name)
            self.write(f"run directory {directory}\n")
            relax = job.target == "relax"
            try:
                if relax:
                    before_run(preset.logging.pre_command, directory)
                    change(directory, status=status.RUNNING, started=status.utc_now())
                server.submit(name, entry_words(job, directory), job_env(job))
            except BaseException as error:
                conclude(directory, EXIT_FINDINGS, {"class": type(error).__name__, "message": str(error), "rank": None})
                raise
            self.write(f"job {name}\n")
            if not self.wait:
                change(directory, process={})
                self.write(f"follow it with `p3o-launch runs follow {directory}`\n")
                return EXIT_OK
            code = follow_job(server, name, directory, self.write, stop)
            if relax:
                after_run(preset.logging.post_command, directory, RunRecord.load(directory).status)
            return code


def entry_words(job: Job, directory: Path) -> list[str]:
    """The command of the job."""
    arguments = job.arguments_in(str(directory))
    if job.target == "relax":
        return ["python3", "-m", MODULE, *arguments]
    return ["python3", "-m", "p3o_launch", "run-resolved", str(directory), "--", *arguments]


def job_env(job: Job) -> dict[str, Any]:
    """The job's runtime environment."""
    if job.target == "relax":
        return packed_env(job.runtime_env, job.preset.logging.output_root)
    packed = packed_env(job.preset.cluster.runtime_env, job.preset.logging.output_root)
    variables = packed.get("env_vars")
    own = variables if isinstance(variables, dict) else {}
    return {**packed, "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S), **own}}


def follow_job(server: Any, name: str, directory: Path, write: Callable[[str], None], stop: Callable[[], bool]) -> int:
    """Show the job's output, also in ``logs/launch.log``, until it ends, and record the end; the exit code."""
    with (directory / "logs" / "launch.log").open("a", encoding="utf-8") as log:

        def both(text: str) -> None:
            write(text)
            log.write(text)
            log.flush()

        state = server.follow(name, both, stop)
    code = record_end(directory, state)
    if stop():
        told = RunInterrupted(f"the job {name} was stopped", hint=f"its record is in {directory}")
        if RunRecord.load(directory).status != status.SUCCEEDED:
            raise told
    return code


def record_end(directory: Path, state: Any) -> int:
    """Write how a job ended unless the run has done it itself; the run's exit code."""
    code = {"SUCCEEDED": EXIT_OK, "STOPPED": EXIT_INTERRUPTED}.get(state.status, state.exit_code or EXIT_FINDINGS)
    failure = None
    if code != EXIT_OK:
        message = f"the job ended with exit code {state.exit_code}" if state.exit_code else state.message
        failure = {"class": "JobFailed", "message": message or "no reason was given", "rank": None}
    conclude(directory, code, failure)
    recorded = RunRecord.load(directory).data.get("exit_code")
    return int(recorded) if isinstance(recorded, int) else code


def conclude(directory: Path, code: int, failure: dict[str, Any] | None) -> None:
    """Write the end of a run that is not written yet, also where only ``lost`` was."""
    data = RunRecord.load(directory).data
    if data["status"] not in (*status.UNFINISHED, status.LOST):
        return
    outcome = {EXIT_OK: status.SUCCEEDED, EXIT_INTERRUPTED: status.INTERRUPTED}.get(code, status.FAILED)
    change(directory, status=outcome, exit_code=code, failure=failure, ended=status.utc_now())
