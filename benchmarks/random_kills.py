"""Kill a real CPU run at random moments, resume it, and check every time what must hold.

After each kill: the process ends within bounds, no process of the run is left, its record says how it ended, metrics
hold every step once, every visible checkpoint is complete, and the run resumes with ``run --resume``, from its newest
checkpoint or, killed before the first, from its start. A run that reaches its end must have the metrics and rollouts of
one that was never interrupted, bit for bit.

Usage: ``python benchmarks/random_kills.py [--kills 30] [--seed 0] [--work DIRECTORY]``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from p3o_launch.launch.record import RunRecord
from p3o_launch.runtime.mcore.checkpoint_dirs import complete, latest
from p3o_launch.runtime.metrics import read_jsonl

TINY = Path(__file__).parents[1] / "tests" / "data" / "run" / "tiny.yaml"
ROLLOUTS = 200
END_S = 120.0
START_S = 400.0
STEP_S = 0.3
# Kills of one run before it may reach its end, so that the beginnings of several are hit too.
PER_RUN = 6
# What a step took is not what it computed.
VOLATILE = ("time", "perf/", "tok/s")


def heed_signals() -> None:
    """A campaign under ``nohup`` or in the background ignores signals, and a run would inherit that."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def send(number: signal.Signals) -> Callable[[Launch], None]:
    return lambda launch: launch.process.send_signal(number)


def kill_named(*texts: str) -> Callable[[Launch], None]:
    """Kill one process of the run by its id, if there is one of that kind yet; else the driver."""

    def kill(launch: Launch) -> None:
        victims = [p for p in launch.family() if any(text in name_of(p) for text in texts)]
        (launch.pick(victims) if victims else psutil.Process(launch.process.pid)).kill()

    return kill


def name_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()[:1])
    except psutil.Error:
        return ""


KINDS: dict[str, tuple[Callable[[Launch], None], tuple[str, ...]]] = {
    "SIGINT": (send(signal.SIGINT), ("interrupted",)),
    "SIGTERM": (send(signal.SIGTERM), ("interrupted",)),
    "SIGHUP": (send(signal.SIGHUP), ("interrupted",)),
    "driver killed": (send(signal.SIGKILL), ("lost",)),
    # Before there is one, the driver is killed instead.
    "rank killed": (kill_named("_RankActor"), ("failed", "lost")),
    # Ray itself ends a driver whose raylet is gone, unless the run has noticed first.
    "Ray server killed": (kill_named("raylet", "gcs_server"), ("failed", "lost")),
}


@dataclass
class Launch:
    """One process of ``p3o-launch run`` and everything it ever started."""

    work: Path
    rng: random.Random
    resume: str | None
    seen: dict[int, psutil.Process] = field(default_factory=dict)

    def __post_init__(self) -> None:
        words = [sys.executable, "-m", "p3o_launch", "run"]
        words += ["--resume", self.resume] if self.resume else ["--preset", str(TINY)]
        # A rate at which rewards, and with them gradients, do not vanish within the run.
        settings = [f"batch.num_rollout={ROLLOUTS}", "optimizer.lr=2e-5"]
        settings += ["checkpoint.save_interval=5", "logging.tensorboard=false"]
        for setting in () if self.resume else settings:
            words += ["--set", setting]
        self.log = self.work / "output"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                words, cwd=self.work, stderr=log, stdout=log, start_new_session=True, preexec_fn=heed_signals
            )

    def family(self) -> list[psutil.Process]:
        """Processes of the run that live now; remembered for later."""
        try:
            children: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.Error:
            children = []
        self.seen |= {child.pid: child for child in children}
        return children

    def pick(self, processes: list[psutil.Process]) -> psutil.Process:
        return self.rng.choice(sorted(processes, key=lambda process: process.pid))

    def wait_until(self, moment: float) -> bool:
        """Wait up to ``moment``; False when the run ended by itself before."""
        while time.monotonic() < moment:
            if self.process.poll() is not None:
                return False
            self.family()
            time.sleep(0.1)
        return self.process.poll() is None

    def wait_for(self, line: str) -> bool:
        """Wait until a line of the output begins with the pattern ``line``; False when the run ended before."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            if re.search(f"^{line}", self.log.read_text(errors="replace"), re.MULTILINE):
                return True
            self.family()
            time.sleep(0.02)
        return False

    def left(self) -> list[str]:
        """What still lives a while after the end."""
        _, alive = psutil.wait_procs(list(self.seen.values()), timeout=30)
        return [f"{p.pid} {name_of(p)}" for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    def end_all(self) -> None:
        """After a failed check: leave nothing behind."""
        for process in [*self.family(), *self.seen.values()]:
            if process.is_running():
                process.kill()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(timeout=10)


def figures(directory: Path) -> list[dict[str, Any]]:
    """Metrics lines without what differs between two runs of the same numbers."""
    rows = read_jsonl(directory / "metrics.jsonl")
    return [{key: value for key, value in row.items() if not key.startswith(VOLATILE)} for row in rows]


def rollouts(directory: Path) -> dict[str, list[dict[str, Any]]]:
    return {path.name: read_jsonl(path) for path in sorted((directory / "rollouts").glob("*.jsonl"))}


def newest(work: Path) -> Path | None:
    found = sorted(work.glob("runs/*/seed_*/*/run.json"), key=lambda path: path.parent.name)
    return found[-1].parent if found else None


def need(condition: bool, what: str, launch: Launch) -> None:
    if not condition:
        raise SystemExit(f"FAILED: {what}\n{launch.log.read_text()[-3000:]}")


@dataclass
class Campaign:
    """Kills in a row. ``reference``: the run that nothing happened to.

    ``start_s`` [s]: from its record to its first step.
    """

    work: Path
    rng: random.Random
    reference: Path
    start_s: float
    outcomes: Counter[str] = field(default_factory=Counter)
    ends: list[float] = field(default_factory=list)
    current: Path | None = None

    def kill_once(self) -> bool:
        """Start or resume, kill at a random moment, check. False when the run ended before the kill."""
        launch = Launch(self.work, self.rng, self.current.name if self.current else None)
        try:
            kind = self.rng.choice(sorted(KINDS))
            action, expected = KINDS[kind]
            if self.rng.random() < 0.5:  # while it starts
                begun, moment = launch.wait_for("run directory"), self.rng.uniform(0.0, self.start_s)
            else:  # in a step, a save, or what lies between them
                first = self.steps_done() + 1
                begun = launch.wait_for(f"step {self.rng.randint(first, max(first, ROLLOUTS - 1))}/")
                moment = self.rng.uniform(0.0, STEP_S)
            if not begun or not launch.wait_until(time.monotonic() + moment):
                self.finished(launch)
                return False
            launch.family()
            action(launch)
            began = time.monotonic()
            launch.process.wait(timeout=END_S)
            self.ends.append(time.monotonic() - began)
            left = launch.left()
            need(not left, f"{kind}: left behind: {left}", launch)
            directory = self.current or newest(self.work)
            assert directory is not None
            return self.check(launch, directory, kind, expected)
        except BaseException:
            launch.end_all()
            raise

    def steps_done(self) -> int:
        """Steps that the next launch does not make again."""
        kept = latest(self.current / "checkpoints") if self.current is not None else None
        return int(kept.name.rpartition("_")[2]) if kept is not None else 0

    def check(self, launch: Launch, directory: Path, kind: str, expected: tuple[str, ...]) -> bool:
        """What must hold after a kill. False when it came after the end of the run."""
        status = RunRecord.load(directory).status
        code = launch.process.returncode
        # A resumed process that was killed before it took the run over leaves the record of the end before.
        untouched = self.current is not None and RunRecord.load(directory).data["process"]["pid"] != launch.process.pid
        if status == "succeeded":
            # The signal came after the last step, or the cluster came up at the second attempt.
            self.outcomes[f"{kind}: too late or survived (not counted)"] += 1
            self.finished(launch)
            return False
        need(untouched or status in expected, f"{kind}: status {status}, exit code {code}", launch)
        steps = [row["step"] for row in read_jsonl(directory / "metrics.jsonl")]
        need(steps == list(range(1, len(steps) + 1)), f"{kind}: metrics lines {steps}", launch)
        reference = figures(self.reference)
        need(figures(directory) == reference[: len(steps)], f"{kind}: other figures than the reference", launch)
        visible = [path for path in (directory / "checkpoints").glob("rollout_*") if path.is_dir()]
        need(sorted(visible) == complete(directory / "checkpoints"), f"{kind}: an incomplete checkpoint", launch)
        self.outcomes[f"{kind}: {'untouched' if untouched else status}"] += 1
        kept = latest(directory / "checkpoints")
        self.outcomes["after a checkpoint" if kept is not None else "before the first checkpoint"] += 1
        self.outcomes["in a resumed run"] += self.current is not None
        self.current = directory
        return True

    def finish(self) -> None:
        """Let the last run reach its end."""
        if self.current is None:
            return
        launch = Launch(self.work, self.rng, self.current.name)
        try:
            launch.wait_until(time.monotonic() + START_S)
            self.finished(launch)
        except BaseException:
            launch.end_all()
            raise

    def finished(self, launch: Launch) -> None:
        directory = self.current or newest(self.work)
        assert directory is not None
        launch.process.wait(timeout=END_S)
        done = "P3O703" in launch.log.read_text()  # stopped between its last step and its end
        need(done or RunRecord.load(directory).status == "succeeded", "the run did not succeed", launch)
        need(figures(directory) == figures(self.reference), "other metrics than the uninterrupted run", launch)
        need(rollouts(directory) == rollouts(self.reference), "other rollouts than the uninterrupted run", launch)
        need(not launch.left(), "processes left after the end", launch)
        self.outcomes["was complete, refused with P3O703" if done else "reached the end"] += 1
        self.current = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, help="kept; without it, a temporary directory that is removed")
    options = parser.parse_args()
    work = options.work or Path(tempfile.mkdtemp(prefix="p3o-kills-"))
    work.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    rng = random.Random(options.seed)
    try:
        (work / "reference").mkdir(exist_ok=True)
        began = time.monotonic()
        first = Launch(work / "reference", rng, None)
        first.wait_for("run directory")
        recorded = time.monotonic()
        first.wait_for(r"step \d+/")
        stepped = time.monotonic()
        first.wait_until(began + START_S)
        reference = newest(work / "reference")
        need(reference is not None and RunRecord.load(reference).status == "succeeded", "no reference run", first)
        assert reference is not None
        print(f"reference: {len(figures(reference))} steps in {time.monotonic() - began:.0f} s", flush=True)
        (work / "killed").mkdir(exist_ok=True)
        campaign = Campaign(work / "killed", rng, reference, stepped - recorded)
        done = 0
        while done < options.kills:
            done += campaign.kill_once()
            print(f"{done}/{options.kills} {json.dumps(campaign.outcomes, sort_keys=True)}", flush=True)
            if done % PER_RUN == 0:
                campaign.finish()
        campaign.finish()
        for what, count in sorted(campaign.outcomes.items()):
            print(f"{count:3d}  {what}")
        print(f"longest end after a kill {max(campaign.ends):.1f} s; processes left behind: 0")
        print("every line and every rollout equal to the uninterrupted run's, bit for bit")
    finally:
        if options.work is None:
            shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
