"""YAML text to values with places: YAML 1.1 scalars, and nothing hostile gets through or takes long."""

from __future__ import annotations

import time
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from p3o_launch.loading import flatten
from p3o_launch.nodes import MAX_DEPTH, MAX_NODES, parse, scalar, shown, shown_key, trap


def data_of(text: str) -> Any:
    root, findings = parse(text, "x.yaml")
    assert not findings
    assert root is not None
    return flatten(root).data


def codes(text: str) -> list[str]:
    return [finding.code for finding in parse(text, "x.yaml")[1]]


PLAIN = [
    *("", "~", "null", "NULL", "true", "True", "TRUE", "tRUE", "yes", "no", "on", "off", "Off", "y", "n"),
    *("0", "7", "-7", "+7", "1_000", "010", "-017", "08", "0x1F", "0b101", "0b", "0x", "00", "1__0", "_1"),
    *("1:30", "190:20:30", "1:60", "-1:30", "1:30.5", "20:30:40.15", "0:0", "0:0.5", ":1"),
    *("1.5", "-1.5", "1.", ".5", "1e5", "1.0e5", "1.0e+5", "1.0E-5", "1e-5", "1_0.5", ".inf", "-.INF", "+.Inf", "."),
    *("+", "--1", "1.2.3", "a", "0o7", "1e400", "1.0e+400", "٣", "x1", "1x", "1,5", "-.", "e5", "0.", "._1"),
]


@pytest.mark.parametrize("text", PLAIN)
def test_a_plain_scalar_reads_as_pyyaml_reads_it(text: str) -> None:
    expected = yaml.safe_load(f"- {text}")[0]
    assert repr(scalar(text)) == repr(expected)


@settings(max_examples=400, deadline=None)
@given(st.text(alphabet="0123456789+-._:eExXbBaAinfINF", min_size=1, max_size=8))
def test_number_like_text_reads_as_pyyaml_reads_it(text: str) -> None:
    loader = yaml.SafeLoader("")
    node = yaml.ScalarNode(loader.resolve(yaml.ScalarNode, text, (True, False)), text)
    try:
        expected = loader.construct_object(node)
    except ValueError:  # PyYAML resolves some texts it cannot build, such as 0b_ or 1:_
        expected = text
    if not isinstance(expected, str | int | float | None):
        expected = text  # a timestamp stays text
    assert repr(scalar(text)) == repr(expected)


def test_nan_is_read() -> None:
    assert repr(scalar(".NaN")) == "nan"


def test_a_date_stays_text() -> None:
    assert data_of("when: 2026-12-01") == {"when": "2026-12-01"}


@pytest.mark.parametrize(
    ("raw", "means"), [("010", "8"), ("-017", "-15"), ("1:30", "90"), ("190:20:30", "685230"), ("1:30.5", "90.5")]
)
def test_a_number_that_means_something_else_is_a_trap(raw: str, means: str) -> None:
    assert str(trap(raw)).endswith(f"means {means}")


@pytest.mark.parametrize("raw", ["8", "0", "00", "-0", "0x10", "1_000", "1.5", "1e-5", "a:b", "08", "12:99", "0" * 100])
def test_a_plain_number_is_no_trap(raw: str) -> None:
    assert trap(raw) is None


def test_every_value_and_key_knows_its_place() -> None:
    root, _ = parse("a:\n  b: 1\n  c: [x,\n      y]\n", "f.yaml", "extends")
    assert root is not None
    flat = flatten(root)
    places = {".".join(path): (p.line, p.column) for path, p in flat.values.items()}
    assert places == {"": (1, 1), "a": (2, 3), "a.b": (2, 6), "a.c": (3, 6), "a.c.0": (3, 7), "a.c.1": (4, 7)}
    assert {".".join(path): (p.line, p.column) for path, p in flat.keys.items()} == {
        "a": (1, 1),
        "a.b": (2, 3),
        "a.c": (3, 3),
    }
    assert {(p.file, p.origin) for p in flat.values.values()} == {("f.yaml", "extends")}


def test_columns_count_characters() -> None:
    root, _ = parse('{"ü": "ä", b: 1}', "f.yaml")
    assert root is not None
    assert flatten(root).values[("b",)].column == 15


def test_a_merge_key_fills_in_what_is_not_written() -> None:
    text = "a: &a {x: 1, y: 2}\nb: &b {y: 3, z: 4}\nc:\n  <<: [*a, *b]\n  x: 9\nd:\n  x: 8\n  <<: *b\n"
    data = data_of(text)
    assert data["c"] == yaml.safe_load(text)["c"] == {"x": 9, "y": 2, "z": 4}
    assert data["d"] == {"x": 8, "y": 3, "z": 4}


def test_a_quoted_merge_key_is_a_key() -> None:
    assert data_of('"<<": 1') == {"<<": 1}


def test_quoted_and_tagged_text_stays_text() -> None:
    assert data_of("a: '010'\nb: !!str 010\nc: ! 010\nd: |\n  on\n") == {
        "a": "010",
        "b": "010",
        "c": "010",
        "d": "on\n",
    }


def test_keys_are_text_whatever_they_look_like() -> None:
    assert data_of("on: 1\n010: 2\n~: 3\n") == {"on": 1, "010": 2, "~": 3}


HOSTILE = {
    "alias bomb": (
        "a: &a [x,x,x,x,x,x,x,x,x,x]\n"
        + "".join(f"{b}: &{b} [{','.join(['*' + a] * 10)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)),
        "P3O004",
    ),
    "merge bomb": (
        "a: &a {x: 1}\n"
        + "".join(
            f"{b}: &{b} {{{', '.join(f'{b}{i}: *{a}' for i in range(10))}, <<: *{a}}}\n"
            for a, b in zip("abcdefgh", "bcdefghi", strict=True)
        ),
        "P3O004",
    ),
    "alias of itself": ("a: &a [*a]\n", "P3O004"),
    "alias of its parent": ("a: &a\n  b: &b\n    c: *a\n", "P3O004"),
    "flow lists": ("[" * 100_000, "P3O004"),
    "flow mappings": ("{a: " * 100_000, "P3O004"),
    "block lists": ("- " * 100_000, "P3O004"),
    "deep by aliases": ("a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 40)), "P3O004"),
    "many keys": ("\n".join(f"k{i}: 1" for i in range(20_000)), "P3O004"),
    "many items": ("[" + "a," * 400_000, "P3O004"),
    "long key": ("x" * 900_000 + ": 1", "P3O002"),
    "anchors": ("&" * 100_000, "P3O002"),
    "question marks": ("? " * 100_000, "P3O002"),
    "colons": ("a: " * 10_000, "P3O002"),
    "unknown alias": ("a: *nothing\n", "P3O002"),
    "a list as a key": ("? [a]\n: b\n", "P3O002"),
    "merging a number": ("<<: 3\n", "P3O002"),
    "second document": ("a: 1\n---\nb: 2\n", "P3O002"),
    "tab": ("a:\n\t- b\n", "P3O002"),
    "python object": ("a: !!python/object/apply:os.system ['true']\n", "P3O005"),
    "python name": ("a: !!python/name:os.system\n", "P3O005"),
    "binary": ("a: !!binary aGk=\n", "P3O005"),
    "tagged key": ("!mine a: 1\n", "P3O005"),
    "set": ("!!set {a, b}\n", "P3O005"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_yaml_is_one_finding_in_under_a_second(name: str) -> None:
    text, code = HOSTILE[name]
    start = time.perf_counter()
    found = codes(text)
    assert time.perf_counter() - start < 1
    assert found == [code]


@pytest.mark.parametrize(
    "text",
    [
        "#" * 900_000,
        'a: "' + "\\x41" * 200_000 + '"',
        "a: " + "9" * 100_000,
        "a: " + "x" * 900_000,
        "a: 1\n" + "\n" * 900_000,
    ],
    ids=["comment", "escapes", "digits", "text", "lines"],
)
def test_long_but_harmless_yaml_is_read_in_under_a_second(text: str) -> None:
    start = time.perf_counter()
    assert codes(text) == []
    assert time.perf_counter() - start < 1


def test_limits_are_limits_and_not_below() -> None:
    assert codes("[" * MAX_DEPTH + "]" * MAX_DEPTH) == []
    assert codes("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1)) == ["P3O004"]
    assert codes("[" + "1," * (MAX_NODES - 1) + "]") == []
    assert codes("[" + "1," * MAX_NODES + "]") == ["P3O004"]


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet=st.sampled_from("ab01:-?[]{},&*!|>'\"%@`#\n\t \\<~é\u2028\ufeff"), max_size=60))
def test_no_text_makes_the_parser_raise(text: str) -> None:
    root, findings = parse(text, "x.yaml")
    if root is None and not findings:
        assert yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)) is None


def test_messages_show_values_on_one_printable_line() -> None:
    assert shown("a\nb\x1b[31m") == "'a\\nb\\x1b[31m'"
    assert len(shown("x" * 1000)) <= 60
    assert [shown(value) for value in (None, True, False, 1.5)] == ["empty", "true", "false", "1.5"]
    assert shown_key("plain_key-1.x") == "plain_key-1.x"
    assert shown_key("two words") == "'two words'"
    assert shown_key("ü") == "'ü'"
