"""``p3o-launch run``: check, then the script of a dry run, or preflight and the run itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from p3o_launch.check import CheckResult, check_file
from p3o_launch.diagnostics import LocatedFinding, Severity
from p3o_launch.errors import EXIT_FINDINGS, EXIT_OK, UsageError
from p3o_launch.launch.drift import drift
from p3o_launch.launch.job import PROXIES, Job, make_job
from p3o_launch.launch.launch_warnings import launch_warnings
from p3o_launch.launch.preflight import Request, asset_findings, machine_findings, require_packages
from p3o_launch.launch.preset_run import PresetRun
from p3o_launch.launch.resume import find_resumption, nothing_left, recorded_run
from p3o_launch.launch.script import run_script
from p3o_launch.launch.submit import Submission, jobs_address, package_findings
from p3o_launch.presets import resolve_name
from p3o_launch.report import format_text
from p3o_launch.schema import Preset


def run_preset(
    preset: str | None,
    profile: str | None = None,
    overrides: Sequence[str] = (),
    dry_run: bool = False,
    output: str | Path | None = None,
    resume: str | None = None,
    run_dir: Path | None = None,
    target: str = "builtin",
    clear_proxies: bool = False,
    strict: bool = False,
) -> int:
    """Run ``preset``, a file or a shipped name; the exit code.

    Findings go to standard output, everything else to standard error. ``resume``: carry on that run, in its directory;
    without a ``preset``, as the run's own ``resolved.yaml`` says.
    ``dry_run`` prints the script of the run (or writes it to ``output``) and starts nothing. ``run_dir``: use exactly
    this directory. ``clear_proxies``: without the shell's proxy variables. ``strict``: a warning refuses the launch.
    Raises what the run failed with, after its record says so.
    """
    if output is not None and not dry_run:
        raise UsageError("--output needs --dry-run", hint="a run's own directory is below logging.output_root")
    if resume is not None and target != "builtin":
        raise UsageError("--resume goes on with a run of the builtin target", hint="give Relax's own --load")
    if dry_run and resume is not None:
        raise UsageError("--dry-run has no script for --resume", hint="run the command itself: it writes nothing twice")
    if preset is None:
        if resume is None:
            raise UsageError("--preset is missing", hint="`p3o-launch presets` names the shipped ones")
        resume = str(recorded_run(resume))
        preset = f"{resume}/resolved.yaml"
    result = _checked(preset, profile, overrides)
    if result.has_errors or result.preset is None:
        return _report(result, result.findings)
    job = make_job(result, result.preset, profile, target, clear_proxies)
    if dry_run:
        _print_findings(result.source, result.findings, sys.stderr)
        return _write_script(run_script(job), output)
    _print_findings(result.source, result.findings, sys.stdout)
    resumption = find_resumption(result.preset, resume) if resume is not None else None
    found = nothing_left(result, result.preset, resumption) if resumption else []
    request = Request(preset, tuple(overrides))
    found = found or _machine_findings(result, result.preset, target, request, as_job=target == "relax")
    if found:
        return _report(result, found)
    if _warned(result, result.preset, job) and strict:
        return EXIT_FINDINGS
    if target == "relax":
        return Submission(job, jobs_address(job.address)).execute()
    require_packages()
    if resumption is not None:
        for line in drift(resumption.directory, resumption.record.data):
            sys.stderr.write(f"warning: {line}\n")
    return PresetRun(result, result.preset, profile, run_dir, resumption, job, strict=strict).execute()


def submit_preset(
    preset: str,
    profile: str | None = None,
    overrides: Sequence[str] = (),
    target: str = "builtin",
    wait: bool = True,
    clear_proxies: bool = False,
    strict: bool = False,
) -> int:
    """Run ``preset`` as a job of the Ray cluster that ``cluster.ray_address`` or ``RAY_ADDRESS`` names; the exit code.

    ``wait``: follow the job to its end; without it, return once the job is accepted. ``strict``: a warning refuses the
    launch; what the job itself warns of is in its output.
    """
    result = _checked(preset, profile, overrides)
    if result.has_errors or result.preset is None:
        return _report(result, result.findings)
    address = jobs_address(result.preset.cluster.ray_address)
    if target == "builtin":  # inside the job, the cluster is the one the job runs on
        result = _checked(preset, profile, [*overrides, "cluster.ray_address=auto"])
    assert result.preset is not None
    job = make_job(result, result.preset, profile, target, clear_proxies)
    _print_findings(result.source, result.findings, sys.stdout)
    found = _machine_findings(result, result.preset, target, Request(preset, tuple(overrides)), as_job=True)
    if found:
        return _report(result, found)
    if _warned(result, result.preset, job) and strict:
        return EXIT_FINDINGS
    return Submission(job, address, wait).execute()


def _warned(result: CheckResult, preset: Preset, job: Job) -> bool:
    """Print what this machine warns of, in the environment of the launch; whether there was any warning at all."""
    if job.clear_proxies:
        for name in PROXIES:
            os.environ.pop(name, None)
    warned = launch_warnings(result, preset)
    _print_findings(result.source, warned, sys.stdout)
    return bool(warned or result.count(Severity.WARNING))


def _checked(preset: str, profile: str | None, overrides: Sequence[str]) -> CheckResult:
    result = check_file(resolve_name(preset), overrides=overrides, profile=profile)
    if result.crashed:
        raise RuntimeError("\n".join(result.crashes))
    return result


def _report(result: CheckResult, findings: Sequence[LocatedFinding]) -> int:
    _print_findings(result.source, findings, sys.stdout)
    return EXIT_FINDINGS


def _machine_findings(
    result: CheckResult, preset: Preset, target: str, request: Request, as_job: bool
) -> list[LocatedFinding]:
    """What stands against a launch from this machine. A Relax job's GPUs are the cluster's, not this machine's."""
    found = package_findings(result, preset.cluster.runtime_env, preset.logging.output_root, as_job)
    look = asset_findings(result, preset) if target == "relax" else machine_findings(result, preset, request)
    return found or look


def _print_findings(source: str, findings: Sequence[LocatedFinding], stream: Any) -> None:
    colour = bool(stream.isatty())
    stream.write(format_text([CheckResult(source, None, tuple(findings))], colour))
    stream.flush()


def _write_script(text: str, output: str | Path | None) -> int:
    if output is None:
        sys.stdout.write(text)
        return EXIT_OK
    path = Path(output)
    try:
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)
    except OSError as error:
        raise UsageError(f"the script cannot be written to {output}: {error.strerror}") from error
    return EXIT_OK
