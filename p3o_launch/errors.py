"""Errors a user may see, and the exit code each one ends the process with.

::

    P3OLaunchError                    1   base: a message plus an optional hint
    +-- UsageError                    2   the command line asks for something that does not exist
    +-- PresetError                   1   a preset that cannot be loaded or has errors (carries findings)
    +-- PreflightError                1   this machine, or a file the preset names, cannot serve the run
    |   +-- DataError                 1   a prompt file that cannot be read (carries file and line)
    |   +-- MissingExtraError         1   an optional package is absent (names the extra)
    +-- RunError                      1   the run itself failed
    |   +-- NonFiniteRatioError       1   an importance ratio or a moment is not finite (carries step, rank)
    |   +-- RankDiedError             1   a rank's process ended (carries the rank)
    |   +-- RankFailedError           1   a rank raised an error that is not one of these (carries rank and class)
    |   +-- CheckpointError           1   a checkpoint cannot be written or read
    +-- RunInterrupted              130   SIGINT, SIGTERM or SIGHUP

Anything else that reaches the boundary in ``cli.py`` is a bug of ours: exit code 3, traceback in a log file.
``assert`` is for our own invariants only.
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_FINDINGS = 1
EXIT_USAGE = 2
EXIT_INTERNAL = 3
EXIT_INTERRUPTED = 130


class P3OLaunchError(Exception):
    """An error whose reader is a user: what is wrong, and what to do about it."""

    exit_code: int = EXIT_FINDINGS

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments survive pickling (Ray carries these from the ranks to the driver).
        return (_rebuild, (type(self), self.message, self.__dict__.copy()))


def _rebuild(cls: type[P3OLaunchError], message: str, state: dict[str, object]) -> P3OLaunchError:
    error = cls.__new__(cls)
    Exception.__init__(error, message)
    error.__dict__.update(state)
    return error


class UsageError(P3OLaunchError):
    """The command line names something that does not exist."""

    exit_code = EXIT_USAGE


class PresetError(P3OLaunchError):
    """A preset that cannot be used; ``findings`` says why, one entry per fault."""

    def __init__(self, message: str, *, findings: tuple[object, ...] = (), hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.findings = findings


class PreflightError(P3OLaunchError):
    """This machine, or a file the preset names, cannot serve the run. Raised before any actor starts."""


class DataError(PreflightError):
    """A prompt file that cannot be read, or a record in it that cannot be used."""

    def __init__(self, message: str, *, path: str, line: int | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.path = path
        self.line = line


class MissingExtraError(PreflightError):
    """An optional package is absent; the message names the extra that brings it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"this command needs the package {package!r}, which is not installed",
            hint=f"pip install 'p3o-launch[{extra}]'",
        )
        self.package = package
        self.extra = extra


class RunError(P3OLaunchError):
    """The run failed after it had started."""


class NonFiniteRatioError(RunError):
    """An importance ratio, its square, or a moment is not finite. Raised on every rank, before the optimizer step."""

    def __init__(
        self,
        message: str = "an importance ratio of this optimizer step is not finite",
        *,
        step: int | None = None,
        ranks: tuple[int, ...] = (),
        hint: str | None = "look for nan or inf in the rollout log-probs or the trainer's logits of that step",
    ) -> None:
        super().__init__(message, hint=hint)
        self.step = step
        self.ranks = ranks


class RankDiedError(RunError):
    """A rank's process ended without being asked to."""

    def __init__(self, message: str, *, rank: int, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.rank = rank


class RankFailedError(RunError):
    """A rank raised an error of another library, or of ours; ``cause`` is its class name."""

    def __init__(self, message: str, *, rank: int, cause: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.rank = rank
        self.cause = cause


class CheckpointError(RunError):
    """A checkpoint cannot be written, or the one asked for cannot be read."""


class RunInterrupted(P3OLaunchError):
    """The user, or the system, asked the run to stop."""

    exit_code = EXIT_INTERRUPTED
