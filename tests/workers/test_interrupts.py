"""Runs that are stopped, killed, or lose a process: the status is right, the end is bounded, no process is left."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import psutil
import pytest
from heads import Head

from p3o_launch.launch.record import RunRecord
from p3o_launch.runtime.workers.watchdog import NOTICE

HERE = Path(__file__).parent
START_S = 90
END_S = 40


class SlowRun:
    """``slow_run.py`` in a session of its own, with every process it ever had."""

    def __init__(self, root: Path, *arguments: str, **variables: str) -> None:
        environment = dict(os.environ)
        environment.pop("RAY_AUTH_TOKEN", None)
        environment.pop("RAY_AUTH_MODE", None)
        environment |= variables
        self.log = root / "stderr"
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "slow_run.py"), str(root / "runs"), *arguments],
            stderr=self.log.open("wb"),
            stdout=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        self.root = root
        self.family: list[psutil.Process] = []

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + START_S
        while text not in self.log.read_text():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.1)
        self.family = psutil.Process(self.process.pid).children(recursive=True)

    def named(self, text: str) -> list[psutil.Process]:
        return [p for p in self.family if p.is_running() and any(text in part for part in p.cmdline()[:1])]

    def end(self) -> int:
        return self.process.wait(timeout=END_S)

    def record(self) -> dict:
        (path,) = self.root.glob("runs/*/seed_*/*/run.json")
        return json.loads(path.read_text())

    def left(self) -> list[str]:
        """Processes of the run that are still there a moment after its end."""
        _, alive = psutil.wait_procs(self.family, timeout=15)
        return [" ".join(p.cmdline()[:2]) for p in alive if p.status() != psutil.STATUS_ZOMBIE]

    def clean_up(self) -> None:
        for process in [*self.family, psutil.Process(self.process.pid)] if self.process.poll() is None else self.family:
            if process.is_running():
                process.kill()
        self.process.wait(timeout=10)


@pytest.fixture
def run(tmp_path):
    started = SlowRun(tmp_path)
    yield started
    started.clean_up()


def temp_dirs() -> set[Path]:
    return set(Path("/tmp").glob("p3o-*"))


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGINT, signal.SIGHUP))]
)
def test_a_signal_ends_the_run_with_its_processes_and_says_interrupted(run, number):
    before = temp_dirs()
    run.wait_for("step 2/")
    assert len(run.named("ray::")) >= 2
    run.process.send_signal(number)
    assert run.end() == 130
    assert run.left() == []
    record = run.record()
    assert (record["status"], record["exit_code"]) == ("interrupted", 130)
    assert record["failure"]["message"].startswith(f"the run was stopped by {number.name}")
    assert record["steps_done"] >= 2
    assert temp_dirs() <= before
    assert "Traceback" not in run.log.read_text()


def test_ctrl_c_reaches_the_whole_group_and_still_ends_in_order(run):
    run.wait_for("step 2/")
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.end() == 130
    assert run.left() == []
    assert run.record()["status"] == "interrupted"


@pytest.mark.slow
def test_a_signal_while_the_ranks_start_ends_the_run(run):
    run.wait_for("starting 2 ranks")
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130
    assert run.left() == []
    assert run.record()["status"] == "interrupted"


def test_a_second_signal_does_not_wait(run):
    run.wait_for("step 2/")
    ranks = run.named("ray::")
    for process in ranks:  # ranks that do not answer
        process.suspend()
    run.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130
    assert run.left() == []
    assert run.record()["status"] == "interrupted"


def test_a_killed_driver_takes_its_cluster_along_and_the_run_is_lost(run):
    run.wait_for("step 2/")
    run.process.kill()
    run.end()
    assert run.left() == []
    assert run.record()["status"] == "running"
    (path,) = run.root.glob("runs/*/seed_*/*/run.json")
    assert RunRecord.load(path.parent).status == "lost"
    time.sleep(1)
    assert NOTICE in run.log.read_text()


def test_a_killed_rank_fails_the_run_and_is_named(run):
    run.wait_for("step 2/")
    log = next(run.root.glob("runs/*/seed_*/*/logs/rank_1.log"))
    victim = next(p for p in run.named("ray::") if any(f.path == str(log) for f in writable_files(p)))
    victim.kill()
    assert run.end() == 1
    assert run.left() == []
    record = run.record()
    assert (record["status"], record["failure"]["class"], record["failure"]["rank"]) == ("failed", "RankDiedError", 1)
    assert "rank 1 died during" in run.log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("server", ["raylet", "gcs_server"])
def test_a_killed_ray_server_fails_the_run_within_bounds(run, server):
    run.wait_for("step 2/")
    for process in run.named(server):
        process.kill()
    assert run.end() == 1
    assert run.left() == []
    (path,) = run.root.glob("runs/*/seed_*/*/run.json")
    # Ray ends a driver whose raylet is gone at once, unless the run has noticed first.
    assert RunRecord.load(path.parent).status in ("failed", "lost")
    time.sleep(1)
    assert any(text in run.log.read_text() for text in (f"lost its {server}", NOTICE))


def writable_files(process):
    """Files behind the standard output of a process."""
    target = os.readlink(f"/proc/{process.pid}/fd/1")
    return [type("File", (), {"path": target})]


@pytest.mark.slow
def test_a_run_on_a_cluster_that_exists_leaves_it_as_it_was(tmp_path):
    head = Head(tmp_path)
    try:
        access = {
            name: head.environment[name]
            for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER")
        }
        run = SlowRun(tmp_path, head.address, **access)
        try:
            run.wait_for("step 2/")
            actors = [p for p in head.processes() if any("_RankActor" in part for part in p.cmdline())]
            assert len(actors) == 2
            run.process.send_signal(signal.SIGINT)
            assert run.end() == 130
            _, alive = psutil.wait_procs(actors, timeout=15)
            assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []
            assert head.nodes[0].poll() is None
            assert run.record()["status"] == "interrupted"
        finally:
            run.clean_up()
    finally:
        head.close()


@pytest.mark.slow
def test_a_terminal_that_is_closed_interrupts_the_run_it_shows(tmp_path):
    ours, theirs = pty.openpty()
    command = [sys.executable, str(HERE / "slow_run.py"), str(tmp_path / "runs")]
    run = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=lambda: take_terminal(theirs)
    )
    os.close(theirs)
    said = b""
    while b"loss" not in said:
        said += os.read(ours, 65536)
    family = psutil.Process(run.pid).children(recursive=True)
    os.close(ours)
    assert run.wait(timeout=END_S) == 130
    _, alive = psutil.wait_procs(family, timeout=15)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []
    (path,) = tmp_path.glob("runs/*/seed_*/*/run.json")
    record = json.loads(path.read_text())
    assert (record["status"], record["failure"]["message"][:34]) == (
        "interrupted",
        "the run was stopped by SIGHUP afte",
    )


def take_terminal(terminal: int) -> None:
    """Become the session whose terminal it is."""
    os.setsid()
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
