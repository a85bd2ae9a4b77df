"""The decode loop: prompts in, sampled tokens and their log-probs out, through ``GPTModel`` and a key/value cache.

Shapes: n rows of a batch, s tokens fed at once, h hidden size, v vocabulary entries.

Prompts of unequal length start together at position 0. The batch is prefilled up to its shortest prompt and then moves
one position at a time; a row whose prompt is longer is fed its own next token where the others are fed a sampled one.
So no row is ever padded and no mask is needed, with any attention kernel: a row computes what it would compute alone.
Rows of one batch should be close in length; ``batches`` sees to that.

It deliberately is not a serving engine: no paging, no scheduling between requests, no graphs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from p3o_launch.runtime.mcore.compat import quiet_import
from p3o_launch.runtime.mcore.groups import ParallelGroups
from p3o_launch.runtime.mcore.model import unwrap
from p3o_launch.runtime.rollout.sampling import draw, sampled_log_probs, uniforms
from p3o_launch.runtime.types import Completion, GenerationRequest, SamplingParams


@dataclass(frozen=True, slots=True)
class DecodeModel:
    """A model in ``eval`` mode to sample from: this rank's chunks in virtual-stage order, and its groups.

    ``vocab_size``: entries that may be sampled; logits beyond are padding of the vocabulary.
    """

    chunks: Sequence[torch.nn.Module]
    groups: ParallelGroups
    device: torch.device
    vocab_size: int


class CachedForward:
    """The model with a key/value cache for ``rows`` sequences of up to ``length`` tokens.

    All pipeline ranks call it together. No autograd, and no ``inference_mode``: a buffer that Megatron shares with the
    trainer would come back as an inference tensor, which no backward pass accepts.
    """

    def __init__(self, model: DecodeModel, rows: int, length: int) -> None:
        context = quiet_import("megatron.core.inference.contexts.static_context").StaticInferenceContext
        self.model = model
        self.contexts = [context(rows, length) for _ in model.chunks]
        self.position = 0

    def __call__(self, tokens: Tensor) -> Tensor | None:
        """Feed ``tokens`` [n, s] at the cache's position; logits of the last one, [n, v], on the last stage only."""
        n, s = tokens.shape
        positions = torch.arange(self.position, self.position + s, device=tokens.device).expand(n, s)
        output: Tensor | None = None
        for chunk, context in zip(self.model.chunks, self.contexts, strict=True):
            bare: Any = unwrap(chunk)
            if not bare.pre_process:
                bare.set_input_tensor(self._receive(n, s, bare.config))
            output = bare(tokens, positions, None, inference_context=context, runtime_gather_output=True)
            if not bare.post_process:
                self._send(output)
                output = None
            context.sequence_len_offset += s
            context.enable_decode_mode()
        self.position += s
        return None if output is None else output[:, -1, : self.model.vocab_size]

    def keep(self, rows: Tensor) -> None:
        """Drop every row but ``rows`` [m] (indices into the present ones, in the order to keep)."""
        for context in self.contexts:
            context.max_batch_size = len(rows)
            cache = context.key_value_memory_dict
            for layer, (key, value) in cache.items():
                cache[layer] = (key[:, rows], value[:, rows])

    def _ring(self, step: int) -> int:
        """Global rank ``step`` stages on; the last stage of one virtual chunk feeds the first stage of the next."""
        groups = self.model.groups
        return dist.get_global_rank(groups.pp, (groups.pp_rank + step) % groups.pp_size)

    def _receive(self, n: int, s: int, config: Any) -> Tensor:
        hidden = torch.empty(s, n, config.hidden_size, dtype=config.pipeline_dtype, device=self.model.device)
        dist.recv(hidden, self._ring(-1), group=self.model.groups.pp)
        return hidden

    def _send(self, hidden: Tensor) -> None:
        dist.send(hidden.contiguous(), self._ring(1), group=self.model.groups.pp)


@torch.no_grad()
def generate_batch(
    model: DecodeModel, requests: Sequence[GenerationRequest], sampling: SamplingParams, eos_ids: Collection[int]
) -> list[Completion]:
    """Sample one batch of at least one request; completions in the order of ``requests``, on every TP and PP rank."""
    device = model.device
    lengths = torch.tensor([len(r.prompt_ids) for r in requests], device=device)
    longest = int(lengths.max())
    tokens = torch.zeros(len(requests), longest + sampling.max_new_tokens, dtype=torch.int64)
    for row, request in enumerate(requests):
        tokens[row, : len(request.prompt_ids)] = torch.tensor(request.prompt_ids)
    tokens = tokens.to(device)
    log_probs = torch.zeros(tokens.shape, dtype=torch.float64, device=device)
    seeds = torch.tensor([_as_int64(r.seed) for r in requests], device=device)
    stops = torch.tensor(sorted(eos_ids), dtype=torch.int64, device=device)
    ends = lengths + sampling.max_new_tokens  # one past the last token of each row, lowered when a row stops

    position = int(lengths.min())
    alive = torch.arange(len(requests), device=device)  # the rows in the cache, finished ones included
    cached = CachedForward(model, len(requests), tokens.shape[1])
    fed = tokens[:, :position]
    while True:
        logits = cached(fed)
        step = position - lengths[alive]
        sampled, chosen = _sample(model, logits, seeds[alive], step, sampling)
        # A row still in its prompt goes on with it; a finished one is fed anything, it reaches nobody else.
        writes = (step >= 0) & (position < ends[alive])
        rows = alive[writes]
        tokens[rows, position] = sampled[writes]
        log_probs[rows, position] = chosen[writes]
        stopped = rows[torch.isin(sampled[writes], stops)]
        ends[stopped] = position + 1
        position += 1
        running = ends[alive] > position
        count = int(running.sum())
        if count == 0:
            break
        if 2 * count <= len(alive):  # halving keeps the copying below the cost of one step
            kept = running.nonzero().squeeze(1)
            cached.keep(kept)
            alive = alive[kept]
        fed = tokens[alive, position - 1 : position]
    return _completions(requests, sampling, tokens.tolist(), log_probs.tolist(), ends.tolist(), set(eos_ids))


def _as_int64(seed: int) -> int:
    """A seed of any size as the bits of an int64."""
    seed %= 1 << 64
    return seed - (1 << 64) if seed >= 1 << 63 else seed


def _sample(
    model: DecodeModel, logits: Tensor | None, seeds: Tensor, step: Tensor, sampling: SamplingParams
) -> tuple[Tensor, Tensor]:
    """One token per row and its log-prob (float64 [n]), the same on every TP and PP rank.

    TP ranks have equal logits, but a parallel prefix sum need not round alike on two devices: the first one decides.
    """
    groups = model.groups
    if logits is not None:
        token, log_prob = draw(sampled_log_probs(logits, sampling), uniforms(seeds, step.clamp(min=0)))
        message = torch.stack([token.double(), log_prob.double()])
    else:
        message = torch.empty(2, len(seeds), dtype=torch.float64, device=model.device)
    if groups.is_last_stage and groups.tp_size > 1:
        dist.broadcast(message, dist.get_global_rank(groups.tp, 0), group=groups.tp)
    if groups.pp_size > 1:
        dist.broadcast(message, groups.last_stage_global_rank, group=groups.pp)
    return message[0].long(), message[1]


def _completions(
    requests: Sequence[GenerationRequest],
    sampling: SamplingParams,
    tokens: list[list[int]],
    log_probs: list[list[float]],
    ends: list[int],
    eos_ids: set[int],
) -> list[Completion]:
    completions = []
    for request, ids, values, end in zip(requests, tokens, log_probs, ends, strict=True):
        start = len(request.prompt_ids)
        completions.append(
            Completion(
                request_id=request.request_id,
                response_ids=tuple(ids[start:end]),
                log_probs=tuple(values[start:end]),
                truncated=end - start == sampling.max_new_tokens and ids[end - 1] not in eos_ids,
            )
        )
    return completions


def batches(requests: Sequence[GenerationRequest], max_new_tokens: int, max_tokens: int) -> Iterator[list[int]]:
    """Indices of ``requests`` in batches of similar prompt length, each with room for ``max_tokens`` cached tokens.

    A batch holds at least one request, and never more cache than rows x (its longest prompt + ``max_new_tokens``).
    """
    batch: list[int] = []
    for index in sorted(range(len(requests)), key=lambda i: (len(requests[i].prompt_ids), i)):
        width = len(requests[index].prompt_ids) + max_new_tokens
        if batch and (len(batch) + 1) * width > max_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
