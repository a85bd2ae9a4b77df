"""What stands against a launch from this machine without forbidding it: disk (604), proxies (605), dirty tree (704)."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from p3o_launch import memory
from p3o_launch.check import CheckResult
from p3o_launch.diagnostics import LocatedFinding
from p3o_launch.guards import all_guards
from p3o_launch.launch.environment import working_tree
from p3o_launch.launch.preflight import place_of
from p3o_launch.schema import Preset

FULL = 0.9  # striped file systems fail before they are full: see P3O604
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")


def launch_warnings(result: CheckResult, preset: Preset) -> list[LocatedFinding]:
    """Findings of severity warning, sorted, without those the preset ignores with a reason."""
    found = [*_disk(result, preset), *_proxies(result, preset), *_tree(result)]
    return sorted((item for item in found if item.code not in preset.ignore), key=lambda item: item.sort_key)


class Disk(NamedTuple):
    """``path``: the directory that was looked at. Sizes in bytes."""

    path: Path
    free: int
    total: int


def disk_of(directory: str) -> Disk:
    """The file system that ``directory``, or its nearest existing parent, lies on."""
    path = Path(directory).absolute()
    while not path.exists():
        path = path.parent
    usage = shutil.disk_usage(path)
    return Disk(path, usage.free, usage.total)


def checkpoint_bytes(preset: Preset) -> int:
    """One checkpoint of the whole model: weights, the rollout copy, and Adam's state."""
    whole = preset.model_copy(
        update={"parallel": preset.parallel.model_copy(update=_ONE_RANK)},
    )
    parameters, width = memory.stage_parameters(whole), memory.parameter_bytes(whole)
    copies = 2 if preset.rollout.engine == "megatron" else 1
    return parameters * width * copies + memory.state_bytes(whole)


_ONE_RANK = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
}


def saved_bytes(preset: Preset) -> int:
    """Disk that the run's checkpoints take at most: those kept, and the one being written."""
    saves = preset.checkpoint.save_final or preset.checkpoint.save_interval is not None
    return checkpoint_bytes(preset) * (preset.checkpoint.keep + 1) if saves else 0


def _disk(result: CheckResult, preset: Preset) -> Iterator[LocatedFinding]:
    disk, needed = disk_of(preset.logging.output_root), saved_bytes(preset)
    after = 1 - (disk.free - needed) / disk.total
    if needed > disk.free or after > FULL:
        message = (
            f"{disk.path} has {disk.free / memory.GIB:.1f} of {disk.total / memory.GIB:.0f} GiB free; "
            f"checkpoints can take {needed / memory.GIB:.1f} GiB (checkpoint.keep {preset.checkpoint.keep}, and one "
            f"being written), which makes it {min(100 * after, 100):.0f} % full"
        )
        yield _finding(result, "P3O604", "logging.output_root", message, "free space, or set logging.output_root")


def proxy_fault(environment: Mapping[str, str]) -> str | None:
    """Why this shell's proxies would reach node-local addresses; None when they do not."""
    proxy = next((name for word in _PROXIES for name in (word, word.upper()) if environment.get(name)), None)
    if proxy is None:
        return None
    exempt = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    hosts = {host.strip() for host in exempt.split(",") if host.strip()}
    wanted = {"localhost", "127.0.0.1", *_own_addresses()}
    if "*" in hosts or wanted <= hosts:
        return None
    missing = ", ".join(sorted(wanted - hosts))
    ranges = " (ranges such as 10.0.0.0/8 are not understood by every client)" if any("/" in h for h in hosts) else ""
    return f"{proxy} is set and no_proxy does not list {missing}{ranges}"


def _own_addresses() -> set[str]:
    """Addresses under which other processes reach this machine."""
    try:
        return {str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    except OSError:
        return set()


def _proxies(result: CheckResult, preset: Preset) -> Iterator[LocatedFinding]:
    # The megatron engine has no server; a Ray cluster's own address is still an HTTP endpoint.
    if preset.rollout.engine == "megatron" and preset.cluster.ray_address is None:
        return
    fault = proxy_fault(os.environ)
    if fault is not None:
        path = "rollout.engine" if preset.rollout.engine != "megatron" else "cluster.ray_address"
        yield _finding(result, "P3O605", path, fault, "extend no_proxy, or run with --clear-proxies")


def _tree(result: CheckResult) -> Iterator[LocatedFinding]:
    tree = working_tree()
    if tree is not None and tree.dirty:
        count = len(tree.untracked)
        untracked = f", {count} untracked file{'' if count == 1 else 's'}" if count else ""
        changed = "uncommitted changes" if tree.patch else "no changes to tracked files"
        message = f"the working tree at {tree.commit[:12]} is not clean: {changed}{untracked}"
        yield _finding(result, "P3O704", "", message, "commit; the difference is saved with the run")


def _finding(result: CheckResult, code: str, path: str, message: str, hint: str) -> LocatedFinding:
    rule = all_guards()[code]
    return LocatedFinding(place_of(result, path), rule.severity, code, rule.name, message, hint, path)
