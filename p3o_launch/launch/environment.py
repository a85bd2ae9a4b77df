"""What a run stands on: versions, machine, and the state of the working tree. Reads only; never fails a run.

Standard library only: a generated script carries this module.
"""

from __future__ import annotations

import hashlib
import platform
import socket
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from p3o_launch.launch.redact import redact_text

PACKAGES = ("p3o-launch", "torch", "megatron-core", "ray", "transformers", "vllm")
PATCH_LIMIT = 10 * 2**20
UNTRACKED_LIMIT = 1000
UNTRACKED_BYTES = 64 * 2**20
COMMAND_TIMEOUT_S = 10.0


def versions() -> dict[str, str | None]:
    """Version of everything whose change may move a figure; None where it is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def machine() -> dict[str, Any]:
    """Host name, system and GPUs of this machine."""
    return {
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python_executable": sys.executable,
        "gpus": [f"{gpu.name} ({gpu.memory})" for gpu in gpus()],
        "driver": next((gpu.driver for gpu in gpus()), None),
    }


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as ``nvidia-smi`` describes it."""

    name: str
    memory: str
    driver: str


def gpus() -> list[Gpu]:
    """GPUs of this machine, without loading CUDA; none when there is no driver."""
    lines = _output(["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"])
    rows = [[cell.strip() for cell in line.split(",")] for line in (lines or "").splitlines()]
    return [Gpu(*row) for row in rows if len(row) == 3]


@dataclass(frozen=True, slots=True)
class Tree:
    """State of a git working tree. ``patch``: tracked changes against the commit, secrets replaced."""

    commit: str
    branch: str | None
    dirty: bool
    patch: str
    untracked: dict[str, str]

    def record(self) -> dict[str, Any]:
        """What ``run.json`` holds of it."""
        return {
            "commit": self.commit,
            "branch": self.branch,
            "dirty": self.dirty,
            "patch": "git.patch" if self.patch else None,
            "untracked_sha256": self.untracked,
        }


def working_tree(start: Path | None = None) -> Tree | None:
    """The tree around the working directory, else the one around the package; None where neither is in git."""
    package = find_spec("p3o_launch")
    places = package.submodule_search_locations if package is not None else None
    for directory in (start or Path.cwd(), *map(Path, places or ())):
        root = _git(directory, "rev-parse", "--show-toplevel")
        commit = _git(directory, "rev-parse", "HEAD")
        if root and commit:
            return _tree(Path(root.strip()), commit.strip())
    return None


def _tree(root: Path, commit: str) -> Tree:
    branch = (_git(root, "symbolic-ref", "--short", "-q", "HEAD") or "").strip() or None
    patch = _git(root, "diff", "HEAD", "--binary") or ""
    if len(patch) > PATCH_LIMIT:
        patch = f"# the diff has {len(patch)} characters and was left out\n"
    names = (_git(root, "ls-files", "--others", "--exclude-standard", "-z") or "").split("\0")
    untracked = _hashes(root, sorted(name for name in names if name))
    return Tree(commit, branch, bool(patch or untracked), redact_text(patch), untracked)


def _hashes(root: Path, names: list[str]) -> dict[str, str]:
    """SHA-256 of untracked files, up to a count and a total size; what lies beyond is said to be skipped."""
    hashes: dict[str, str] = {}
    total = 0
    for name in names[:UNTRACKED_LIMIT]:
        path = root / name
        try:
            size = path.stat().st_size
            total += size
            too_much = total > UNTRACKED_BYTES or not path.is_file()
            hashes[name] = f"skipped, {size} bytes" if too_much else hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            hashes[name] = f"unreadable: {error.strerror}"
    if len(names) > UNTRACKED_LIMIT:
        hashes["..."] = f"{len(names) - UNTRACKED_LIMIT} more files"
    return hashes


def _git(directory: Path, *arguments: str) -> str | None:
    return _output(["git", "-C", str(directory), *arguments])


def _output(command: list[str]) -> str | None:
    """Standard output of a command that succeeds in time, else None."""
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=COMMAND_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else None
