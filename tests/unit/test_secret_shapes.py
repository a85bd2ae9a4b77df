"""Secrets by name and by shape, and the words that only look like them. Every key here is made up."""

from __future__ import annotations

from typing import Any

import pytest
from guard_presets import codes, findings, make

from p3o_launch.secret_shapes import is_secret_name, secrets_of, shape_of

HEX = "0123456789abcdef" * 2 + "01234567"

SHAPES = [
    "hf_" + "Example" * 4,
    "sk-" + "Example0" * 3,
    "sk-proj-" + "Ex-ample_" * 3 + "0123456789abcdefgh",
    "ghp_" + "Example0" * 4,
    "github_pat_" + "Example0_" * 4,
    "glpat-" + "Example0" * 3,
    "AKIA" + "EXAMPLE0" * 2,
    "xoxb-123456-" + "Example0",
    "AIza" + "Example0" * 5,
    "nvapi-" + "Example0" * 4,
    "wandb_v1_" + "Example0" * 5,
    "local-" + HEX,
    "eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmF0dXJl",
    "-----BEGIN RSA PRIVATE KEY-----",
    "https://user:correct-horse@example.org/x.git",
    "redis://:correct-horse@10.0.0.1:6379",
    "https://example.org/data.jsonl?sig=Example0Example0",
    "Authorization: Bearer Example0Example0Example0",
]
NOT_SHAPES = [
    "",
    "hf_checkpoint",
    "hf_hub",
    "/models/hf_converted/Qwen3-0.6B",
    "sk-learn",
    "sklearn.preprocessing.StandardScaler",
    "tokenizer",
    "max_tokens_per_gpu",
    "https://example.org/data.jsonl",
    "https://user@example.org/x.git",
    "ssh://git@example.org:22/x.git",
    "http://10.0.0.1:8265",
    "https://${USER}:${PASSWORD}@example.org",
    "https://user:${PASSWORD}@example.org",
    "https://example.org/?token=${TOKEN}",
    "Bearer ${HF_TOKEN}",
    "/hub/models--Qwen--Qwen3-0.6B/snapshots/" + HEX,
    HEX,
    "${HF_TOKEN}",
]


@pytest.mark.parametrize("text", SHAPES)
def test_told_by_shape_wherever_it_stands(text: str) -> None:
    assert shape_of(text)
    for changes in (
        {"description": f"run with {text} please"},
        {"cluster.env": {"ANYTHING": text}},
        {"cluster.runtime_env": {"pip": ["torch", text]}},
        {"rollout.extra": {"deep": {"deeper": [text]}}},
        {"data.prompt_data": text},
        {"logging.pre_command": f"curl {text}"},
        {"ignore": {"P3O113": text}},
    ):
        found = findings(changes)
        assert "P3O705" in {code for code, _ in found}, changes
        said = " ".join(
            f"{finding.message} {finding.hint} {finding.path}" for code, finding in found if code == "P3O705"
        )
        assert text not in said


@pytest.mark.parametrize("text", NOT_SHAPES)
def test_not_a_secret_by_shape(text: str) -> None:
    assert shape_of(text) is None


@pytest.mark.parametrize(
    "name",
    [
        "WANDB_API_KEY",
        "wandb_key",
        "HF_TOKEN",
        "hfToken",
        "HUGGING_FACE_HUB_TOKEN",
        "RAY_AUTH_TOKEN",
        "token",
        "api-key",
        "apiKey",
        "DB_PASSWORD",
        "password",
        "CLIENT_SECRET",
        "AWS_SECRET_ACCESS_KEY",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "Authorization",
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)
    assert codes({"cluster.env": {name: "correct-horse"}}) == ["705"]


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer",
        "TOKENIZERS_PARALLELISM",
        "max_tokens_per_gpu",
        "MAX_TOKENS",
        "eos_token",
        "pad_token_id",
        "stop_token",
        "input_key",
        "label_key",
        "SORT_KEY",
        "key",
        "PWD",
        "OLDPWD",
        "HF_TOKEN_PATH",
        "PASSWORD_FILE",
        "RAY_AUTH_MODE",
        "SECRET_NAME",
        "SSH_AUTH_SOCK",
        "",
    ],
)
def test_names_that_only_contain_the_word(name: str) -> None:
    assert not is_secret_name(name)
    assert codes({"cluster.env": {name: "correct-horse"}}) == []


@pytest.mark.parametrize(
    "value",
    [
        "",
        "${HF_TOKEN}",
        "$HF_TOKEN",
        "${HF_TOKEN:-}",
        "$(cat ~/.hf)",
        "Bearer ${HF_TOKEN}",
        "{{ secrets.HF_TOKEN }}",
        "<your token>",
        "your-token-here",
        "EMPTY",
        "none",
        "false",
        "1",
        "***",
        "xxxx",
        "/run/secrets/hf_token",
    ],
)
def test_a_reference_or_placeholder_under_a_secrets_name(value: str) -> None:
    assert codes({"cluster.env": {"HF_TOKEN": value}}) == []


def test_a_default_inside_a_reference_is_a_secret() -> None:
    assert codes({"cluster.env": {"HF_TOKEN": "${HF_TOKEN:-hf_" + "Example" * 4 + "}"}}) == ["705"]


@pytest.mark.parametrize(
    ("name", "expected"), [("RUN_LABEL", ["705"]), ("GIT_COMMIT", []), ("data_sha1", []), ("code-rev", [])]
)
def test_forty_hexadecimal_digits_are_a_key_unless_the_name_says_digest(name: str, expected: list[str]) -> None:
    assert codes({"cluster.env": {name: HEX}}) == expected


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("export HF_TOKEN=correct-horse", ["705"]),
        ("WANDB_API_KEY='correct-horse' python x.py", ["705"]),
        ("login --api-key correct-horse", ["705"]),
        ("login --token=correct-horse", ["705"]),
        (f"wandb login {HEX}", ["705"]),
        (f"wandb login --relogin {HEX}", ["705"]),
        ("export HF_TOKEN=$MY_TOKEN", []),
        ('export HF_TOKEN="$(cat ~/.hf)"', []),
        ("wandb login $WANDB_API_KEY", []),
        ("python train.py --tokenizer qwen --max-tokens 5 --token-file x", []),
        (f"git checkout {HEX}", []),
        ("MAX_TOKENS=5 EOS_TOKEN=x ./run", []),
    ],
)
def test_commands(command: str, expected: list[str]) -> None:
    assert codes({"logging.pre_command": command}) == expected
    assert codes({"logging.post_command": command}) == expected


def test_a_secret_used_as_a_key_is_not_shown() -> None:
    secret = SHAPES[0]
    (found,) = secrets_of(make({"cluster.runtime_env": {"env_vars": {secret: "1"}}}))
    assert found.path == "cluster.runtime_env.env_vars"
    assert secret not in repr(found)


def test_a_numeric_password() -> None:
    changes: dict[str, Any] = {"cluster.runtime_env": {"config": {"password": 123456, "port": 6379, "token_count": 5}}}
    assert codes(changes) == ["705"]


def test_schema_fields_are_no_secrets_by_name() -> None:
    assert codes({"data.input_key": "question", "data.label_key": "answer"}) == []
