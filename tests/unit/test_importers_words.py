"""Text into words: two layouts, places, quotes."""

from __future__ import annotations

import pytest

from p3o_launch.importers.words import Word, split


def texts(text: str) -> list[str]:
    return [word.text for word in split(text, "f").words]


def test_one_argument_per_line_is_taken_as_it_stands() -> None:
    text = (
        '--resource\n{"actor": [1, 4]}\n--system-prompt\nA user asks. <think> so </think>\n# a comment\n\n--lr\n1e-6\n'
    )
    assert texts(text) == [
        "--resource",
        '{"actor": [1, 4]}',
        "--system-prompt",
        "A user asks. <think> so </think>",
        "--lr",
        "1e-6",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "--lr 1e-6 --seed 42",
        "--lr 1e-6 \\\n  --seed 42",
        "--lr 1e-6\n--seed 42",
        "--lr '1e-6' \"--seed\" 4\\2 # a comment --seed 7",
        "--lr \\\r\n 1e-6 --seed 42\r\n",
    ],
)
def test_shell_lines_give_the_same_words(text: str) -> None:
    assert texts(text) == ["--lr", "1e-6", "--seed", "42"]


def test_words_know_their_line_and_column() -> None:
    assert split("--lr 1e-6 \\\n  --seed '4 2'", "f").words == [
        Word("--lr", 1, 1, starts=True),
        Word("1e-6", 1, 6),
        Word("--seed", 2, 3),
        Word("4 2", 2, 10, quoted=True),
    ]
    assert split("--lr\n  1e-6\n", "f").words == [Word("--lr", 1, 1), Word("1e-6", 2, 3)]


def test_variables_are_seen_and_not_expanded() -> None:
    words = split("--lr $LR --load \"${BASE}/x\" --save '$literal' --seed `date`", "f").words
    assert {word.text: word.variable for word in words} == {
        "--lr": False,
        "$LR": True,
        "--load": False,
        "${BASE}/x": True,
        "--save": False,
        "$literal": False,
        "--seed": False,
        "`date`": True,
    }


def test_an_open_quote_is_found_where_it_opens() -> None:
    found = split("--lr 1e-6 \\\n --load '/a b --seed 42", "f")
    assert [(item.code, item.position.line, item.position.column) for item in found.findings] == [("P3O018", 2, 9)]
    assert found.words[-1].text == "/a b --seed 42"


def test_quotes_that_would_reach_the_program_are_found() -> None:
    found = split('--split\n\'99,1,0\'\n--resource\n{"a": "b"}\n', "f")
    assert [(item.code, item.position.line) for item in found.findings] == [("P3O018", 2)]


def test_an_empty_quoted_argument_is_a_word() -> None:
    assert texts("--tag '' --seed 1") == ["--tag", "", "--seed", "1"]
