"""Mutated argument lists and YAML: never a traceback, never slow, every finding inside its file."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from importer_lists import CLEAN
from test_importers_script import SCRIPT

from p3o_launch.importers import Request, lint_text, summary
from p3o_launch.importers.flags import table

CORPUS = Path(__file__).parent.parent / "data" / "corpus"
EXAMPLES = int(os.environ.get("P3O_LAUNCH_EXAMPLES", "120"))
MAX_SECONDS = 1.0

RELAXED = settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
LISTS = [
    (path.parent.name, path.read_text("utf-8").split("\n"))
    for path in sorted((CORPUS / "launch").rglob("*.args"))
    if path.stat().st_size < 6000
]
TREES = [
    (path.parent.name, path.read_text("utf-8").split("\n"))
    for path in sorted((CORPUS / "yaml").rglob("*.yaml"))
    if path.stat().st_size < 12_000 and path.parent.name == "nemo_rl"
]
ODD = [
    *(
        "",
        "-1",
        "0",
        "1",
        "2",
        "3",
        "1e-5",
        "1E400",
        "nan",
        "inf",
        "-inf",
        "0.1",
        "1.5",
        "true",
        "False",
        "None",
        "null",
    ),
    *(
        "9" * 30,
        "9" * 400,
        "1" * 5000,
        "${HOME}",
        "$X",
        "'",
        '"',
        '"a b"',
        "{}",
        "[]",
        "{a: 1}",
        "\\",
        "#",
        "--",
        "-",
        "=",
    ),
    *(
        '{"actor":[1,4]}',
        '{"actor":["x"]}',
        '{"a":' * 200,
        "p3o",
        "grpo",
        "ppo",
        "a=b",
        "é\u2028",
        "\x85",
        "a\rb",
        "*x",
    ),
    *("A=(", ")", "(", "${A[@]}", "${B[@]}", "A+=(", "$(", "<<EOF", "EOF", "&&", "2>&1", "x.py", "-m", "A=$A$A", "#!"),
]
VALUES = st.one_of(
    st.sampled_from(ODD),
    st.integers(-10, 10**6).map(str),
    st.floats(allow_nan=True).map(str),
    st.text(max_size=30),
)
NAMES = sorted(table("relax").flags)
WORDS = st.one_of(VALUES, st.sampled_from(NAMES), st.sampled_from(NAMES).map(lambda name: name[:-1]))
PATHS = ["policy", "policy.generation", "grpo", "loss_fn", "policy.megatron_cfg", "cluster", "a..b", "", "defaults"]


for _framework, _text in CLEAN.items():  # the limit is on judging, not on importing what judges
    lint_text(_text, Request(_framework), "launch.txt")


def examine(framework: str, text: str, **request: Any) -> None:
    """Lint twice (the configuration's own terms, and as P3O) and look at every finding."""
    for target in (None, "p3o"):
        began = time.process_time()
        result = lint_text(text, Request(framework, target=target, **request), "launch.txt")
        assert time.process_time() - began < MAX_SECONDS
        assert result.check.crashes == ()
        assert not [item for item in result.check.findings if item.code == "P3O901"]
        if result.facts is not None:
            json.dumps(summary(result.facts), default=str)
        lines = text.split("\n")
        for item in result.check.findings:
            if item.position.file != "launch.txt":
                continue
            assert 1 <= item.position.line <= len(lines)
            assert 1 <= item.position.column <= len(lines[item.position.line - 1]) + 1


@st.composite
def mutated(draw: st.DrawFn, texts: list[tuple[str, list[str]]], words: st.SearchStrategy[str]) -> tuple[str, str]:
    """A real configuration with a few lines replaced, dropped, doubled, moved or broken."""
    framework, lines = draw(st.sampled_from(texts))
    lines = list(lines)
    for _ in range(draw(st.integers(1, 6))):
        index = draw(st.integers(0, len(lines) - 1))
        kind = draw(st.sampled_from(["replace", "drop", "double", "insert", "join", "cut", "tail"]))
        if kind == "replace":
            lines[index] = draw(words)
        elif kind == "drop" and len(lines) > 1:
            del lines[index]
        elif kind == "double":
            lines.insert(draw(st.integers(0, len(lines))), lines[index])
        elif kind == "insert":
            lines.insert(index, draw(words))
        elif kind == "join":
            lines[index] = f"{lines[index]} {draw(words)}"
        elif kind == "cut":
            lines[index] = lines[index][: draw(st.integers(0, 20))]
        else:
            head, colon, _ = lines[index].partition(draw(st.sampled_from([":", "="])))
            lines[index] = f"{head}{colon} {draw(words)}"
    return framework, draw(st.sampled_from(["\n", "\r\n", " \\\n", " "])).join(lines)


@RELAXED
@given(mutated(LISTS, WORDS))
def test_mutated_argument_lists(case: tuple[str, str]) -> None:
    examine(*case)


@RELAXED
@given(mutated([("slime", SCRIPT.split("\n")), ("verl", SCRIPT.split("\n"))], WORDS))
def test_mutated_scripts(case: tuple[str, str]) -> None:
    examine(*case)


@RELAXED
@given(mutated(TREES, VALUES))
def test_mutated_yaml(case: tuple[str, str]) -> None:
    examine(*case)


@pytest.mark.slow
@settings(RELAXED, max_examples=10_000)
@given(st.one_of(mutated(LISTS, WORDS), mutated(TREES, VALUES)))
def test_ten_thousand_mutations(case: tuple[str, str]) -> None:
    examine(*case)


@RELAXED
@given(st.sampled_from(sorted(CLEAN)), st.text(max_size=300))
def test_any_text_at_all(framework: str, text: str) -> None:
    examine(framework, text)


@RELAXED
@given(st.sampled_from(["slime", "relax", "megatron"]), st.lists(WORDS, max_size=60), st.sampled_from(["\n", " "]))
def test_words_in_any_order(framework: str, words: list[str], joiner: str) -> None:
    examine(framework, joiner.join(words))


@RELAXED
@given(
    st.sampled_from(["verl", "nemo_rl"]),
    st.lists(st.tuples(st.sampled_from(["", "+", "++", "~", "-"]), st.sampled_from(PATHS), VALUES), max_size=8),
)
def test_any_overrides(framework: str, entries: list[tuple[str, str, str]]) -> None:
    overrides = tuple(f"{sign}{path}={value}" for sign, path, value in entries)
    examine(framework, CLEAN[framework], overrides=overrides)


@pytest.mark.parametrize("framework", sorted(CLEAN))
def test_thousands_of_unknown_flags_and_quotes_stay_fast(framework: str) -> None:
    examine(framework, "\n".join(f"--unknown-flag-{number}" for number in range(5000)))
    examine(framework, "'\"" * 20_000)
    examine(framework, "--a " + "\\" * 50_000)
    examine(framework, "a: ${b}\nb: ${a}\n" + "c: [" * 20)
    for line in ("group{}.temperatur_{}=1\n", "actor_rollout_ref.actor.unknown_{}{}=1\n", "temperatur_{}{}: 1\n"):
        examine(framework, "".join(line.format(number, number) for number in range(3000)))
    examine(framework, "group:\n" + "".join(f"  temperatur_{number}: 1\n" for number in range(3000)))
