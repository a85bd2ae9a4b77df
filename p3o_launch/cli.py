"""Entry point: one error boundary, and a short way for a plain ``validate``.

The commands themselves are in ``commands.py``. Importing Typer, and the pydantic adapters it builds for every option,
takes longer than checking a preset; so a ``validate`` of files and options that this module can read goes straight to
the work, and anything else (help, mistakes, other commands) goes to Typer.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from p3o_launch.errors import EXIT_FINDINGS, EXIT_INTERNAL, EXIT_INTERRUPTED, EXIT_OK, P3OLaunchError
from p3o_launch.terminal import tell

_VALUES = {"--format": "format_", "--profile": "profile", "--recipe": "recipe"}


def plain_validate(words: Sequence[str]) -> dict[str, Any] | None:
    """``validate_files``' arguments from a command line; None when Typer should read it."""
    if words[:1] != ["validate"]:
        return None
    files: list[str] = []
    overrides: list[str] = []
    options: dict[str, Any] = {}
    rest = iter(words[1:])
    for word in rest:
        if word == "--strict":
            options["strict"] = True
        elif word == "--set" or word in _VALUES:
            value = next(rest, "-")
            if value.startswith("-"):
                return None
            if word == "--set":
                overrides.append(value)
            else:
                options[_VALUES[word]] = value
        elif word.startswith("-") and word != "-":
            return None
        else:
            files.append(word)
    return {"files": files, "overrides": overrides, **options} if files else None


def dispatch() -> NoReturn:
    """Run the command line; ends with SystemExit or with the error of the command."""
    arguments = plain_validate(sys.argv[1:])
    if arguments is not None:
        from p3o_launch.console import validate_files

        raise SystemExit(validate_files(**arguments))
    from p3o_launch.commands import app

    app()
    raise SystemExit(EXIT_OK)


def guarded(command: Callable[[], Any]) -> int:
    """The one error boundary: runs ``command`` and turns whatever it raises into an exit code."""
    try:
        code = _exit_code(command)
        sys.stdout.flush()  # a reader that has gone away shows here, not in the interpreter's last breath
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - the interpreter flushes stdout once more at exit
        return EXIT_FINDINGS
    return code


def _exit_code(command: Callable[[], Any]) -> int:
    try:
        command()
    except P3OLaunchError as error:
        tell(sys.stderr, f"error: {error.message}\n" + (f"    hint: {error.hint}\n" if error.hint else ""))
        return error.exit_code
    except KeyboardInterrupt:
        tell(sys.stderr, "interrupted\n")
        return EXIT_INTERRUPTED
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else EXIT_OK if stop.code is None else EXIT_FINDINGS
    except BrokenPipeError:
        raise
    except Exception:
        import traceback

        from p3o_launch.console import keep_traceback

        keep_traceback(traceback.format_exc())
        return EXIT_INTERNAL
    return EXIT_OK


def main() -> NoReturn:
    """Entry point of the ``p3o-launch`` command."""
    sys.exit(guarded(dispatch))
