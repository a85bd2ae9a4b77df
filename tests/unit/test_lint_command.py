"""`p3o-launch lint`: output, exit codes, standard input, start-up."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from importer_lists import NEMO, RELAX, SLIME
from typer.testing import CliRunner, Result

from p3o_launch.commands import app


def run(*words: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, ["lint", *words], input=stdin)


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "launch.args"
    path.write_text("\n".join(RELAX.replace("'", "").split()), "utf-8")
    return str(path)


def test_a_sound_configuration_passes(recipe: str) -> None:
    result = run("--from", "relax", recipe, "--as", "p3o")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "no findings" in result.stderr


def test_errors_fail_and_stand_at_their_line(recipe: str) -> None:
    Path(recipe).write_text(Path(recipe).read_text("utf-8") + "\n--use-tis\n", "utf-8")
    result = run("--from", "relax", recipe)
    line = len(Path(recipe).read_text("utf-8").split("\n")) - 1
    assert result.exit_code == 1
    assert result.stdout.startswith(f"{recipe}:{line}:1: error P3O102 --use-tis ")


def test_warnings_pass_unless_strict(recipe: str) -> None:
    Path(recipe).write_text(Path(recipe).read_text("utf-8") + "\n--colour\nred\n", "utf-8")
    assert run("--from", "relax", recipe).exit_code == 0
    assert run("--from", "relax", recipe, "--strict").exit_code == 1


def test_notes_for_the_record_never_fail(recipe: str) -> None:
    Path(recipe).write_text(Path(recipe).read_text("utf-8") + "\n--rollout-temperature\n0.6\n", "utf-8")
    result = run("--from", "relax", recipe, "--as", "p3o", "--strict")
    assert result.exit_code == 0
    assert "info P3O025" in result.stdout


def test_the_standard_input_is_read() -> None:
    result = run("--from", "slime", "-", stdin=SLIME + "--kl-coef 0.01\n")
    assert result.exit_code == 1
    assert result.stdout.startswith("<stdin>:")


def test_json_holds_the_findings(recipe: str) -> None:
    result = run("--from", "relax", recipe, "--as", "p3o", "--format", "json")
    report = json.loads(result.stdout)
    assert report["files"][0]["ok"] is True
    assert report["files"][0]["findings"] == []


def test_facts_are_printed_as_json(recipe: str) -> None:
    record = json.loads(run("--from", "relax", recipe, "--facts").stdout)
    assert record["advantage_estimator"] == "p3o"
    assert record["p3o"]["ess_scope"] == "step"
    assert record["num_gpus"] == {
        "train": 4,
        "rollout": 4,
        "critic": 0,
        "total": 4,
        "roles": {"actor": [1, 4], "rollout": [1, 4]},
    }


def test_overrides_follow_the_file(tmp_path: Path) -> None:
    path = tmp_path / "grpo.yaml"
    path.write_text(NEMO, "utf-8")
    assert run("--from", "nemo_rl", str(path)).exit_code == 0
    result = run("--from", "nemo_rl", str(path), "grpo.num_generations_per_prompt=1")
    assert result.exit_code == 1
    assert "<overrides>:1:" in result.stdout
    assert "P3O112" in result.stdout


def test_gpus_and_their_name_can_be_given(recipe: str) -> None:
    Path(recipe).write_text(
        Path(recipe).read_text("utf-8") + "\n--fp8-format\nhybrid\n--fp8-recipe\ntensorwise\n", "utf-8"
    )
    assert run("--from", "relax", recipe, "--gpu", "H100").exit_code == 0
    assert "P3O501" in run("--from", "relax", recipe, "--gpu", "A100-40GB").stdout


def test_a_file_that_is_not_there_is_a_finding() -> None:
    result = run("--from", "slime", "nowhere.args")
    assert result.exit_code == 1
    assert "nowhere.args:1:1: error P3O001" in result.stdout


def test_usage_errors_exit_with_two(recipe: str) -> None:
    command = [sys.executable, "-m", "p3o_launch", "lint", recipe]
    for extra in ([], ["--from", "openrlhf"], ["--from", "slime", "--format", "xml"]):
        done = subprocess.run([*command, *extra], capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stdout) == (2, ""), extra


def test_nothing_heavy_is_imported(recipe: str) -> None:
    program = (
        "import sys, io\n"
        "from p3o_launch.cli import dispatch, guarded\n"
        f"sys.argv = ['p3o-launch', 'lint', '--from', 'relax', {recipe!r}]\n"
        "sys.stdout = io.StringIO()\n"
        "guarded(dispatch)\n"
        "heavy = {'torch', 'ray', 'megatron', 'numpy', 'transformers'} & sys.modules.keys()\n"
        "sys.exit(1 if heavy else 0)\n"
    )
    assert io.StringIO is not None
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
