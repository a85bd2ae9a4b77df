"""What every rule must bring along to be explained, and what keeps the registry honest."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from p3o_launch.diagnostics import Severity
from p3o_launch.guards import Rule, all_guards

GUARDS = [rule for code, rule in all_guards().items() if "P3O100" < code < "P3O900"]


@pytest.mark.parametrize("rule", GUARDS, ids=lambda rule: rule.code)
def test_a_rule_explains_itself(rule: Rule) -> None:
    assert re.fullmatch(r"P3O[1-8]\d\d", rule.code)
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", rule.name)
    for text in (rule.why, rule.fix):
        assert len(text) > 20
        assert text[0].isupper() or text.startswith(("cluster.", "evaluation."))
        assert text.endswith(".")
    assert rule.source
    assert rule.allows == "" or rule.allows.endswith(".")


def test_what_changes_the_objective_or_breaks_the_replay_cannot_be_ignored() -> None:
    ignorable = {rule.code for rule in GUARDS if rule.ignorable and rule.severity is Severity.ERROR}
    assert not [code for code in ignorable if code.startswith("P3O2")]
    # On a node of one's own, ending processes by name harms nobody.
    assert [code for code in ignorable if code.startswith("P3O7")] == ["P3O709"]
    # A width of the monitoring band does not enter the loss.
    assert [code for code in ignorable if code.startswith("P3O1")] == ["P3O115"]


def test_the_whole_catalogue_is_there() -> None:
    wanted = {
        *range(1, 12),
        *range(101, 119),
        *range(201, 212),
        *range(301, 316),
        *range(401, 411),
        *range(501, 508),
        *range(601, 611),
        *range(701, 710),
        *range(801, 804),
        901,
    }
    assert {f"P3O{code:03d}" for code in wanted} <= set(all_guards())


def test_rules_load_without_heavy_modules() -> None:
    code = (
        "import sys; from p3o_launch.guards import all_guards; all_guards();"
        "print(sorted({'torch', 'ray', 'megatron', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"
