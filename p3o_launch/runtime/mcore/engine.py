"""The ``megatron`` rollout engine: samples on the trainer's own ranks, with a snapshot of the trainer's weights.

SPMD: every rank of the layout makes the same calls. Requests are dealt to the DP x CP ranks by index, the TP and PP
ranks of one model replica work on the same ones, and every rank returns every completion.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist

from p3o_launch.assets import resolve_checkpoint
from p3o_launch.errors import RunError
from p3o_launch.runtime.mcore import snapshot
from p3o_launch.runtime.mcore.generation import DecodeModel, batches, generate_batch
from p3o_launch.runtime.mcore.groups import ParallelGroups
from p3o_launch.runtime.rollout.engines import EngineParts
from p3o_launch.runtime.rollout.sampling import check_sampling
from p3o_launch.runtime.rollout.stop_tokens import stop_token_ids
from p3o_launch.runtime.types import Completion, GenerationRequest, SamplingParams
from p3o_launch.schema import Preset

CACHE_TOKENS = 1 << 17
"""Default room of one batch's key/value cache [tokens]: at most 19.3 GB for a 4B Qwen3 in bf16, on one rank."""


class MegatronEngine:
    """Samples from a snapshot of the trainer's weights; implements ``types.RolloutEngine``.

    ``chunks``: the trainer's model chunks, wrapped or bare; they are read in ``update_weights`` and never changed.
    ``eos_ids``: tokens that end a response; None takes what the preset's checkpoint names. ``cache_tokens``: room for
    the key/value cache of one batch [tokens]; more requests than fit are sampled one batch after the other. The engine
    starts without weights: call ``update_weights`` (or ``load_state``) before ``generate``.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        groups: ParallelGroups,
        preset: Preset,
        eos_ids: Collection[int] | None = None,
        *,
        cache_tokens: int = CACHE_TOKENS,
    ) -> None:
        self._trainer = chunks
        self._groups = groups
        self._preset = preset
        if eos_ids is None:
            eos_ids = stop_token_ids(resolve_checkpoint(preset.model.hf_checkpoint))
        self._eos_ids = eos_ids
        self._cache_tokens = cache_tokens
        self._rollout = snapshot.build_rollout_chunks(preset, groups)
        device = torch.device("cpu") if groups.device == "cpu" else torch.device("cuda", torch.cuda.current_device())
        self._model = DecodeModel(self._rollout, groups, device, preset.model.vocab_size)
        self._snapshot_id: int | None = None

    @property
    def snapshot_id(self) -> int:
        """Name of the snapshot that is sampled from. Raises RunError before the first ``update_weights``."""
        if self._snapshot_id is None:
            raise RunError("the rollout engine has no weights yet", hint="call update_weights before the first rollout")
        return self._snapshot_id

    def update_weights(self, snapshot_id: int) -> None:
        """Copy the trainer's present weights, rounded as ``rollout.weight_quantization`` says."""
        scheme = self._preset.rollout.weight_quantization
        snapshot.refresh(self._rollout, self._trainer, scheme, self._groups)
        self._snapshot_id = snapshot_id

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> list[Completion]:
        """Sample every request; the completions are in the order of ``requests``, on every rank.

        The trainer's random states are not touched. Raises RunError, on every rank alike, for a prompt that is empty or
        leaves no room for the response, and when a log-prob is not finite; ValueError for bad sampling parameters.
        """
        _ = self.snapshot_id
        check_sampling(sampling)
        self._check_room(requests, sampling.max_new_tokens)
        shards, shard = self._groups.dp_cp.size(), self._groups.dp_cp.rank()
        mine = requests[shard::shards]
        done: list[Completion | None] = [None] * len(mine)
        for indices in batches(mine, sampling.max_new_tokens, self._cache_tokens):
            batch = generate_batch(self._model, [mine[i] for i in indices], sampling, self._eos_ids)
            for index, completion in zip(indices, batch, strict=True):
                done[index] = completion
        completions = self._gather(done, len(requests))
        _check_finite(completions)
        return completions

    def _gather(self, done: list[Completion | None], total: int) -> list[Completion]:
        """Every rank's share, dealt back into the order of the requests."""
        group = self._groups.dp_cp
        shares: list[Any] = [done]
        if group.size() > 1:
            shares = [None] * group.size()
            dist.all_gather_object(shares, done, group=group)
        return [shares[index % group.size()][index // group.size()] for index in range(total)]

    def _check_room(self, requests: Sequence[GenerationRequest], max_new_tokens: int) -> None:
        limit = self._preset.model.max_position_embeddings
        for request in requests:
            length = len(request.prompt_ids)
            if length == 0:
                raise RunError(f"request {request.request_id} has an empty prompt")
            if length + max_new_tokens > limit:
                raise RunError(
                    f"request {request.request_id}: a prompt of {length} tokens and a response of up to "
                    f"{max_new_tokens} do not fit the model's {limit} positions",
                    hint="lower rollout.max_prompt_len or the response length, or check model.max_position_embeddings",
                )

    def state(self) -> dict[str, Any]:
        """What a checkpoint must keep of the rollout policy, as input to, or template for, ``dist_checkpointing``.

        ``snapshot_id`` (-1: none yet) and the weights as they are sampled from, after rounding.
        """
        weights = snapshot.sharded_state(self._rollout, self._groups)
        return {"snapshot_id": -1 if self._snapshot_id is None else self._snapshot_id, **weights}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what ``dist_checkpointing`` saved of ``state``; the trainer's weights are not consulted."""
        snapshot.load_sharded_state(self._rollout, state)
        saved = int(state["snapshot_id"])
        self._snapshot_id = None if saved < 0 else saved


def create(parts: EngineParts) -> MegatronEngine:
    """Factory for ``runtime.rollout.engines``."""
    return MegatronEngine(parts.trainer_chunks, parts.groups, parts.preset, parts.eos_ids)


def _check_finite(completions: Sequence[Completion]) -> None:
    """All ranks hold the same completions here, so all raise or none does."""
    for completion in completions:
        if not all(map(math.isfinite, completion.log_probs)):
            raise RunError(
                f"request {completion.request_id}: the rollout policy gave a log-prob that is not finite",
                hint="the snapshot's weights or logits hold nan or inf; look at the last optimizer steps",
            )
