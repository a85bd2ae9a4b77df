"""The P3O objective (Fakoor et al., arXiv:2605.12380) and the GRPO baseline, as pure functions on tensors.

No process group, no Megatron, no state. What belongs to a whole optimizer step goes in as a :class:`StepContext`.
"""

from __future__ import annotations

from p3o_launch.runtime.objective.advantage import expand_to_tokens, group_advantages
from p3o_launch.runtime.objective.ess import ESS_EPS, StepContext, ess_moments, step_context
from p3o_launch.runtime.objective.loss import (
    ClipTerms,
    TokenTerms,
    exact_kl,
    kl_proxy,
    p3o_token_terms,
    ppo_clip_loss,
    ppo_clip_terms,
)

__all__ = [
    "ESS_EPS",
    "ClipTerms",
    "StepContext",
    "TokenTerms",
    "ess_moments",
    "exact_kl",
    "expand_to_tokens",
    "group_advantages",
    "kl_proxy",
    "p3o_token_terms",
    "ppo_clip_loss",
    "ppo_clip_terms",
    "step_context",
]
