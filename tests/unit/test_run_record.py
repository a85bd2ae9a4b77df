"""Run directories, records, and what must never reach them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from datetime import UTC, datetime

import pytest

from p3o_launch.errors import PreflightError, UsageError
from p3o_launch.launch import record as status
from p3o_launch.launch.process import is_alive, own_mark, start_mark
from p3o_launch.launch.record import RunRecord, find_run, find_runs, write_atomic
from p3o_launch.launch.redact import REDACTED, redact, redact_text
from p3o_launch.launch.rundir import claim_run_dir, create_run_dir, new_run_id


def test_run_ids_sort_by_time_and_differ_within_a_second():
    moment = datetime(2026, 1, 31, 23, 59, 59, tzinfo=UTC)
    first, second = new_run_id(moment), new_run_id(moment)
    assert re.fullmatch(r"20260131T235959Z-[0-9a-f]{6}", first)
    assert first != second


def test_runs_that_start_together_never_share_a_directory(tmp_path, monkeypatch):
    ids = iter(["same"] * 8 + [f"id-{i}" for i in range(8)])
    lock = threading.Lock()

    def next_id():
        with lock:
            return next(ids)

    monkeypatch.setattr("p3o_launch.launch.rundir.new_run_id", next_id)
    made = []
    threads = [threading.Thread(target=lambda: made.append(create_run_dir(tmp_path, "p", 1))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 8
    assert all(path.parent == tmp_path / "p" / "seed_1" for path in made)


def test_an_output_root_that_is_a_file_is_a_clear_error(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(PreflightError, match="no run directory can be made"):
        create_run_dir(tmp_path / "runs", "p", 1)


@pytest.mark.parametrize("content", [None, "", "logs"])
def test_a_directory_without_a_run_can_be_claimed_once(tmp_path, content):
    directory = tmp_path / "here"
    if content is not None:
        (directory / content).mkdir(parents=True)
    assert claim_run_dir(directory) == directory
    with pytest.raises(PreflightError, match="P3O701"):
        claim_run_dir(directory)


def test_a_directory_with_other_files_is_not_claimed(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(PreflightError, match="P3O701"):
        claim_run_dir(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_record_changes_as_a_whole_and_leaves_no_temporary_file(tmp_path):
    record = RunRecord.create(tmp_path, {"preset": "p"})
    record.update(status=status.RUNNING, steps_done=3)
    again = RunRecord.load(tmp_path)
    assert (again.status, again.data["steps_done"], again.data["preset"]) == ("running", 3, "p")
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_a_write_that_fails_leaves_the_old_record(tmp_path, monkeypatch):
    target = tmp_path / "run.json"
    write_atomic(target, "old")

    def fail(*args):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        write_atomic(target, "new")
    assert target.read_text() == "old"


def test_a_run_whose_process_is_gone_is_lost_on_the_next_look(tmp_path):
    code = (
        "import os, pathlib, sys\n"
        "from p3o_launch.launch.record import RunRecord\n"
        "RunRecord.create(pathlib.Path(sys.argv[1]), {}).update(status='running')\n"
        "os._exit(9)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "running"
    record = RunRecord.load(tmp_path)
    assert (record.status, record.data["failure"]["class"]) == ("lost", "lost")
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "lost"


def test_a_pid_that_was_given_to_another_process_is_noticed(tmp_path):
    record = RunRecord.create(tmp_path, {})
    assert RunRecord.load(tmp_path).status == "created"
    record.data["process"]["start"] = "another boot/1"
    record.write()
    assert RunRecord.load(tmp_path).status == "lost"


def test_a_run_of_another_machine_is_left_as_it_says(tmp_path):
    record = RunRecord.create(tmp_path, {})
    record.data["process"] = {"host": "elsewhere", "pid": 1, "start": "x"}
    record.write()
    assert RunRecord.load(tmp_path).status == "created"


def test_process_marks_tell_the_living_from_the_dead():
    pid, mark = own_mark()
    assert is_alive(pid, mark)
    assert not is_alive(pid, "another")
    assert not is_alive(0, None)
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    assert start_mark(child.pid) is None


@pytest.mark.parametrize("text", ["{", "[]", "{}", ""])
def test_a_broken_record_is_a_clear_error(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(UsageError):
        RunRecord.load(tmp_path)


def test_runs_are_found_by_path_id_and_unambiguous_part(tmp_path):
    for run_id in ("20260101T000000Z-aaaaaa", "20260102T000000Z-bbbbbb"):
        directory = tmp_path / "p" / "seed_1" / run_id
        directory.mkdir(parents=True)
        RunRecord.create(directory, {})
    assert [path.name[-6:] for path in find_runs(tmp_path)] == ["aaaaaa", "bbbbbb"]
    assert find_run(tmp_path, "bbbbbb").name.endswith("bbbbbb")
    assert find_run(tmp_path, "20260101").name.endswith("aaaaaa")
    assert find_run(tmp_path, str(tmp_path / "p/seed_1/20260101T000000Z-aaaaaa")).name.endswith("aaaaaa")
    with pytest.raises(UsageError, match="fits 2 runs"):
        find_run(tmp_path, "2026")
    with pytest.raises(UsageError, match="there is no run"):
        find_run(tmp_path, "nothing")


SECRETS = [
    "hf_" + "a" * 34,
    "sk-" + "b" * 40,
    "ghp_" + "c" * 36,
    "AKIA" + "D" * 16,
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl",
    "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----",
]


@pytest.mark.parametrize("secret", SECRETS)
def test_values_with_the_shape_of_a_secret_are_replaced_everywhere(secret):
    for place in (secret, f"x {secret} y", {"a": [secret]}, {"command_line": ["--set", f"k={secret}"]}):
        assert secret not in json.dumps(redact(place)).replace("\\n", "\n")


@pytest.mark.parametrize("name", ["HF_TOKEN", "WANDB_API_KEY", "password", "client_secret", "aws.secret-access-key"])
def test_values_under_a_secret_name_are_replaced(name):
    assert redact({name: "plain"}) == {name: REDACTED}


def test_a_password_in_an_address_or_an_assignment_is_replaced():
    assert redact_text("http://me:pw@proxy:80/x") == f"http://{REDACTED}@proxy:80/x"
    assert redact_text("cluster.env.HF_TOKEN=abc rest") == f"cluster.env.HF_TOKEN={REDACTED} rest"


@pytest.mark.parametrize(
    "harmless", ["max_tokens_per_gpu=4096", "tokens_per_s", "http://host:80/a@b", "sk-short", "tokenizer=abc"]
)
def test_harmless_text_is_left_alone(harmless):
    assert redact_text(harmless) == harmless
    assert redact({harmless: "value"}) == {harmless: "value"}


def test_a_record_on_disk_holds_no_secret(tmp_path):
    RunRecord.create(tmp_path, {"overrides": [f"cluster.env.X={SECRETS[0]}"], "env": {"HF_TOKEN": "plain-word"}})
    text = (tmp_path / "run.json").read_text()
    assert SECRETS[0] not in text
    assert "plain-word" not in text
