"""Prompts that can all be used and are odd nevertheless: said before the run, with counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from p3o_launch.assets import resolve_checkpoint
from p3o_launch.check import check_file
from p3o_launch.errors import DataError
from p3o_launch.launch.preflight import load_inputs
from p3o_launch.presets import resolve_name
from p3o_launch.runtime.rollout.prompt_survey import Unknown, label_warnings
from p3o_launch.runtime.rollout.prompts import PromptSet, load_prompts, sample_prompts
from p3o_launch.runtime.rollout.tokenizer import Tokenizer, load_tokenizer
from p3o_launch.runtime.types import Prompt
from p3o_launch.schema import Preset

SUMS = [{"q": f"{left}+{right}=", "a": str(left + right)} for left in range(4) for right in range(4)]


class Characters:
    """One token per character; ``0`` stands for what is not among ``known``, ``dropped`` gives no token at all."""

    unknown_id: int | None = 0

    def __init__(self, known: str | None = None, dropped: str = "") -> None:
        self.known, self.dropped = known, dropped

    def encode(self, text: str, *, chat: bool = False) -> list[int]:
        kept = [char for char in text if char not in self.dropped]
        return [ord(char) if self.known is None or char in self.known else 0 for char in kept]


@pytest.fixture(scope="module")
def arithmetic() -> Tokenizer:
    return load_tokenizer(resolve_checkpoint("builtin:arithmetic"))


def preset(path: Path | str, reward: str = "exact", **changes: Any) -> Preset:
    whole = check_file(resolve_name("on_policy"), profile="cpu").preset
    assert whole is not None
    data = whole.data.model_copy(update={"prompt_data": str(path), "input_key": "q", "label_key": "a", **changes})
    return whole.model_copy(update={"data": data, "reward": whole.reward.model_copy(update={"type": reward})})


def write(tmp_path: Path, *records: dict[str, Any], name: str = "p.jsonl") -> Path:
    path = tmp_path / name
    path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    return path


def loaded(tmp_path: Path, *records: dict[str, Any], tokenizer: Any = None, **changes: Any) -> PromptSet:
    path = write(tmp_path, *records)
    return load_prompts(preset(path, **changes), tokenizer or Characters(), "train")


def labelled(labels: list[str], reward: str, tokenizer: Any = None, score: Any = lambda text, label: 0.0) -> list[str]:
    prompts = [Prompt(index, f"{index}=", (index,), label) for index, label in enumerate(labels)]
    vocabulary = tokenizer or Characters()
    return label_warnings(preset("p.jsonl", reward), "p.jsonl", prompts, vocabulary, Unknown(vocabulary), score)


def test_ordinary_prompts_are_not_warned_of(tmp_path: Path, arithmetic: Tokenizer) -> None:
    assert loaded(tmp_path, *SUMS, tokenizer=arithmetic).warnings == ()
    inputs = load_inputs(preset("builtin:arithmetic", eval_prompt_data="builtin:arithmetic"))
    assert inputs.warnings == ()


def test_characters_that_the_tokenizer_does_not_know_are_counted(tmp_path: Path, arithmetic: Tokenizer) -> None:
    odd = [{"q": "1 + 1=", "a": "2"}, {"q": "2×3=", "a": "6"}]
    (warning,) = loaded(tmp_path, *SUMS, *odd, tokenizer=arithmetic).warnings
    assert warning.startswith("2 of 18 prompts of ")
    assert "does not know (' ' '×'), such as '1 + 1=': the model does not see them" in warning


def test_prompts_of_which_none_is_known_are_an_error(tmp_path: Path, arithmetic: Tokenizer) -> None:
    spaced = [{"q": record["q"].replace("+", " + "), "a": record["a"]} for record in SUMS]
    with pytest.raises(DataError, match=r"every prompt of .* does not know: ' '"):
        loaded(tmp_path, *spaced, tokenizer=arithmetic)


def test_a_prompt_of_unknown_tokens_alone_is_malformed(tmp_path: Path, arithmetic: Tokenizer) -> None:
    words = {"q": "hello", "a": "5"}
    with pytest.raises(DataError, match=r":17: the checkpoint's tokenizer knows no character of the prompt"):
        loaded(tmp_path, *SUMS, words, tokenizer=arithmetic)
    left = loaded(tmp_path, *SUMS, words, tokenizer=arithmetic, malformed_lines="skip")
    assert (len(left), left.skipped) == (16, {"unknown to the tokenizer": 1})


def test_characters_that_a_tokenizer_drops_are_unknown_too(tmp_path: Path) -> None:
    (warning,) = loaded(tmp_path, *SUMS, {"q": "9§+1=", "a": "2"}, tokenizer=Characters(dropped="§")).warnings
    assert "('§')" in warning
    assert Unknown(Characters(dropped="\u200b\u0301 ")).in_text("a\u200b e\u0301") == ""


def test_a_tokenizer_without_a_token_of_its_own_for_it_knows_everything() -> None:
    class Backend:
        eos_token_id = bos_token_id = unk_token_id = 7
        pad_token_id = None

    assert Tokenizer(Backend()).unknown_id is None
    assert Unknown(object()).is_in((7,)) is False  # type: ignore[arg-type]


def test_fewer_different_prompts_than_a_rollout_takes(tmp_path: Path) -> None:
    (warning,) = loaded(tmp_path, *SUMS[:3]).warnings
    assert "holds 3 different prompts, a rollout takes 16 (batch.rollout_batch_size)" in warning
    assert loaded(tmp_path, *SUMS).warnings == ()


def test_prompts_that_come_again_and_disagree(tmp_path: Path) -> None:
    again = loaded(tmp_path, *SUMS, SUMS[0], SUMS[1] | {"a": "9"}).warnings
    assert [warning.partition(" of ")[0] for warning in again] == ["2", "1 prompt"]
    assert "2 of 18 prompts" in again[0]
    assert "occurs with different labels" in again[1]


def test_evaluation_prompts_that_are_trained_on(tmp_path: Path) -> None:
    train, held_out = write(tmp_path, *SUMS), write(tmp_path, {"q": "9+9=", "a": "18"}, SUMS[2], name="e.jsonl")
    inputs = load_inputs(preset(train, eval_prompt_data=str(held_out)))
    (warning,) = inputs.warnings
    assert warning.startswith("1 of 2 evaluation prompts of ")


def test_labels_that_no_response_can_be(arithmetic: Tokenizer) -> None:
    assert labelled(["1", "23456789"], "exact") == []
    (warning,) = labelled(["1", "123456789", "x1"], "exact", arithmetic)
    assert warning == (
        "2 of 3 labels of p.jsonl can be no response (reward.type exact): they are longer than "
        "rollout.max_response_len (8) or of characters that the tokenizer does not know ('x')"
    )
    with pytest.raises(DataError, match="every reward is 0"):
        labelled(["a long label", "another one"], "exact")


def test_labels_in_words_of_which_the_verifier_takes_no_number() -> None:
    def reads_no_sentence(text: str, label: str) -> float:
        return float("total" in label)

    labels = ["7", "\\text{two and a half}", "Paris", "the total is 7", "the answer is 42", "no number at all"]
    (warning,) = labelled(labels, "math", score=reads_no_sentence)
    assert warning.startswith("2 labels of p.jsonl are in words, such as 'the answer is 42'")
    assert labelled(labels[:4], "math", score=reads_no_sentence) == []


def test_the_math_verifier_is_asked(tmp_path: Path) -> None:
    records = [*SUMS, {"q": "40+2=", "a": "The answer is 42"}, {"q": "70+2=", "a": "48/2 = 24 sold, then\n#### 72"}]
    inputs = load_inputs(preset(write(tmp_path, *records), reward="math", eval_prompt_data="builtin:arithmetic"))
    assert [warning for warning in inputs.warnings if "in words" in warning] == [
        f"1 label of {tmp_path / 'p.jsonl'} is in words, such as 'The answer is 42': only a box with the same words "
        "is rewarded"
    ]


def test_a_wrong_key_is_named_although_malformed_lines_may_be_skipped(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"16 skipped: malformed line\); .*:1: no key 'question'") as caught:
        loaded(tmp_path, *SUMS, malformed_lines="skip", input_key="question")
    assert caught.value.hint == "the record has 'q', 'a'"


def test_a_sample_says_whether_it_is_all(tmp_path: Path) -> None:
    whole = preset(write(tmp_path, *SUMS), eval_prompt_data=None)
    assert [len(sample_prompts(whole, Characters(), "train", limit)[0]) for limit in (3, 16, 99)] == [3, 16, 16]
    assert [sample_prompts(whole, Characters(), "train", limit)[1] for limit in (3, 16, 99)] == [False, True, True]
    assert sample_prompts(whole, Characters(), "eval", 3) == ([], True)
