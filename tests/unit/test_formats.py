"""Every output format: what programs read must be exactly what was found."""

from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.parse import unquote

import jsonschema
import pytest

from p3o_launch.check import CheckResult, check_file, check_text
from p3o_launch.diagnostics import LocatedFinding, Position, Severity
from p3o_launch.importers import Request, lint_file
from p3o_launch.report import FORMATS, format_full, format_github, format_json, format_sarif, format_text

DATA = Path(__file__).parents[1] / "data"
ERR = sorted((DATA / "err").glob("*.yaml"))
SARIF = jsonschema.Draft4Validator(json.loads((DATA / "schemas" / "sarif-schema-2.1.0.json").read_text()))


@pytest.fixture(scope="module")
def results() -> list[CheckResult]:
    return [check_file(str(path)) for path in ERR]


def crafted(**changes: object) -> CheckResult:
    values = {
        "position": Position("a b/x.yaml", 3, 5),
        "severity": Severity.ERROR,
        "code": "P3O112",
        "name": "group-of-one",
        "message": "100% wrong\n::error::x",
        "hint": "use 2, not 1: more",
        "path": "batch.n_samples_per_prompt",
    }
    return CheckResult("x.yaml", None, (LocatedFinding(**(values | changes)),))  # type: ignore[arg-type]


def test_sarif_of_every_faulty_file_is_valid_and_complete(results: list[CheckResult]) -> None:
    log = json.loads(format_sarif(results))
    SARIF.validate(log)
    (run,) = log["runs"]
    found = [finding for result in results for finding in result.findings]
    assert [entry["ruleId"] for entry in run["results"]] == [finding.code for finding in found]
    rules = run["tool"]["driver"]["rules"]
    assert all(rules[entry["ruleIndex"]]["id"] == entry["ruleId"] for entry in run["results"])
    levels = {"error": "error", "warning": "warning", "info": "note"}
    assert [entry["level"] for entry in run["results"]] == [levels[finding.severity.value] for finding in found]
    for entry, finding in zip(run["results"], found, strict=True):
        physical = entry["locations"][0]["physicalLocation"]
        assert physical["region"] == {"startLine": finding.position.line, "startColumn": finding.position.column}
        assert unquote(physical["artifactLocation"]["uri"]) == f"file://{finding.position.file}"


def test_sarif_without_findings_is_valid() -> None:
    log = json.loads(format_sarif([check_file(str(DATA / "base.yaml"))]))
    SARIF.validate(log)
    assert log["runs"][0]["results"] == []


def test_sarif_carries_what_is_ignored_with_its_reason() -> None:
    text = f'extends: {DATA / "base.yaml"}\nalgorithm: {{eps_clip: 0.1}}\nignore: {{P3O113: "a parity test"}}\n'
    log = json.loads(format_sarif([check_text(text)]))
    SARIF.validate(log)
    (entry,) = log["runs"][0]["results"]
    assert entry["suppressions"] == [{"kind": "inSource", "justification": "a parity test"}]


def test_sarif_escapes_paths_and_names_no_file_for_the_command_line() -> None:
    (inside,) = json.loads(format_sarif([crafted()]))["runs"][0]["results"]
    assert inside["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "a%20b/x.yaml"
    outside = json.loads(format_sarif([crafted(position=Position("--set", 1, 9, "--set"))]))
    SARIF.validate(outside)
    assert "physicalLocation" not in outside["runs"][0]["results"][0]["locations"][0]


def test_a_github_annotation_escapes_what_could_end_it() -> None:
    assert format_github([crafted()]) == (
        "::error title=P3O112 group-of-one,file=a b/x.yaml,line=3,col=5::"
        "100%25 wrong%0A::error::x%0Ahint: use 2, not 1: more\n"
    )
    assert "file=a%2Cb%3Ac.yaml," in format_github([crafted(position=Position("a,b:c.yaml", 1, 1))])


def test_a_github_annotation_about_the_command_line_names_no_file() -> None:
    line = format_github([crafted(position=Position("--set", 1, 9, "--set"), severity=Severity.INFO)])
    assert line.startswith("::notice title=P3O112 group-of-one::--set: 100%25")


def test_github_gives_one_line_per_finding(results: list[CheckResult]) -> None:
    lines = format_github(results).splitlines()
    assert len(lines) == sum(len(result.findings) for result in results)
    assert all(re.match(r"::(error|warning|notice) title=P3O\d{3} [a-z0-9-]+,file=", line) for line in lines)


def test_json_holds_every_finding(results: list[CheckResult]) -> None:
    report = json.loads(format_json(results))
    assert report["version"] == 1
    assert [len(file["findings"]) for file in report["files"]] == [len(result.findings) for result in results]
    documented = (DATA.parents[1] / "docs" / "formats.md").read_text()
    keys = {key for file in report["files"] for finding in file["findings"] for key in finding}
    keys |= report.keys() | report["summary"].keys() | report["files"][0].keys() | {"reason"}
    assert [key for key in sorted(keys) if f"`{key}`" not in documented] == []


def test_the_json_report_follows_its_documented_schema(results: list[CheckResult]) -> None:
    documented = (DATA.parents[1] / "docs" / "formats.md").read_text()
    schema = json.loads(documented.partition("```json\n")[2].partition("```")[0])
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(json.loads(format_json(results)))


def test_the_full_text_points_at_the_value() -> None:
    result = check_file(str(DATA / "err" / "P3O112_one.yaml"))
    (finding,) = result.findings
    lines = format_full([result]).splitlines()
    assert lines[0] + "\n" == format_text([result]).splitlines(keepends=True)[0]
    source, caret = lines[1:3]
    written = (DATA / "err" / "P3O112_one.yaml").read_text().splitlines()[finding.position.line - 1]
    assert source == f"{finding.position.line:>5} | {written}"
    assert source[caret.index("^") :] == written[finding.position.column - 1 :]


def test_no_source_line_is_shown_that_holds_a_secret() -> None:
    secrets = [path for path in ERR if path.name.startswith("P3O705")]
    assert secrets
    for path in secrets:
        assert " | " not in format_full([check_file(str(path))])
    text = f'extends: {DATA / "base.yaml"}\ncluster: {{env: {{RANK: "1", DB_PASSWORD: "correct horse"}}}}\n'
    shown = format_full([check_text(text, file="x.yaml")])
    assert "P3O708" in shown
    assert "horse" not in shown


def test_a_source_line_cannot_steer_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(f'extends: {DATA / "base.yaml"}\nbatch: {{"\u202e漢字\u0085": 1}}\n', encoding="utf-8")
    shown = format_full([check_file(str(path))])
    assert "\u202e" not in shown
    assert "\x85" not in shown
    assert "\\u202e漢字" in shown


def test_a_long_line_is_cut_around_the_value(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    padding = "a" * 300
    path.write_text(f'extends: {DATA / "base.yaml"}\nbatch: {{"{padding}": 1, n_samples_per_prompt: 1}}\n')
    lines = format_full([check_file(str(path))]).splitlines()
    assert max(len(line) for line in lines if " | " in line) < 120
    assert "..." in next(line for line in lines if line.startswith("    2 | "))


@pytest.mark.parametrize("name", FORMATS)
def test_no_format_needs_a_finding(name: str) -> None:
    assert isinstance(FORMATS[name]([], False), str)


def test_lint_shows_the_argument_it_points_at(tmp_path: Path) -> None:
    path = tmp_path / "launch.args"
    path.write_text("--use-tis\n--rollout-top-p\n0.9\n--wandb-key\nhorse\n")
    result = lint_file(str(path), Request("slime", target="p3o")).check
    shown = format_full([result]).splitlines()
    assert "    1 | --use-tis" in shown
    assert "horse" not in format_full([result])
    assert " | " not in format_text([result])
