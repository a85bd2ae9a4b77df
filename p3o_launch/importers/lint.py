"""Read -> facts -> judge: the one function behind ``p3o-launch lint``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from p3o_launch.check import CheckResult
from p3o_launch.diagnostics import LocatedFinding, Position, Severity
from p3o_launch.errors import UsageError
from p3o_launch.importers.arguments import parse
from p3o_launch.importers.custom_config import custom_config
from p3o_launch.importers.facts import Draft, Facts
from p3o_launch.importers.flags import table
from p3o_launch.importers.from_yaml import draft_from_yaml
from p3o_launch.importers.judge import judge, switched
from p3o_launch.importers.megatron import Reader, environment, megatron_rl
from p3o_launch.importers.notes import notes
from p3o_launch.importers.record import argument_record
from p3o_launch.importers.slime import slime_facts
from p3o_launch.importers.source import read_source
from p3o_launch.importers.words import split
from p3o_launch.loading import ChainFile
from p3o_launch.rules_file import file_finding

FRAMEWORKS = ("relax", "slime", "megatron", "verl", "nemo_rl")
TARGETS = ("p3o",)


@dataclass(frozen=True, slots=True)
class Request:
    """How to read a configuration. ``overrides``: Hydra-style, for verl and NeMo-RL. ``env``: ``"KEY=VALUE"``.

    ``gpus``: number of trainer GPUs, where the source does not say it. ``gpu``: their product name. ``target``:
    ``"p3o"`` asks whether the configuration would be sound for P3O with whole-step ESS.
    """

    framework: str
    overrides: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    gpus: int | None = None
    gpu: str | None = None
    target: str | None = None


@dataclass(frozen=True)
class LintResult:
    """What is known about one configuration. ``facts`` is None when the file could not be read at all."""

    check: CheckResult
    facts: Facts | None = field(default=None)

    @property
    def warned(self) -> bool:
        """Is there a warning, which ``--strict`` makes an error? Notes for the record are none."""
        return self.check.count(Severity.WARNING) > 0


def lint_file(path: str, request: Request) -> LintResult:
    """Every finding of a configuration file; ``-`` is the standard input. Raises UsageError for a bad request only."""
    _refuse(request)
    text, name, findings = read_source(path)
    if text is None:
        return LintResult(CheckResult(name, None, tuple(findings)))
    result = lint_text(text, request, name)
    result.check.chain = (ChainFile(name, text.encode(), ""),)  # reports show the source line
    return result


def lint_text(text: str, request: Request, file: str = "<text>") -> LintResult:
    """Like ``lint_file``, for a text that reports show as ``file``."""
    _refuse(request)
    start = Position(file, 1, 1)
    if not text.strip():
        return LintResult(CheckResult(file, None, (file_finding("P3O001", start, "the file is empty"),)))
    if request.framework in ("verl", "nemo_rl"):
        draft, broken = draft_from_yaml(text, request.framework, file, request.overrides)
        if draft is None:
            return LintResult(CheckResult(file, None, _sorted(broken)))
    else:
        draft = _from_arguments(text, request, file)
    for entry in request.env:
        name, _, value = entry.partition("=")
        environment(draft, name, value)
    if request.gpus is not None and "cluster.gpus_per_node" not in draft.places:
        draft.values.setdefault("cluster", {}).update(num_nodes=1, gpus_per_node=request.gpus)
    if request.gpu is not None:
        draft.put("cluster.gpu", request.gpu, "--gpu")
    return _judged(draft.finish(), request)


def _from_arguments(text: str, request: Request, file: str) -> Draft:
    strict = request.framework == "megatron"
    arguments = parse(split(text, file), table(request.framework), file, strict)
    draft = Draft(request.framework, file, "flag", Position(file, 1, 1), findings=arguments.findings)
    custom_config(arguments)
    read = Reader(arguments, draft)
    if strict:
        megatron_rl(read)
    else:
        slime_facts(read, relax=request.framework == "relax")
    argument_record(read)
    return draft


def _judged(facts: Facts, request: Request) -> LintResult:
    findings = list(facts.findings)
    if request.target == "p3o":
        findings += notes(facts)
        facts_judged = switched(facts)
    else:
        facts_judged = facts
    found, crashes = judge(facts_judged)
    findings += found
    check = CheckResult(facts.file, facts_judged.preset, _sorted(findings), crashes=tuple(crashes))
    return LintResult(check, facts)


def _sorted(findings: Sequence[LocatedFinding]) -> tuple[LocatedFinding, ...]:
    return tuple(sorted(dict.fromkeys(findings), key=lambda finding: finding.sort_key))


def _refuse(request: Request) -> None:
    if request.framework not in FRAMEWORKS:
        what = f"there is no framework {request.framework!r}" if request.framework else "whose configuration is it?"
        raise UsageError(what, hint=f"use --from {', '.join(FRAMEWORKS[:-1])} or {FRAMEWORKS[-1]}")
    if request.target not in (None, *TARGETS):
        raise UsageError(f"--as {request.target!r} is not known", hint="use --as p3o")
    if request.overrides and request.framework not in ("verl", "nemo_rl"):
        raise UsageError("overrides are for verl and nemo_rl", hint="append flags to the argument list instead")
    for entry in request.env:
        if not entry.partition("=")[1] or not entry.partition("=")[0].strip():
            raise UsageError(f"--env {entry!r} is not of the form KEY=VALUE")
    if request.gpus is not None and request.gpus < 1:
        raise UsageError(f"--gpus {request.gpus} is not a number of GPUs")
