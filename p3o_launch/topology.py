"""Integer arithmetic on a preset. The guards and the runtime read the same numbers from here. No torch.

Source: Megatron's rank layout; DP = world / (TP x PP x CP), never the GPU count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from p3o_launch.schema import Preset


@dataclass(frozen=True, slots=True)
class Topology:
    """Sizes derived from a preset. ``None`` where the inputs do not divide (a guard says so)."""

    world_size: int
    tp: int
    pp: int
    cp: int
    dp: int | None
    vpp: int | None
    samples_per_rollout: int
    micro_batches_per_step: int | None
    steps_per_rollout: int | None
    total_steps: int | None
    max_tokens_per_sample: int
    sequence_multiple: int


def exact_quotient(numerator: int, denominator: int) -> int | None:
    """``numerator / denominator`` when it is a whole number >= 1, else None."""
    quotient, remainder = divmod(numerator, denominator)
    return quotient if remainder == 0 and quotient >= 1 else None


def topology(preset: Preset) -> Topology:
    """Derive every size; never raises."""
    p, b = preset.parallel, preset.batch
    world = preset.cluster.num_nodes * preset.cluster.gpus_per_node
    tp, pp, cp = p.tensor_model_parallel_size, p.pipeline_model_parallel_size, p.context_parallel_size
    dp = exact_quotient(world, tp * pp * cp)
    micro_batches = None
    if dp is not None and not b.use_dynamic_batch_size:
        micro_batches = exact_quotient(b.global_batch_size, b.micro_batch_size * dp)
    vpp = None
    if p.num_layers_per_virtual_pipeline_stage is not None:
        vpp = exact_quotient(preset.model.num_layers, pp * p.num_layers_per_virtual_pipeline_stage)
    samples = b.rollout_batch_size * b.n_samples_per_prompt
    steps_per_rollout = exact_quotient(samples, b.global_batch_size)
    return Topology(
        world_size=world,
        tp=tp,
        pp=pp,
        cp=cp,
        dp=dp,
        vpp=vpp,
        samples_per_rollout=samples,
        micro_batches_per_step=micro_batches,
        steps_per_rollout=steps_per_rollout,
        total_steps=None if steps_per_rollout is None else steps_per_rollout * b.num_rollout,
        max_tokens_per_sample=preset.rollout.max_prompt_len + preset.rollout.max_response_len,
        sequence_multiple=(2 * cp if cp > 1 else 1) * (tp if p.sequence_parallel else 1),
    )
