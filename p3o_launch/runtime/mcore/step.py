"""The two-pass ESS step on Megatron: statistics pass, one all-reduce, frozen cap, training pass (docs/design.md).

Equations of arXiv:2605.12380 are in ``runtime/objective``; this file is the order in which they are applied to one
optimizer step that is cut over micro-batches and over DP x CP x TP x PP ranks. What it deliberately is not: it knows no
Ray, no files, no schedule of its own; both passes go through Megatron's ``get_forward_backward_func``.

Shapes: logits [b, s/cp, v/tp]; log-probs, mask, advantages [b, s/cp]; moments [4] = (S1, S2, N, invalid), float64.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from p3o_launch.errors import NonFiniteRatioError, RunError
from p3o_launch.runtime.collectives import broadcast_moments, sum_moments
from p3o_launch.runtime.mcore.batch import ForwardInputs, MicroBatch, forward_inputs
from p3o_launch.runtime.mcore.compat import quiet_import
from p3o_launch.runtime.mcore.cpu_backend import device_backend
from p3o_launch.runtime.mcore.groups import ParallelGroups
from p3o_launch.runtime.mcore.logprobs import token_entropy, token_log_probs
from p3o_launch.runtime.objective import StepContext, ess_moments, p3o_token_terms, ppo_clip_terms, step_context
from p3o_launch.runtime.replay import ReplayWindow, StatePair, replay_guard, undo_on_error

LossFunc = Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Any]]]

MEANS = (
    "loss",
    "score_loss",
    "behavior_kl_proxy",
    "adaptive_kl_loss",
    "cap_fraction",
    "clip_fraction",
    "entropy",
    "ess",
)
"""What a step reports per token: token sums, added over micro-batches and ranks, divided by N."""
SUMS = (*MEANS, "s1", "s2", "tokens")

_NOTHING, _GRADIENT, _FIGURES = 0, 1, 2
"""What a rank saw of a figure that is not finite, by weight: the highest on any rank tells who saw it."""


@dataclass(frozen=True, slots=True)
class Objective:
    """What one optimizer step minimises. ``eps_low``/``eps_high``: PPO's clip widths, for ``grpo`` only."""

    estimator: Literal["p3o", "grpo"]
    ess_scope: Literal["step", "micro_batch"] = "step"
    kl_mode: Literal["proxy_safe", "proxy"] = "proxy_safe"
    clip_low: float = 0.2
    clip_high: float = 0.2
    eps_low: float = 0.4
    eps_high: float = 0.4

    @property
    def two_pass(self) -> bool:
        """Whether the step needs a statistics pass before its training pass."""
        return self.estimator == "p3o" and self.ess_scope == "step"


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """One optimizer step: the frozen context (None for grpo), per-token means by name, and wall times [s]."""

    context: StepContext | None
    means: dict[str, float]
    grad_norm: float
    seconds: dict[str, float]


class PolicyStep:
    """Runs optimizer steps of one rank. Every rank of the layout must call :meth:`run` with its own micro-batches.

    ``chunks``: the DDP-wrapped model chunks of this rank, one per virtual pipeline stage. ``optimizer``: Megatron's.
    ``rng_states``: (get, set) pairs to restore after the statistics pass besides torch's own generators.
    """

    def __init__(
        self,
        chunks: list[nn.Module],
        optimizer: Any,
        groups: ParallelGroups,
        objective: Objective,
        rng_states: Sequence[StatePair] = (),
    ) -> None:
        self.chunks = chunks
        self.optimizer = optimizer
        self.groups = groups
        self.objective = objective
        self.device = torch.device(groups.device)
        self.rng_states = tuple(rng_states)
        self.context: StepContext | None = None
        """Published for the training pass alone."""

    def run(self, micro_batches: Sequence[MicroBatch], step: int) -> StepOutcome:
        """Statistics pass (p3o, step scope), training pass, optimizer step. ``step``: for error messages only.

        Raises NonFiniteRatioError, on every rank alike and before the optimizer moves, when a ratio, its square, a
        moment, the loss or a gradient is not finite. The rank states, windows and weights are then as before the call.
        """
        windows = [ReplayWindow(micro_batches) for _ in self.chunks]
        seconds: dict[str, float] = {}
        try:
            if self.objective.two_pass:
                started = time.perf_counter()
                self.context = self.frozen_context(windows, step)
                seconds["stats_pass_s"] = time.perf_counter() - started
            started = time.perf_counter()
            with undo_on_error(self.rng_states):  # a single-pass step may draw: dropout
                sums = self.train_pass(windows, step)
            seconds["train_pass_s"] = time.perf_counter() - started
            context = self.context
        finally:
            self.context = None
        started = time.perf_counter()
        with device_backend(self.groups.device):
            _, grad_norm, _ = self.optimizer.step()
        seconds["optimizer_s"] = time.perf_counter() - started
        return self.outcome(sums, context, float(grad_norm), seconds)

    # --- pass 1: S1, S2, N and the ESS of the whole optimizer step (Eq. 11) ---

    def frozen_context(self, windows: Sequence[ReplayWindow[MicroBatch]], step: int) -> StepContext:
        """Statistics pass, one all-reduce over DP x CP, one broadcast over PP, one host check on every rank."""
        with replay_guard(windows, self.rng_states):
            local = self.stats_pass(windows)
        total = local.clone()
        if self.groups.is_last_stage:
            sum_moments(total, self.groups.dp_cp)
        broadcast_moments(total, self.groups.last_stage_global_rank, self.groups.pp)
        try:
            return step_context(total)
        except NonFiniteRatioError as error:
            raise self._located(error, _FIGURES if local[3] > 0 else _NOTHING, step) from None

    @torch.no_grad()
    def stats_pass(self, windows: Sequence[ReplayWindow[MicroBatch]]) -> Tensor:
        """This rank's own moments [4], float64, on the device; zeros below the last pipeline stage. No host sync."""
        moments = torch.zeros(4, dtype=torch.float64, device=self.device)

        def accumulate(inputs: ForwardInputs, logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
            log_probs = token_log_probs(logits, inputs.targets, self.groups.tp)
            moments.add_(ess_moments(log_probs, inputs.behavior_log_probs, inputs.mask))
            return logits.new_zeros(()), _no_tokens(self.device), {}

        self._forward_backward(windows, accumulate, forward_only=True)
        return moments

    # --- pass 2: the loss of every micro-batch under the one frozen cap (Eq. 12) ---

    def train_pass(self, windows: Sequence[ReplayWindow[MicroBatch]], step: int) -> dict[str, float]:
        """Forward and backward of the whole step; gradients end up divided by the step's global token count N."""
        sums = torch.zeros(len(SUMS), dtype=torch.float64, device=self.device)
        failed = torch.zeros(2, dtype=torch.bool, device=self.device)  # [the step must not happen, seen on this rank]
        with device_backend(self.groups.device):
            for chunk in self.chunks:
                chunk.zero_grad_buffer()  # type: ignore[operator]
            self.optimizer.zero_grad()
        loss = self._p3o_loss if self.objective.estimator == "p3o" else self._grpo_loss
        self._forward_backward(windows, partial(loss, sums, failed), forward_only=False)
        return self._agree(sums, failed, step)

    def _p3o_loss(
        self, sums: Tensor, failed: Tensor, inputs: ForwardInputs, logits: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Token sum of - sg(min(r, c)) log pi sg(A) + (1 - e) KL, with the e and c of the step or the micro-batch."""
        log_probs = token_log_probs(logits, inputs.targets, self.groups.tp)
        moments = ess_moments(log_probs.detach(), inputs.behavior_log_probs, inputs.mask)
        context = self.context if self.objective.ess_scope == "step" else self._pooled_context(moments, failed)
        if context is None:  # a ratio of this micro-batch is not finite: `_agree` raises on every rank after the pass
            return (logits * 0).nan_to_num().sum(), inputs.mask.sum().int(), {}
        terms = p3o_token_terms(
            log_probs,
            inputs.behavior_log_probs,
            inputs.advantages,
            inputs.mask,
            context,
            kl_mode=self.objective.kl_mode,
            clip_low=self.objective.clip_low,
            clip_high=self.objective.clip_high,
        )
        valid = inputs.mask.sum()
        self._record(
            sums,
            logits,
            inputs,
            loss=terms.token_loss,
            score_loss=terms.score_loss,
            behavior_kl_proxy=terms.behavior_kl,
            adaptive_kl_loss=terms.adaptive_kl_loss,
            cap_fraction=terms.cap_hits,
            clip_fraction=terms.clip_hits,
            ess=context.ess * valid,
            s1=moments[0],
            s2=moments[1],
            tokens=moments[2],
        )
        return terms.token_loss.sum(), valid.int(), {}

    def _pooled_context(self, moments: Tensor, failed: Tensor) -> StepContext | None:
        """ESS of one micro-batch index, pooled over its DP x CP ranks (Algorithm 2). None when it is not finite."""
        try:
            return step_context(sum_moments(moments.clone(), self.groups.dp_cp))
        except NonFiniteRatioError:
            failed[0] = True
            failed[1] |= moments[3] > 0
            return None

    def _grpo_loss(
        self, sums: Tensor, failed: Tensor, inputs: ForwardInputs, logits: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Token sum of max(-r A, -clip(r) A), with r against the rollout log-probs."""
        log_probs = token_log_probs(logits, inputs.targets, self.groups.tp)
        moments = ess_moments(log_probs.detach(), inputs.behavior_log_probs, inputs.mask)
        failed |= moments[3] > 0
        terms = ppo_clip_terms(
            log_probs,
            inputs.behavior_log_probs,
            inputs.advantages,
            inputs.mask,
            eps_low=self.objective.eps_low,
            eps_high=self.objective.eps_high,
        )
        self._record(
            sums,
            logits,
            inputs,
            loss=terms.loss,
            clip_fraction=terms.clip_hits,
            s1=moments[0],
            s2=moments[1],
            tokens=moments[2],
        )
        return terms.loss.sum(), inputs.mask.sum().int(), {}

    @torch.no_grad()
    def _record(self, sums: Tensor, logits: Tensor, inputs: ForwardInputs, **terms: Tensor) -> None:
        """Add token sums on the device, without a host sync."""
        terms["entropy"] = token_entropy(logits, self.groups.tp).masked_fill(~inputs.mask, 0)
        for name, value in terms.items():
            sums[SUMS.index(name)] += value.detach().sum(dtype=torch.float64)

    # --- plumbing ---

    def _forward_backward(
        self,
        windows: Sequence[ReplayWindow[MicroBatch]],
        loss: Callable[[ForwardInputs, Tensor], tuple[Tensor, Tensor, dict[str, Any]]],
        *,
        forward_only: bool,
    ) -> None:
        """One pass of Megatron's schedule. Both passes come through here and share one ``forward_step``."""

        def forward_step(
            window: ReplayWindow[MicroBatch], model: nn.Module, *_: Any, return_schedule_plan: bool = False
        ) -> tuple[Tensor, LossFunc]:
            if return_schedule_plan:
                raise RunError(
                    "the schedule asks for a schedule plan (combined 1F1B): another forward than the statistics pass's",
                    hint="set parallel.overlap_moe_expert_parallel_comm: false",
                )
            inputs = forward_inputs(next(window), self.groups.cp)
            return model(**inputs.model_kwargs), partial(loss, inputs)

        rows, length = windows[0].peek().tokens.shape
        config: Any = self.chunks[0].config
        # Stages that tell each other the shape wait for the device at every micro-batch; the schedule works it out.
        config.variable_seq_lengths = self.groups.pp_size > 1 and not _one_shape(windows[0])
        schedules = quiet_import("megatron.core.pipeline_parallel.schedules")
        with device_backend(self.groups.device):
            schedules.get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=list(windows) if len(self.chunks) > 1 else windows[0],
                model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
                num_microbatches=len(windows[0]),
                seq_length=length,
                micro_batch_size=rows,
                forward_only=forward_only,
            )

    def _agree(self, sums: Tensor, failed: Tensor, step: int) -> dict[str, float]:
        """Add the step's sums over all ranks, and the verdict with them, so that every rank raises or none does.

        TP ranks of the last stage hold replicas: only the first of each adds its sums.
        """
        counts = self.groups.is_last_stage and self.groups.tp_rank == 0
        seen = failed[1] | ~torch.isfinite(sums).all()
        spoilt = ~self._gradients_finite()
        verdict = (failed[0] | seen | spoilt).double().reshape(1)
        message = torch.cat([sums.nan_to_num() if counts else torch.zeros_like(sums), verdict])
        if self.groups.world_size > 1:
            dist.all_reduce(message)
        *values, bad_ranks = message.tolist()
        if bad_ranks:
            error = NonFiniteRatioError("a ratio, the loss or a gradient of this optimizer step is not finite")
            raise self._located(error, _FIGURES if seen else _GRADIENT if spoilt else _NOTHING, step)
        return dict(zip(SUMS, values, strict=True))

    def _gradients_finite(self) -> Tensor:
        finite = torch.ones((), dtype=torch.bool, device=self.device)
        for chunk in self.chunks:
            for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:  # type: ignore[misc]
                finite = finite.logical_and(torch.isfinite(buffer.grad_data.sum()))
        return finite

    def _located(self, error: NonFiniteRatioError, seen_here: int, step: int) -> NonFiniteRatioError:
        """Name the step and the ranks that saw it. Every rank comes here: the verdict was reduced before.

        Gradients are summed over DP before anyone looks, so they accuse a rank only where no rank's own figures do.
        """
        seen: list[int] = [seen_here]
        if self.groups.world_size > 1:
            seen = [_NOTHING] * self.groups.world_size
            dist.all_gather_object(seen, seen_here)
        ranks = tuple(rank for rank, saw in enumerate(seen) if saw != _NOTHING and saw == max(seen))
        where = f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))
        text = f"optimizer step {step}: {error.message}" + (f" (seen on {where})" if ranks else "")
        return NonFiniteRatioError(text, step=step, ranks=ranks, hint=error.hint)

    def outcome(
        self,
        sums: dict[str, float],
        context: StepContext | None,
        grad_norm: float = math.nan,
        seconds: dict[str, float] | None = None,
    ) -> StepOutcome:
        """What a step came to, from the token sums of its training pass."""
        return StepOutcome(context, self._means(sums, context), grad_norm, seconds or {})

    def _means(self, sums: dict[str, float], context: StepContext | None) -> dict[str, float]:
        """Per-token means, the ratio's mean and standard deviation, and how well the two passes agree."""
        n = max(sums["tokens"], 1.0)
        means = {name: sums[name] / n for name in MEANS} | {"tokens": sums["tokens"]}
        means["ratio_mean"] = sums["s1"] / n
        means["ratio_std"] = math.sqrt(max(sums["s2"] / n - means["ratio_mean"] ** 2, 0.0))
        if self.objective.estimator == "p3o" and context is None:
            return means  # micro-batch scope: the token-weighted mean of the micro-batches' ESS
        moments = torch.tensor([sums["s1"], sums["s2"], sums["tokens"], 0.0], dtype=torch.float64)
        seen = step_context(moments).ess
        means["ess"] = context.ess if context is not None else seen
        if context is not None:
            # What the training pass saw against what the statistics pass promised: 0 when the replay is exact.
            means["replay_error"] = abs(seen - context.ess)
        return means


def _one_shape(window: ReplayWindow[MicroBatch]) -> bool:
    """Whether all hidden states of the step have the shape that Megatron derives from the first micro-batch's."""
    batches = window.items
    return all(b.cp_group is None and b.tokens.shape == batches[0].tokens.shape for b in batches)


def _no_tokens(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.int, device=device)
