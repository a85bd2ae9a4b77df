"""Findings as text and as JSON: the shapes that people and programs rely on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from p3o_launch.check import CheckResult, Suppressed, check_text
from p3o_launch.diagnostics import LocatedFinding, Position, Severity
from p3o_launch.report import FORMATS, format_json, format_text, summary

FOUND = LocatedFinding(
    Position("x.yaml", 9, 3),
    Severity.ERROR,
    "P3O301",
    "tp-bad",
    "tp (3) does not divide gpus (4)",
    "use 2",
    "parallel.tp",
)
INHERITED = LocatedFinding(
    Position("base.yaml", 1, 1, "extends"), Severity.WARNING, "P3O113", "inert-clip", "eps_clip is inert", None, "a.b"
)


def result(*findings: LocatedFinding, suppressed: tuple[Suppressed, ...] = ()) -> CheckResult:
    return CheckResult("x.yaml", None, findings, suppressed)


def test_text_is_a_line_per_finding_with_hint_and_origin() -> None:
    assert format_text([result(FOUND, INHERITED)]) == (
        "x.yaml:9:3: error P3O301 tp (3) does not divide gpus (4) [tp-bad]\n"
        "    hint: use 2\n"
        "base.yaml:1:1: warning P3O113 eps_clip is inert [inert-clip]\n"
        "    origin: extends, for x.yaml\n"
    )


def test_text_without_findings_is_empty() -> None:
    assert format_text([result()]) == ""


def test_colour_is_added_only_when_asked_for() -> None:
    assert "\x1b" not in format_text([result(FOUND)])
    coloured = format_text([result(FOUND)], colour=True)
    assert "\x1b[31merror\x1b[0m" in coloured
    for code in ("\x1b[1m", "\x1b[0m", "\x1b[31m"):
        coloured = coloured.replace(code, "")
    assert coloured == format_text([result(FOUND)])


def test_json_has_the_documented_shape() -> None:
    report: dict[str, Any] = json.loads(format_json([result(FOUND, suppressed=(Suppressed(INHERITED, "shared"),))]))
    assert report == {
        "version": 1,
        "files": [
            {
                "file": "x.yaml",
                "ok": False,
                "findings": [
                    {
                        "file": "x.yaml",
                        "line": 9,
                        "column": 3,
                        "origin": "",
                        "severity": "error",
                        "code": "P3O301",
                        "name": "tp-bad",
                        "message": "tp (3) does not divide gpus (4)",
                        "hint": "use 2",
                        "path": "parallel.tp",
                    }
                ],
                "suppressed": [
                    {
                        "file": "base.yaml",
                        "line": 1,
                        "column": 1,
                        "origin": "extends",
                        "severity": "warning",
                        "code": "P3O113",
                        "name": "inert-clip",
                        "message": "eps_clip is inert",
                        "hint": None,
                        "path": "a.b",
                        "reason": "shared",
                    }
                ],
            }
        ],
        "summary": {"files": 1, "errors": 1, "warnings": 0, "infos": 0, "suppressed": 1},
    }


def test_json_is_whole_when_values_are_not() -> None:
    for text in ("a: .nan\n", 'a: "\\ud83d"\n', "a: é\n", ""):
        json.loads(format_json([check_text(text)]))


@pytest.mark.parametrize(
    ("results", "line"),
    [
        ([result()], "1 file: no findings"),
        ([result(), result()], "2 files: no findings"),
        ([result(FOUND), result(INHERITED, FOUND)], "2 files: 2 errors, 1 warning"),
        ([result(suppressed=(Suppressed(INHERITED, "x"),))], "1 file: no findings (1 ignored with a reason)"),
    ],
)
def test_the_summary_counts(results: list[CheckResult], line: str) -> None:
    assert summary(results) == line


def test_the_summary_says_when_only_the_shape_was_checked() -> None:
    assert "only the shape of part.yaml was checked" in summary([check_text("partial: true\n", file="part.yaml")])


def test_every_format_takes_every_result() -> None:
    for formatter in FORMATS.values():
        assert isinstance(formatter([result(FOUND)], False), str)
