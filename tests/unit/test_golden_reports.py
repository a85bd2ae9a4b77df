"""Golden pairs: ``tests/data/err/CODE_what.yaml`` and the exact report ``.out``; near misses in ``tests/data/ok``.

A first line ``# args: --set a.b=c --profile cpu --recipe smoke`` gives the command line's part; with ``--paired OTHER``
the file is judged as the second arm of a comparison. A first line ``# also: P3O119`` names a code that the fault cannot
come without: the builtin runtime does not carry the feature out. After a wanted change of a message,
``P3O_LAUNCH_UPDATE_GOLDEN=1 pytest tests/unit/test_golden_reports.py`` writes the reports anew; read the difference
before you commit it.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from p3o_launch.check import CheckResult, check_file
from p3o_launch.guards import all_guards
from p3o_launch.paired import factors, judge_pair, seed_list
from p3o_launch.report import format_text
from p3o_launch.rules_file import FILE_RULES
from p3o_launch.rules_pair import PAIR_RULES

DATA = Path(__file__).parents[1] / "data"
ERR = sorted((DATA / "err").glob("*.yaml"))
OK = sorted((DATA / "ok").glob("*.yaml"))
# Guards and file rules. The others need a machine, a run directory or imported arguments; a crash is in test_check.py.
RULES_OF_PRESETS = [
    code for code, rule in all_guards().items() if rule.body or code in (FILE_RULES | PAIR_RULES).keys() - {"P3O901"}
]


def code_of(path: Path) -> str:
    return path.name.partition("_")[0]


def check_golden(path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckResult:
    monkeypatch.chdir(path.parent)
    first = path.read_bytes().partition(b"\n")[0].decode("utf-8", "replace")
    words = shlex.split(first.partition("# args:")[2])
    pairs = list(zip(words[::2], words[1::2], strict=True))
    options = dict(pairs)
    overrides = [value for option, value in pairs if option == "--set"]
    assert {option for option, _ in pairs} <= {"--set", "--profile", "--recipe", "--paired", "--seeds", "--factor"}
    result = check_file(
        path.name, overrides=overrides, profile=options.get("--profile"), recipe=options.get("--recipe")
    )
    if "--paired" not in options:
        return result
    assert not result.findings
    named = factors([value for option, value in pairs if option == "--factor"])
    return judge_pair(check_file(options["--paired"]), result, named, seed_list(options.get("--seeds")))


@pytest.mark.parametrize("path", ERR, ids=lambda path: path.stem)
def test_a_faulty_file_gives_exactly_its_report(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = check_golden(path, monkeypatch)
    report = format_text([result])
    expected = path.with_suffix(".out")
    if os.environ.get("P3O_LAUNCH_UPDATE_GOLDEN"):
        expected.write_text(report, encoding="utf-8")
    assert report == expected.read_text(encoding="utf-8")
    first = path.read_bytes().partition(b"\n")[0].decode("utf-8", "replace")
    assert {finding.code for finding in result.findings} == {code_of(path), *first.partition("# also:")[2].split()}


@pytest.mark.parametrize("path", OK, ids=lambda path: path.stem)
def test_a_near_miss_gives_no_finding(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = check_golden(path, monkeypatch)
    assert format_text([result]) == ""
    assert result.preset is not None


def test_the_base_of_the_golden_files_has_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(DATA)
    assert format_text([check_file("base.yaml")]) == ""


@pytest.mark.parametrize("code", RULES_OF_PRESETS)
def test_every_rule_has_a_faulty_file_and_a_near_miss(code: str) -> None:
    assert code in {code_of(path) for path in ERR}, f"tests/data/err/{code}_*.yaml is missing"
    assert code in {code_of(path) for path in OK}, f"tests/data/ok/{code}_*.yaml is missing"


def test_every_golden_file_belongs_to_a_rule() -> None:
    known = set(all_guards())
    assert {code_of(path) for path in ERR + OK} <= known
    assert {path.stem for path in (DATA / "err").glob("*.out")} == {path.stem for path in ERR}
