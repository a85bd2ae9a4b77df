"""What commands share between the parser and the work: findings to stdout, everything else to stderr, exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from p3o_launch.check import CheckResult, check_file
from p3o_launch.diagnostics import Severity
from p3o_launch.errors import EXIT_FINDINGS, EXIT_INTERNAL, EXIT_OK, UsageError
from p3o_launch.loading import STDIN
from p3o_launch.presets import resolve_name
from p3o_launch.report import FORMATS, format_text, summary

if TYPE_CHECKING:
    from p3o_launch.schema import Preset


def validate_files(
    files: Sequence[str],
    format_: str = "text",
    overrides: Sequence[str] = (),
    profile: str | None = None,
    recipe: str | None = None,
    strict: bool = False,
) -> int:
    """Check every file (or shipped preset, or ``-``), print all findings, and return the exit code."""
    known_format(format_)
    if list(files).count(STDIN) > 1:
        raise UsageError("the standard input can be read once", hint="give - once")
    paths = [name if name == STDIN else resolve_name(name) for name in files]
    results = [check_file(path, overrides=overrides, profile=profile, recipe=recipe) for path in paths]
    code = report(results, format_)
    warned = any(result.count(Severity.WARNING) for result in results)
    return code or (EXIT_FINDINGS if strict and warned else EXIT_OK)


def known_format(name: str) -> None:
    """UsageError unless a formatter has this name."""
    if name not in FORMATS:
        raise UsageError(f"there is no format {name!r}", hint=f"use {' or '.join(FORMATS)}")


def report(results: Sequence[CheckResult], format_: str = "text") -> int:
    """Findings to stdout, the summary to stderr; the exit code that follows from errors and crashed rules."""
    sys.stdout.write(FORMATS[format_](results, _colour()))
    say(summary(results))
    crashes = [crash for result in results for crash in result.crashes]
    if crashes:
        keep_traceback("\n".join(crashes))
        return EXIT_INTERNAL
    return EXIT_FINDINGS if any(result.has_errors for result in results) else EXIT_OK


def unbroken(result: CheckResult) -> Preset:
    """The preset of a result without errors; otherwise its findings are printed and the process ends."""
    if result.has_errors:
        raise SystemExit(report([result]))
    if result.preset is None:
        raise UsageError(f"{result.source} is a part of presets, not one", hint="name a preset that extends it")
    sys.stdout.write(format_text([result], _colour()) if result.findings else "")
    return result.preset


def say(line: str) -> None:
    """A line for people, to stderr."""
    sys.stderr.write(line + "\n")


def keep_traceback(text: str) -> str:
    """Keep a traceback where a bug report can take it from; returns the file's name."""
    import tempfile

    with tempfile.NamedTemporaryFile("w", prefix="p3o-launch-", suffix=".log", delete=False) as stream:
        stream.write(text)
    say(f"internal error; the traceback is in {stream.name}")
    return stream.name


def _colour() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
