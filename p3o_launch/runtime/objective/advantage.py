"""Group-relative advantages (GRPO), shared by P3O and the baseline.

Shape legend
    n   samples of a rollout        b, s   samples and positions of a micro-batch
    rewards [n]   group_ids [n], equal for samples of one prompt   advantages [n]

    A = (R - mean) / (std + 1e-6), mean and std (G - 1 denominator) over the G samples of the prompt
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from p3o_launch.runtime.objective.masking import as_bool, require_same_shape, working_dtype, zero_outside

STD_EPS = 1e-6


def group_advantages(
    rewards: Tensor | Sequence[float],
    group_ids: Tensor | Sequence[int],
    normalize: bool = True,
) -> Tensor:
    """Advantages [n], computed in float64; float32 unless the rewards are float64 (a list of floats is).

    A group whose rewards are all equal gets exactly 0, decided by comparing them and not by a rounded mean; so does a
    group of one, which has nothing to be compared with (a guard refuses such a preset). ``normalize`` false leaves
    the division by the standard deviation out. Raises ``ValueError`` on unequal shapes or a reward that is not finite.
    """
    rewards = rewards if isinstance(rewards, Tensor) else torch.tensor(rewards, dtype=torch.float64)
    ids = group_ids if isinstance(group_ids, Tensor) else torch.tensor(group_ids, dtype=torch.int64)
    require_same_shape(rewards=rewards, group_ids=ids)
    if rewards.dim() != 1:
        raise ValueError(f"rewards must have one dimension, got shape {tuple(rewards.shape)}")
    values = rewards.double()
    if not bool(torch.isfinite(values).all()):
        raise ValueError(f"rewards must be finite, got {values[~torch.isfinite(values)].tolist()}")
    _, group, counts = torch.unique(ids, return_inverse=True, return_counts=True)
    zeros = torch.zeros_like(counts, dtype=torch.float64)
    deviation = values - (zeros.scatter_add(0, group, values) / counts)[group]
    lowest = zeros.scatter_reduce(0, group, values, "amin", include_self=False)
    highest = zeros.scatter_reduce(0, group, values, "amax", include_self=False)
    advantages = torch.where((lowest == highest)[group], 0.0, deviation)
    if normalize:
        variance = zeros.scatter_add(0, group, deviation * deviation) / (counts - 1).clamp(min=1)
        advantages = advantages / (variance.sqrt()[group] + STD_EPS)
    return advantages.to(working_dtype(rewards))


def expand_to_tokens(advantages: Tensor, mask: Tensor) -> Tensor:
    """One advantage per sample [b] -> the same number on each of its valid tokens, 0 elsewhere [b, s]."""
    if mask.dim() != 2 or advantages.shape != mask.shape[:1]:
        raise ValueError(f"advantages {tuple(advantages.shape)} must be [b] and mask {tuple(mask.shape)} [b, s]")
    return zero_outside(advantages.unsqueeze(1).expand(mask.shape), as_bool(mask), advantages.dtype)
