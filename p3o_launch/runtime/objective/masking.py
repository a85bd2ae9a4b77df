"""Shape checks, precision, and the rule that padding may hold anything.

Shape legend
    b   samples in the micro-batch
    s   positions of the padded sequence
    V   valid response tokens: positions where mask is true
    log_probs [b, s]   behavior_log_probs [b, s]   mask [b, s] (bool, or numbers where non-zero is valid)

Every function that takes a mask replaces what lies outside V *before* any arithmetic: ``0 * nan`` is nan, both in
the value and in the backward pass, so multiplying by a mask afterwards is too late.
"""

from __future__ import annotations

import torch
from torch import Tensor


def require_same_shape(**tensors: Tensor) -> None:
    """Refuse broadcasting: a [b, 1] advantage against [b, s] log-probs is a mistake that would run.

    Raises ``ValueError`` with every name and shape.
    """
    if len({tuple(t.shape) for t in tensors.values()}) > 1:
        shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in tensors.items())
        raise ValueError(f"shapes must be equal, broadcasting is not allowed: {shapes}")


def working_dtype(*tensors: Tensor) -> torch.dtype:
    """float32, or float64 when any input is float64 (the verification mode of the trainer)."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def as_bool(mask: Tensor) -> Tensor:
    """Mask as bool, on its device."""
    return mask if mask.dtype == torch.bool else mask != 0


def zero_outside(values: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Values in ``dtype`` with exact zeros outside V; the gradient outside V is exactly zero too."""
    return torch.where(mask, values.to(dtype), torch.zeros((), dtype=dtype, device=values.device))


def log_ratio(log_probs: Tensor, behavior_log_probs: Tensor, mask: Tensor) -> Tensor:
    """l = p - b on V and 0 elsewhere [b, s], subtracted after both are upcast to the working dtype."""
    dtype = working_dtype(log_probs, behavior_log_probs)
    return zero_outside(log_probs, mask, dtype) - zero_outside(behavior_log_probs, mask, dtype)
