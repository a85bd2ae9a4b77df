"""`ignore`: every reason is recorded; no error that changes the objective or breaks the replay can be silenced."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from p3o_launch.check import check_text
from p3o_launch.diagnostics import Severity
from p3o_launch.guards import all_guards
from p3o_launch.report import format_json

ERR = Path(__file__).parents[1] / "data" / "err"
RULES = {code: rule for code, rule in all_guards().items() if rule.body is not None}
FILES = [
    path
    for path in sorted(ERR.glob("P3O[1-7]*.yaml"))
    if path.name.partition("_")[0] in RULES and "# args:" not in path.read_text("utf-8").partition("\n")[0]
]
# Every error that may be ignored, and why doing so cannot train another objective than the preset says.
HARMLESS = {
    "P3O115": "the band is reported, and does not enter the loss",
    "P3O305": "Megatron refuses the start itself",
    "P3O313": "the builtin engine deals prompts out unevenly; other engines refuse",
    "P3O412": "engine and trainer see the same positions",
    "P3O501": "the kernels refuse the start themselves",
    "P3O504": "the engine computes as it would without the variable, or refuses",
    "P3O510": "the kernels refuse the start themselves, or compute in float32",
    "P3O509": "the kernels refuse the start themselves",
    "P3O601": "memory runs out, or does not",
    "P3O606": "Megatron refuses the start itself, or runs slower",
    "P3O709": "on a node of one's own nobody else is harmed",
}


def test_only_these_errors_can_be_ignored() -> None:
    ignorable = {code for code, rule in all_guards().items() if rule.ignorable and rule.severity is Severity.ERROR}
    assert ignorable == set(HARMLESS)


@pytest.mark.parametrize("family", ["P3O1", "P3O2"])
def test_no_error_of_the_objective_or_the_replay_but_a_report_of_it_can(family: str) -> None:
    errors = [rule for code, rule in RULES.items() if code.startswith(family) and rule.severity is Severity.ERROR]
    assert errors
    assert {rule.code for rule in errors if rule.ignorable} <= {"P3O115"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_ignoring_a_finding_works_where_it_may_and_is_refused_where_it_may_not(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ERR)  # some name a checkpoint beside them
    code = path.name.partition("_")[0]
    rule = RULES[code]
    # What a rule about the author's own lines is about does not come by inheritance.
    text = path.read_text("utf-8") if rule.own else f"extends: {path.name}\n"
    before = [f for f in check_text(text).findings if f.code == code]
    result = check_text(f'{text}ignore: {{{code}: "measured: no effect here"}}\n')
    codes = {finding.code for finding in result.findings}
    assert before
    if rule.severity is Severity.ERROR and code not in HARMLESS:
        assert {code, "P3O013"} <= codes
        assert result.suppressed == ()
        return
    assert code not in codes
    assert [(item.finding, item.reason) for item in result.suppressed] == [
        (finding, "measured: no effect here") for finding in sorted(before, key=lambda finding: finding.sort_key)
    ]
    (file,) = json.loads(format_json([result]))["files"]
    assert {item["reason"] for item in file["suppressed"]} == {"measured: no effect here"}
    assert result.preset is not None
    assert result.preset.ignore == {code: "measured: no effect here"}
