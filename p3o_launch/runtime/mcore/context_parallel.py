"""Which tokens a context-parallel rank holds: pure index arithmetic.

Megatron cuts a sequence into 2c equal chunks for c ranks and gives rank r chunks r and 2c - 1 - r, so that causal
attention costs every rank the same. Packed rows are cut segment by segment. Lengths must be multiples of 2c.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch


def zigzag_indices(tokens: int, cp_rank: int, cp_size: int, device: torch.device | str | None = None) -> torch.Tensor:
    """Text positions of this rank's tokens, in the order it holds them: int64 [tokens / cp_size]."""
    if tokens % (2 * cp_size):
        raise ValueError(f"{tokens} tokens cannot be cut into {2 * cp_size} equal chunks for {cp_size} ranks")
    chunk = tokens // (2 * cp_size)
    positions = torch.arange(tokens, device=device).view(2 * cp_size, chunk)
    return positions[[cp_rank, 2 * cp_size - 1 - cp_rank]].reshape(-1)


def packed_zigzag_indices(
    edges: Sequence[int], cp_rank: int, cp_size: int, device: torch.device | str | None = None
) -> torch.Tensor:
    """Row positions of this rank's tokens when each segment ``[edges[i], edges[i + 1])`` is cut by itself."""
    pieces = [start + zigzag_indices(stop - start, cp_rank, cp_size, device) for start, stop in pairwise(edges)]
    return torch.cat(pieces)


def split_sequence(tensor: torch.Tensor, cp_rank: int, cp_size: int, dim: int = 1) -> torch.Tensor:
    """This rank's part of ``tensor`` along its sequence dimension; the whole of it for one rank."""
    if cp_size == 1:
        return tensor
    return tensor.index_select(dim, zigzag_indices(tensor.shape[dim], cp_rank, cp_size, tensor.device))
