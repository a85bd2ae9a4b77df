"""Secrets in a preset, found by the name they stand under and by their shape. Nothing here ever returns the secret.

By name: only keys the user chose (environment, runtime environment, free-form parameters, assignments and flags of
hook commands); the schema's own fields, such as ``data.label_key``, are none. By shape: every text of the preset.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from p3o_launch.fields import FIELDS, TOP

if TYPE_CHECKING:
    from p3o_launch.schema import Preset


class Secret(NamedTuple):
    """Where a secret lies and what kind it is. ``in_key``: the key itself is one; ``path`` is then its mapping."""

    path: str
    kind: str
    hint: str
    in_key: bool = False


# What issuers put in front of their keys. Minimum lengths keep words and module names out.
_SHAPES = {
    "a Hugging Face token": r"(?<![A-Za-z0-9])hf_[A-Za-z0-9]{20,}(?![\w/-])",
    "an API key (sk-...)": r"(?<![\w-])sk-[A-Za-z0-9_-]*[A-Za-z0-9]{16,}",
    "a GitHub token": r"(?<![A-Za-z0-9])(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,})",
    "a GitLab token": r"(?<![\w-])glpat-[\w-]{16,}",
    "an AWS access key": r"(?<![A-Za-z0-9])(?:AKIA|ASIA)[0-9A-Z]{16}(?![0-9A-Za-z])",
    "a Slack token": r"(?<![\w-])xox[abeprs]-[\w-]{10,}",
    "a Slack webhook": r"hooks\.slack\.com/services/\w+/\w+/\w+",
    "a Google API key": r"(?<![\w-])(?:AIza[\w-]{30,}|ya29\.[\w-]{20,})",
    "an NVIDIA API key": r"(?<![\w-])nvapi-[\w-]{20,}",
    "a PyPI token": r"(?<![\w-])pypi-[\w-]{32,}",
    "an npm token": r"(?<![\w-])npm_[A-Za-z0-9]{30,}",
    "a Weights & Biases key": r"(?<![\w-])(?:wandb_v\d_\w{20,}|local-[0-9a-f]{40}(?![0-9a-f]))",
    "a JSON web token": r"(?<![\w-])eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "a password in a URL": r"[A-Za-z][A-Za-z0-9+.-]*://[^\s/:@]*:(?![$<{*]|x+@|%)[^\s/@]+@",
    "a signed URL": r"[?&](?:access_token|token|api_?key|sig|signature|X-Amz-Signature)=(?![$<{*])[^&\s]{12,}",
    "a bearer token": r"(?i:\bbearer)\s+(?![$<{*])[\w.~+/-]{16,}",
}
# Patterns stay text: re compiles and keeps each on first use, and start-up does not pay for them.
_HEX_KEY = r"(?:local-)?[0-9a-f]{40}"
_REFERENCE = r"\$\{[^}]*\}|\$\([^)]*\)|\$\w+|\{\{.*?\}\}|%\w+%|<[^>]*>"
_PLACEHOLDER = (
    r"(?i)|none|null|true|false|yes|no|on|off|[01]|empty|dummy|placeholder|redacted|changeme|change[-_]me|todo|unset"
    r"|anonymous|x{3,}|\*+|\.{3}|your[-_ ].*"
)
_WORD = r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+"
_ASSIGNMENT = r"""(?:^|[\s;&|(])([A-Za-z_]\w*)=("[^"]*"|'[^']*'|[^\s;&|)]*)"""
_FLAG = r"""(?:^|\s)--?([A-Za-z][\w-]*)(?:=|\s+)("[^"]*"|'[^']*'|[^\s;&|)]+)"""
_LOGIN = r"\bwandb\s+login\s+(?:-\S+\s+)*([0-9a-f]{40}|\w{40,})"

_SECRET_WORDS = frozenset(
    (
        "password",
        "passwd",
        "passphrase",
        "secret",
        "credential",
        "credentials",
        "apikey",
        "authtoken",
        "accesstoken",
        "authorization",
    )
)
# A key or a token is a secret by what stands before it.
_KEY_OWNERS = frozenset(
    (
        "api",
        "access",
        "secret",
        "private",
        "auth",
        "signing",
        "encryption",
        "master",
        "account",
        "storage",
        "subscription",
        "service",
        "ssh",
        "deploy",
        "wandb",
        "hf",
        "huggingface",
        "openai",
        "anthropic",
        "github",
        "gitlab",
        "azure",
        "aws",
        "google",
        "gemini",
        "comet",
        "neptune",
        "swanlab",
        "mlflow",
        "deepseek",
        "nvidia",
    )
)
_TEXT_TOKENS = frozenset(
    (
        "eos",
        "bos",
        "pad",
        "unk",
        "sep",
        "cls",
        "mask",
        "special",
        "stop",
        "start",
        "end",
        "begin",
        "image",
        "video",
        "audio",
        "think",
        "per",
        "max",
        "min",
        "num",
        "next",
        "first",
        "last",
        "new",
        "prompt",
        "response",
        "separator",
    )
)
_DIGESTS = frozenset(
    (
        "commit",
        "sha",
        "sha1",
        "rev",
        "revision",
        "hash",
        "digest",
        "checksum",
        "ref",
        "version",
        "id",
    )
)
_TEXTS = ("text", "name", "map")
_COMMANDS = ("logging.pre_command", "logging.post_command")


def secrets_of(preset: Preset) -> Iterator[Secret]:
    """One ``Secret`` per text of the preset that holds one."""
    for path, value in _fields(preset):
        if isinstance(value, Mapping):
            yield from _in_mapping(value, path)
        elif isinstance(value, str):
            kind = shape_of(value) or (_in_command(value) if path in _COMMANDS else None)
            if kind is not None:
                yield Secret(path, kind, _mend(None))


@cache
def _places() -> tuple[tuple[str, str], ...]:
    """(group, field) of every setting that holds text or a free-form mapping; group ``""`` is the preset itself."""
    groups = {"": TOP, **FIELDS}
    return tuple((group, name) for group, fields in groups.items() for name in fields if fields[name][0] in _TEXTS)


def _fields(preset: Preset) -> Iterator[tuple[str, Any]]:
    for group, name in _places():
        if group:
            yield f"{group}.{name}", _read(_read(preset, group), name)
        else:
            yield name, _read(preset, name)


def _read(model: Any, name: str) -> Any:
    try:
        return getattr(model, name)
    except Exception:  # while a preset has shape errors, its broken fields raise; the others are still looked at
        return None


def _in_mapping(value: object, path: str, key: str = "") -> Iterator[Secret]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            kind = shape_of(str(name))
            if kind is not None:
                yield Secret(path, f"{kind} as a key", _mend(None), in_key=True)
            else:
                yield from _in_mapping(item, f"{path}.{name}", str(name))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _in_mapping(item, f"{path}.{index}", key)
    elif isinstance(value, str):
        kind = shape_of(value) or name_kind(key, value) or _hex_kind(key, value)
        if kind is not None:
            yield Secret(path, kind, _mend(key))
    elif isinstance(value, int) and not isinstance(value, bool) and value > 1 and _is_password_name(key):
        yield Secret(path, "a password", _mend(key))


def _mend(key: str | None) -> str:
    if key and re.fullmatch(r"[A-Z][A-Z0-9_]*", key):
        return f"remove it, revoke it, and export {key} in the shell that launches the run"
    return "remove it, revoke it, and pass it by an environment variable of the shell that launches the run"


@cache
def _any_shape() -> tuple[re.Pattern[str], tuple[str, ...]]:
    # Compiled on first use and as one pattern: validation starts faster, and a text is read once.
    pattern = "|".join(f"(?P<k{number}>{shape})" for number, shape in enumerate(_SHAPES.values()))
    return re.compile(pattern), tuple(_SHAPES)


def shape_of(text: str) -> str | None:
    """The kind of secret a text contains, told by its shape alone."""
    if len(text) < 12:
        return None
    pattern, kinds = _any_shape()
    match = pattern.search(text)
    return kinds[int(match.lastgroup[1:])] if match is not None and match.lastgroup is not None else None


def name_kind(name: str, value: str) -> str | None:
    """What a literal value under a secret's name is; None for references, placeholders and files."""
    if not is_secret_name(name) or _is_no_literal(value):
        return None
    return "a password" if _is_password_name(name) else "a literal secret"


def _is_password_name(name: str) -> bool:
    words = _words(name)
    return bool(words) and words[-1] in ("password", "passwd", "passphrase")


def is_secret_name(name: str) -> bool:
    """``WANDB_API_KEY``, ``hfToken``, ``db_password``: yes. ``tokenizer``, ``eos_token``, ``label_key``: no."""
    words = _words(name)
    if not words:
        return False
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if last == "token":
        return before not in _TEXT_TOKENS
    if last == "key":
        return before in _KEY_OWNERS
    return last in _SECRET_WORDS


def _words(name: str) -> list[str]:
    return [word.lower() for word in re.findall(_WORD, name)]


def _is_no_literal(value: str) -> bool:
    rest = re.sub(_REFERENCE, "", value).strip().strip("\"'")
    for scheme in ("bearer", "basic", "token"):
        rest = rest[len(scheme) :].strip() if rest.lower().startswith(scheme + " ") or rest.lower() == scheme else rest
    return re.fullmatch(_PLACEHOLDER, rest) is not None or rest.startswith(("/", "~/", "./", "../", "file:"))


def _hex_kind(key: str, value: str) -> str | None:
    if re.fullmatch(_HEX_KEY, value) and not _DIGESTS.intersection(_words(key)):
        return "a 40-digit hexadecimal key, as Weights & Biases issues them"
    return None


def _in_command(command: str) -> str | None:
    if re.search(_LOGIN, command):
        return "a Weights & Biases key"
    for pattern in (_ASSIGNMENT, _FLAG):
        for name, value in re.findall(pattern, command):
            kind = name_kind(name, value) or (_hex_kind(name, value.strip("\"'")) if value else None)
            if kind is not None:
                return f"{kind} in a command"
    return None
