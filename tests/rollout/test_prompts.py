"""Prompt files: what is wrong is named with its line before anything starts, or counted where skipping is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from p3o_launch.check import check_file
from p3o_launch.errors import DataError, PreflightError
from p3o_launch.presets import resolve_name
from p3o_launch.runtime.rollout.prompts import load_prompts
from p3o_launch.schema import Preset


class Characters:
    """One token per character."""

    def encode(self, text: str, *, chat: bool = False) -> list[int]:
        return [ord(c) for c in text]


def preset(path: Path | str, **changes: Any) -> Preset:
    whole = check_file(resolve_name("on_policy"), profile="cpu").preset
    assert whole is not None
    data = whole.data.model_copy(update={"prompt_data": str(path), "input_key": "q", "label_key": "a", **changes})
    return whole.model_copy(update={"data": data})


def write(tmp_path: Path, *lines: str | bytes) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    return path


GOOD = json.dumps({"q": "1+1=", "a": "2"})


def test_records_become_prompts(tmp_path: Path) -> None:
    path = write(tmp_path, b"\xef\xbb\xbf" + GOOD.encode(), "", json.dumps({"q": "2+3=", "a": 5}) + "\r", "")
    prompts = load_prompts(preset(path), Characters(), "train")
    assert [(p.text, p.label, p.token_ids) for p in prompts.prompts] == [
        ("1+1=", "2", (49, 43, 49, 61)),
        ("2+3=", "5", (50, 43, 51, 61)),
    ]
    assert prompts.skipped == {}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", r":2: not a JSON object \(Expecting property name"),
        ("[1, 2]", ":2: a JSON list, not an object"),
        ('{"q": "x"}', r":2: no key 'a' \(data.label_key\)"),
        ('{"q": null, "a": "1"}', r":2: 'q' \(data.input_key\) is a null, not text"),
        ('{"q": "x", "a": true}', r":2: 'a' \(data.label_key\) is a boolean"),
        ('{"q": "", "a": "1"}', ":2: 'q' .* is empty"),
        ("[" * 100_000, ":2: not a JSON object"),
        (b'{"q": "\xff", "a": "1"}', r":2: not UTF-8 text \(byte 8 of the line\)"),
        (GOOD.encode("utf-16"), ":2: not UTF-8 text"),
        ('{"q": "x", "q": "y", "a": "1"}', r":2: .*\(the key 'q' is given twice\)"),
        ('{"q": "x", "a": ' + "9" * 5000 + "}", ":2: not a usable JSON object"),
        (r'{"q": "\ud800", "a": "1"}', r":2: 'q' \(data.input_key\) holds half of a surrogate pair"),
        ('{"q": "x", "a": " "}', r":2: 'a' \(data.label_key\) is empty"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path: Path, line: str | bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_prompts(preset(write(tmp_path, GOOD, line)), Characters(), "train")


def test_a_line_that_is_not_text_can_be_skipped_like_any_other(tmp_path: Path) -> None:
    prompts = load_prompts(preset(write(tmp_path, b"\xff\xfe", GOOD), malformed_lines="skip"), Characters(), "train")
    assert (len(prompts), prompts.skipped) == (1, {"malformed line": 1})


def test_what_has_no_end_is_not_read() -> None:
    with pytest.raises(DataError, match="/dev/zero is not a regular file"):
        load_prompts(preset("/dev/zero"), Characters(), "train")


def test_a_single_line_of_ten_megabytes_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, json.dumps({"q": "1+1=", "a": "2", "notes": "x" * 10_000_000}), GOOD)
    assert len(load_prompts(preset(path), Characters(), "train")) == 2


def test_bad_and_overlong_lines_are_counted_when_they_may_be_skipped(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD, "{", json.dumps({"q": "1" * 17, "a": "1"}), "[]")
    prompts = load_prompts(preset(path, malformed_lines="skip", overlong_prompts="skip"), Characters(), "train")
    assert len(prompts) == 1
    assert prompts.skipped == {"malformed line": 2, "overlong prompt": 1}


def test_a_prompt_above_the_cap_names_its_line_and_both_numbers(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD, json.dumps({"q": "1" * 17, "a": "1"}))
    with pytest.raises(DataError, match=r":2: the prompt has 17 tokens, rollout.max_prompt_len is 16") as caught:
        load_prompts(preset(path), Characters(), "train")
    assert caught.value.line == 2
    assert "overlong_prompts: skip" in str(caught.value.hint)


def test_missing_and_empty_files_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        load_prompts(preset(tmp_path / "absent.jsonl"), Characters(), "train")
    with pytest.raises(DataError, match="is a directory"):
        load_prompts(preset(tmp_path), Characters(), "train")
    with pytest.raises(DataError, match="holds no usable prompt"):
        load_prompts(preset(write(tmp_path, "", "")), Characters(), "train")
    with pytest.raises(DataError, match="1 skipped: malformed line"):
        load_prompts(preset(write(tmp_path, "{"), malformed_lines="skip"), Characters(), "train")
    with pytest.raises(PreflightError, match="no built-in prompt set"):
        load_prompts(preset("builtin:geometry"), Characters(), "train")


def test_order_is_a_function_of_seed_and_rollout_alone() -> None:
    first, again = (load_prompts(preset("builtin:arithmetic"), Characters(), "train") for _ in range(2))
    assert [p.index for p in first.batch(7, 16)] == [p.index for p in again.batch(7, 16)]
    assert [p.index for p in first.batch(7, 16)] != [p.index for p in first.batch(8, 16)]


def test_each_pass_shows_every_prompt_once_also_across_batches(tmp_path: Path) -> None:
    path = write(tmp_path, *(json.dumps({"q": str(i), "a": "1"}) for i in range(10)))
    prompts = load_prompts(preset(path), Characters(), "train")
    shown = [p.index for rollout in range(5) for p in prompts.batch(rollout, 4)]
    assert sorted(shown[:10]) == sorted(shown[10:]) == list(range(10))
    assert shown[:10] != shown[10:]


def test_a_batch_may_be_larger_than_the_set(tmp_path: Path) -> None:
    prompts = load_prompts(preset(write(tmp_path, GOOD)), Characters(), "train")
    assert [p.index for p in prompts.batch(0, 5)] == [0] * 5


def test_builtin_splits_share_no_problem() -> None:
    whole = preset("builtin:arithmetic", eval_prompt_data="builtin:arithmetic")
    train, held_out = (load_prompts(whole, Characters(), split) for split in ("train", "eval"))  # type: ignore[arg-type]
    assert not {p.text for p in train.prompts} & {p.text for p in held_out.prompts}
    assert len(train) + len(held_out) == 20_000
