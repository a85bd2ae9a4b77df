"""What a run launches: a target, its arguments, its environment. Made once, used by ``run``, ``submit`` and scripts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from p3o_launch.check import CheckResult
from p3o_launch.errors import UsageError
from p3o_launch.launch.arguments import resolved_arguments
from p3o_launch.launch.redact import redact, redact_text
from p3o_launch.launch.relax import RUN_DIR, relax_arguments, relax_environment
from p3o_launch.report import finding_record
from p3o_launch.runtime.plan import default_environment
from p3o_launch.schema import Preset

TARGETS = ("builtin", "relax")
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


@dataclass(frozen=True, slots=True)
class Job:
    """One launch. ``arguments`` hold ``RUN_DIR`` where the run's directory belongs.

    ``facts``: what the record says that is known beforehand. ``environment``: of the builtin run's process, or
    ``env_vars`` of the Relax job. ``address``: of the Jobs server; None leaves it to ``RAY_ADDRESS``.
    """

    preset: Preset
    target: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    facts: Mapping[str, Any] = field(default_factory=dict)
    address: str | None = None
    clear_proxies: bool = False

    def arguments_in(self, directory: str) -> list[str]:
        """The arguments of a run in ``directory``."""
        return [argument.replace(RUN_DIR, directory) for argument in self.arguments]

    @property
    def runtime_env(self) -> dict[str, Any]:
        """Ray's runtime environment of a Relax job."""
        return {**self.preset.cluster.runtime_env, "env_vars": dict(self.environment)}


def make_job(
    result: CheckResult,
    preset: Preset,
    profile: str | None = None,
    target: str = "builtin",
    clear_proxies: bool = False,
) -> Job:
    """The job of a checked preset. Raises UsageError for an unknown target, PreflightError for what it cannot do."""
    if target not in TARGETS:
        raise UsageError(f"there is no target {target!r}", hint=f"use {' or '.join(TARGETS)}")
    relax = target == "relax"
    arguments = relax_arguments(preset) if relax else resolved_arguments(preset)
    return Job(
        preset=preset,
        target=target,
        arguments=tuple(redact_text(argument) for argument in arguments),
        environment=relax_environment(preset) if relax else default_environment(preset),
        facts=known_facts(result, preset, profile) | {"target": target, "proxies_cleared": clear_proxies},
        address=preset.cluster.ray_address if relax else None,
        clear_proxies=clear_proxies,
    )


def known_facts(result: CheckResult, preset: Preset, profile: str | None) -> dict[str, Any]:
    """What is known about a run when its preset is resolved; nothing of the machine."""
    return {
        "preset": preset.name,
        "preset_file": result.source,
        "preset_chain": [{"path": f.path, "sha256": f.sha256, "origin": f.origin} for f in result.chain],
        "profile": profile or result.choices.get("profile"),
        "choices": dict(result.choices),
        "overrides": redact(list(result.overrides)),
        "seed": preset.seed.seed,
        "algorithm": preset.algorithm.advantage_estimator,
        "findings": [finding_record(finding) for finding in result.findings],
        "suppressed": [finding_record(item.finding) | {"reason": item.reason} for item in result.suppressed],
    }
