"""A preset from the standard input, as ``lint`` reads a configuration."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

FAULTY = "extends: parent.yaml\nmodel:\n  hidden_dropout: 0.1\n"


def validate(where: Path, text: str | bytes | None, *words: str) -> subprocess.CompletedProcess[str]:
    """``p3o-launch validate`` with ``text`` on its standard input; None closes that."""
    (where / "parent.yaml").write_text("schema_version: 1\nextends: temp_1p2\n", "utf-8")
    command = [sys.executable, "-m", "p3o_launch", "validate", *words]
    if text is None:
        command = ["sh", "-c", 'exec "$@" <&-', "sh", *command]
    raw = text.encode() if isinstance(text, str) else text
    done = subprocess.run(command, input=raw, capture_output=True, cwd=where, timeout=60, check=False)
    return subprocess.CompletedProcess(command, done.returncode, done.stdout.decode(), done.stderr.decode())


def test_a_sound_preset_has_no_findings_and_what_it_extends_is_relative_to_the_directory(tmp_path: Path) -> None:
    done = validate(tmp_path, "extends: parent.yaml\n", "-")
    assert (done.returncode, done.stdout) == (0, "")
    assert "1 file: no findings" in done.stderr


@pytest.mark.parametrize(
    ("format_", "word"),
    [
        ("text", "<stdin>:3:19: error P3O201"),
        ("full", "    3 |   hidden_dropout: 0.1\n"),
        ("github", "::error title=P3O201 dropout-in-replay::<stdin>: "),
        ("json", '"file": "<stdin>"'),
        ("sarif", '"ruleId": "P3O201"'),
    ],
)
def test_every_format_names_the_standard_input(tmp_path: Path, format_: str, word: str) -> None:
    done = validate(tmp_path, FAULTY, "-", "--format", format_)
    assert done.returncode == 1
    assert word in done.stdout
    if format_ == "sarif":
        (found,) = json.loads(done.stdout)["runs"][0]["results"]
        assert "physicalLocation" not in found["locations"][0]


def test_options_and_other_files_go_with_it(tmp_path: Path) -> None:
    done = validate(tmp_path, FAULTY, "temp_0p6", "-", "--set", "model.hidden_dropout=0", "--profile", "a100x4")
    assert done.returncode == 0
    assert "2 files: no findings" in done.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "P3O001 the file is empty"),
        (b"\xff", "P3O001 the file is not UTF-8"),
        (b"# " + b"x" * 1_000_000, "P3O004 the file is larger"),
        (None, "P3O001 the file cannot be read: there is no standard input"),
        ("extends: nowhere.yaml\n", "P3O008 the file 'nowhere.yaml' does not exist"),
        ("extends: [temp_1p2, temp_1p2\n", "P3O002"),
    ],
)
def test_what_cannot_be_read_is_a_finding(tmp_path: Path, text: str | bytes | None, words: str) -> None:
    done = validate(tmp_path, text, "-")
    assert done.returncode == 1
    assert words in done.stdout
    assert done.stdout.startswith("<stdin>:")


def test_it_can_be_read_once(tmp_path: Path) -> None:
    done = validate(tmp_path, FAULTY, "-", "-")
    assert done.returncode == 2
    assert "can be read once" in done.stderr
