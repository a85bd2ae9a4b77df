"""Measure optimizer steps in several layouts on the ranks of this machine, without taking them (``runtime/verify.py``).

Every layout computes the same step: the same weights, the same samples. The first layout of each model and dtype leaves
its gradients in a file, tensor by tensor under their Hugging Face names; each rank of every other layout compares what
it holds with that.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from p3o_launch.runtime.local_ranks import RankEnv
from p3o_launch.runtime.mcore.counting import counted
from p3o_launch.runtime.mcore.step import StepOutcome
from p3o_launch.runtime.mcore.trainer import MegatronRank
from p3o_launch.runtime.mcore.weights_hf import gathered
from p3o_launch.runtime.plan import RunPlan, make_plan
from p3o_launch.runtime.replay import ReplayWindow
from p3o_launch.runtime.rollout.arithmetic import ALPHABET, problems
from p3o_launch.runtime.types import Sample
from p3o_launch.runtime.verify import SAMPLES, Layout, Measurement
from p3o_launch.schema import Preset

FIRST_CHARACTER = 3
EOS = 1
"""The embedded tokenizer: pad 0, end of sequence 1, unknown 2, then one token per character of ``ALPHABET``."""

MOE = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32}


def samples(count: int = SAMPLES, seed: int = 0) -> list[Sample]:
    """Solved arithmetic problems, with behaviour log-probs around the embedded model's own, and random advantages."""
    source = random.Random(seed)
    made = []
    for index, (text, answer) in enumerate(source.sample(problems("train"), count)):
        response = (*_ids(answer), EOS)
        log_probs = tuple(-0.05 - abs(source.gauss(0.0, 0.6)) for _ in response)
        made.append(
            Sample(
                sample_id=index,
                group_id=index // 4,
                prompt_ids=_ids(text),
                response_ids=response,
                behavior_log_probs=log_probs,
                reward=1.0,
                advantage=source.gauss(0.0, 1.0),
                truncated=False,
                snapshot_id=0,
            )
        )
    return made


def _ids(text: str) -> tuple[int, ...]:
    return tuple(FIRST_CHARACTER + ALPHABET.index(character) for character in text)


def probe_layouts(
    env: RankEnv, base: Preset, layouts: Sequence[Layout], directory: Path
) -> list[dict[str, Any] | None]:
    """On every rank: measure each layout in turn; None for the layouts this rank takes no part in.

    ``directory`` keeps the references from one call to the next, and must be the same on all ranks.
    """
    results: list[dict[str, Any] | None] = []
    for layout in layouts:
        init_method = env.new_init_method()  # advances on every rank, so that all name the same rendezvous
        if env.rank >= layout.ranks:
            results.append(None)
            continue
        plan = make_plan(preset_of(base, layout, directory), directory)
        rank = MegatronRank(plan, env.rank, init_method)
        try:
            results.append(_probe(rank, plan, layout, directory))
        finally:
            rank.close()
    return results


def preset_of(base: Preset, layout: Layout, directory: Path) -> Preset:
    """``base`` cut as ``layout`` says: every relation between its sizes holds by construction."""
    model: dict[str, Any] = {}
    if layout.model == "moe":
        model = {**MOE, "hf_checkpoint": str(directory / f"moe-{layout.dtype}")}
    multiple = (2 * layout.cp if layout.cp > 1 else 1) * (layout.tp if layout.sequence_parallel else 1)
    return base.model_copy(
        update={
            "model": base.model.model_copy(update=model),
            "precision": base.precision.model_copy(update={"params_dtype": layout.dtype}),
            "parallel": base.parallel.model_copy(
                update={
                    "tensor_model_parallel_size": layout.tp,
                    "pipeline_model_parallel_size": layout.pp,
                    "context_parallel_size": layout.cp,
                    "expert_model_parallel_size": layout.ep,
                    "expert_tensor_parallel_size": 1 if layout.model == "moe" else None,
                    "num_layers_per_virtual_pipeline_stage": layout.vpp_layers,
                    "sequence_parallel": layout.sequence_parallel,
                }
            ),
            "batch": base.batch.model_copy(
                update={
                    "rollout_batch_size": SAMPLES // 4,
                    "n_samples_per_prompt": 4,
                    "global_batch_size": SAMPLES,
                    "micro_batch_size": SAMPLES // (layout.dp * layout.splits),
                    "use_dynamic_batch_size": layout.tokens is not None,
                    "max_tokens_per_gpu": layout.tokens,
                    "sequence_padding_multiple": multiple,
                    "pack_sequences": layout.packed,
                }
            ),
            "optimizer": base.optimizer.model_copy(update={"clip_grad": 0.0}),
            "cluster": base.cluster.model_copy(update={"gpus_per_node": layout.ranks, "num_nodes": 1}),
        }
    )


def _probe(rank: MegatronRank, plan: RunPlan, layout: Layout, directory: Path) -> dict[str, Any]:
    file = directory / f"reference-{layout.model}-{layout.dtype}.pt"
    # Only a layout of one rank comes first; in every other, rank 0 has left the file before it joins.
    is_reference = layout.ranks == 1 and not file.exists()
    if is_reference and layout.model == "moe":
        _write_moe_checkpoint(plan, rank)
    rank.setup(rollout=False)
    micro_batches = rank.micro_batches(samples())
    windows = [ReplayWindow(micro_batches) for _ in rank.chunks]
    started = time.perf_counter()
    with counted() as forward:
        rank.step.stats_pass(windows)
    for window in windows:
        window.restore(0)
    with counted() as whole:
        with counted() as statistics:
            rank.step.context = context = rank.step.frozen_context(windows, step=1)
        sums = rank.step.train_pass(windows, step=1)
    seconds = time.perf_counter() - started
    outcome: StepOutcome = rank.step.outcome(sums, context)
    gradients = {
        name: gradient.double().clone() for name, gradient in gathered(rank.chunks, rank.groups, gradients=True)
    }
    if is_reference:
        torch.save(gradients, file)
    reference: dict[str, torch.Tensor] = torch.load(file)
    if plan.world_size > 1:
        dist.barrier()
    return {
        "tokens": context.valid_tokens,
        "cap": context.cap,
        "loss": outcome.means["loss"],
        "replay_error": outcome.means["replay_error"],
        "micro_batches": len(micro_batches),
        "ess_collectives": statistics.count - forward.count,
        "ess_bytes": statistics.bytes - forward.bytes,
        "step_collectives": whole.count,
        "step_bytes": whole.bytes,
        "seconds": seconds,
        "stage": rank.groups.pp_rank,
        "difference": sum(float((gradients[name] - reference[name]).square().sum()) for name in gradients),
        "reference": sum(float(gradient.square().sum()) for gradient in reference.values()),
        "names": sorted(gradients),
        "all_names": sorted(reference),
    }


def _write_moe_checkpoint(plan: RunPlan, rank: MegatronRank) -> None:
    """Random weights of the mixture-of-experts model in Hugging Face's form, so that each layout loads the same."""
    from p3o_launch.runtime.mcore.groups import ParallelSizes, init_distributed
    from p3o_launch.runtime.mcore.model import build_model

    preset = plan.preset
    directory = Path(preset.model.hf_checkpoint)
    directory.mkdir()
    groups = init_distributed(
        ParallelSizes(), rank=0, world_size=1, init_method=f"file://{directory}/store", backend=plan.dist_backend
    )
    try:
        chunks = build_model(preset.model, preset.parallel, preset.precision, groups)
        generator = torch.Generator().manual_seed(0)
        weights = {}
        for name, weight in gathered(chunks, groups):
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            weights[name] = (1.0 + 0.1 * noise if weight.dim() == 1 else 0.08 * noise).to(weight.dtype).contiguous()
    finally:
        groups.destroy()
    (directory / "config.json").write_text("{}")
    save_file(weights, directory / "model.safetensors")


def combine(ranks: Sequence[dict[str, Any] | None]) -> Measurement:
    """One measurement from those of a layout's ranks. Ranks that disagree make it NaN: no layout may hide that."""
    taking_part = [result for result in ranks if result is not None]
    first = taking_part[0]
    agreed = {name: first[name] for name in ("tokens", "cap", "loss")}
    if any(result[name] != value for result in taking_part for name, value in agreed.items()):
        agreed |= {"cap": float("nan")}
    stages: dict[int, float] = {}
    for result in taking_part:  # replicas of a stage hold the same gradient: the worst one counts
        stages[result["stage"]] = max(stages.get(result["stage"], 0.0), result["difference"])
    covered = {name for result in taking_part for name in result["names"]}
    error = (sum(stages.values()) / first["reference"]) ** 0.5 if covered == set(first["all_names"]) else float("nan")
    return Measurement(
        **agreed,
        gradient_error=error,
        replay_error=max(result["replay_error"] for result in taking_part),
        micro_batches=first["micro_batches"],
        ess_collectives=max(result["ess_collectives"] for result in taking_part),
        ess_bytes=max(result["ess_bytes"] for result in taking_part),
        step_collectives=max(result["step_collectives"] for result in taking_part),
        step_bytes=max(result["step_bytes"] for result in taking_part),
        seconds=max(result["seconds"] for result in taking_part),
    )
