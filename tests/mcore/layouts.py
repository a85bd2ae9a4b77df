"""One training step of the tiny model in a given parallel layout, and what came out of it. Not a test.

The step is plain next-token training on fixed sequences of unequal length, through the same building blocks as the
two-pass step. Its outcome is put together over all ranks and named as in the Hugging Face checkpoint, so that outcomes
of different layouts can be compared tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p3o_launch.schema import Model, Optimizer, Precision
from tests.mcore.ranks import RankEnv
from tests.mcore.tiny import parallel

SEQUENCE_LENGTHS = (16, 24, 8, 32, 8, 16, 24, 16)


@dataclass(frozen=True)
class Layout:
    """``vpp``: model chunks per pipeline rank. ``packed``: two sequences per row, in thd form. ``mixed``: packed, and
    only every other row is split over the context-parallel ranks; the others are dealt out to them whole."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    vpp: int | None = None
    sp: bool = False
    packed: bool = False
    mixed: bool = False
    recompute: str = "none"
    overlap: bool = False

    def __str__(self) -> str:
        sizes = {name: getattr(self, name) for name in ("tp", "pp", "cp", "ep", "vpp")}
        parts = [f"{name}{size}" for name, size in sizes.items() if size not in (1, None)]
        parts += [name for name in ("sp", "packed", "mixed", "overlap") if getattr(self, name)]
        parts += [self.recompute] if self.recompute != "none" else []
        return "-".join(parts) or "plain"


@dataclass
class Outcome:
    """``loss``: summed over all tokens, before the step. ``gradients`` and ``weights`` by Hugging Face name."""

    loss: float
    tokens: int
    grad_norm: float
    gradients: dict[str, Any]
    weights: dict[str, Any]


def sequences() -> list[Any]:
    """Token sequences, one longer than ``SEQUENCE_LENGTHS`` so that inputs have those lengths."""
    import torch

    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 32, (length + 1,), generator=generator) for length in SEQUENCE_LENGTHS]


def train_steps(
    env: RankEnv, model: Model, layout: Layout, precision: Precision, hf_dir: Path, steps: int = 1
) -> Outcome:
    """``steps`` optimizer steps on the same data; gradients are those of the first step, weights after the last."""
    from p3o_launch.runtime.mcore.cpu_backend import device_backend
    from p3o_launch.runtime.mcore.groups import ParallelSizes, init_distributed
    from p3o_launch.runtime.mcore.model import build_model, wrap_ddp
    from p3o_launch.runtime.mcore.optimizer import build_optimizer, zero_gradients
    from p3o_launch.runtime.mcore.rng import seed_rank
    from p3o_launch.runtime.mcore.weights_hf import gathered, load_hf

    sizes = ParallelSizes(tp=layout.tp, pp=layout.pp, cp=layout.cp, ep=layout.ep, etp=1, vpp=layout.vpp)
    method = env.new_init_method()
    groups = init_distributed(sizes, rank=env.rank, world_size=env.world_size, init_method=method, timeout_s=60)
    try:
        seed_rank(7, groups)
        vpp_layers = None if layout.vpp is None else model.num_layers // (layout.pp * layout.vpp)
        split = parallel(
            tp=layout.tp,
            pp=layout.pp,
            cp=layout.cp,
            ep=layout.ep,
            etp=1,
            sp=layout.sp,
            vpp_layers=vpp_layers,
            **_extras(layout),
        )
        bare = build_model(model, split, precision, groups)
        load_hf(bare, hf_dir, groups)
        chunks = wrap_ddp(bare, split, precision, groups)
        with device_backend("cpu"):
            optimizer = build_optimizer(chunks, Optimizer(lr=1e-2, clip_grad=0.5), precision, split, groups.device)
            first: Outcome | None = None
            for _ in range(steps):
                zero_gradients(chunks, optimizer)
                loss, tokens = forward_backward(chunks, groups, layout)
                gradients = _whole(gathered(chunks, groups, gradients=True), groups)
                _, norm, _ = optimizer.step()
                first = first or Outcome(loss, tokens, float(norm), gradients, {})
        assert first is not None
        first.weights = _whole(gathered(chunks, groups), groups)
        return first
    finally:
        groups.destroy()


def _extras(layout: Layout) -> dict[str, Any]:
    extras: dict[str, Any] = {"recompute_granularity": layout.recompute, "overlap_grad_reduce": layout.overlap}
    if layout.recompute == "full":
        extras |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    return extras


def forward_backward(chunks: list[Any], groups: Any, layout: Layout) -> tuple[float, int]:
    import torch
    import torch.distributed as dist
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from p3o_launch.runtime.mcore.logprobs import token_log_probs

    def forward_step(iterator: Iterator[Any], chunk: Any) -> tuple[Any, Any]:
        batch = next(iterator)
        logits = chunk(batch["tokens"], batch["positions"], None, packed_seq_params=batch.get("packed"))

        def loss(logits: Any) -> tuple[Any, Any, Any]:
            total = -token_log_probs(logits, batch["targets"], groups.tp).sum()
            count = torch.tensor(batch["targets"].numel(), dtype=torch.int)
            return total, count, torch.stack([total.detach().double(), count.double()])

        return logits, loss

    batches = micro_batches(groups, layout)
    iterators = [iter(batches) for _ in chunks]
    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(batches),
        seq_length=max(SEQUENCE_LENGTHS),
        micro_batch_size=1,
    )
    total = torch.stack(reports).sum(0) if groups.is_last_stage else torch.zeros(2, dtype=torch.float64)
    dist.all_reduce(total, group=groups.dp_cp)
    dist.broadcast(total, src=groups.last_stage_global_rank, group=groups.pp)
    return float(total[0]), int(total[1])


def micro_batches(groups: Any, layout: Layout) -> list[dict[str, Any]]:
    """This rank's part of the step: DP takes every dp-th unit, CP its zig-zag part of each."""
    import torch

    everything = sequences()
    size = 2 if layout.packed or layout.mixed else 1
    units = [everything[start : start + size] for start in range(0, len(everything), size)]
    mine = [(unit, True) for unit in units[groups.dp_rank :: groups.dp_size]]
    if layout.mixed:
        whole = [unit for unit, _ in mine[1::2]]
        mine = mine[::2] + [(unit, False) for unit in whole[groups.cp_rank :: groups.cp_size]]
    batches = []
    for unit, split in mine:
        tokens = torch.cat([sequence[:-1] for sequence in unit])[None]
        targets = torch.cat([sequence[1:] for sequence in unit])[None]
        positions = torch.cat([torch.arange(len(sequence) - 1) for sequence in unit])[None]
        batch: dict[str, Any] = {"tokens": tokens, "targets": targets, "positions": positions}
        batches.append(_split_cp(batch, [len(sequence) - 1 for sequence in unit], groups, layout, split))
    return batches


def _split_cp(batch: dict[str, Any], lengths: list[int], groups: Any, layout: Layout, split: bool) -> dict[str, Any]:
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams

    from p3o_launch.runtime.mcore.context_parallel import packed_zigzag_indices

    edges = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    if groups.cp_size > 1 and split:
        kept = packed_zigzag_indices(edges, groups.cp_rank, groups.cp_size)
        batch = {name: tensor[:, kept] for name, tensor in batch.items()}
    if layout.packed or layout.mixed:
        bounds = torch.tensor(edges, dtype=torch.int32)
        longest = max(lengths)
        batch["packed"] = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest
        )
        if layout.mixed:
            batch["packed"].local_cp_size = groups.cp_size if split else 1
            batch["packed"].cp_group = groups.cp if split else None
    return batch


def _whole(stage: Iterator[tuple[str, Any]], groups: Any) -> dict[str, Any]:
    """Tensors of all pipeline stages, on every rank."""
    import torch.distributed as dist

    mine = {name: tensor.clone() for name, tensor in stage}
    parts: list[Any] = [None] * groups.pp_size
    dist.all_gather_object(parts, mine, group=groups.pp)
    return {name: tensor for part in parts for name, tensor in part.items()}
