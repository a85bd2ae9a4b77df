"""``p3o-launch verify``: the partition-invariance matrix on this machine's own processes."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path

from p3o_launch.check import check_file
from p3o_launch.errors import EXIT_FINDINGS, EXIT_OK, MissingExtraError, PreflightError, UsageError
from p3o_launch.presets import resolve_name
from p3o_launch.runtime.local_ranks import run_local_ranks
from p3o_launch.runtime.mcore.preload import MODULES
from p3o_launch.runtime.verify import Layout, as_json, as_text, default_layouts, every_layout, judge_all
from p3o_launch.schema import Preset

TIMEOUT_S = 900.0
LAYOUTS_PER_FORK = 24
"""Layouts measured by the same processes: gloo keeps the threads of every group that was destroyed."""


def verify(world: int, patterns: Sequence[str], output_format: str, device: str) -> int:
    """Measure and print every layout that fits ``world`` processes; exit code 1 when one is out of tolerance.

    ``patterns``: shell patterns of layout names, from the default matrix and the whole grid; none means the default
    matrix, ``*`` everything. Raises UsageError for a pattern that matches nothing or an unknown format,
    MissingExtraError without the runtime packages, RunError when a rank fails.
    """
    if output_format not in ("text", "json"):
        raise UsageError(f"there is no format {output_format!r}", hint="use text or json")
    if device not in ("cpu", "cuda"):
        raise UsageError(f"there is no device {device!r}", hint="use cpu or cuda")
    everything = every_layout(world) if patterns else default_layouts(world)
    layouts = chosen(everything if device == "cpu" else cuda_layouts(world), patterns)
    for package in ("torch", "megatron"):
        if find_spec(package) is None:
            raise MissingExtraError(package if package == "torch" else "megatron-core", "runtime")
    base = _base(device)
    sys.stderr.write(f"{len(layouts)} layouts on up to {world} processes ({device})\n")
    from p3o_launch.runtime.mcore.probe import combine, probe_layouts

    measured = []
    with tempfile.TemporaryDirectory(prefix="p3o-verify-") as directory:
        for start in range(0, len(layouts), LAYOUTS_PER_FORK):
            part = layouts[start : start + LAYOUTS_PER_FORK]
            ranks = run_local_ranks(
                probe_layouts, world, base, part, Path(directory), timeout=TIMEOUT_S, preload=MODULES
            )
            measured += [combine([results[index] for results in ranks]) for index in range(len(part))]
    verdicts = judge_all(layouts, measured)
    if output_format == "json":
        sys.stdout.write(json.dumps(as_json(verdicts), indent=2) + "\n")
    else:
        sys.stdout.write(as_text(verdicts))
    return EXIT_FINDINGS if any(verdict.faults for verdict in verdicts) else EXIT_OK


def chosen(layouts: Sequence[Layout], patterns: Sequence[str]) -> list[Layout]:
    """The layouts whose name matches a pattern, with the references they are compared with."""
    if not patterns:
        return list(layouts)
    for pattern in patterns:
        if not any(fnmatch(layout.name, pattern) for layout in layouts):
            names = [layout.name for layout in layouts if not layout.name.startswith("grid ")]
            names += ["'grid *'"] if len(names) < len(layouts) else []
            raise UsageError(f"no layout is called {pattern!r}", hint=f"the layouts here are: {', '.join(names)}")
    named = [layout for layout in layouts if any(fnmatch(layout.name, pattern) for pattern in patterns)]
    kinds = {(layout.model, layout.dtype) for layout in named}
    references: dict[tuple[str, str], Layout] = {}
    for layout in layouts:
        references.setdefault((layout.model, layout.dtype), layout)
    needed = {references[kind] for kind in kinds}
    return [layout for layout in layouts if layout in needed or layout in named]


def cuda_layouts(world: int) -> list[Layout]:
    """The part of the matrix that Transformer Engine's kernels run in float32: no packing, no context parallelism.

    Not run by this project's own tests, which have no GPU.
    """
    kept = [
        replace(layout, dtype="float32", name=layout.name.removeprefix("float32 "))
        for layout in default_layouts(world)
        if not layout.packed and layout.tokens is None and layout.cp == 1
    ]
    return list({layout.name: layout for layout in kept}.values())


def _base(device: str) -> Preset:
    preset = check_file(resolve_name("on_policy"), profile="cpu").preset
    assert preset is not None, "the shipped preset is sound"
    if device == "cpu":
        return preset
    import torch

    if not torch.cuda.is_available():
        raise PreflightError("--device cuda needs a GPU that PyTorch can use", hint="leave --device out for the CPU")
    return preset.model_copy(update={"cluster": preset.cluster.model_copy(update={"device": "cuda"})})
