"""One run of an accepted preset: directory, record, driver, and what is said about it at the end."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p3o_launch.check import CheckResult
from p3o_launch.errors import (
    EXIT_FINDINGS,
    EXIT_INTERNAL,
    EXIT_INTERRUPTED,
    EXIT_OK,
    P3OLaunchError,
    RunError,
    RunInterrupted,
)
from p3o_launch.launch import record as status
from p3o_launch.launch.environment import machine, versions
from p3o_launch.launch.hooks import after_run, before_run
from p3o_launch.launch.job import Job, make_job
from p3o_launch.launch.preflight import load_inputs
from p3o_launch.launch.progress import LiveProgress, PlainProgress, make_progress
from p3o_launch.launch.quoting import word
from p3o_launch.launch.record import RunRecord, process_facts, utc_now
from p3o_launch.launch.resume import Resumption
from p3o_launch.launch.run_files import write_run_dir
from p3o_launch.launch.rundir import claim_run_dir, create_run_dir
from p3o_launch.launch.summary import summarize
from p3o_launch.runtime.driver import (
    ClusterStart,
    Driver,
    Inputs,
    RanksStart,
    failure_facts,
    megatron_ranks,
    ray_cluster,
)
from p3o_launch.runtime.loop import LoopState, Row, Sink
from p3o_launch.runtime.mcore.checkpoint_dirs import latest, prune
from p3o_launch.runtime.metrics import JsonlSink, RolloutSink, TensorBoardSink
from p3o_launch.runtime.plan import RunPlan, make_plan
from p3o_launch.runtime.signals import StopRequest
from p3o_launch.schema import Preset


class RecordSink(Sink):
    """Keeps ``steps_done`` and ``last_checkpoint`` of the record current, and ``keep`` checkpoints on disk."""

    def __init__(self, record: RunRecord, keep: int) -> None:
        self._record = record
        self._keep = keep

    def on_resume(self, state: LoopState) -> None:
        self._record.update(steps_done=state.optimizer_step)

    def on_step(self, step: int, rollout_id: int, row: Row) -> None:
        self._record.update(steps_done=step)

    def on_checkpoint(self, directory: Path, state: LoopState) -> None:
        self._record.update(last_checkpoint=str(directory.relative_to(self._record.directory)))
        prune(directory.parent, self._keep)


@dataclass
class PresetRun:
    """One run of an accepted preset, from its inputs to its summary. The callables bring in the rest.

    ``run_dir``: use exactly this directory; with ``adopt`` it holds the record that a script wrote for this run.
    ``strict``: a warning about the prompts stops the run before anything is written.
    """

    result: CheckResult
    preset: Preset
    profile: str | None = None
    run_dir: Path | None = None
    resumption: Resumption | None = None
    job: Job | None = None
    adopt: bool = False
    strict: bool = False
    load: Callable[[Preset], Inputs] = load_inputs
    start_cluster: ClusterStart = ray_cluster
    start_ranks: RanksStart = megatron_ranks

    def execute(self) -> int:
        with StopRequest() as stop:
            inputs = self.load(self.preset)
            if stop():
                raise RunInterrupted("interrupted before the run began; nothing was written")
            if self.strict and inputs.warnings:
                sys.stderr.write("".join(f"warning: {warning}\n" for warning in inputs.warnings))
                return EXIT_FINDINGS
            record = self._record(inputs)
            plan = make_plan(self.preset, record.directory)
            progress = make_progress(plan.total_steps)
            progress.say(f"run directory {record.directory}")
            for source, reasons in inputs.skipped.items():
                for reason, count in reasons.items():
                    progress.say(f"warning: {count} prompts of {source} are left out: {reason}")
            for warning in inputs.warnings:
                progress.say(f"warning: {warning}")
            return self._drive(plan, inputs, record, progress, stop)

    def _record(self, inputs: Inputs) -> RunRecord:
        """The record of a new run, or that of the run to go on with, made this process's own."""
        if self.resumption is not None:
            self.resumption.reopen(self.job or make_job(self.result, self.preset, self.profile), sys.argv)
            return self.resumption.record
        record = self._write_record(make_plan(self.preset, self._directory()))
        record.update(prompts=len(inputs.prompts), skipped=inputs.skipped, data_warnings=list(inputs.warnings))
        return record

    def _directory(self) -> Path:
        if self.adopt and self.run_dir is not None:
            return self.run_dir
        if self.run_dir is not None:
            return claim_run_dir(self.run_dir)
        return create_run_dir(Path(self.preset.logging.output_root), self.preset.name, self.preset.seed.seed)

    def _write_record(self, plan: RunPlan) -> RunRecord:
        """Write the record of a new run, or take over the one a script wrote just now."""
        if self.adopt:
            record = RunRecord.load(plan.run_dir)
            record.update(**process_facts(), versions=versions(), machine=machine())
            return record
        job = self.job or make_job(self.result, self.preset, self.profile)
        return write_run_dir(plan.run_dir, job)

    def _drive(
        self,
        plan: RunPlan,
        inputs: Inputs,
        record: RunRecord,
        progress: PlainProgress | LiveProgress,
        stop: StopRequest,
    ) -> int:
        started = time.monotonic()
        sinks: list[Sink] = [JsonlSink(plan.run_dir), RecordSink(record, self.preset.checkpoint.keep), progress]
        if self.preset.logging.log_rollouts:
            sinks.append(RolloutSink(plan.rollouts_dir))
        if self.preset.logging.tensorboard:
            sinks.append(TensorBoardSink(plan.tensorboard_dir))
        driver = Driver(
            plan=plan,
            inputs=inputs,
            sinks=sinks,
            checkpoint=self.resumption.checkpoint if self.resumption else None,
            restart=self.resumption is not None,
            should_stop=stop,
            announce=progress.say,
            on_started=lambda job_id: record.update(ray_job_id=job_id),
            after_cluster=stop.install,
            start_cluster=self.start_cluster,
            start_ranks=self.start_ranks,
        )
        stop.on_force(lambda: self._force(driver, record))
        record.update(status=status.RUNNING, started=utc_now())
        try:
            before_run(self.preset.logging.pre_command, plan.run_dir)
            state = driver.run()
            if state.optimizer_step == 0:
                raise RunError("the run ended without one optimizer step", hint="look at batch.num_rollout")
        except RunInterrupted as error:
            raise self._interrupted(record, stop) from error
        except SystemExit as error:
            if error.code != signal.SIGTERM:
                raise
            # While Ray starts, the handler in place is Ray's own: it exits with the signal's number.
            stop.received = stop.received or signal.SIGTERM
            raise self._interrupted(record, stop) from error
        except BaseException as error:
            code = error.exit_code if isinstance(error, P3OLaunchError) else EXIT_INTERNAL
            finish(record, status.FAILED, code, failure_facts(error))
            self._after(record)
            raise
        finally:
            stop.on_force(lambda: None)
        finish(record, status.SUCCEEDED, EXIT_OK)
        self._after(record)
        result = summarize(plan.run_dir, time.monotonic() - started)
        for line in [*result.curves(), *result.lines()]:
            progress.say(line)
        progress.say(f"results {plan.run_dir}")
        return EXIT_OK

    def _force(self, driver: Driver, record: RunRecord) -> None:
        """The second signal: say how it ended while there is time, then end the processes."""
        failure = {"class": "RunInterrupted", "message": "stopped by a second signal", "rank": None}
        finish(record, status.INTERRUPTED, EXIT_INTERRUPTED, failure)
        driver.force()

    def _interrupted(self, record: RunRecord, stop: StopRequest) -> RunInterrupted:
        """Write down that a signal ended the run; the error that says so to the user."""
        told = RunInterrupted(
            f"the run was stopped by {stop.name} after {record.data['steps_done']} steps",
            hint=f"it goes on with: p3o-launch run --resume {word(str(record.directory))}",
        )
        finish(record, status.INTERRUPTED, EXIT_INTERRUPTED, failure_facts(told))
        self._after(record)
        return told

    def _after(self, record: RunRecord) -> None:
        code = after_run(self.preset.logging.post_command, record.directory, record.status)
        if code != 0:
            sys.stderr.write(f"warning: logging.post_command ended with exit code {code}\n")


def finish(record: RunRecord, outcome: str, exit_code: int, failure: dict[str, Any] | None = None) -> None:
    """Write how the run ended. The first end that is written stays."""
    if record.status in status.UNFINISHED:
        # Ranks finish a save that the driver was stopped in.
        kept = latest(record.directory / "checkpoints")
        newest = str(kept.relative_to(record.directory)) if kept is not None else record.data.get("last_checkpoint")
        ended = utc_now()
        record.update(status=outcome, exit_code=exit_code, failure=failure, ended=ended, last_checkpoint=newest)
