"""The tokens that end a response come from the checkpoint, and a checkpoint that names none is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from p3o_launch.errors import PreflightError
from p3o_launch.runtime.rollout.stop_tokens import stop_token_ids


def write(directory: Path, **files: object) -> Path:
    for name, content in files.items():
        (directory / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return directory


def test_every_stop_token_of_the_generation_config_counts(tmp_path: Path) -> None:
    where = write(tmp_path, generation_config={"eos_token_id": [9, 3, 9]}, config={"eos_token_id": 5})
    assert stop_token_ids(where) == (3, 9)


@pytest.mark.parametrize("generation", [{}, {"eos_token_id": None}])
def test_config_json_answers_when_the_generation_config_does_not(tmp_path: Path, generation: dict[str, None]) -> None:
    assert stop_token_ids(write(tmp_path, generation_config=generation, config={"eos_token_id": 0})) == (0,)
    (tmp_path / "generation_config.json").unlink()
    assert stop_token_ids(tmp_path) == (0,)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"eos_token_id": "</s>"}, "must be a token id"),
        ({"eos_token_id": []}, "must be a token id"),
        ({"eos_token_id": [True]}, "must be a token id"),
        ({"eos_token_id": -1}, "must be a token id"),
        ("{", "cannot read"),
        ([1], "does not hold a JSON object"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, content: object, message: str) -> None:
    with pytest.raises(PreflightError, match=message) as caught:
        stop_token_ids(write(tmp_path, generation_config=content))
    assert "generation_config.json" in caught.value.message


def test_no_stop_token_at_all_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match="names no end-of-sequence token"):
        stop_token_ids(tmp_path)
