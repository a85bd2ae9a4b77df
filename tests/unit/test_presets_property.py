"""Mutated presets: never a traceback, never slow, every finding inside its file, and every format can print it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from p3o_launch.check import CheckResult, check_text
from p3o_launch.fields import FIELDS, TOP
from p3o_launch.guards import all_guards
from p3o_launch.presets import names
from p3o_launch.report import FORMATS

DATA = Path(__file__).parents[1] / "data"
RELAXED = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
LIMIT_S = 1.0


def _sources() -> list[str]:
    """Texts to mutate: a whole preset, every resolved one, every golden file that is text."""
    whole = [(DATA / "base.yaml").read_text("utf-8")]
    for path in sorted((DATA / "err").glob("*.yaml")) + sorted((DATA / "ok").glob("*.yaml")):
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        if len(text) < 3_000:
            whole.append(text)
    return whole


SOURCES = _sources()
PATHS = [f"{group}.{name}" for group, fields in FIELDS.items() for name in fields]
KEYS = [*TOP, *FIELDS, *sorted({name for fields in FIELDS.values() for name in fields}), "extends", "profile", "<<"]
SCALARS = st.one_of(
    st.sampled_from(
        [
            *(
                "",
                "~",
                "null",
                "true",
                "off",
                "0",
                "1",
                "-1",
                "2",
                "3",
                "64",
                "1e-5",
                "1e999",
                ".inf",
                ".nan",
                "010",
                "1:30",
            ),
            *(
                "0x1F",
                "p3o",
                "grpo",
                "vllm",
                "A100-80GB",
                "builtin:arithmetic",
                "[]",
                "{}",
                "[1, 2]",
                "{a: {b: c}}",
                "*a",
            ),
            *(
                "&a x",
                "!!python/object:os.system x",
                "!x y",
                "|",
                ">",
                "'",
                '"',
                "#",
                "${A}",
                "9" * 400,
                "- a",
                "\t",
                "?",
            ),
        ]
    ),
    st.integers(-(10**6), 10**12).map(str),
    st.floats().map(repr),
    st.text(max_size=12),
)


@st.composite
def mutated(draw: st.DrawFn) -> str:
    """A preset's text with a few lines changed, moved, doubled, cut, or with values put in."""
    lines = draw(st.sampled_from(SOURCES)).split("\n")
    for _ in range(draw(st.integers(1, 5))):
        index = draw(st.integers(0, len(lines) - 1))
        kind = draw(st.sampled_from(["value", "value", "key", "drop", "double", "indent", "cut", "text", "setting"]))
        line = lines[index]
        if kind == "value":
            lines[index] = f"{line.partition(':')[0]}: {draw(SCALARS)}"
        elif kind == "key":
            indent = line[: len(line) - len(line.lstrip())]
            lines[index] = f"{indent}{draw(st.sampled_from(KEYS))}:{line.partition(':')[2]}"
        elif kind == "drop" and len(lines) > 1:
            del lines[index]
        elif kind == "double":
            lines.insert(draw(st.integers(0, len(lines))), line)
        elif kind == "indent":
            lines[index] = " " * draw(st.integers(1, 5)) + line
        elif kind == "cut":
            lines[index] = line[: draw(st.integers(0, len(line)))]
        elif kind == "text":
            at = draw(st.integers(0, len(line)))
            lines[index] = line[:at] + draw(st.text(max_size=4)) + line[at:]
        elif kind == "setting":
            group, _, name = draw(st.sampled_from(PATHS)).partition(".")
            lines += [f"{group}:", f"  {name}: {draw(SCALARS)}"]
    return "\n".join(lines)


OVERRIDES = st.lists(
    st.tuples(st.sampled_from([*PATHS, "profile", "recipe", "seed", "nothing.here", "a"]), SCALARS).map("=".join),
    max_size=3,
)


def examine(text: str, overrides: tuple[str, ...] = (), profile: str | None = None) -> CheckResult:
    """Check a text as a file of the golden folder, and hold the result to what every result must be."""
    file = str(DATA / "err" / "mutated.yaml")
    started = time.process_time()
    result = check_text(text, file=file, overrides=overrides, profile=profile)
    assert time.process_time() - started < LIMIT_S
    assert result.crashes == ()
    texts = {entry.path: entry.raw.decode("utf-8-sig", "replace") for entry in result.chain} | {file: text}
    for finding in result.findings:
        assert finding.code in all_guards()
        place = finding.position
        if place.file.startswith("--set"):
            assert 1 <= place.line <= sum(override.count("\n") + 1 for override in overrides)
            continue
        lines = texts[place.file].split("\n")
        assert 1 <= place.line <= len(lines), finding
        assert 1 <= place.column <= len(lines[place.line - 1]) + 1, finding
    for name, formatter in FORMATS.items():
        printed = formatter([result], False)
        if name == "text":
            hints = sum(finding.hint is not None for finding in result.findings)
            origins = sum(bool(finding.position.origin) for finding in result.findings)
            assert printed.count("\n") == len(result.findings) + hints + origins, printed
        if name in ("json", "sarif"):
            json.loads(printed)
        if name == "github":
            assert printed.count("\n") == len(result.findings)
    assert result.preset is not None or result.has_errors or result.partial
    return result


@RELAXED
@given(mutated(), st.sampled_from([None, "cpu", "a100x4"]))
def test_mutated_presets(text: str, profile: str | None) -> None:
    examine(text, profile=profile)


@RELAXED
@given(mutated(), OVERRIDES)
def test_mutated_presets_with_overrides(text: str, overrides: list[str]) -> None:
    examine(text, tuple(overrides))


@RELAXED
@given(st.sampled_from(names()), OVERRIDES)
def test_shipped_presets_with_any_overrides(name: str, overrides: list[str]) -> None:
    examine(f"extends: {name}\nschema_version: 1\n", tuple(overrides))


@RELAXED
@given(st.text(max_size=200))
def test_any_text_at_all(text: str) -> None:
    examine(text)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(RELAXED, max_examples=20_000)
@given(mutated(), OVERRIDES)
def test_twenty_thousand_mutations(text: str, overrides: list[str]) -> None:
    examine(text, tuple(overrides))
