"""Runs as jobs of a real Ray head with its Jobs server: arguments, records, logs, stopping."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from heads import BIN, Head, free_port

TINY = Path(__file__).parents[1] / "data" / "run" / "tiny.yaml"
JOB_S = 90
HOSTILE = "a 'b' \"c\" $HOME $(touch owned) `touch owned` \\ 模型\nline two; touch owned #"

TRAINER = """
import json, os, sys, time
place = sys.argv[sys.argv.index("--rollout-result-dir") + 1]
seen = {"arguments": sys.argv[1:], "temperature": os.environ.get("P3O_BEHAVIOR_TEMPERATURE"), "x": os.environ.get("X")}
with open(os.path.join(os.path.dirname(place), "seen.json"), "w") as file:
    json.dump(seen, file)
print("the trainer ran", flush=True)
time.sleep(float(os.environ.get("FAKE_SLEEP", "0")))
sys.exit(int(os.environ.get("FAKE_EXIT", "0")))
"""


class JobsHead(Head):
    """A Ray head with its Jobs server at ``jobs``, on which Relax's trainer is a program that notes its arguments."""

    def __init__(self, root: Path) -> None:
        package = root / "path" / "relax" / "entrypoints"
        package.mkdir(parents=True)
        (package / "train.py").write_text(TRAINER)
        dashboard = free_port()
        self.jobs = f"http://127.0.0.1:{dashboard}"
        super().__init__(root, jobs_port=dashboard, PYTHONPATH=str(root / "path"))


def own_repository(directory: Path) -> None:
    """A git repository that nobody else commits to while the test compares records."""
    (directory / ".gitignore").write_text("*\n")
    author = ["-c", "user.name=test", "-c", "user.email=test@example.invalid"]
    for words in (["init", "-q"], [*author, "commit", "-q", "--allow-empty", "-m", "empty"]):
        subprocess.run(["git", "-C", str(directory), *words], check=True)


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    started = JobsHead(tmp_path_factory.mktemp("head"))
    yield started
    started.close()


class Place:
    """A directory to run commands in, with files a Relax preset needs."""

    def __init__(self, head: JobsHead, root: Path) -> None:
        self.head, self.root = head, root
        own_repository(root)
        (root / "model $(touch owned)").mkdir()
        (root / "model $(touch owned)" / "config.json").write_text("{}")
        (root / "prompts 'a'.jsonl").write_text("{}\n")

    def relax(self, **env: str) -> list[str]:
        settings = {
            "model.hf_checkpoint": "model $(touch owned)",
            "data.prompt_data": "prompts 'a'.jsonl",
            "data.eval_prompt_data": "prompts 'a'.jsonl",
            "data.input_key": HOSTILE,
            "cluster.env": {"X": HOSTILE, "CUDA_DEVICE_MAX_CONNECTIONS": "1", **env},
        }
        words = ["--preset", "temp_1p2", "--target", "relax", "--ray-address", self.head.jobs]
        for path, value in settings.items():
            words += ["--set", f"{path}={json.dumps(value)}"]
        return words

    def launch(self, *words: str, check: int | None = 0) -> subprocess.CompletedProcess[str]:
        command = [str(BIN / "p3o-launch"), *words]
        done = subprocess.run(
            command,
            cwd=self.root,
            env=self.head.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=JOB_S,
        )
        assert check is None or done.returncode == check, done.stdout + done.stderr
        return done

    def runs(self) -> list[Path]:
        return sorted(path.parent for path in self.root.rglob("run.json"))

    def record(self) -> dict:
        (run,) = self.runs()
        return json.loads((run / "run.json").read_text())


@pytest.fixture
def place(head, tmp_path):
    return Place(head, tmp_path)


def test_a_relax_job_gets_exactly_the_arguments_from_run_and_from_the_script_and_leaves_one_record(place):
    options = place.relax()
    done = place.launch("run", *options)
    assert "the trainer ran" in done.stderr
    place.launch("run", *options, "--dry-run", "--output", "x.sh")
    # Another address in the shell must not win over the one that was resolved.
    environment = place.head.environment | {"RAY_ADDRESS": "http://127.0.0.1:1", "P3O_PYTHON": str(BIN / "python3")}
    script = subprocess.run(
        ["bash", "x.sh"], cwd=place.root, env=environment, capture_output=True, text=True, check=False, timeout=JOB_S
    )
    assert script.returncode == 0, script.stderr
    assert "the trainer ran" in script.stderr
    runs = place.runs()
    assert len(runs) == 2
    records = [json.loads((run / "run.json").read_text()) for run in runs]
    for run, record in zip(runs, records, strict=True):
        seen = json.loads((run / "seen.json").read_text())
        assert seen["arguments"] == record["arguments"]
        # Ray itself replaces $NAME in the values of a runtime environment; the shell must not touch them.
        assert (seen["temperature"], seen["x"]) == ("1.2", os.path.expandvars(HOSTILE))
        assert record["submission_id"] == f"p3o-{run.name}"
        assert (record["status"], record["exit_code"]) == ("succeeded", 0)
        assert "the trainer ran" in (run / "logs" / "launch.log").read_text()
    for record in records:  # `python` and `python3` of one environment are the same interpreter
        machine = record["machine"]
        machine["python_executable"] = str(Path(machine["python_executable"]).resolve())
    volatile = {"run_id", "created", "started", "ended", "process", "command_line", "submission_id", "arguments"}
    first, second = ({key: value for key, value in record.items() if key not in volatile} for record in records)
    assert first == second
    own = [
        [word.replace(str(run), "RUN") for word in record["arguments"]]
        for run, record in zip(runs, records, strict=True)
    ]
    assert own[0] == own[1]
    for run in runs:
        assert (run / "command.sh").read_text().splitlines() == (place.root / "x.sh").read_text().splitlines()
    assert not list(place.root.rglob("owned"))


def test_a_job_that_fails_gives_its_exit_code_and_its_reason(place):
    place.launch("run", *place.relax(FAKE_EXIT="7"), check=7)
    record = place.record()
    assert (record["status"], record["exit_code"]) == ("failed", 7)
    assert record["failure"] == {"class": "JobFailed", "message": "the job ended with exit code 7", "rank": None}


def test_a_detached_job_goes_on_is_shown_and_can_be_stopped(place):
    place.launch("submit", *place.relax(FAKE_SLEEP="120"), "--no-wait")
    (run,) = place.runs()
    shown = place.launch("runs", "show", run.name).stdout
    assert f"job p3o-{run.name} of {place.head.jobs}" in shown
    assert len(shown.splitlines()) == 10
    assert place.record()["status"] == "running"
    done = place.launch("runs", "stop", run.name)
    assert f"{run.name} is interrupted" in done.stderr
    assert (place.record()["status"], place.record()["exit_code"]) == ("interrupted", 130)
    assert "it is interrupted" in place.launch("runs", "stop", run.name, check=2).stderr
    followed = place.launch("runs", "follow", run.name, check=130)
    assert "the trainer ran" in followed.stderr


def test_a_server_that_is_not_there_is_an_error_that_says_so_and_writes_nothing(place):
    options = place.relax()
    options[options.index("--ray-address") + 1] = f"http://127.0.0.1:{free_port()}"
    done = place.launch("run", *options, check=1)
    assert "cannot reach the Jobs server at http://127.0.0.1:" in done.stderr
    assert place.runs() == []
    done = place.launch("submit", "--preset", str(TINY), check=2)
    assert "no Ray cluster is named" in done.stderr


def test_the_builtin_runtime_trains_inside_a_job_and_records_itself(place):
    options = ["--preset", str(TINY), "--set", "batch.num_rollout=1", "--ray-address", place.head.jobs]
    done = place.launch("submit", *options)
    assert "step 1/1" in done.stderr
    record = place.record()
    assert (record["status"], record["steps_done"], record["exit_code"]) == ("succeeded", 1, 0)
    (run,) = place.runs()
    assert record["submission_id"] == f"p3o-{run.name}"
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 1
    assert (run / "checkpoints" / "rollout_000001" / "checkpoint.json").is_file()
    assert "step 1/1" in (run / "logs" / "launch.log").read_text()
