"""The checkpoint that ships: small, complete, readable, about half good at a task whose splits share no problem."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from types import ModuleType

import pytest
import torch

from p3o_launch.assets import resolve_checkpoint
from p3o_launch.errors import PreflightError
from p3o_launch.runtime.rollout.arithmetic import ALPHABET, LONGEST_ANSWER, LONGEST_PROMPT, problem, problems
from p3o_launch.runtime.rollout.tokenizer import load_tokenizer

DIRECTORY = resolve_checkpoint("builtin:arithmetic")
SCRIPT = Path(__file__).parents[2] / "scripts" / "pretrain_arithmetic.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pretrain_arithmetic", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_problem_is_right_and_fits() -> None:
    train, held_out = problems("train"), problems("eval")
    everything = train + held_out
    assert len(set(everything)) == len(everything) == 20_000
    assert not {text for text, _ in train} & {text for text, _ in held_out}
    assert 0.08 < len(held_out) / 20_000 < 0.12
    for text, answer in everything:
        operator = "+" if "+" in text else "-"
        left, right = text.removesuffix("=").split(operator)
        assert int(answer) == (int(left) + int(right) if operator == "+" else int(left) - int(right))
    assert max(len(text) for text, _ in everything) == LONGEST_PROMPT
    assert max(len(answer) for _, answer in everything) == LONGEST_ANSWER
    assert {c for text, answer in everything for c in text + answer} == set(ALPHABET)


@pytest.mark.parametrize("index", [-1, 20_000])
def test_there_is_no_problem_beyond_the_last(index: int) -> None:
    with pytest.raises(ValueError, match=f"no number {index}"):
        problem(index)


def test_a_character_is_a_token_and_text_comes_back() -> None:
    tokenizer = load_tokenizer(DIRECTORY)
    for text, answer in random.Random(0).sample(problems("train"), 50):
        ids = tokenizer.encode(text + answer)
        assert len(ids) == len(text + answer)
        assert tokenizer.decode(ids) == text + answer
    assert tokenizer.decode([*tokenizer.encode("19"), 1]) == "19"


def test_a_special_token_that_did_not_end_the_response_is_not_dropped() -> None:
    tokenizer = load_tokenizer(DIRECTORY)
    one, nine = tokenizer.encode("19")
    assert tokenizer.decode([one, 0, nine, 1]) == "1<pad>9"
    assert tokenizer.decode([one, nine, 0]) == "19<pad>"


def test_the_weights_are_small_float32_and_as_the_script_shapes_them(script: ModuleType) -> None:
    from safetensors import safe_open
    from transformers import AutoTokenizer

    weights = DIRECTORY / "model.safetensors"
    assert weights.stat().st_size < 700_000
    model = script.build_model(AutoTokenizer.from_pretrained(DIRECTORY))
    expected = {name: list(value.shape) for name, value in model.named_parameters()}
    with safe_open(weights, "pt") as file:
        assert {name: file.get_slice(name).get_shape() for name in file.keys()} == expected  # noqa: SIM118
        assert {file.get_slice(name).get_dtype() for name in expected} == {"F32"}


def test_it_is_right_on_a_third_to_a_half_of_unseen_problems(script: ModuleType) -> None:
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    torch.set_num_threads(1)
    model = Qwen3ForCausalLM.from_pretrained(DIRECTORY, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(DIRECTORY)
    held_out = random.Random(1).sample(problems("eval"), 400)
    assert 0.3 < script.accuracy(model, tokenizer, held_out, 1.0) < 0.5
    assert script.accuracy(model, tokenizer, held_out, 0.0) > 0.8


def test_other_checkpoints_are_looked_up_or_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match="no built-in checkpoint 'builtin:algebra'"):
        resolve_checkpoint("builtin:algebra")
    with pytest.raises(PreflightError, match=r"no config\.json"):
        resolve_checkpoint(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve_checkpoint(str(tmp_path)) == tmp_path
    with pytest.raises(PreflightError, match=r"tokenizer in .* cannot be read"):
        load_tokenizer(tmp_path)
