"""The two collectives of a two-pass step. The group is an argument; nothing here knows Megatron.

A group that is ``None`` or has one member is skipped. It never means the world, as it would in torch.distributed:
summing over TP or PP replicas would scale N.

    moments [4] float64 = (S1, S2, N, invalid), see ``objective/ess.py``
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def sum_moments(moments: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sum over the ranks that hold different tokens (DP x CP), in one all-reduce of four doubles.

    In place; returns ``moments``. Every rank of the group must call.
    """
    _require_moments(moments)
    if not _is_alone(group):
        dist.all_reduce(moments, group=group)
    return moments


def broadcast_moments(moments: Tensor, src_global_rank: int, group: dist.ProcessGroup | None) -> Tensor:
    """Give every pipeline stage the sums of the last one (global rank ``src_global_rank``), in one broadcast.

    In place; returns ``moments``. What the other stages pass in is overwritten, not read.
    """
    _require_moments(moments)
    if not _is_alone(group):
        dist.broadcast(moments, src=src_global_rank, group=group)
    return moments


def _is_alone(group: dist.ProcessGroup | None) -> bool:
    return group is None or dist.get_world_size(group) == 1


def _require_moments(moments: Tensor) -> None:
    # A rank with another size or dtype would make the backend read past a buffer, or abort the whole group.
    if moments.shape != (4,) or moments.dtype != torch.float64:
        raise ValueError(f"moments must be float64 of shape (4,), got {moments.dtype} of shape {tuple(moments.shape)}")
