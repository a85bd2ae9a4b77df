"""Check results -> SARIF 2.1.0, the format code-scanning services read. Pure: no files, no terminal.

Source: OASIS, Static Analysis Results Interchange Format 2.1.0, sections 3.13 (log), 3.27 (result), 3.49 (rule).
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from p3o_launch.check import CheckResult
from p3o_launch.diagnostics import LocatedFinding, Severity
from p3o_launch.guards import Rule, all_guards

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}


def format_sarif(results: Sequence[CheckResult], colour: bool = False) -> str:
    """One run. Suppressed findings are results too, with the preset's reason as justification."""
    from p3o_launch import __version__

    found = [(finding, None) for result in results for finding in result.findings]
    ignored = [(item.finding, item.reason) for result in results for item in result.suppressed]
    codes = sorted({finding.code for finding, _ in [*found, *ignored]})
    rules = all_guards()
    driver = {
        "name": "p3o-launch",
        "semanticVersion": __version__,
        "rules": [_rule(rules[code]) for code in codes],
    }
    run = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "invocations": [{"executionSuccessful": not any(result.crashed for result in results)}],
        "results": [_result(finding, reason, codes.index(finding.code)) for finding, reason in [*found, *ignored]],
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2, ensure_ascii=False) + "\n"


def _rule(rule: Rule) -> dict[str, Any]:
    allows = f" Allowed: {rule.allows}" if rule.allows else ""
    return {
        "id": rule.code,
        "name": rule.name,
        "shortDescription": {"text": rule.name.replace("-", " ")},
        "fullDescription": {"text": rule.why},
        "help": {"text": f"{rule.fix}{allows} Source: {rule.source}"},
        "defaultConfiguration": {"level": _LEVELS[rule.severity]},
    }


def _result(finding: LocatedFinding, reason: str | None, index: int) -> dict[str, Any]:
    text = finding.message + (f"\nhint: {finding.hint}" if finding.hint else "")
    result: dict[str, Any] = {
        "ruleId": finding.code,
        "ruleIndex": index,
        "level": _LEVELS[finding.severity],
        "message": {"text": text},
        "locations": [_location(finding)],
        "properties": {"path": finding.path, "origin": finding.position.origin},
    }
    if reason is not None:
        result["suppressions"] = [{"kind": "inSource", "justification": reason}]
    return result


def _location(finding: LocatedFinding) -> dict[str, Any]:
    place = finding.position
    location: dict[str, Any] = {}
    if is_file(place.file):
        location["physicalLocation"] = {
            "artifactLocation": {"uri": file_uri(place.file)},
            "region": {"startLine": place.line, "startColumn": place.column},
        }
    logical = finding.path or place.file
    location["logicalLocations"] = [{"fullyQualifiedName": logical, "kind": "member"}]
    return location


def is_file(name: str) -> bool:
    """False for what only stands for a place: ``--set``, ``--profile``, ``<stdin>``."""
    return not name.startswith(("-", "<"))


def file_uri(path: str) -> str:
    """A relative path as a relative URI, an absolute one as ``file://``."""
    encoded = quote(path.replace(os.sep, "/"))
    return f"file://{encoded}" if os.path.isabs(path) else encoded
