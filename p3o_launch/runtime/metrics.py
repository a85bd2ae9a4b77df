"""Sinks of the loop that write files: ``metrics.jsonl``, ``evaluations.jsonl``, ``rollouts/`` and TensorBoard.

A line is flushed to the operating system before the loop goes on, so a killed run keeps every finished step.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from p3o_launch.runtime.loop import LoopState, Row, Sink


def json_line(record: Mapping[str, Any]) -> str:
    """One line of strict JSON. Numbers JSON has no word for become the strings ``nan``, ``inf`` and ``-inf``."""
    strict = {key: _strict(value) for key, value in record.items()}
    return json.dumps(strict, ensure_ascii=False, allow_nan=False) + "\n"


def _strict(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class JsonlSink(Sink):
    """``metrics.jsonl``: one line per optimizer step. ``evaluations.jsonl``: one per evaluation, if there is any.

    Beside the metrics, a line holds ``step``, ``rollout`` and ``time`` (Unix time [s]).
    """

    def __init__(self, run_dir: Path, now: Callable[[], float] = time.time) -> None:
        self._run_dir = run_dir
        self._now = now
        self._files: dict[str, IO[str]] = {}

    def on_resume(self, state: LoopState) -> None:
        self.close()
        keep_lines(self._run_dir / "metrics.jsonl", lambda row: row["step"] <= state.optimizer_step)
        # The evaluation of the starting weights belongs to the start, and a run that begins again makes it again.
        done = state.next_rollout if state != LoopState() else -1
        keep_lines(self._run_dir / "evaluations.jsonl", lambda row: row["rollout"] <= done)

    def on_step(self, step: int, rollout_id: int, row: Row) -> None:
        self._write("metrics.jsonl", step, rollout_id, row)

    def on_evaluation(self, step: int, rollout_id: int, row: Row) -> None:
        self._write("evaluations.jsonl", step, rollout_id, row)

    def _write(self, name: str, step: int, rollout_id: int, row: Row) -> None:
        if name not in self._files:
            self._files[name] = (self._run_dir / name).open("a", encoding="utf-8")
        head = {"step": step, "rollout": rollout_id, "time": round(self._now(), 3)}
        self._files[name].write(json_line(head | dict(sorted(row.items()))))
        self._files[name].flush()

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()


class RolloutSink(Sink):
    """``rollouts/rollout_000000.jsonl``: one line per sample, one file per rollout, complete or absent."""

    def __init__(self, rollouts_dir: Path) -> None:
        self._dir = rollouts_dir

    def on_resume(self, state: LoopState) -> None:
        for path in self._dir.glob("rollout_*.jsonl"):
            if int(path.stem.rpartition("_")[2]) >= state.next_rollout:
                path.unlink()

    def on_rollout(self, rollout_id: int, records: Sequence[Mapping[str, Any]]) -> None:
        self._dir.mkdir(exist_ok=True)
        target = self._dir / f"rollout_{rollout_id:06d}.jsonl"
        partial = target.with_suffix(".partial")
        partial.write_text("".join(json_line(record) for record in records), encoding="utf-8")
        partial.replace(target)


class TensorBoardSink(Sink):
    """The same numbers as event files, written by the tensorboard package alone (torch's writer would load torch)."""

    def __init__(self, directory: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer: Any = EventFileWriter(str(directory))

    def on_resume(self, state: LoopState) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        # Readers drop what earlier files hold at this step and later.
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=state.optimizer_step + 1, session_log=start))

    def on_step(self, step: int, rollout_id: int, row: Row) -> None:
        self._add(step, row)

    def on_evaluation(self, step: int, rollout_id: int, row: Row) -> None:
        self._add(step, row)

    def _add(self, step: int, row: Row) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=float(value)) for tag, value in sorted(row.items())]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def keep_lines(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> None:
    """Rewrite a JSONL file with the records that are ``wanted``, as a whole or not at all."""
    if not path.is_file():
        return
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json_line(row) for row in read_jsonl(path) if wanted(row)), encoding="utf-8")
    partial.replace(path)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Records of a JSONL file; a last line cut short by a kill is left out, an absent file is empty."""
    if not path.is_file():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records
