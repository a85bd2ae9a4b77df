"""The command line as a user meets it: output streams, exit codes, and what is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from p3o_launch import cli, commands, console
from p3o_launch.errors import P3OLaunchError, RunInterrupted, UsageError
from p3o_launch.guards import all_guards

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
HEAVY = ("torch", "ray", "megatron", "transformers", "numpy", "vllm", "tensorboard", "rich")


def run(*words: str, cwd: Path = DATA, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "p3o_launch", *words],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


# validate


def test_validate_of_sound_files_says_so_on_stderr_and_ends_with_0() -> None:
    done = run("validate", "base.yaml", "temp_1p2")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "2 files: no findings\n")


def test_validate_prints_findings_to_stdout_and_ends_with_1() -> None:
    done = run("validate", "err/P3O007_octal.yaml", "base.yaml")
    assert done.returncode == 1
    assert done.stdout.startswith("err/P3O007_octal.yaml:3:21: error P3O007 ")
    assert done.stderr == "2 files: 1 error\n"


def test_warnings_fail_only_when_strict(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("extends: on_policy\nalgorithm: {eps_clip: 0.3}\n")
    assert run("validate", "a.yaml", cwd=tmp_path).returncode == 0
    strict = run("validate", "a.yaml", "--strict", cwd=tmp_path)
    assert strict.returncode == 1
    assert "warning P3O113" in strict.stdout


def test_json_goes_to_stdout_alone() -> None:
    done = run("validate", "err/P3O007_octal.yaml", "--format", "json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["summary"]["errors"] == 1


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["validate"], "Missing argument"),
        (["validate", "temp_1p3"], "did you mean temp_1p2?"),
        (["validate", "base.yaml", "--format", "xml"], "use text or "),
        (["validate", "base.yaml", "--set", "nothing"], "path=value"),
        (["validate", "base.yaml", "--set"], "requires an argument"),
        (["validate", "base.yaml", "--no-such-option"], "No such option"),
        (["valdate", "base.yaml"], "No such command"),
        (["explain", "P3O999"], "explain --list"),
        (["explain", "inert-clap"], "did you mean P3O113 (inert-clip)?"),
        (["explain"], "explain CODE"),
        (["presets", "temp_1p3"], "did you mean temp_1p2?"),
        (["diff", "on_policy"], "Missing argument"),
        (["run", "--preset", "temp_1p3", "--profile", "cpu"], "did you mean temp_1p2?"),
        (["runs"], "Commands"),
        ([], "Commands"),
    ],
    ids=" ".join,
)
def test_what_does_not_exist_is_a_usage_error(words: list[str], hint: str) -> None:
    done = run(*words)
    assert done.returncode == 2
    assert hint in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_file_is_a_finding_that_names_the_shipped_preset() -> None:
    done = run("validate", "temp_1p2.yaml", "nowhere/x.yaml")
    assert done.returncode == 1
    assert "temp_1p2.yaml:1:1: error P3O001" in done.stdout
    assert "named temp_1p2" in done.stdout
    assert done.stdout.count("error") == 2


def test_options_reach_the_check() -> None:
    done = run("validate", "temp_1p2", "--profile", "cpu", "--recipe", "smoke", "--set", "rollout.top_p=0.9")
    assert done.returncode == 1
    assert done.stdout.startswith("--set:1:15: error P3O401")
    assert run("validate", "temp_1p2", "--profile", "gpu").stdout.startswith("--profile:1:1: error P3O008")


def test_output_is_plain_where_it_is_no_terminal() -> None:
    assert "\x1b" not in run("validate", "err/P3O007_octal.yaml").stdout
    assert "\x1b" not in run("validate", "--help", FORCE_COLOR="").stdout


WORDS = [
    "validate a.yaml",
    "validate a b --strict",
    "validate --format json a --set x=1 --set y=2 --profile cpu --recipe smoke b",
    "validate a --set x=1=2 --profile cpu --profile a100x4",
    "validate a --format=json",
    "validate a --set -x",
    "validate -- a",
    "validate --strict",
    "validate --help",
    "validate a --help",
    "explain 301",
    "validate a --set",
]


@pytest.mark.parametrize("words", WORDS)
def test_the_short_way_reads_a_command_line_as_typer_does(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("files", "format_", "overrides", "profile", "recipe", "strict")
    seen: list[dict[str, Any]] = []

    def record(*values: Any) -> int:
        seen.append(dict(zip(names, values, strict=True)))
        return 0

    monkeypatch.setattr(commands, "validate_files", record)
    CliRunner().invoke(commands.app, words.split())
    short = cli.plain_validate(words.split())
    if short is not None:
        defaults = {"format_": "text", "profile": None, "recipe": None, "strict": False}
        assert {**defaults, **short} == {
            **seen[0],
            "files": list(seen[0]["files"]),
            "overrides": list(seen[0]["overrides"]),
        }


def test_plain_command_lines_take_the_short_way() -> None:
    assert [cli.plain_validate(words.split()) is not None for words in WORDS] == [True] * 4 + [False] * 8


# what is imported


@pytest.mark.parametrize(
    "words",
    [
        "--help",
        "--version",
        "validate base.yaml err/P3O007_octal.yaml",
        "validate base.yaml --format json",
        "explain P3O301",
        "explain --list",
        "schema",
        "presets",
        "presets temp_1p2 --resolved",
        "diff temp_1p2 grpo_temp_1p2 --paired",
        "runs list nowhere",
        "run --preset temp_1p2 --profile cpu --dry-run",
    ],
)
def test_no_command_but_run_imports_anything_heavy(words: str) -> None:
    code = (
        "import sys\n"
        f"sys.argv[1:] = {words.split()!r}\n"
        "from p3o_launch.cli import dispatch, guarded\n"
        "code = guarded(dispatch)\n"
        f"loaded = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "sys.stderr.write(f'loaded={loaded} code={code}')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=DATA, capture_output=True, text=True, timeout=60, check=False
    )
    assert "loaded=[]" in done.stderr
    assert "code=3" not in done.stderr


def test_a_sound_preset_is_validated_without_typer_and_pydantic() -> None:
    code = (
        "import sys\nsys.argv[1:] = ['validate', 'base.yaml']\n"
        "from p3o_launch.cli import dispatch, guarded\nassert guarded(dispatch) == 0\n"
        "assert not {'typer', 'pydantic', 'p3o_launch.schema'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=DATA, check=True, capture_output=True, timeout=60)


# the other commands


def test_explain_knows_every_rule_by_code_number_and_name() -> None:
    listed = run("explain", "--list").stdout.splitlines()
    assert [line.split()[0] for line in listed] == list(all_guards())
    pages = {run("explain", word).stdout for word in ("P3O302", "p3o302", "302", "global-batch-not-divisible")}
    assert len(pages) == 1
    assert "why:" in pages.pop()


@pytest.mark.parametrize("code", all_guards())
def test_every_rule_can_be_explained(code: str) -> None:
    rule = all_guards()[code]
    assert rule.why.endswith((".", "`", ")"))
    assert rule.fix
    assert rule.source
    assert rule.name == rule.name.lower().replace(" ", "-").replace("_", "-")


def test_the_json_schema_takes_every_shipped_preset_and_refuses_a_typo() -> None:
    schema = json.loads(run("schema").stdout)
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for path in (ROOT / "presets").rglob("*.yaml"):
        assert not list(validator.iter_errors(yaml.safe_load(path.read_text()))), path
    base = yaml.safe_load((DATA / "base.yaml").read_text())
    assert not list(validator.iter_errors(base))
    for group, field, value in [
        ("batch", "micro_batchsize", 1),
        ("batch", "micro_batch_size", 0),
        ("optimizer", "lr", "x"),
    ]:
        assert list(validator.iter_errors({**base, group: {**base[group], field: value}}))


def test_presets_lists_every_shipped_one_with_a_description() -> None:
    lines = run("presets").stdout.splitlines()
    shown = {line.split()[0] for line in lines if line.startswith("  ") and len(line.split()) > 2}
    assert shown == {
        path.stem for folder in ("", "profiles", "recipes") for path in (ROOT / "presets" / folder).glob("*.yaml")
    }


def test_a_resolved_preset_is_yaml_that_tells_where_each_value_comes_from(tmp_path: Path) -> None:
    text = run("presets", "temp_1p2", "--resolved", cwd=ROOT).stdout
    (line,) = [line for line in text.splitlines() if line.strip().startswith("temperature: 1.2")]
    assert line.endswith("# presets/temp_1p2.yaml:8")
    assert "# presets/profiles/a100x4.yaml" in text
    (tmp_path / "copy.yaml").write_text(text)
    assert run("validate", "copy.yaml", cwd=tmp_path).stderr == "1 file: no findings\n"
    same = run("diff", "temp_1p2", str(tmp_path / "copy.yaml"))
    assert (same.returncode, same.stdout) == (0, "")


def test_presets_name_shows_the_file_as_it_is() -> None:
    assert run("presets", "temp_1p2").stdout == (ROOT / "presets/temp_1p2.yaml").read_text()


def test_presets_with_findings_are_not_resolved() -> None:
    done = run("presets", "err/P3O007_octal.yaml", "--resolved")
    assert done.returncode == 1
    assert "P3O007" in done.stdout


def test_diff_names_what_differs_and_paired_allows_the_algorithm_only() -> None:
    done = run("diff", "on_policy", "temp_0p6")
    assert "rollout.temperature: 1.0 -> 0.6\n" in done.stdout
    assert done.returncode == 0
    assert run("diff", "on_policy", "temp_0p6", "--paired").returncode == 1
    assert run("diff", "temp_0p6", "grpo_temp_0p6", "--paired").returncode == 0


def test_version_is_told() -> None:
    assert run("--version").stdout == "p3o-launch 0.1.0\n"


# the error boundary


def boundary(error: BaseException | None) -> int:
    def command() -> None:
        if error is not None:
            raise error

    return cli.guarded(command)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (None, 0, ""),
        (P3OLaunchError("it is broken", hint="mend it"), 1, "error: it is broken\n    hint: mend it\n"),
        (UsageError("no such thing"), 2, "error: no such thing\n"),
        (RunInterrupted("stopped"), 130, "error: stopped\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (SystemExit(5), 5, ""),
        (SystemExit(None), 0, ""),
        (SystemExit("text"), 1, ""),
    ],
)
def test_the_boundary_turns_errors_into_exit_codes(
    error: BaseException | None, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert boundary(error) == code
    assert capsys.readouterr().err == said


def test_a_reader_that_goes_away_is_no_crash() -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", f"{sys.executable} -m p3o_launch schema | head -n 1"],
        cwd=DATA,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("{\n", "")


def test_a_bug_ends_with_3_and_leaves_its_traceback_in_a_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert boundary(ZeroDivisionError("a bug")) == 3
    (log,) = tmp_path.glob("p3o-launch-*.log")
    assert "ZeroDivisionError: a bug" in log.read_text()
    assert str(log) in capsys.readouterr().err


def test_a_crashed_rule_ends_with_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    real = console.check_file(str(DATA / "base.yaml"))
    real.crashes = ("Traceback ...",)
    assert console.report([real]) == 3
    assert len(list(tmp_path.glob("p3o-launch-*.log"))) == 1
