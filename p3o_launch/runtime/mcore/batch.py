"""Micro-batches of one optimizer step, and the one function that turns them into a model's inputs.

Shapes
------
b  rows of a micro-batch        s  row length [tokens], padded, before the context-parallel split
n  samples packed in one row    s/cp  a context-parallel rank's part of a row, two zig-zag chunks

Every tensor is aligned to the position that *predicts*: logits at position t score token t + 1, so ``targets[t]`` is
``tokens[t + 1]`` and ``mask[t]`` says whether that token belongs to the response. Hence a split along s is the same for
all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from p3o_launch.runtime.mcore.compat import quiet_import
from p3o_launch.runtime.mcore.context_parallel import packed_zigzag_indices
from p3o_launch.runtime.types import Sample


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch, not yet split over context-parallel ranks.

    ``tokens``, ``targets`` [b, s] int64; ``mask`` [b, s] bool; ``behavior_log_probs``, ``advantages`` [b, s] float;
    ``position_ids`` [b, s] int64, counted within each sample. When b = 1 row packs n samples, ``cu_seqlens`` [n + 1]
    int32 holds their bounds and ``bounds`` the same on the host (reading a tensor would cost a sync), else both are
    None. ``cp_group``: the group this micro-batch is split over when it is not the layout's own (dynamic context
    parallelism); ``None`` means the layout's.
    """

    tokens: Tensor
    position_ids: Tensor
    targets: Tensor
    mask: Tensor
    behavior_log_probs: Tensor
    advantages: Tensor
    cu_seqlens: Tensor | None = None
    bounds: tuple[int, ...] | None = None
    cp_group: ProcessGroup | None = None

    def to(self, device: torch.device) -> MicroBatch:
        """Copy to ``device``."""
        moved: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        moved |= {name: value.to(device) for name, value in moved.items() if isinstance(value, Tensor)}
        return MicroBatch(**moved)


@dataclass(frozen=True)
class ForwardInputs:
    """What both passes feed the model, and what both loss functions read; [b, s/cp] each."""

    model_kwargs: dict[str, Any]
    targets: Tensor
    mask: Tensor
    behavior_log_probs: Tensor
    advantages: Tensor


def forward_inputs(micro_batch: MicroBatch, cp_group: ProcessGroup | None) -> ForwardInputs:
    """Build the inputs of a forward pass. The stats pass and the train pass both call this and nothing else.

    ``cp_group``: the layout's context-parallel group, used unless the micro-batch names its own.
    """
    group = micro_batch.cp_group if micro_batch.cp_group is not None else cp_group
    size = group.size() if group is not None else 1
    rank = group.rank() if group is not None else 0
    edges = micro_batch.bounds if micro_batch.bounds is not None else (0, micro_batch.tokens.shape[1])
    index = packed_zigzag_indices(edges, rank, size, micro_batch.tokens.device) if size > 1 else None

    def split(tensor: Tensor) -> Tensor:
        return tensor if index is None else tensor.index_select(1, index)

    kwargs: dict[str, Any] = {
        "input_ids": split(micro_batch.tokens),
        "position_ids": split(micro_batch.position_ids),
        "attention_mask": None,
    }
    if micro_batch.cu_seqlens is not None:
        kwargs["packed_seq_params"] = _packed_params(micro_batch)
    return ForwardInputs(
        model_kwargs=kwargs,
        targets=split(micro_batch.targets),
        mask=split(micro_batch.mask),
        behavior_log_probs=split(micro_batch.behavior_log_probs),
        advantages=split(micro_batch.advantages),
    )


def _packed_params(micro_batch: MicroBatch) -> Any:
    cu_seqlens, bounds = micro_batch.cu_seqlens, micro_batch.bounds
    assert bounds is not None
    longest = max(end - start for start, end in pairwise(bounds))
    params = quiet_import("megatron.core.packed_seq_params").PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=cu_seqlens,
        cu_seqlens_kv_padded=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    if micro_batch.cp_group is not None:
        params.cp_group, params.local_cp_size = micro_batch.cp_group, micro_batch.cp_group.size()
    return params


def padded_length(sample: Sample, multiple: int) -> int:
    """Tokens of a sample, prompt and response, rounded up to ``multiple``."""
    n = len(sample.prompt_ids) + len(sample.response_ids)
    return n + -n % multiple


def make_micro_batch(
    samples: Sequence[Sample], *, row_length: int | None, multiple: int, pad_id: int, packed: bool, dtype: torch.dtype
) -> MicroBatch:
    """Tensors of one micro-batch, on the CPU.

    ``row_length`` [tokens]: pad rows to this (pipelines need equal rows over a step), else to the longest sample.
    ``multiple``: every segment is padded to a multiple of this. An empty sample list makes a dummy: one short row whose
    mask is empty, which adds nothing to any sum. ``dtype``: of log-probs and advantages.
    """
    lengths = [padded_length(s, multiple) for s in samples]
    if not samples:
        lengths = [row_length if row_length is not None else max(multiple, 2)]
    bounds: tuple[int, ...] | None = None
    if packed:
        bounds = (0, *accumulate(lengths))
        if row_length is not None and bounds[-1] < row_length:
            bounds = (*bounds, row_length)
        shape = (1, bounds[-1])
        places = [(0, start) for start in bounds[: len(samples)]]
    else:
        shape = (max(len(samples), 1), max([*lengths, row_length or 0]))
        places = [(row, 0) for row in range(len(samples))]
    tokens = torch.full(shape, pad_id, dtype=torch.int64)
    targets = torch.full(shape, pad_id, dtype=torch.int64)
    mask = torch.zeros(shape, dtype=torch.bool)
    behavior = torch.zeros(shape, dtype=dtype)
    advantages = torch.zeros(shape, dtype=dtype)
    for sample, (row, start) in zip(samples, places, strict=True):
        ids = torch.tensor(sample.prompt_ids + sample.response_ids, dtype=torch.int64)
        tokens[row, start : start + len(ids)] = ids
        targets[row, start : start + len(ids) - 1] = ids[1:]
        first = start + len(sample.prompt_ids) - 1
        last = first + len(sample.response_ids)
        mask[row, first:last] = True
        behavior[row, first:last] = torch.tensor(sample.behavior_log_probs, dtype=dtype)
        advantages[row, first:last] = sample.advantage
    segments = pairwise(bounds) if bounds is not None else [(0, shape[1])]
    position_ids = torch.cat([torch.arange(end - start) for start, end in segments]).expand(shape).contiguous()
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32) if bounds is not None else None
    return MicroBatch(tokens, position_ids, targets, mask, behavior, advantages, cu_seqlens, bounds)
