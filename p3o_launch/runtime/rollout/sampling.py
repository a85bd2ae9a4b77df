"""From logits to a token: temperature, truncation (evaluation only), and random numbers that belong to a request.

Shapes: n rows of a batch, v vocabulary entries. logits, log-probs [n, v]; seeds, steps, tokens [n].

Sampling is by the inverse distribution function: one uniform number per token. The numbers come from a counter, not
from a generator with state, so a request draws the same stream in any batch, on any rank and device, and nobody else's
random state moves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from p3o_launch.runtime.types import SamplingParams


def _signed(value: int) -> int:
    """The int64 with the bits of an unsigned 64-bit ``value``: torch multiplies int64 modulo 2^64."""
    return value - (1 << 64) if value >= 1 << 63 else value


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MULTIPLIERS = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))


def mix64(z: Tensor) -> Tensor:
    """SplitMix64's finalizer on int64 bits (Steele, Lea, Flood: Fast splittable pseudorandom number generators)."""
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        z = (z ^ _shift_right(z, shift)) * multiplier
    return z ^ _shift_right(z, 31)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's own keeps the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def uniforms(seeds: Tensor, steps: Tensor) -> Tensor:
    """Number ``steps[i]`` (counted from 0) of stream ``seeds[i]``, uniform in [0, 1); float64 [n].

    ``seeds``, ``steps``: int64 [n]. Seeds are mixed first, so that neighbouring seeds share no numbers.
    """
    bits = mix64(mix64(seeds) + (steps + 1) * _GAMMA)
    return _shift_right(bits, 11).double() * 2.0**-53


def sampled_log_probs(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """Log-probs of the distribution that is sampled, [n, v]; at least float32. Cut-off entries are -inf.

    Temperature first, then top-k, then top-p on what top-k left, each renormalised. Temperature 0 is greedy: the whole
    mass on the largest logit, the first of equals. Raises ValueError for parameters outside their range.
    """
    check_sampling(sampling)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if sampling.temperature == 0:
        greedy = torch.full_like(logits, -torch.inf)
        return greedy.scatter_(1, logits.argmax(-1, keepdim=True), 0.0)
    scaled = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        scaled = _keep_top_k(scaled, sampling.top_k)
    if sampling.top_p < 1:
        scaled = _keep_top_p(scaled, sampling.top_p)
    return torch.log_softmax(scaled, dim=-1)


def check_sampling(sampling: SamplingParams) -> None:
    """Raise ValueError when a parameter is outside its range."""
    if not 0 <= sampling.temperature < float("inf"):
        raise ValueError(f"temperature must be finite and not negative, not {sampling.temperature}")
    if not 0 < sampling.top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1], not {sampling.top_p}")
    if sampling.top_k == 0 or sampling.top_k < -1:
        raise ValueError(f"top_k must be -1 (off) or at least 1, not {sampling.top_k}")
    if sampling.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, not {sampling.max_new_tokens}")


def _keep_top_k(scaled: Tensor, k: int) -> Tensor:
    """Exactly ``k`` entries survive, also among equals."""
    kept = scaled.topk(k, dim=-1)
    return torch.full_like(scaled, -torch.inf).scatter_(1, kept.indices, kept.values)


def _keep_top_p(scaled: Tensor, p: float) -> Tensor:
    """The smallest set of likeliest entries whose mass reaches ``p``; never empty."""
    ordered = torch.softmax(scaled, dim=-1).sort(dim=-1, descending=True, stable=True)
    before = ordered.values.cumsum(-1) - ordered.values
    # ``before`` of the first entry is 0 up to rounding, and must count as below p however small p is.
    before[:, 0] = -1.0
    drop = torch.zeros_like(scaled, dtype=torch.bool).scatter_(1, ordered.indices, before >= p)
    return scaled.masked_fill(drop, -torch.inf)


def draw(log_probs: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The token each number falls on, and its log-prob: int64 [n] and float [n].

    ``numbers``: float64 [n] in [0, 1). The distribution function is summed in float64: at 150,000 entries a float32 sum
    would lose the rare ones. An entry of probability 0 is never drawn.
    """
    cumulative = log_probs.double().exp().cumsum(-1)
    total = cumulative[:, -1:]
    # Strictly below the total: rounding of the product must not point past the last entry that has mass.
    target = torch.minimum(numbers[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, target, right=True).clamp_(max=log_probs.shape[-1] - 1)
    return tokens.squeeze(1), log_probs.gather(1, tokens).squeeze(1)
