"""What is looked at on this machine before any process starts: packages, GPUs, files, prompts.

The first half finds faults of the machine, each a finding at the place in the preset that asks for too much; the
second loads tokenizer and prompts and raises DataError at the first record that cannot be used.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from p3o_launch.check import CheckResult
from p3o_launch.diagnostics import LocatedFinding, Position, Severity
from p3o_launch.errors import MissingExtraError, PreflightError
from p3o_launch.launch.environment import gpus
from p3o_launch.runtime.driver import Inputs
from p3o_launch.runtime.loop import Texts
from p3o_launch.schema import Preset

if TYPE_CHECKING:
    from p3o_launch.runtime.rollout.prompts import Encoder, PromptSet

BUILTIN = "builtin:"
_PACKAGES = {"torch": "torch", "megatron": "megatron-core", "ray": "ray", "transformers": "transformers"}


@dataclass(frozen=True, slots=True)
class Request:
    """How the user asked for the run: what the remedy of a finding must repeat."""

    preset: str
    overrides: tuple[str, ...] = ()


def require_packages() -> None:
    """Raise MissingExtraError when the runtime extra is not installed. Imports none of it."""
    for module, package in _PACKAGES.items():
        if find_spec(module) is None:
            raise MissingExtraError(package, "runtime")


def machine_findings(result: CheckResult, preset: Preset, request: Request) -> list[LocatedFinding]:
    """What this machine lacks, sorted; empty when the run may start. Without the GPUs, no file is looked for."""
    found = list(_gpu_findings(result, preset, request)) or asset_findings(result, preset)
    return sorted(found, key=lambda finding: finding.sort_key)


def _gpu_findings(result: CheckResult, preset: Preset, request: Request) -> Iterator[LocatedFinding]:
    cluster = preset.cluster
    if cluster.device == "cpu" or cluster.ray_address is not None:
        return
    present = len(gpus())
    if cluster.num_nodes == 1 and present >= cluster.gpus_per_node:
        return
    wanted = cluster.num_nodes * cluster.gpus_per_node
    kind = f" of type {cluster.gpu}" if cluster.gpu else ""
    nodes = f" on {cluster.num_nodes} nodes" if cluster.num_nodes > 1 else ""
    has = {0: "no GPU", 1: "1 GPU"}.get(present, f"{present} GPUs")
    yield _finding(
        result,
        "P3O609",
        "not-enough-gpus",
        "cluster.gpus_per_node",
        f"{preset.name} needs {wanted} GPUs{kind}{nodes}; this machine has {has} (nvidia-smi)",
        f"run the same scenario on the CPU: {cpu_command(request)}"
        + ("; or set cluster.ray_address to a cluster that has them" if cluster.num_nodes > 1 else ""),
    )


def cpu_command(request: Request) -> str:
    """The command that runs the same scenario with the profile ``cpu``."""
    words = ["p3o-launch", "run", "--preset", request.preset, "--profile", "cpu"]
    for override in request.overrides:
        path, _, value = override.partition("=")
        words += ["--recipe", value] if path == "recipe" else ["--set", override]
    return shlex.join(words)


def asset_findings(result: CheckResult, preset: Preset) -> list[LocatedFinding]:
    """Files and directories the preset names and this machine lacks."""
    return list(_asset_findings(result, preset))


def _asset_findings(result: CheckResult, preset: Preset) -> Iterator[LocatedFinding]:
    checkpoint = preset.model.hf_checkpoint
    if not checkpoint.startswith(BUILTIN) and not (Path(checkpoint) / "config.json").is_file():
        there = Path(checkpoint).is_dir()
        what = "holds no config.json" if there else "is not a directory"
        yield _finding(
            result,
            "P3O610",
            "missing-asset",
            "model.hf_checkpoint",
            f"model.hf_checkpoint ({checkpoint}) {what}",
            "download the checkpoint first and name its directory; a run reads no network",
        )
    for field, value in (("prompt_data", preset.data.prompt_data), ("eval_prompt_data", preset.data.eval_prompt_data)):
        if value is None or value.startswith(BUILTIN) or Path(value).is_file():
            continue
        yield _finding(
            result,
            "P3O610",
            "missing-asset",
            f"data.{field}",
            f"data.{field} ({value}) is not a file",
            f"name a JSONL file with one object per line that holds {preset.data.input_key!r} and "
            f"{preset.data.label_key!r}",
        )


def _finding(result: CheckResult, code: str, name: str, path: str, message: str, hint: str) -> LocatedFinding:
    return LocatedFinding(place_of(result, path), Severity.ERROR, code, name, message, hint, path)


def place_of(result: CheckResult, path: str) -> Position:
    """Where ``path`` was written, else where its group was, else the start of the preset."""
    parts = tuple(path.split("."))
    for length in range(len(parts), 0, -1):
        if parts[:length] in result.values:
            return result.values[parts[:length]]
    return Position(result.source, 1, 1)


def load_inputs(preset: Preset) -> Inputs:
    """Tokenizer, prompts and verifier. Raises PreflightError, for a record that cannot be used DataError."""
    from p3o_launch.assets import resolve_checkpoint
    from p3o_launch.runtime.mcore.hf_config import check_hf_config
    from p3o_launch.runtime.rollout.prompts import load_prompts
    from p3o_launch.runtime.rollout.rewards import require_verifier, score
    from p3o_launch.runtime.rollout.tokenizer import load_tokenizer

    if preset.rollout.engine != "megatron":
        raise PreflightError(
            f"this version runs rollout.engine: megatron, not {preset.rollout.engine}",
            hint="--set rollout.engine=megatron",
        )
    checkpoint = resolve_checkpoint(preset.model.hf_checkpoint)
    check_hf_config(preset.model, checkpoint)
    tokenizer = load_tokenizer(checkpoint)
    prompts = load_prompts(preset, tokenizer, split="train")
    wanted = preset.evaluation.interval is not None
    evaluation = load_prompts(preset, tokenizer, split="eval") if wanted else None
    require_verifier(preset.reward)

    texts = Texts(decode=tokenizer.decode, score=lambda text, label: score(preset.reward, text, label))
    warnings = input_warnings(preset, tokenizer, prompts, evaluation, texts.score)
    skipped = {preset.data.prompt_data: prompts.skipped}
    if evaluation is not None:
        skipped[preset.data.eval_prompt_data or ""] = evaluation.skipped
    counted = {source: reasons for source, reasons in skipped.items() if reasons}
    return Inputs(prompts=prompts, texts=texts, eval_prompts=evaluation, skipped=counted, warnings=warnings)


def input_warnings(
    preset: Preset,
    tokenizer: Encoder,
    prompts: PromptSet,
    evaluation: PromptSet | None,
    score: Callable[[str, str], float],
) -> tuple[str, ...]:
    """What is odd about prompts and labels that can all be used. Raises DataError when every reward must be 0."""
    from p3o_launch.runtime.rollout.prompt_survey import Unknown, label_warnings, shared_warnings

    unknown, found = Unknown(tokenizer), list(prompts.warnings)
    found += label_warnings(preset, preset.data.prompt_data, prompts.prompts, tokenizer, unknown, score)
    if evaluation is not None and preset.data.eval_prompt_data is not None:
        source = preset.data.eval_prompt_data
        found += evaluation.warnings
        found += label_warnings(preset, source, evaluation.prompts, tokenizer, unknown, score)
        found += shared_warnings(prompts.prompts, evaluation.prompts, source)
    return tuple(found)
