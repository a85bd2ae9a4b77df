"""Check results -> text for people, JSON, GitHub annotations and SARIF for programs. Pure: no files, no terminal.

``FORMATS`` maps a format's name to its formatter ``(results, colour) -> str``; a new format is one more entry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from p3o_launch.check import CheckResult
from p3o_launch.diagnostics import LocatedFinding, Severity

JSON_VERSION = 1

_COLOURS = {Severity.ERROR: "31", Severity.WARNING: "33", Severity.INFO: "36"}


def format_text(results: Sequence[CheckResult], colour: bool = False) -> str:
    """``file:line:column: severity CODE message [name]``, one finding after the other; empty without findings.

    In colour, which only terminals get, each is followed by its source line and a caret.
    """
    return "".join(_text(finding, result, colour, colour) for result in results for finding in result.findings)


def format_full(results: Sequence[CheckResult], colour: bool = False) -> str:
    """The text format with source lines, whether or not a terminal reads it."""
    return "".join(_text(finding, result, colour, True) for result in results for finding in result.findings)


def _text(finding: LocatedFinding, result: CheckResult, colour: bool, source_line: bool) -> str:
    position = finding.position
    where = f"{position.file}:{position.line}:{position.column}:"
    severity, message = finding.severity.value, finding.message
    if colour:
        where, severity = f"\x1b[1m{where}\x1b[0m", f"\x1b[{_COLOURS[finding.severity]}m{severity}\x1b[0m"
    lines = [f"{where} {severity} {finding.code} {message} [{finding.name}]"]
    if source_line:
        from p3o_launch.excerpt import excerpt

        lines += excerpt(result.chain, position, finding.code)
    if finding.hint:
        lines.append(f"    hint: {finding.hint}")
    if position.origin:
        lines.append(f"    origin: {position.origin}, for {result.source}")
    return "\n".join(lines) + "\n"


def format_json(results: Sequence[CheckResult], colour: bool = False) -> str:
    """One object: ``version``, ``files`` (each with ``file``, ``ok``, ``findings``, ``suppressed``), ``summary``.

    A finding has the keys ``file``, ``line``, ``column``, ``origin``, ``severity``, ``code``, ``name``, ``message``,
    ``hint`` (or null) and ``path``; a suppressed one has ``reason`` too. Keys are only ever added; a change of meaning
    raises ``version``.
    """
    import json

    files = [
        {
            "file": result.source,
            "ok": not result.has_errors,
            "findings": [finding_record(finding) for finding in result.findings],
            "suppressed": [{**finding_record(item.finding), "reason": item.reason} for item in result.suppressed],
        }
        for result in results
    ]
    report = {"version": JSON_VERSION, "files": files, "summary": {"files": len(files), **_counts(results)}}
    return json.dumps(report, indent=2, ensure_ascii=False) + "\n"


def finding_record(finding: LocatedFinding) -> dict[str, object]:
    """A finding as plain data."""
    return {
        "file": finding.position.file,
        "line": finding.position.line,
        "column": finding.position.column,
        "origin": finding.position.origin,
        "severity": finding.severity.value,
        "code": finding.code,
        "name": finding.name,
        "message": finding.message,
        "hint": finding.hint,
        "path": finding.path,
    }


_COMMANDS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "notice"}


def format_github(results: Sequence[CheckResult], colour: bool = False) -> str:
    """One workflow command per finding, which GitHub shows as an annotation at the line.

    Source: GitHub Actions, "Workflow commands for GitHub Actions", setting an error message.
    """
    return "".join(_annotation(finding) for result in results for finding in result.findings)


def _annotation(finding: LocatedFinding) -> str:
    position, message = finding.position, finding.message
    properties = {"title": f"{finding.code} {finding.name}"}
    if position.file.startswith(("-", "<")):  # --set or the standard input: no line of any file in the repository
        message = f"{position.file}: {message}"
    else:
        properties |= {"file": position.file, "line": str(position.line), "col": str(position.column)}
    if finding.hint:
        message += f"\nhint: {finding.hint}"
    listed = ",".join(f"{name}={_escaped(value, ':,')}" for name, value in properties.items())
    return f"::{_COMMANDS[finding.severity]} {listed}::{_escaped(message)}\n"


def _escaped(text: str, also: str = "") -> str:
    """Text that cannot end the command it stands in, nor start another one."""
    for char in "%\r\n" + also:  # the percent sign first: the others are written with it
        text = text.replace(char, f"%{ord(char):02X}")
    return text


def format_sarif(results: Sequence[CheckResult], colour: bool = False) -> str:
    """SARIF 2.1.0: see ``sarif.py``, which is loaded only when it is asked for."""
    from p3o_launch.sarif import format_sarif as write

    return write(results, colour)


def _counts(results: Sequence[CheckResult]) -> dict[str, int]:
    counts = {f"{severity.value}s": sum(result.count(severity) for result in results) for severity in Severity}
    return {**counts, "suppressed": sum(len(result.suppressed) for result in results)}


def summary(results: Sequence[CheckResult]) -> str:
    """One line about all files: ``2 files: 1 error, 3 warnings``."""
    files = _plural(len(results), "file")
    counts = _counts(results)
    suppressed = f" ({counts['suppressed']} ignored with a reason)" if counts["suppressed"] else ""
    found = [
        _plural(counts[f"{severity.value}s"], severity.value) for severity in Severity if counts[f"{severity.value}s"]
    ]
    if found:
        return f"{files}: {', '.join(found)}{suppressed}"
    parts = [result.source for result in results if result.partial]
    shape_only = f"; only the shape of {', '.join(parts)} was checked, which is a part of a preset" if parts else ""
    return f"{files}: no findings{suppressed}{shape_only}"


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


FORMATS: dict[str, Callable[[Sequence[CheckResult], bool], str]] = {
    "text": format_text,
    "full": format_full,
    "json": format_json,
    "github": format_github,
    "sarif": format_sarif,
}
