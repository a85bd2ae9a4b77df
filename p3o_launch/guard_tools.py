"""What several guard families share: wording of values and choices, divisors, the environment the actors will see."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from p3o_launch.diagnostics import Finding

if TYPE_CHECKING:
    from p3o_launch.schema import Preset

PAPER = "arXiv:2605.12380"
ARGUMENTS = "https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/training/arguments.py"
CONFIG = "https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/transformer/transformer_config.py"

SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")


def value_at(preset: Preset, path: str) -> object:
    """The value at a dotted path of schema fields; a typing error in the path is our own bug and raises."""
    value: object = preset
    for part in path.split("."):
        value = getattr(value, part)
    return value


def shown(value: object) -> str:
    """A value as it is written in YAML, short enough for one line."""
    if value is None:
        return "absent"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
    text = printable(str(value))
    return text if len(text) <= 80 else text[:77] + "..."


def printable(text: str) -> str:
    """The text on one line, with control characters escaped: a preset must not steer the reader's terminal."""
    return text if text.isprintable() else ascii(text)[1:-1]


def named(preset: Preset, path: str) -> str:
    """``batch.global_batch_size (64)``: a setting with its value."""
    return f"{path} ({shown(value_at(preset, path))})"


def either(choices: Iterable[object], conjunction: str = "or") -> str:
    """``1, 2 or 4``."""
    words = [str(choice) for choice in choices]
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} {conjunction} {words[-1]}"


def both(names: Iterable[object]) -> str:
    """``a, b and c``."""
    return either(names, "and")


def counted(number: int, noun: str, plural: str = "s") -> str:
    """``1 layer``, ``3 layers``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{plural}"


def up_to(number: int, word: str = "less") -> str:
    """``4 or less``; of what must be 1 at least, ``1``."""
    return "1" if number == 1 else f"{number} or {word}"


# Far above any number of ranks, layers or samples; without it a number with many digits would be tried for minutes.
_LARGEST_TRIED = 20_000


def divisors(number: int) -> list[int]:
    """Every divisor, ascending; of a number above 4 x 10^8, those up to 20,000 and what they leave."""
    small = [d for d in range(1, min(math.isqrt(number), _LARGEST_TRIED) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def nearest(choices: Iterable[int], target: int, count: int = 2) -> list[int]:
    """The ``count`` choices closest to ``target``, ascending."""
    return sorted(sorted(choices, key=lambda choice: (abs(choice - target), choice))[:count])


def beside(target: int, multiple: int) -> list[int]:
    """The positive multiples of ``multiple`` next to ``target``: below and above."""
    below = target // multiple * multiple
    return [below, below + multiple] if below else [multiple]


def is_p3o(preset: Preset) -> bool:
    """Is the objective P3O?"""
    return preset.algorithm.advantage_estimator == "p3o"


def replays(preset: Preset) -> bool:
    """Does the optimizer step read its window twice? Only p3o's step scope does."""
    return is_p3o(preset) and preset.algorithm.ess_scope == "step"


def dropout_findings(preset: Preset, consequence: str) -> Iterator[Finding]:
    """One finding per dropout that is written and not 0, one for those left to Megatron's default of 0.1."""
    absent = []
    for field in ("attention_dropout", "hidden_dropout"):
        path = f"model.{field}"
        value = getattr(preset.model, field)
        if value is None:
            absent.append(path)
        elif value > 0:
            yield Finding(path, f"{named(preset, path)} drops units in the trainer: {consequence}", f"set {path}: 0")
    if absent:
        verb = "is" if len(absent) == 1 else "are"
        yield Finding(
            absent[0],
            f"{both(absent)} {verb} absent, which means Megatron's default 0.1: {consequence}",
            "write " + both(f"{path}: 0" for path in absent),
            related=tuple(absent[1:]),
        )


def policy_ratio_from_rollout(preset: Preset) -> bool:
    """Is the denominator of the policy ratio what the rollout engine reported? P3O has no other."""
    return is_p3o(preset) or preset.algorithm.use_rollout_logprobs is True


class EnvEntry(NamedTuple):
    """One environment variable of the actors and the dotted path where the preset sets it."""

    value: str
    path: str


def actor_env(preset: Preset) -> dict[str, EnvEntry]:
    """Environment the preset gives the actors: ``cluster.runtime_env.env_vars``, and ``cluster.env`` over it."""
    entries: dict[str, EnvEntry] = {}
    env_vars = preset.cluster.runtime_env.get("env_vars")
    if isinstance(env_vars, Mapping):
        for name, value in env_vars.items():
            entries[str(name)] = EnvEntry(str(value), f"cluster.runtime_env.env_vars.{name}")
    for name, value in preset.cluster.env.items():
        entries[name] = EnvEntry(value, f"cluster.env.{name}")
    return entries


def version_of(text: str | None) -> tuple[int, ...] | None:
    """``"v0.11.1rc2"`` -> (0, 11, 1); None when there is no number."""
    if text is None:
        return None
    numbers = []
    for part in text.strip().lower().lstrip("v").split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers) or None


def leaves(value: object, path: str, key: str = "") -> Iterator[tuple[str, str, object]]:
    """Every scalar below a free-form value as (path, key, value); the items of a list carry the key of their list."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from leaves(item, f"{path}.{name}", str(name))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}.{index}", key)
    else:
        yield path, key, value
