"""What was most likely meant by a value or a name that a preset cannot have; and that writing it mends the fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from p3o_launch.check import check_text
from p3o_launch.fields import FIELDS, TOP
from p3o_launch.shape import suggest
from p3o_launch.synonyms import SYNONYMS, note, plain

BASE = "extends: base.yaml\n"
FILE = str(Path(__file__).parents[1] / "data" / "preset.yaml")

VALUES: list[tuple[str, str, str, tuple[str, ...]]] = [
    # the setting, what is written, the hint, what the hint says to write
    ("batch.rollout_batch_size", "-3", "use 1 or more", ("1",)),
    ("optimizer.lr", "-1e-5", "use 0 or more", ("0",)),
    ("model.rotary_base", "0", "use a number above 0", ("1",)),
    ("optimizer.lr_warmup_fraction", "5", "use 1 or less", ("1",)),
    ("optimizer.lr", "1e-5x", "write 1e-5", ("1e-5",)),
    ("optimizer.lr", "[1e-5]", "write 1e-5 without the brackets", ("1e-5",)),
    ("optimizer.lr", "[1e-5, 1e-6]", "write one number", ()),
    ("optimizer.lr", "{a: 1}", "write one number", ()),
    ("optimizer.lr", "", "write a number", ()),
    ("optimizer.weight_decay", "", "write a number, or remove the line", ()),
    ("optimizer.weight_decay", "1%", "write 0.01", ("0.01",)),
    ("optimizer.weight_decay", "1/100", "write 0.01", ("0.01",)),
    ("optimizer.weight_decay", "0,01", "write 0.01", ("0.01",)),
    ("optimizer.weight_decay", "\N{MINUS SIGN}1", "write -1", ()),
    ("optimizer.weight_decay", "true", "write a number, or remove the line", ()),
    ("optimizer.weight_decay", "1/0", "write a number, or remove the line", ()),
    ("optimizer.weight_decay", ".nan", "write a finite number, or remove the line", ()),
    ("batch.num_rollout", "4k", "write 4000 or 4096", ("4000", "4096")),
    ("batch.num_rollout", "1.5k", "write 1500 or 1536", ("1500", "1536")),
    ("batch.num_rollout", "1,000", "write 1000", ("1000",)),
    ("batch.num_rollout", "3 rollouts", "write 3", ("3",)),
    ("batch.num_rollout", '"12"', "remove the quotes", ("12",)),
    ("batch.num_rollout", "1e3", "write 1000", ("1000",)),
    ("batch.num_rollout", "12.0", "write 12", ("12",)),
    ("batch.num_rollout", "1.5", "write 1 or 2", ("1", "2")),
    ("batch.num_rollout", "many", "write a whole number", ()),
    ("batch.num_rollout", "1.2.3", "write a whole number", ()),
    ("cluster.gpus_per_node", "auto", "write a whole number, or remove the line", ()),
    ("batch.num_rollout", "010", "write 10, or 8 if octal is meant", ("10", "8")),
    ("batch.num_rollout", "1:36", "write 96", ("96",)),
    ("rollout.extra", "{stop_at: 010}", "write 10, 8 if octal is meant, or quote it if it is text", ()),
    ("rollout.extra", "{stop_at: 1:36}", "write 96, or quote it if it is text", ()),
    ("algorithm.advantage_estimator", "ppo", "use p3o or grpo", ("grpo",)),
    ("algorithm.advantage_estimator", "gpro", "did you mean grpo?", ("grpo",)),
    ("algorithm.advantage_estimator", "[grpo]", "write grpo without the brackets", ("grpo",)),
    ("algorithm.advantage_estimator", "3", "use p3o or grpo", ("p3o",)),
    ("optimizer.optimizer", "sgd", "use adam", ("adam",)),
    ("rollout.weight_quantization", "", "use none, int8, int4 or fp8_e4m3", ("none",)),
    ("algorithm.use_kl_loss", "1", "write true", ("true",)),
    ("algorithm.use_kl_loss", "0", "write false", ("false",)),
    ("algorithm.use_kl_loss", "flase", "did you mean false?", ("false",)),
    ("algorithm.use_kl_loss", '"no"', "remove the quotes", ("no",)),
    ("algorithm.use_kl_loss", "[true, false]", "write true or false, or remove the line", ()),
    ("data.input_key", "off", 'put it in quotes: "off"', ('"off"',)),
    ("data.input_key", "[prompt]", "write prompt without the brackets", ("prompt",)),
    ("data.input_key", "", "write a text, or remove the line", ()),
    ("data.prompt_data", '""', "write a text", ()),
    ("cluster.env", "[A=1]", "write `NAME: value` lines below it, indented", ()),
    ("cluster.env", "", "use {}", ("{}",)),
    ("cluster.env", "{A: }", 'write "" for an empty one', ('{A: ""}',)),
    ("cluster.env", "{A: 1}", 'put it in quotes: "1"', ('{A: "1"}',)),
]


def preset(path: str, value: str) -> str:
    group, _, field = path.partition(".")
    return f"{BASE}{group}:\n  {field}: {value}\n"


@pytest.mark.parametrize(("path", "value", "hint", "offers"), VALUES)
def test_a_value_of_the_wrong_kind_is_answered_with_one_that_fits(
    path: str, value: str, hint: str, offers: tuple[str, ...]
) -> None:
    (found,) = check_text(preset(path, value), file=FILE).findings
    assert (found.code, found.hint) == ("P3O007", hint)
    for offer in offers:
        left = check_text(preset(path, offer), file=FILE).findings
        assert not [item for item in left if item.code.startswith("P3O0")], offer


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("name: ../run one\n", "use run_one"),
        ("rollout:\n", "write its settings below it, indented"),
        ("reward:\n", "write its settings below it, indented, or remove the line"),
        ("rollout: 3\n", "write its settings below it, indented"),
    ],
)
def test_what_is_no_field_of_a_group(text: str, hint: str) -> None:
    (found,) = check_text(BASE + text, file=FILE).findings
    assert (found.code, found.hint) == ("P3O007", hint)


def test_a_hint_shows_no_secret() -> None:
    (found,) = check_text(BASE + "cluster:\n  env: {API_KEY: [hf_0123456789]}\n", file=FILE).findings
    assert "0123456789" not in f"{found.message}{found.hint}"


@pytest.mark.parametrize("name", sorted(SYNONYMS))
def test_another_frameworks_name_leads_to_ours(name: str) -> None:
    """As a key of the group, at the top, and in ``--set``: one finding, with the name to write."""
    path = SYNONYMS[name]
    group, _, field = path.partition(".")
    assert field in FIELDS[group]
    assert not any(name in fields for fields in FIELDS.values())
    assert name not in TOP
    expected = f"did you mean {path}{note(name)}?"
    (below,) = check_text(f"{BASE}{group}:\n  {name}: 1\n", file=FILE).findings
    assert (below.code, below.hint) == ("P3O006", expected)
    (given,) = check_text(BASE, file=FILE, overrides=(f"{group}.{name}=1",)).findings
    assert (given.code, given.hint) == ("P3O009", expected)
    if name not in FIELDS:
        (top,) = check_text(f"{BASE}{name}: 1\n", file=FILE).findings
        assert (top.code, top.hint) == ("P3O006", expected)


@pytest.mark.parametrize(
    ("dotted", "meant"),
    [
        ("actor_rollout_ref.rollout.n", "batch.n_samples_per_prompt"),
        ("actor_rollout_ref.actor.optim.lr", "optimizer.lr"),
        ("actor_rollout_ref.rollout.temperature", "rollout.temperature"),
        ("policy.generation.max_new_tokens", "rollout.max_response_len"),
        ("trainer.nnodes", "cluster.num_nodes"),
        ("--rollout-max-response-len", "rollout.max_response_len"),
        ("--tensor-model-parallel-size", "parallel.tensor_model_parallel_size"),
        ("optimizer.learningRate", "optimizer.lr"),
        ("evaluation.temperatur", "evaluation.temperature"),
        ("batch.micro_batch_siz", "batch.micro_batch_size"),
    ],
)
def test_deep_paths_flags_and_misprints_lead_to_ours(dotted: str, meant: str) -> None:
    assert suggest(tuple(dotted.split("."))) == tuple(meant.split("."))


def test_a_name_is_read_however_it_is_spelt() -> None:
    assert plain("--Max-New-Tokens") == plain("maxNewTokens") == plain("max_new_tokens") == "max_new_tokens"


@pytest.mark.parametrize(
    "override",
    [
        "cluster.env.CUDA_DEVICE_MAX_CONNECTIONS=1",
        "cluster.env.NCCL_DEBUG=off",
        "cluster.env.HTTP_PROXY=",
        "cluster.runtime_env.env_vars.OMP_NUM_THREADS=1",
        "logging.output_root=2026",
        "name=12",
        'logging.output_root="2026"',
    ],
)
def test_a_text_needs_no_quotes_that_a_shell_would_eat(override: str) -> None:
    result = check_text(BASE, file=FILE, overrides=(override,))
    assert result.findings == ()
    value = result.resolved
    for key in override.partition("=")[0].split("."):
        value = value[key]
    assert value == override.partition("=")[2].strip('"')


def test_a_text_that_is_null_stays_absent() -> None:
    result = check_text(BASE, file=FILE, overrides=("data.eval_prompt_data=null", "evaluation.interval=null"))
    assert result.findings == ()
    assert result.resolved["data"]["eval_prompt_data"] is None
