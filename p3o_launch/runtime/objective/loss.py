"""Token terms of P3O (arXiv:2605.12380, Eq. 7, 12 and Algorithm 2) and of the PPO-clip baseline.

Shape legend
    b   samples        s   positions        v   vocabulary        V   valid response tokens (mask true), N of them
    log_probs p, behavior_log_probs b, advantages A, mask, every returned term [b, s]      logits [b, s, v]

    l = p - b           r = exp(l)          c = e (StepContext, float64, no gradient)
    score      -sg(min(r, c)) p sg(A)                          one-sided cap, no lower clip, no branch on the sign of A
    K          l + exp(clip(-l, -10, 10)) - 1                  behaviour KL, sampled token (k3)
    token loss score + (1 - e) K                               Eq. 12; divide the sum over the step by N, once

Nothing here divides: a mean of micro-batch means is a different objective. Terms are float32 (float64 if an input
is), and zero outside V in value and gradient whatever the padding holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from p3o_launch.runtime.objective.ess import StepContext
from p3o_launch.runtime.objective.masking import as_bool, log_ratio, require_same_shape, working_dtype, zero_outside

KL_CLAMP = 10.0


@dataclass(frozen=True, slots=True)
class TokenTerms:
    """Per-token terms [b, s]. Only ``score_loss``, ``behavior_kl`` and ``adaptive_kl_loss`` carry a gradient.

    ``cap_hits`` (r > c) and ``clip_hits`` (r outside the monitoring band) are 0.0 or 1.0.
    """

    ratio: Tensor
    coefficient: Tensor
    score_loss: Tensor
    behavior_kl: Tensor
    adaptive_kl_loss: Tensor
    cap_hits: Tensor
    clip_hits: Tensor

    @property
    def token_loss(self) -> Tensor:
        """score + (1 - e) K [b, s]."""
        return self.score_loss + self.adaptive_kl_loss


@dataclass(frozen=True, slots=True)
class ClipTerms:
    """PPO-clip terms [b, s]. ``clip_hits``: 1.0 where the clipped branch is the active one."""

    ratio: Tensor
    loss: Tensor
    clip_hits: Tensor


def p3o_token_terms(
    log_probs: Tensor,
    behavior_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    context: StepContext,
    kl_mode: str = "proxy_safe",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> TokenTerms:
    """Terms of Eq. 12 for one micro-batch, under the context of its ESS scope.

    ``clip_low``, ``clip_high``: the monitoring band [1 - low, 1 + high]; it never enters the loss. Raises
    ``ValueError`` on unequal shapes or an unknown ``kl_mode``.
    """
    require_same_shape(log_probs=log_probs, behavior_log_probs=behavior_log_probs, advantages=advantages, mask=mask)
    valid = as_bool(mask)
    dtype = working_dtype(log_probs, behavior_log_probs)
    policy = zero_outside(log_probs, valid, dtype)
    log_r = log_ratio(log_probs, behavior_log_probs, valid)
    ratio = torch.where(valid, log_r.detach().exp(), 0.0)
    coefficient = ratio.clamp(max=context.cap)
    behavior_kl = kl_proxy(log_r, kl_mode)
    # The comparison is float32 on purpose: on-policy, c = 1 - 1e-8-ish is 1 there, and no token counts as capped.
    ratio32 = ratio.float()
    cap32 = torch.full((), context.cap, dtype=torch.float32, device=ratio.device)
    outside = (ratio32 < 1.0 - clip_low) | (ratio32 > 1.0 + clip_high)
    return TokenTerms(
        ratio=ratio,
        coefficient=coefficient,
        score_loss=-coefficient * policy * zero_outside(advantages.detach(), valid, dtype),
        behavior_kl=behavior_kl,
        adaptive_kl_loss=(1.0 - context.ess) * behavior_kl,
        cap_hits=(ratio32 > cap32).to(dtype),
        clip_hits=(outside & valid).to(dtype),
    )


def kl_proxy(log_ratio: Tensor, kl_mode: str = "proxy_safe") -> Tensor:
    """K = l + exp(clip(-l, -10, 10)) - 1, any shape. Its mean under the policy's samples is the KL while |l| <= 10.

    ``proxy`` lets autograd differentiate the clamp: the slope beyond it is +1, which pushes a token that is already
    far too unlikely (l < -10) further away. ``proxy_safe`` has the same value and the slope 1 - exp(clip(-l)).
    """
    clamped_exp = (-log_ratio).clamp(-KL_CLAMP, KL_CLAMP).exp()
    value = log_ratio + clamped_exp - 1.0
    if kl_mode == "proxy":
        return value
    if kl_mode != "proxy_safe":
        hint = "; the exact KL needs full-vocabulary logits of the rollout: use exact_kl" if kl_mode == "exact" else ""
        raise ValueError(f"kl_mode must be 'proxy_safe' or 'proxy', got {kl_mode!r}{hint}")
    slope = (1.0 - clamped_exp).detach()
    return value.detach() + slope * (log_ratio - log_ratio.detach())


def exact_kl(policy_logits: Tensor, behavior_logits: Tensor, mask: Tensor) -> Tensor:
    """KL(policy || behaviour) per token over the whole vocabulary [b, s]: checks ``kl_proxy``, never trains.

    Logits outside V are replaced by 0 before the softmax. Raises ``ValueError`` on unequal shapes.
    """
    require_same_shape(policy_logits=policy_logits, behavior_logits=behavior_logits)
    require_same_shape(**{"policy_logits without vocabulary": policy_logits[..., 0], "mask": mask})
    valid = as_bool(mask)
    dtype = working_dtype(policy_logits, behavior_logits)
    policy = zero_outside(policy_logits, valid.unsqueeze(-1), dtype).log_softmax(-1)
    behavior = zero_outside(behavior_logits, valid.unsqueeze(-1), dtype).log_softmax(-1)
    return torch.where(valid, (policy.exp() * (policy - behavior)).sum(-1), 0.0)


def ppo_clip_terms(
    log_probs: Tensor,
    behavior_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    eps_low: float,
    eps_high: float,
    dual_clip: float | None = None,
) -> ClipTerms:
    """max(-r A, -clip(r, 1 - low, 1 + high) A) per token, r against the behaviour log-probs.

    ``dual_clip`` (> 1): where A < 0 the loss is at most -dual_clip * A. The ratio is not differentiated where the
    clipped branch is active: an overflown ratio there must not turn a zero gradient into 0 * inf. Raises
    ``ValueError`` on unequal shapes.
    """
    require_same_shape(log_probs=log_probs, behavior_log_probs=behavior_log_probs, advantages=advantages, mask=mask)
    valid = as_bool(mask)
    log_r = log_ratio(log_probs, behavior_log_probs, valid)
    advantage = zero_outside(advantages.detach(), valid, log_r.dtype)
    ratio = torch.where(valid, log_r.detach().exp(), 0.0)
    clipped_loss = -ratio.clamp(1.0 - eps_low, 1.0 + eps_high) * advantage
    # -ratio * advantage is nan at inf * 0, where the clipped loss is 0 and so is the gradient.
    clip_active = ~(-ratio * advantage >= clipped_loss)
    bounded = clip_active
    if dual_clip is not None:
        bound = -dual_clip * advantage
        at_bound = (advantage < 0) & (torch.maximum(-ratio * advantage, clipped_loss) > bound)
        clipped_loss, bounded = torch.where(at_bound, bound, clipped_loss), clip_active | at_bound
    live_ratio = torch.where(bounded, 0.0, log_r).exp()
    loss = torch.where(bounded, clipped_loss, -live_ratio * advantage)
    return ClipTerms(ratio=ratio, loss=torch.where(valid, loss, 0.0), clip_hits=(clip_active & valid).to(log_r.dtype))


def ppo_clip_loss(
    log_probs: Tensor,
    behavior_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    eps_low: float,
    eps_high: float,
    dual_clip: float | None = None,
) -> Tensor:
    """Per-token loss [b, s] of :func:`ppo_clip_terms`; divide its sum over the step by the step's N."""
    return ppo_clip_terms(log_probs, behavior_log_probs, advantages, mask, eps_low, eps_high, dual_clip).loss
