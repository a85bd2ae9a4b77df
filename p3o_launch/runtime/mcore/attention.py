"""Core attention for the layer spec without Transformer Engine: dense, packed and context-parallel, on any device.

Shapes: s query tokens of this rank, t key tokens, b sequences, n heads and g key/value groups of this TP rank, d head
width, c context-parallel ranks.

Megatron's own ``DotProductAttention`` refuses packed sequences and context parallelism. This module serves both with
the results of the plain case: keys and values are gathered over the context-parallel group and put back in the order
of the text, so every query sums over its keys in the order it would without the split. Transformer Engine's attention
replaces it where it is installed.
"""

from __future__ import annotations

import contextlib
import copy
import math
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from p3o_launch.runtime.mcore.compat import all_gather_single, quiet_import, reduce_scatter_single
from p3o_launch.runtime.mcore.context_parallel import packed_zigzag_indices, zigzag_indices

_MegatronModule = quiet_import("megatron.core.transformer.module").MegatronModule
_SelfAttention = quiet_import("megatron.core.transformer.attention").SelfAttention


class _GatherSequence(torch.autograd.Function):
    """Concatenate dim 0 over the group; the backward sums the gradients of all ranks and returns this rank's part.

    Every rank's queries attend to the gathered keys, so the gradient of one rank's keys is spread over all ranks.
    """

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        gathered = local.new_empty((group.size() * local.shape[0], *local.shape[1:]))
        all_gather_single(gathered, local.contiguous(), group)
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.contiguous()
        local = grad.new_empty((grad.shape[0] // ctx.group.size(), *grad.shape[1:]))
        reduce_scatter_single(local, grad, ctx.group)
        return local, None


def gather_sequence(local: torch.Tensor, order: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """``local`` [s, ...] of every rank -> [c s, ...] in text order. ``order``: text position of each gathered row."""
    gathered: torch.Tensor = _GatherSequence.apply(local, group)
    return gathered.index_select(0, torch.argsort(order))


class TorchCoreAttention(_MegatronModule):  # type: ignore[misc, valid-type]
    """Scaled dot product attention with grouped keys, causal unless a mask is given.

    ``attention_mask`` (bool, True where a key is hidden, broadcastable to [b, n, s, t]) replaces the causal mask, as in
    Megatron. Without one, query i stands at position t - s + i: a prefill, a decoding step over a key/value cache and a
    training batch are the same case.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        if attention_type != "self":
            raise ValueError(f"attention of type {attention_type!r} is not supported, only self attention")
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        self.cp_group: dist.ProcessGroup | None = getattr(pg_collection, "cp", None)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """[s, b, n, d], [t, b, g, d] twice -> [s, b, n d]; packed: [s, n, d], [t, g, d] twice -> [s, n d]."""
        if attention_bias is not None:
            raise ValueError("an attention bias is not supported")
        if packed_seq_params is not None and packed_seq_params.qkv_format == "thd":
            return self._packed(query, key, value, packed_seq_params)
        return self._dense(query, key, value, attention_mask)

    def _dense(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, hidden: torch.Tensor | None
    ) -> torch.Tensor:
        visible = None if hidden is None else ~hidden
        group = self.cp_group
        if group is not None and group.size() > 1:
            if hidden is not None:
                raise ValueError("context parallelism takes no attention mask: the text order gives it")
            size, tokens = group.size(), query.shape[0] * group.size()
            position = zigzag_indices(tokens, group.rank(), size, query.device)
            order = torch.cat([zigzag_indices(tokens, rank, size, query.device) for rank in range(size)])
            key, value = gather_sequence(key, order, group), gather_sequence(value, order, group)
            visible = position[:, None] >= torch.arange(tokens, device=query.device)[None, :]
        q, k, v = (side.permute(1, 2, 0, 3) for side in (query, key, value))
        out = self._attend(q, k, v, visible)
        return out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)

    def _packed(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: Any) -> torch.Tensor:
        """Each segment attends within itself. Segment bounds count tokens of the whole group, as in Megatron."""
        bounds = params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded
        group = _micro_batch_group(params) or self.cp_group
        size, rank = (1, 0) if group is None else (group.size(), group.rank())
        edges: list[int] = bounds.tolist()
        if group is not None and size > 1:
            order = torch.cat([packed_zigzag_indices(edges, r, size, query.device) for r in range(size)])
            key, value = gather_sequence(key, order, group), gather_sequence(value, order, group)
        pieces = []
        for start, stop in pairwise(edges):
            visible = None
            if size > 1:
                position = zigzag_indices(stop - start, rank, size, query.device)
                visible = position[:, None] >= torch.arange(stop - start, device=query.device)[None, :]
            rows = query[start // size : stop // size]
            q, k, v = (side.transpose(0, 1)[None] for side in (rows, key[start:stop], value[start:stop]))
            pieces.append(self._attend(q, k, v, visible)[0].transpose(0, 1))
        return torch.cat(pieces).reshape(query.shape[0], -1)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor | None
    ) -> torch.Tensor:
        """[b, n, s, d], [b, g, t, d] twice -> [b, n, s, d]. ``visible`` None: causal, aligned at the end."""
        causal = visible is None and query.shape[2] == key.shape[2]
        if visible is None and not causal and query.shape[2] > 1:
            rows = torch.arange(key.shape[2] - query.shape[2], key.shape[2], device=query.device)
            visible = rows[:, None] >= torch.arange(key.shape[2], device=query.device)[None, :]
        dropout = self.dropout if self.training else 0.0
        with _dropout_stream(self.config) if dropout > 0.0 else contextlib.nullcontext():
            return F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=visible,
                dropout_p=dropout,
                is_causal=causal,
                scale=self.scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )


class MicroBatchGroupSelfAttention(_SelfAttention):  # type: ignore[misc, valid-type]
    """Megatron's self attention, with rotary positions of the context-parallel group a micro-batch names.

    A packed micro-batch may be split over a group of its own, or not at all (``local_cp_size`` 1): dynamic context
    parallelism, and models that split their tokens inside. Megatron takes the keys' group from the micro-batch, but the
    rotary positions from the group it was built with.
    """

    pg_collection: Any

    def forward(self, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Any:
        """As Megatron's."""
        group = _micro_batch_group(packed_seq_params)
        if group is None:
            return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)
        built_with = self.pg_collection
        self.pg_collection = copy.copy(built_with)
        self.pg_collection.cp = group
        try:
            return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)
        finally:
            self.pg_collection = built_with


class _Alone:
    """A group of one rank, as far as rotary code asks."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def _micro_batch_group(packed_seq_params: Any) -> Any:
    """The group a micro-batch is split over when it is not the model's own; None when it says nothing."""
    if packed_seq_params is None:
        return None
    if getattr(packed_seq_params, "cp_group", None) is not None:
        return packed_seq_params.cp_group
    return _Alone() if getattr(packed_seq_params, "local_cp_size", None) == 1 else None


def _dropout_stream(config: Any) -> contextlib.AbstractContextManager[None]:
    """Heads differ over TP ranks, so their dropout draws from the state that differs over TP ranks."""
    if config.sequence_parallel:
        return contextlib.nullcontext()
    tracker = quiet_import("megatron.core.tensor_parallel.random").get_cuda_rng_tracker()
    result: contextlib.AbstractContextManager[None] = tracker.fork()
    return result
