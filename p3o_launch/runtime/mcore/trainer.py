"""One rank of the builtin runtime: groups, model, engine, step and checkpoints put together. Plain class, no Ray.

Every rank of the run holds one ``MegatronRank`` and gets the same calls in the same order (SPMD).
"""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from p3o_launch.assets import resolve_checkpoint
from p3o_launch.runtime.mcore import checkpoint
from p3o_launch.runtime.mcore.batch import MicroBatch, make_micro_batch, padded_length
from p3o_launch.runtime.mcore.config import params_dtype
from p3o_launch.runtime.mcore.cpu_backend import device_backend
from p3o_launch.runtime.mcore.engine import MegatronEngine
from p3o_launch.runtime.mcore.groups import ParallelSizes, init_distributed
from p3o_launch.runtime.mcore.model import build_model, wrap_ddp
from p3o_launch.runtime.mcore.optimizer import build_optimizer, build_scheduler
from p3o_launch.runtime.mcore.rng import seed_rank, set_tracker_states, tracker_states
from p3o_launch.runtime.mcore.step import Objective, PolicyStep, StepOutcome
from p3o_launch.runtime.mcore.weights_hf import load_hf
from p3o_launch.runtime.partition import StepPartition, partition_by_tokens, partition_fixed
from p3o_launch.runtime.plan import RunPlan
from p3o_launch.runtime.types import Completion, GenerationRequest, Sample, SamplingParams
from p3o_launch.schema import Algorithm, Preset


class MegatronRank:
    """The policy as one rank sees it: it trains, samples, saves.

    ``init_method``: torch.distributed address, such as ``tcp://127.0.0.1:29500``. Call :meth:`setup` first and
    :meth:`close` last; ``close`` may be called at any time, and twice.
    """

    def __init__(self, plan: RunPlan, rank: int, init_method: str, local_rank: int | None = None) -> None:
        self.plan = plan
        self.preset: Preset = plan.preset
        self.rank = rank
        self.init_method = init_method
        self.local_rank = local_rank
        self.optimizer_step = 0

    def setup(self, *, rollout: bool = True) -> None:
        """Join the group, build the model from the Hugging Face checkpoint, the optimizer and the rollout engine.

        ``rollout=False`` leaves the engine out, for a rank that only trains.
        """
        preset, plan = self.preset, self.plan
        if plan.device == "cpu":
            torch.set_num_threads(preset.cluster.threads_per_rank)
        self.groups = init_distributed(
            ParallelSizes.from_preset(preset),
            rank=self.rank,
            world_size=plan.world_size,
            init_method=self.init_method,
            backend=plan.dist_backend,
            local_rank=self.local_rank,
            timeout_s=preset.cluster.timeout_s,
        )
        seed_rank(plan.seed, self.groups)
        checkpoint_dir = resolve_checkpoint(preset.model.hf_checkpoint)
        chunks = build_model(preset.model, preset.parallel, preset.precision, self.groups)
        load_hf(chunks, checkpoint_dir, self.groups)
        self.chunks = wrap_ddp(chunks, preset.parallel, preset.precision, self.groups)
        with device_backend(self.groups.device):
            self.optimizer = build_optimizer(
                self.chunks, preset.optimizer, preset.precision, preset.parallel, self.groups.device
            )
        self.scheduler = build_scheduler(self.optimizer, preset.optimizer, plan.total_steps)
        self.step = PolicyStep(
            self.chunks,
            self.optimizer,
            self.groups,
            objective_of(preset.algorithm),
            rng_states=[(tracker_states, set_tracker_states)],
        )
        if rollout:
            self.engine = MegatronEngine(self.chunks, self.groups, preset)

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> list[Completion]:
        """Sample from the rollout policy; the completions are in the order of the requests, on every rank."""
        return self.engine.generate(requests, sampling)

    def update_rollout_weights(self, snapshot_id: int) -> None:
        """Make the present weights the rollout policy."""
        self.engine.update_weights(snapshot_id)

    def train_step(self, samples: Sequence[Sample]) -> dict[str, float]:
        """One optimizer step over ``samples`` (the whole global batch, on every rank).

        Returns metrics named as in ``docs/metrics.md``, the same on every rank but for times and memory. Raises
        NonFiniteRatioError on every rank, with weights, optimizer and random streams as they were.
        """
        lr = self.scheduler.get_lr(self.optimizer.param_groups[0])
        outcome = self.step.run(self.micro_batches(samples), step=self.optimizer_step + 1)
        self.scheduler.step(increment=1)
        self.optimizer_step += 1
        return self._metrics(outcome, lr)

    def micro_batches(self, samples: Sequence[Sample]) -> list[MicroBatch]:
        """This rank's share of one optimizer step, on the device; ``samples`` is the whole step, on every rank."""
        preset, sizes = self.preset, self.plan.topology
        multiple = math.lcm(sizes.sequence_multiple, preset.batch.sequence_padding_multiple)
        lengths = [padded_length(sample, multiple) for sample in samples]
        packed = preset.batch.pack_sequences or preset.batch.use_dynamic_batch_size
        partition = plan_step(lengths, preset, self.groups.dp_size)
        row_length = _common_row_length(partition, lengths, packed) if self.groups.pp_size > 1 else None
        return [
            make_micro_batch(
                [samples[i] for i in indices],
                row_length=row_length,
                multiple=multiple,
                pad_id=0,
                packed=packed,
                dtype=torch.float64 if params_dtype(preset.precision) is torch.float64 else torch.float32,
            ).to(self.step.device)
            for indices in partition.micro_batches[self.groups.dp_rank]
        ]

    def _metrics(self, outcome: StepOutcome, lr: float) -> dict[str, float]:
        means, p3o = outcome.means, self.preset.algorithm.advantage_estimator == "p3o"
        metrics = {
            "train/loss": means["loss"],
            "train/entropy": means["entropy"],
            "train/grad_norm": outcome.grad_norm,
            "train/lr": lr,
            "train/actor_optimizer_step": float(self.optimizer_step),
            "perf/peak_memory_bytes": float(self._peak_memory()),
        }
        shared = ("clip_fraction", "ratio_mean", "ratio_std")
        own = ("ess", "cap_fraction", "behavior_kl_proxy", "adaptive_kl_loss", "score_loss") if p3o else ("ess",)
        group = "p3o" if p3o else "grpo"
        metrics |= {f"train/{group}/{name}": means[name] for name in (*own, *shared)}
        metrics[f"train/{group}/valid_tokens"] = means["tokens"]
        if p3o:
            metrics["train/p3o/cap"] = means["ess"]
        if "replay_error" in means:
            metrics["train/p3o/replay_error"] = means["replay_error"]
        return metrics | {f"perf/{name}": value for name, value in outcome.seconds.items()}

    def _peak_memory(self) -> int:
        """Largest memory of this process so far [bytes]: device memory on a GPU, resident memory on the CPU."""
        if self.plan.device == "cuda":
            return torch.cuda.max_memory_allocated()
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def save_checkpoint(self, directory: Path, extra: dict[str, Any]) -> None:
        """Save model, optimizer, scheduler, random state, rollout snapshot and ``extra``; complete or absent."""
        extra = {**extra, "optimizer_step": self.optimizer_step}
        checkpoint.save(
            directory, self.chunks, self.optimizer, self.scheduler, self.groups, extra, engine_state=self.engine.state()
        )

    def load_checkpoint(self, directory: Path) -> dict[str, Any]:
        """Load what :meth:`save_checkpoint` wrote, also under another layout; returns ``extra``."""
        extra, engine_state = checkpoint.load(
            directory, self.chunks, self.optimizer, self.scheduler, self.groups, engine_state=self.engine.state()
        )
        self.engine.load_state(engine_state)
        self.optimizer_step = int(extra["optimizer_step"])
        return extra

    def close(self) -> None:
        """Leave the group. Idempotent."""
        groups = getattr(self, "groups", None)
        if groups is not None:
            groups.destroy()


def objective_of(algorithm: Algorithm) -> Objective:
    """The objective a preset asks for. GRPO's clip widths default to 0.4, as in the recipes."""
    low = 0.4 if algorithm.eps_clip is None else algorithm.eps_clip
    kl_mode = algorithm.kl_mode
    if algorithm.advantage_estimator != "p3o":
        kl_mode = "proxy_safe"  # not read by the baseline
    assert kl_mode != "exact", "P3O105 lets no such preset through"
    return Objective(
        estimator=algorithm.advantage_estimator,
        ess_scope=algorithm.ess_scope,
        kl_mode=kl_mode,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        eps_low=low,
        eps_high=low if algorithm.eps_clip_high is None else algorithm.eps_clip_high,
    )


def plan_step(lengths: Sequence[int], preset: Preset, dp_size: int) -> StepPartition:
    """Cut one optimizer step; ``lengths`` [tokens] are padded sample lengths."""
    if not preset.batch.use_dynamic_batch_size:
        return partition_fixed(len(lengths), dp_size, preset.batch.micro_batch_size)
    budget = preset.batch.max_tokens_per_gpu
    assert budget is not None, "P3O312 lets no such preset through"
    parallel = preset.parallel
    interleaved = parallel.num_layers_per_virtual_pipeline_stage is not None
    return partition_by_tokens(
        lengths,
        dp_size,
        budget * parallel.context_parallel_size,
        count_multiple=parallel.pipeline_model_parallel_size if interleaved else 1,
    )


def _common_row_length(partition: StepPartition, lengths: Sequence[int], packed: bool) -> int:
    """Longest row of the step over all ranks [tokens]: pipeline stages exchange tensors of one shape."""
    reduce = sum if packed else max
    rows = [reduce(lengths[i] for i in indices) for rank in partition.micro_batches for indices in rank if indices]
    return max(rows)
