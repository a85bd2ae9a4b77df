"""``p3o-launch doctor``: what this machine can run, and whether it can run one preset. Reads only; starts nothing.

Every line says what was looked at and what was found. What could not be looked at is a line too, never silence.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from p3o_launch.check import CheckResult, check_file
from p3o_launch.errors import EXIT_FINDINGS, EXIT_OK, P3OLaunchError, UsageError
from p3o_launch.guards_memory import shares
from p3o_launch.hardware import find_gpu
from p3o_launch.launch.environment import Gpu, gpus, versions
from p3o_launch.launch.launch_warnings import FULL, disk_of, launch_warnings, proxy_fault
from p3o_launch.launch.preflight import Request, machine_findings
from p3o_launch.memory import GIB, bars
from p3o_launch.presets import resolve_name
from p3o_launch.report import FORMATS
from p3o_launch.schema import Preset
from p3o_launch.topology import topology

if TYPE_CHECKING:
    from p3o_launch.runtime.types import Prompt

SAMPLE = 1000
CONNECT_TIMEOUT_S = 3.0
REPORT_VERSION = 1
_OK, _WARNING, _ERROR, _UNKNOWN = "ok", "warning", "error", "not checked"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at. ``state``: ``ok``, ``warning``, ``error`` or ``not checked``."""

    area: str
    state: str
    text: str
    hint: str | None = None


def doctor(
    name: str | None = None,
    overrides: Sequence[str] = (),
    profile: str | None = None,
    recipe: str | None = None,
    format_: str = "text",
) -> int:
    """Print the report; exit code 1 when something is an error."""
    if format_ not in ("text", "json"):
        raise UsageError(f"doctor has no format {format_!r}", hint="use text or json")
    checks = list(machine_checks())
    if name is not None:
        result = check_file(resolve_name(name), overrides=overrides, profile=profile, recipe=recipe)
        checks += preset_checks(result, Request(name, tuple(overrides)))
    sys.stdout.write(report_json(checks) if format_ == "json" else report_text(checks))
    return EXIT_FINDINGS if any(check.state == _ERROR for check in checks) else EXIT_OK


def report_text(checks: Sequence[Check]) -> str:
    """The checks under their areas, then how many there are of each state."""
    lines: list[str] = []
    area = ""
    for check in checks:
        if check.area != area:
            area = check.area
            lines.append(area)
        lines.append(f"  {check.state:<12}{check.text}")
        if check.hint:
            lines.append(f"  {'':<12}hint: {check.hint}")
    counts = {state: sum(check.state == state for check in checks) for state in (_OK, _WARNING, _ERROR, _UNKNOWN)}
    return "\n".join([*lines, ", ".join(f"{count} {state}" for state, count in counts.items() if count)]) + "\n"


def report_json(checks: Sequence[Check]) -> str:
    """``{"version": 1, "checks": [{"area", "state", "text", "hint"}, ...]}``."""
    return json.dumps({"version": REPORT_VERSION, "checks": [asdict(check) for check in checks]}, indent=2) + "\n"


def machine_checks() -> Iterator[Check]:
    """Packages, GPUs, processors, memory, disk, proxies, Ray: without a preset."""
    found = versions()
    yield Check("packages", _OK, f"python {found.pop('python')}, p3o-launch {found.pop('p3o-launch')}")
    for package, version in found.items():
        optional = package == "vllm"
        if version is not None:
            yield Check("packages", _OK, f"{package} {version}")
        elif optional:
            yield Check("packages", _OK, f"{package} is not installed; no builtin engine needs it")
        else:
            yield Check("packages", _WARNING, f"{package} is not installed", "pip install 'p3o-launch[runtime]'")
    yield from _gpu_checks(gpus())
    yield Check("machine", _OK, f"{os.cpu_count() or 1} processors")
    yield _memory_check()
    yield _disk_check(".")
    fault = proxy_fault(os.environ)
    if fault:
        yield Check("network", _WARNING, fault, "extend no_proxy, or run with --clear-proxies (P3O605)")
    else:
        yield Check("network", _OK, "no proxy variable reaches node-local addresses")
    yield ray_check(os.environ.get("RAY_ADDRESS"), "RAY_ADDRESS")


def _gpu_checks(present: Sequence[Gpu]) -> Iterator[Check]:
    if not present:
        yield Check("gpus", _OK, "none (nvidia-smi): presets run here with --profile cpu")
        return
    for gpu in present:
        known = find_gpu(gpu.name)
        capability = f", compute capability {known.capability[0]}.{known.capability[1]}" if known else ""
        yield Check("gpus", _OK, f"{gpu.name}, {gpu.memory}, driver {gpu.driver}{capability}")


def _memory_check() -> Check:
    try:
        page, total = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES")
        free = os.sysconf("SC_AVPHYS_PAGES")
    except (ValueError, OSError):
        return Check("machine", _UNKNOWN, "main memory: this system does not say how much there is")
    return Check("machine", _OK, f"{page * total / GIB:.1f} GiB main memory, {page * free / GIB:.1f} unused")


def _disk_check(directory: str) -> Check:
    disk = disk_of(directory)
    used = 1 - disk.free / disk.total if disk.total else 1.0
    text = f"{disk.path}: {disk.free / GIB:.1f} of {disk.total / GIB:.0f} GiB free, {100 * used:.0f} % used"
    if used > FULL:
        return Check(
            "machine",
            _WARNING,
            text,
            "shared file systems fail before they are full, and Ray refuses a node above 95 % (P3O604)",
        )
    return Check("machine", _OK, text)


def ray_check(address: str | None, source: str) -> Check:
    """Does anything accept connections at the address? No Ray is imported, no handshake is made."""
    if not address:
        return Check("network", _OK, f"{source} is not set: a run starts a local cluster of its own")
    if address in ("auto", "local"):
        return Check("network", _UNKNOWN, f"{source} ({address}) names no address; Ray looks for it itself")
    try:
        parts = urlsplit(address if "://" in address else f"ray://{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or not port:
        return Check("network", _ERROR, f"{source} ({address}) is not of the form HOST:PORT", "such as 10.0.0.1:6379")
    try:
        with socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S):
            return Check("network", _OK, f"{source}: {host}:{port} accepts connections; that it is Ray was not checked")
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        return Check("network", _ERROR, f"{source}: {host}:{port} cannot be reached: {reason}", "is the cluster up?")


def preset_checks(result: CheckResult, request: Request) -> Iterator[Check]:
    """The preset's findings, and everything it needs of this machine."""
    area = f"preset {request.preset}"
    for line in FORMATS["text"]([CheckResult(result.source, None, result.findings)], False).splitlines():
        if not line.startswith("    "):
            yield Check(area, _ERROR if ": error P3O" in line else _WARNING, line)
    if result.preset is None or result.has_errors:
        if result.partial:
            yield Check(area, _ERROR, f"{result.source} is a part of presets, not one", "name one that extends it")
        yield Check(area, _UNKNOWN, "GPUs, files and data: the preset has errors")
        return
    preset = result.preset
    if not result.findings:
        yield Check(area, _OK, "validate: no findings")
    if preset.cluster.ray_address:
        yield ray_check(preset.cluster.ray_address, "cluster.ray_address")
        yield Check(area, _UNKNOWN, "GPUs and files of the cluster's nodes: only this machine was looked at")
    for finding in machine_findings(result, preset, request):
        yield Check(area, _ERROR, f"{finding.code} {finding.message}", finding.hint)
    for finding in launch_warnings(result, preset):
        yield Check(area, _WARNING, f"{finding.code} {finding.message}", finding.hint)
    yield from _fit_checks(area, preset, gpus())
    yield _config_check(area, preset)
    yield from _data_checks(area, preset)


def _fit_checks(area: str, preset: Preset, present: Sequence[Gpu]) -> Iterator[Check]:
    declared = find_gpu(preset.cluster.gpu)
    room = declared.memory_gib if declared is not None else None
    for bar in bars(preset, topology(preset)):
        text = f"{bar.name}: about {_size(bar.total)} per rank ({shares(bar)})"
        if preset.cluster.device == "cpu":
            yield Check(area, _OK, text)
        elif room is None:
            yield Check(area, _UNKNOWN, f"{text}; the memory of cluster.gpu ({preset.cluster.gpu}) is not known")
        else:
            share = 100 * bar.total / GIB / room
            state = _WARNING if share > 100 else _OK
            yield Check(area, state, f"{text}: {share:.0f} % of {preset.cluster.gpu}, a lower bound (docs/memory.md)")
    if preset.cluster.device == "cuda" and declared is not None and present:
        real = find_gpu(present[0].name)
        if real is None or real.name != declared.name:
            text = f"cluster.gpu is {preset.cluster.gpu}; this machine has {present[0].name}"
            yield Check(area, _WARNING, text, "declare the GPU that runs: rules judge by it")


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB / 10 else f"{count / 2**20:.1f} MiB"


def _config_check(area: str, preset: Preset) -> Check:
    from p3o_launch.checkpoint_files import read_checkpoint_json

    name = preset.model.hf_checkpoint
    if read_checkpoint_json(name, "config.json") is None:
        return Check(area, _UNKNOWN, f"model group against config.json: none can be read at {name}")
    return Check(area, _OK, f"the model group agrees with config.json of {name} (P3O505)")


def _data_checks(area: str, preset: Preset) -> Iterator[Check]:
    data = preset.data
    encoder = _encoder(preset)
    if isinstance(encoder, str):
        yield Check(area, _UNKNOWN, f"prompt fields and token lengths: {encoder}")
        return
    from p3o_launch.runtime.rollout.prompts import sample_prompts

    for split, source in (("train", data.prompt_data), ("eval", data.eval_prompt_data)):
        if source is None:
            continue
        try:
            prompts, whole = sample_prompts(preset, encoder, split, SAMPLE)  # type: ignore[arg-type]
            yield _length_check(area, preset, source, sorted(len(prompt.token_ids) for prompt in prompts))
            for warning in _oddities(preset, source, split, prompts, whole, encoder):
                yield Check(area, _WARNING, warning)
        except P3OLaunchError as error:
            yield Check(area, _ERROR, error.message, error.hint)


def _oddities(
    preset: Preset, source: str, split: str, prompts: Sequence[Prompt], whole: bool, encoder: Any
) -> Iterator[str]:
    """What a launch would warn of. Labels in words are left to it: to compare them takes a process."""
    from p3o_launch.runtime.rollout import prompt_survey as survey

    if not prompts:
        return
    unknown = survey.Unknown(encoder)
    if not whole:
        source = f"the first {SAMPLE} records of {source}"
    yield from survey.prompt_warnings(source, prompts, unknown)
    if whole and split == "train":
        yield from survey.rollout_warnings(preset, source, prompts)
    if preset.reward.type == "exact":
        yield from survey.label_warnings(preset, source, prompts, encoder, unknown, lambda text, label: 0.0)


def _length_check(area: str, preset: Preset, source: str, lengths: Sequence[int]) -> Check:
    limit = preset.rollout.max_prompt_len
    if not lengths:
        return Check(area, _ERROR, f"{source} holds no usable prompt")
    over = sum(length > limit for length in lengths)
    median = lengths[len(lengths) // 2]
    text = (
        f"{source}: first {len(lengths)} prompts have fields, and {lengths[0]} to {lengths[-1]} tokens, median {median}"
    )
    if over:
        consequence = "the run would stop" if preset.data.overlong_prompts == "error" else "they are skipped"
        state = _ERROR if preset.data.overlong_prompts == "error" else _WARNING
        message = f"{text}; {over} above rollout.max_prompt_len ({limit}): {consequence}"
        return Check(area, state, message, "raise rollout.max_prompt_len, or set data.overlong_prompts: skip")
    later = "; later ones were not read" if len(lengths) == SAMPLE else ""
    return Check(area, _OK, f"{text}, within rollout.max_prompt_len ({limit}){later}")


def _encoder(preset: Preset) -> object:
    """The checkpoint's tokenizer, or a text that says why there is none."""
    from importlib.util import find_spec

    if find_spec("transformers") is None:
        return "transformers is not installed"
    from p3o_launch.assets import resolve_checkpoint
    from p3o_launch.runtime.rollout.tokenizer import load_tokenizer

    load: Callable[[Path], object] = load_tokenizer
    try:
        return load(resolve_checkpoint(preset.model.hf_checkpoint))
    except P3OLaunchError as error:
        return error.message
    except Exception as error:  # transformers raises what it likes for files it cannot use
        return f"the tokenizer of {preset.model.hf_checkpoint} cannot be loaded: {type(error).__name__}"
