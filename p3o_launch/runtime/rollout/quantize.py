"""Rounding of rollout weights to what a low-precision engine would hold. The values stay in the model's dtype.

Symmetric round-to-nearest with one scale per output channel: w -> s * round(w / s), s = max|w| / largest code. This is
what weight-only serving kernels compute, so the rollout policy is really another policy, and its log-probs are exact.

Shapes: weight [out, in]; amax [out].
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

Scheme = Literal["none", "int8", "int4", "fp8_e4m3"]

_LARGEST_CODE = {"int8": 127.0, "int4": 7.0, "fp8_e4m3": 448.0}


def channel_amax(weight: Tensor) -> Tensor:
    """Largest magnitude of each output channel: [out, in] -> [out]."""
    return weight.abs().amax(dim=1)


def rounded(weight: Tensor, scheme: Scheme, amax: Tensor | None = None) -> Tensor:
    """A copy of ``weight`` [out, in] with the values ``scheme`` can hold.

    ``amax`` [out]: largest magnitude of each *whole* output channel. Pass it when ``weight`` is a slice along the input
    dimension, or the scale would depend on the slicing.
    """
    if scheme not in get_args(Scheme):
        raise ValueError(f"unknown weight quantization {scheme!r}; known: {', '.join(get_args(Scheme))}")
    if scheme == "none":
        return weight.clone()
    amax = channel_amax(weight) if amax is None else amax
    # A channel of zeros has no scale; 1 keeps it zero.
    scale = torch.where(amax > 0, amax.float() / _LARGEST_CODE[scheme], 1.0)[:, None]
    codes = weight.float() / scale
    if scheme == "fp8_e4m3":
        codes = codes.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float()
    else:
        codes = codes.round()
    return (codes * scale).to(weight.dtype)
