"""``run --resume RUN``: which run, from which checkpoint, and whether the preset still is the one that was recorded."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from p3o_launch.check import CheckResult
from p3o_launch.diagnostics import LocatedFinding, Severity
from p3o_launch.errors import PreflightError, UsageError
from p3o_launch.guards import all_guards
from p3o_launch.launch import record as status
from p3o_launch.launch.arguments import resolved_data
from p3o_launch.launch.environment import working_tree
from p3o_launch.launch.job import Job
from p3o_launch.launch.preflight import place_of
from p3o_launch.launch.quoting import word
from p3o_launch.launch.record import RunRecord, find_run, utc_now
from p3o_launch.launch.recorder import present, write_inputs
from p3o_launch.launch.run_files import set_aside, write_preset
from p3o_launch.runtime.mcore.checkpoint_dirs import latest
from p3o_launch.schema import Preset

# What a record says of the process that ran, and not of the run.
_OF_ONE_PROCESS = (
    "status",
    "failure",
    "started",
    "ended",
    "steps_done",
    "process",
    "command_line",
    "arguments",
    "git",
    "versions",
    "machine",
)
# What may differ from the recorded preset without moving the objective: a checkpoint is resharded for another layout.
_FREE = ("description", "ignore", "cluster", "checkpoint", "logging", "evaluation", "parallel")


@dataclass(frozen=True, slots=True)
class Resumption:
    """A run to carry on: its directory, its record, and the checkpoint it goes on from.

    ``checkpoint`` is None for a run that ended before its first one: it begins again, in its directory.
    """

    directory: Path
    record: RunRecord
    checkpoint: Path | None

    @property
    def rollouts_done(self) -> int:
        """Rollouts the checkpoint holds; its name says so."""
        return int(self.checkpoint.name.rpartition("_")[2]) if self.checkpoint is not None else 0

    def reopen(self, job: Job, command_line: Sequence[str]) -> None:
        """Make the record and the inputs in the directory those of this process.

        What was so before stays in the record's ``earlier`` and in ``earlier/N``. Of two processes that come at the
        same time, one gets the run and the other a UsageError.
        """
        with _alone(self.directory):
            if RunRecord.load(self.directory).data != self.record.data:
                refuse_running(self.directory, RunRecord.load(self.directory))
                raise UsageError(
                    f"{self.directory.name} was resumed in the meantime", hint=f"p3o-launch runs show {self.directory}"
                )
            self._reopen(job, command_line)

    def _reopen(self, job: Job, command_line: Sequence[str]) -> None:
        data = self.record.data
        past = {key: data.get(key) for key in _OF_ONE_PROCESS}
        tree = working_tree()
        facts = present(tree, job.arguments_in(str(self.directory)))
        if recorded_data(self.directory) != resolved_data(job.preset):
            facts |= job.facts
        set_aside(self.directory, len(data.get("earlier", ())) + 1)
        write_inputs(self.directory, tree, facts["arguments"])
        write_preset(self.directory, job)
        self.record.update(
            **status.process_facts(),
            **facts,
            command_line=list(command_line),
            status=status.CREATED,
            earlier=[*data.get("earlier", ()), past],
            resumed_from=str(self.checkpoint.relative_to(self.directory)) if self.checkpoint is not None else None,
            resumed=utc_now(),
            ended=None,
            exit_code=None,
            failure=None,
        )


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Hold the run's lock; the system lets go of it when a process dies."""
    with (directory / ".resume.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def refuse_running(directory: Path, record: RunRecord) -> None:
    """Raise UsageError when the run has not ended."""
    if record.status in status.UNFINISHED:
        process = record.data["process"]
        raise UsageError(f"{directory.name} still runs, as process {process['pid']} on {process['host']}")


def find_resumption(preset: Preset, name: str) -> Resumption:
    """The run ``name`` below the preset's output root, ready to go on with ``preset``.

    Raises UsageError when there is no such run or it still runs, PreflightError when it cannot be carried on.
    """
    directory = find_run(Path(preset.logging.output_root), name).absolute()
    record = RunRecord.load(directory)
    refuse_running(directory, record)
    changed = changed_settings(recorded_data(directory), resolved_data(preset))
    if changed:
        raise PreflightError(
            f"P3O706 the preset is not the one {directory.name} was started with: {', '.join(changed[:5])} differ "
            "[objective-changed-on-resume]",
            hint=_remedy(directory, changed),
        )
    checkpoint = latest(directory / "checkpoints")
    missing = _why_none(directory, record) if checkpoint is None else None
    if missing is not None:
        raise PreflightError(
            f"P3O702 {directory.name} has no complete checkpoint to resume from: {missing} [resume-finds-nothing]",
            hint=f"run it again from the start, in a new directory: p3o-launch runs rerun {word(str(directory))}",
        )
    return Resumption(directory, record, checkpoint)


def _why_none(directory: Path, record: RunRecord) -> str | None:
    """Why there is no checkpoint, when there ought to be one; None for a run that had not come to its first."""
    named = record.data.get("last_checkpoint")
    if named is not None:
        return f"its record names {named}, which is gone or damaged"
    damaged = sorted(path.name for path in (directory / "checkpoints").glob("[!.]*") if path.is_dir())
    if damaged:
        return f"{damaged[-1]} is damaged"
    if recorded_data(directory).get("checkpoint", {}).get("save_interval") is None:
        return "it saves none before its end (checkpoint.save_interval is not set)"
    return None


def _remedy(directory: Path, changed: list[str]) -> str:
    if changed == ["batch.num_rollout"]:
        return "the learning rate is spread over batch.num_rollout: only at a constant one may a run go on for longer"
    return f"resume with its own settings: p3o-launch run --resume {word(str(directory))}; or start a new run"


def recorded_run(name: str, root: str | Path = "runs") -> Path:
    """The directory of the run ``name``, whose own ``resolved.yaml`` says how it goes on."""
    directory = find_run(Path(root), name).absolute()
    if not (directory / "resolved.yaml").is_file():
        raise UsageError(f"{directory.name} holds no resolved.yaml: it ended before it was written")
    return directory


def nothing_left(result: CheckResult, preset: Preset, resumption: Resumption) -> list[LocatedFinding]:
    """P3O703 when the checkpoint already holds every rollout the preset asks for."""
    wanted, done = preset.batch.num_rollout, resumption.rollouts_done
    if done < wanted:
        return []
    rule = all_guards()["P3O703"]
    message = f"batch.num_rollout ({wanted}) is reached: {resumption.directory.name} has done {done} rollouts"
    position = place_of(result, "batch.num_rollout")
    return [LocatedFinding(position, Severity.ERROR, rule.code, rule.name, message, rule.fix, "batch.num_rollout")]


def recorded_data(directory: Path) -> dict[str, Any]:
    """The resolved preset of a run directory as plain data."""
    try:
        data = yaml.safe_load((directory / "resolved.yaml").read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise UsageError(f"{directory / 'resolved.yaml'} cannot be read: {error}") from error
    return data if isinstance(data, dict) else {}


def changed_settings(recorded: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Dotted names of settings that differ and matter to what is trained, sorted.

    More rollouts are the same run for longer, unless the learning rate is spread over the whole run.
    """
    changed = []
    for group in sorted({*recorded, *wanted} - set(_FREE)):
        left, right = recorded.get(group), wanted.get(group)
        if isinstance(left, dict) and isinstance(right, dict):
            changed += [f"{group}.{key}" for key in sorted({*left, *right}) if left.get(key) != right.get(key)]
        elif left != right:
            changed.append(group)
    optimizer = wanted.get("optimizer", {})
    spread = optimizer.get("lr_decay_style") != "constant" or optimizer.get("lr_warmup_fraction") != 0.0
    return [name for name in changed if spread or name != "batch.num_rollout"]
