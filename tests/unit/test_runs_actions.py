"""What is done with a recorded run: stop it, run it again, and say what has changed since; and what a job packs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml
from run_support import TINY, tiny_preset

from p3o_launch.check import check_text
from p3o_launch.errors import PreflightError, UsageError
from p3o_launch.launch.arguments import resolved_yaml
from p3o_launch.launch.drift import drift
from p3o_launch.launch.environment import working_tree
from p3o_launch.launch.job import make_job
from p3o_launch.launch.record import RunRecord
from p3o_launch.launch.record_file import process_facts
from p3o_launch.launch.run_files import write_run_dir
from p3o_launch.launch.runs_actions import follow_run, stop_run
from p3o_launch.launch.runs_command import show_lines
from p3o_launch.launch.submit import conclude, package_findings, record_end
from p3o_launch.runtime.packaging import excludes, is_excluded, packed_env, packed_size

HERE = Path(__file__).parent


def git(directory: Path, *words: str) -> None:
    author = ["-c", "user.name=test", "-c", "user.email=test@example.invalid"]
    subprocess.run(["git", "-C", str(directory), *author, *words], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository to stand in, with one committed file and the runs ignored."""
    place = tmp_path / "repository"
    place.mkdir()
    (place / ".gitignore").write_text("runs/\n")
    (place / "code.py").write_text("a = 1\n")
    git(place, "init", "-q")
    git(place, "add", ".")
    git(place, "commit", "-q", "-m", "one")
    monkeypatch.chdir(place)
    return place


def recorded(repository: Path, **facts) -> RunRecord:
    """A run directory as a run leaves it before its first step."""
    preset = tiny_preset()
    directory = repository / "runs" / "tiny" / "seed_42" / "20260101T000000Z-abcdef"
    directory.mkdir(parents=True)
    return write_run_dir(directory, make_job(check_text(resolved_yaml(preset)), preset), **facts)


def test_a_dirty_tree_is_kept_as_a_patch_that_restores_it_and_untracked_files_by_hash(repository):
    (repository / "code.py").write_text("a = 2\n")
    (repository / "new ünïcode.txt").write_text("new")
    record = recorded(repository)
    assert record.data["git"]["dirty"] is True
    assert list(record.data["git"]["untracked_sha256"]) == ["new ünïcode.txt"]
    (repository / "code.py").write_text("a = 1\n")
    git(repository, "apply", str(record.directory / "git.patch"))
    assert (repository / "code.py").read_text() == "a = 2\n"


def test_a_clean_tree_has_no_patch_and_no_drift(repository):
    record = recorded(repository)
    assert record.data["git"]["dirty"] is False
    assert not (record.directory / "git.patch").exists()
    assert drift(record.directory, record.data) == []


def test_every_way_the_code_or_a_package_differs_is_named(repository):
    (repository / "code.py").write_text("a = 2\n")
    record = recorded(repository)
    assert drift(record.directory, record.data) == []
    then = record.data["git"]["commit"]
    (repository / "code.py").write_text("a = 3\n")
    git(repository, "commit", "-q", "-a", "-m", "two")
    (repository / "extra.txt").write_text("x")
    record.data["versions"]["torch"] = "0.0.1"
    now = working_tree()
    lines = drift(record.directory, record.data)
    assert any(line.startswith("torch was 0.0.1, is ") for line in lines)
    assert f"the commit was {then[:12]}, is {now.commit[:12]}" in lines
    assert any(line.startswith("the uncommitted changes differ from") for line in lines)
    assert "1 untracked files differ, such as extra.txt" in lines
    assert drift(record.directory, record.data | {"git": None})[-1].endswith("not both")


def test_rerun_runs_the_recorded_configuration_again_and_warns_first(repository):
    record = recorded(repository)
    (repository / "code.py").write_text("a = 2\n")
    command = [sys.executable, str(HERE / "fake_launch.py"), "runs", "rerun", record.directory.name]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "warning: the uncommitted changes differ from none" in done.stderr
    again = next(path.parent for path in repository.rglob("run.json") if path.parent != record.directory)
    assert RunRecord.load(again).status == "succeeded"
    for name in ("resolved.yaml", "resolved_args.txt"):
        assert (again / name).read_text() == (record.directory / name).read_text()
    assert RunRecord.load(again).data["arguments"] == record.data["arguments"]


def test_stop_ends_a_run_of_this_machine_by_its_process_and_waits(repository):
    record = recorded(repository)
    body = "import signal, sys; signal.signal(15, lambda *_: sys.exit(130)); print(flush=True); signal.pause()"
    process = subprocess.Popen([sys.executable, "-c", body], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        record.update(status="running", **process_facts(process.pid))
        # The record is the run's to write; this process does not, so the run counts as lost.
        assert stop_run(record.directory.name) == 1
        assert process.wait(timeout=5) == 130
        assert RunRecord.load(record.directory).status == "lost"
    finally:
        process.kill()
        process.wait()
    with pytest.raises(UsageError, match="does not run: it is lost"):
        stop_run(record.directory.name)
    with pytest.raises(UsageError, match="is no job of a Ray cluster"):
        follow_run(record.directory.name)


class State:
    def __init__(self, status, exit_code=None, message=""):
        self.status, self.exit_code, self.message = status, exit_code, message


@pytest.mark.parametrize(
    ("state", "status", "code"),
    [
        (State("SUCCEEDED", 0), "succeeded", 0),
        (State("STOPPED"), "interrupted", 130),
        (State("FAILED", 3), "failed", 3),
        (State("FAILED", None, "no such module"), "failed", 1),
    ],
)
def test_a_jobs_end_is_recorded_once_and_what_the_run_wrote_itself_stays(repository, state, status, code):
    record = recorded(repository, submission_id="p3o-x", ray_address="http://127.0.0.1:8265")
    assert record_end(record.directory, state) == code
    data = RunRecord.load(record.directory).data
    assert (data["status"], data["exit_code"]) == (status, code)
    assert (data["failure"] is None) == (code == 0)
    conclude(record.directory, 1, None)
    assert RunRecord.load(record.directory).status == status
    shown = show_lines(RunRecord.load(record.directory))
    assert len(shown) == 10
    assert any("job p3o-x of http://127.0.0.1:8265, submitted from" in line for line in shown)


def test_processes_that_start_runs_in_the_same_second_never_share_a_directory(tmp_path):
    """Every process draws the same ids in the same order: only making the directory can tell them apart."""
    body = (
        "import itertools, sys\nfrom pathlib import Path\nfrom p3o_launch.launch import rundir\n"
        "for _ in range(3):\n"
        "    ids = itertools.count()\n"
        "    rundir.new_run_id = lambda: f'id-{next(ids)}'\n"
        "    print(rundir.create_run_dir(Path(sys.argv[1]), 'p', 1))\n"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", body, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(5)
    ]
    made = [line for process in processes for line in process.communicate(timeout=60)[0].splitlines()]
    assert len(made) == 15
    assert len(set(made)) == 15


def test_scripts_that_start_together_make_directories_of_their_own(tmp_path):
    launcher = tmp_path / "launcher"
    launcher.write_text("#!/bin/bash\nexit 0\n")
    launcher.chmod(0o755)
    preset = tiny_preset()
    from p3o_launch.launch.script import run_script

    (tmp_path / "x.sh").write_text(run_script(make_job(check_text(resolved_yaml(preset)), preset)))
    environment = os.environ | {"P3O_LAUNCH": str(launcher), "P3O_PYTHON": sys.executable}
    processes = [
        subprocess.Popen(["bash", "x.sh"], cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL) for _ in range(4)
    ]
    assert [process.wait(timeout=60) for process in processes] == [0] * 4
    records = [json.loads(path.read_text()) for path in tmp_path.rglob("run.json")]
    assert len(records) == 4
    assert {record["status"] for record in records} == {"succeeded"}


@pytest.mark.parametrize(
    ("path", "out"),
    [
        (".git/config", True),
        ("a/__pycache__/x.pyc", True),
        ("data/big.bin", True),
        ("data/keep.txt", False),
        ("src/data.py", False),
        ("runs/x/model", True),
        ("src/runs/x", False),
    ],
)
def test_what_no_job_needs_is_left_out(tmp_path, path, out):
    env = {"working_dir": str(tmp_path), "excludes": ["data/*", "!data/keep.txt"]}
    assert is_excluded(path, excludes(env, str(tmp_path / "runs"))) is out


def test_the_working_directory_is_measured_without_what_is_excluded(tmp_path):
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "pack").write_bytes(b"x" * 1000)
    (tmp_path / "a.py").write_bytes(b"x" * 10)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.py").write_bytes(b"x" * 20)
    total, largest = packed_size(tmp_path, [".git"])
    assert largest == [("sub/b.py", 20), ("a.py", 10)]
    package = tmp_path / "package.zip"
    with zipfile.ZipFile(package, "w") as file:
        for name, _ in largest:
            file.write(tmp_path / name, name)
    assert total == package.stat().st_size - 22  # the end of the archive
    assert packed_env({"pip": ["x"]}, "runs") == {"pip": ["x"]}
    assert packed_env({"working_dir": "gcs://package.zip"}, "runs") == {"working_dir": "gcs://package.zip"}


@pytest.mark.parametrize(
    ("as_job", "limit", "message"),
    [(False, 512, "Ray takes less than 512 MiB"), (True, 100, "Ray's Jobs server takes less than 100 MiB")],
)
def test_a_working_directory_above_rays_limit_is_a_finding_where_it_is_written(tmp_path, as_job, limit, message):
    with (tmp_path / "weights.bin").open("wb") as file:
        file.truncate(limit * 2**20)  # sparse: no disk is used
    text = TINY.read_text().replace(
        "cluster: {device: cpu", f"cluster: {{runtime_env: {{working_dir: {tmp_path}}}, device: cpu"
    )
    result = check_text(text, file="mine.yaml")
    assert result.preset is not None
    (found,) = package_findings(result, result.preset.cluster.runtime_env, "runs", as_job)
    assert (found.code, found.position.file) == ("P3O608", "mine.yaml")
    assert f"holds {limit} MiB; {message}" in found.message
    assert f"weights.bin ({limit} MiB)" in found.hint
    with (tmp_path / "weights.bin").open("r+b") as file:
        file.truncate(limit * 2**20 - 200)
    assert package_findings(result, result.preset.cluster.runtime_env, "runs", as_job) == []
    excluded = {**result.preset.cluster.runtime_env, "excludes": ["*.bin"]}
    assert package_findings(result, excluded, "runs", as_job) == []
    with pytest.raises(PreflightError, match="is not a directory"):
        package_findings(result, {"working_dir": str(tmp_path / "no")}, "runs", as_job)


def test_the_resolved_preset_of_a_record_is_the_one_its_arguments_say(repository):
    from p3o_launch.launch.arguments import data_of

    record = recorded(repository)
    assert yaml.safe_load((record.directory / "resolved.yaml").read_text()) == data_of(record.data["arguments"])
