"""Log-probs of given tokens, and entropies, from logits whose vocabulary is split over the tensor-parallel ranks.

Shapes: b sequences, s tokens, w = v / tp words of this rank. Rank r holds words [r w, (r + 1) w).

Same formula as Megatron's vocab-parallel cross entropy, which always computes in float32; this one follows float64
logits, applies the temperature, and needs two collectives instead of three. Static maths first, collectives only in
the autograd function, so the maths can be tested without processes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def working_dtype(logits: torch.Tensor) -> torch.dtype:
    """float64 for float64 logits, float32 for everything else."""
    return torch.float64 if logits.dtype is torch.float64 else torch.float32


def scaled_copy(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """logits / temperature in the working type, as one new tensor: at [b, s, w] a second one would count."""
    scaled = logits.to(working_dtype(logits), copy=True)
    return scaled if temperature == 1.0 else scaled.div_(temperature)


def local_targets(targets: torch.Tensor, first_word: int, words: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Position of each target among this rank's words, 0 where another rank holds it; and whether this rank does."""
    mine = (targets >= first_word) & (targets < first_word + words)
    return torch.where(mine, targets - first_word, 0), mine


def shifted_sums(shifted: torch.Tensor, index: torch.Tensor, mine: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[b, s, w] logits minus their maximum -> this rank's share of (target logit, sum of exponentials), [2, b, s].

    ``shifted`` is overwritten with its exponentials, which the second value returns.
    """
    target = shifted.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    target = torch.where(mine, target, torch.zeros_like(target))
    exponentials = shifted.exp_()
    return torch.stack([target, exponentials.sum(-1)]), exponentials


class _TokenLogProbs(torch.autograd.Function):
    """Gradient: d log p_t / d x_j = (1[j = t] - p_j) / T."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, group: dist.ProcessGroup | None, temperature: float
    ) -> torch.Tensor:
        size, rank = (1, 0) if group is None else (group.size(), group.rank())
        scaled = scaled_copy(logits, temperature)
        highest = scaled.amax(-1)
        if size > 1:
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        scaled -= highest.unsqueeze(-1)
        words = logits.shape[-1]
        index, mine = local_targets(targets, rank * words, words)
        sums, exponentials = shifted_sums(scaled, index, mine)
        if size > 1:
            dist.all_reduce(sums, group=group)
        probabilities = exponentials.div_(sums[1].unsqueeze(-1))
        ctx.save_for_backward(probabilities, index, mine)
        ctx.dtype, ctx.temperature, ctx.used = logits.dtype, temperature, False
        return sums[0] - sums[1].log()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        # The probabilities become the gradient in place: a second copy of [b, s, w] is the largest tensor of a step.
        assert not ctx.used, "the backward of token_log_probs can run only once"
        ctx.used = True
        probabilities, index, mine = ctx.saved_tensors
        scaled = (grad / ctx.temperature).to(probabilities.dtype)
        result = probabilities.mul_(-scaled.unsqueeze(-1))
        result.scatter_add_(-1, index.unsqueeze(-1), (scaled * mine).unsqueeze(-1))
        return result.to(ctx.dtype), None, None, None


def token_log_probs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    tp_group: dist.ProcessGroup | None,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Log-prob of each target under softmax(logits / temperature): [b, s, v/tp] and int64 [b, s] -> [b, s].

    float64 for float64 logits, else float32. Differentiable once in ``logits``. Targets must be words of the
    vocabulary, also where the caller masks them. ``tp_group`` None means the vocabulary is not split.
    """
    if logits.shape[:-1] != targets.shape:
        raise ValueError(f"logits {tuple(logits.shape)} and targets {tuple(targets.shape)} do not agree")
    result: torch.Tensor = _TokenLogProbs.apply(logits, targets, tp_group, temperature)
    return result


@torch.no_grad()
def token_entropy(logits: torch.Tensor, tp_group: dist.ProcessGroup | None, temperature: float = 1.0) -> torch.Tensor:
    """Entropy [nats] of softmax(logits / temperature) at each token: [b, s, v/tp] -> [b, s]. No gradient."""
    split = tp_group is not None and tp_group.size() > 1
    scaled = scaled_copy(logits, temperature)
    highest = scaled.amax(-1)
    if split:
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=tp_group)
    scaled -= highest.unsqueeze(-1)
    weights = scaled.exp()
    # 0 * -inf is nan: a word that cannot occur adds nothing.
    moment = torch.where(weights > 0, weights * scaled, 0.0).sum(-1)
    sums = torch.stack([weights.sum(-1), moment])
    if split:
        dist.all_reduce(sums, group=tp_group)
    return sums[0].log() - sums[1] / sums[0]
