"""Effective sample size of the importance ratios (arXiv:2605.12380, Eq. 11), as sums that add up over a step.

Shape legend
    b   samples in the micro-batch        s   positions of the padded sequence
    V   valid response tokens             N   their number
    log_probs, behavior_log_probs, mask [b, s]
    moments [4] float64 = (S1, S2, N, invalid) = (sum r, sum r^2, count, tokens whose r or r^2 float64 cannot hold)

The moments add over micro-batches, data-parallel and context-parallel ranks; the ESS does not. ``ess_moments`` stays
on the device; ``step_context`` is the one place that waits for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from p3o_launch.errors import NonFiniteRatioError
from p3o_launch.runtime.objective.masking import as_bool, log_ratio, require_same_shape

ESS_EPS = 1e-8
"""Added to S2, neither to N * S2 nor to the quotient; visible when every ratio is tiny."""


@dataclass(frozen=True, slots=True)
class StepContext:
    """What every micro-batch of one ESS scope shares. Python numbers: detached from any graph, equal on all ranks.

    ``ess`` in [0, 1]; ``cap`` = ess (Eq. 12); ``valid_tokens`` = N; ``ratio_mean``, ``ratio_std``: over V, population.
    """

    ess: float
    cap: float
    valid_tokens: int
    ratio_mean: float
    ratio_std: float


@torch.no_grad()
def ess_moments(log_probs: Tensor, behavior_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Moments of the ratios of one micro-batch: float64 [4] on the device of ``log_probs``, without a host sync.

    The log-ratio is float32 after upcasting (float64 if an input is), exponential, square and sums are float64. A
    valid token counts as invalid when its ratio is not finite, or its square overflows or underflows to zero; the
    sums are zeroed then, so that the flag survives any later addition. Raises ``ValueError`` on unequal shapes.
    """
    require_same_shape(log_probs=log_probs, behavior_log_probs=behavior_log_probs, mask=mask)
    valid = as_bool(mask)
    ratio = torch.where(valid, log_ratio(log_probs, behavior_log_probs, valid).double().exp(), 0.0)
    square = ratio * ratio
    invalid = (valid & ~(torch.isfinite(square) & (square > 0))).sum(dtype=torch.float64)
    sums = torch.stack([ratio.sum(), square.sum(), valid.sum(dtype=torch.float64)])
    return torch.cat([torch.where(invalid > 0, 0.0, sums), invalid.reshape(1)])


def step_context(moments: Tensor) -> StepContext:
    """Normalised ESS, Eq. 11: e = clamp(S1^2 / (N (S2 + eps)), 0, 1), and the cap it sets.

    ``moments``: float64 [4], summed over the whole scope. One host sync. An empty V gives ess 1. Raises
    ``NonFiniteRatioError`` when a token is invalid or a sum is not finite: there is no fallback to ess = 1, which
    would switch the cap and the KL off exactly when they are needed. Raises ``ValueError`` on another shape or dtype.
    """
    if moments.shape != (4,) or moments.dtype != torch.float64:
        raise ValueError(f"moments must be float64 of shape (4,), got {moments.dtype} of shape {tuple(moments.shape)}")
    s1, s2, count, invalid = moments.tolist()
    if invalid > 0:
        raise NonFiniteRatioError(
            f"{invalid:.0f} token(s) of this optimizer step have an importance ratio that is not finite, "
            "or one whose square float64 cannot hold"
        )
    if not all(map(math.isfinite, (s1, s2, count, invalid))):
        raise NonFiniteRatioError(
            f"a sum over the importance ratios of this optimizer step is not finite (S1 {s1}, S2 {s2}, N {count})"
        )
    if count == 0:
        return StepContext(ess=1.0, cap=1.0, valid_tokens=0, ratio_mean=1.0, ratio_std=0.0)
    mean = s1 / count
    # Not s1 * s1 first: that overflows where the quotient is still representable.
    ess = min(max(s1 / (s2 + ESS_EPS) * mean, 0.0), 1.0)
    std = math.sqrt(max(s2 / count - mean * mean, 0.0))
    return StepContext(ess=ess, cap=ess, valid_tokens=int(count), ratio_mean=mean, ratio_std=std)
