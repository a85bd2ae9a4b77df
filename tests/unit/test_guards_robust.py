"""No preset the schema lets through makes a guard raise, and no finding points outside the schema."""

from __future__ import annotations

import math
import random
from typing import Any

from guard_presets import CLEAN, make
from pydantic import ValidationError

from p3o_launch.fields import FIELDS
from p3o_launch.guards import GuardContext, all_guards

ODD_NUMBERS = [0, 1, 2, 3, 5, 7, 16, 48, 64, 97, 4096, 151936, 10**9]
ODD_FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, 1e-300, 1e300, math.inf, -math.inf, math.nan]
ODD_TEXTS = ["x", "A100-40GB", "${A}", "1:2:3", "\x00", "é" * 50, "pkill -f x", "hf_" + "a" * 30, "builtin:../..", "="]
ODD_MAPS: list[dict[str, Any]] = [
    {},
    {"env_vars": None},
    {"env_vars": {"A": 1, "B": None}},
    {"top_p": "x", "top_k": [1], "logit_bias": {"a": "b"}, "seed": {"deep": 1}},
    {"": "", "a.b": {"c.d": "e"}, "password": True},
    {"\x1b[31m\n": {"top_p": 0.5, "seed": 3, "temperature": 2, "password": "horse"}},
    {"bad_words": 5, "temperature": "hot", "min_tokens": math.nan},
]


def odd_value(rng: random.Random, field: tuple[Any, ...]) -> Any:
    kind = field[0]
    if rng.random() < 0.2:
        return None
    if kind == "choice":
        return rng.choice(field[6])
    if kind == "bool":
        return rng.random() < 0.5
    if kind == "map":
        return rng.choice([*ODD_MAPS, {"A": "b"}, {"CUDA_DEVICE_MAX_CONNECTIONS": "", "NCCL_ALGO": "^"}])
    return rng.choice({"int": ODD_NUMBERS, "float": ODD_FLOATS}.get(kind, ODD_TEXTS))


def test_odd_values_in_any_combination() -> None:
    rng = random.Random(7)
    paths = [(group, name) for group in FIELDS for name in FIELDS[group] if group in CLEAN]
    rules = [rule for rule in all_guards().values() if rule.body is not None]
    judged = 0
    seen: set[str] = set()
    while judged < 1500:
        picked = rng.sample(paths, rng.randint(1, 8))
        changes = {f"{group}.{name}": odd_value(rng, FIELDS[group][name]) for group, name in picked}
        try:
            preset = make(changes)
        except ValidationError:
            continue
        judged += 1
        context = GuardContext(preset)
        for rule in rules:
            assert rule.body is not None
            for finding in rule.body(context):
                seen.add(rule.code)
                for path in (finding.path, *finding.related):
                    group, _, rest = path.partition(".")
                    name = rest.partition(".")[0]
                    assert name in FIELDS.get(group, {}) or not rest, (rule.code, path)
                assert finding.message.isprintable()
                assert finding.hint is None or finding.hint.isprintable()
    assert len(seen) > 50
