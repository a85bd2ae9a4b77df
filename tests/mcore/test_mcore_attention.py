"""The core attention against a written-out reference: causal, masked, cached, packed, and context-parallel."""

import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from p3o_launch.runtime.mcore.context_parallel import packed_zigzag_indices, split_sequence, zigzag_indices
from tests.mcore.ranks import RankEnv, run_ranks

HEADS, GROUPS, WIDTH = 4, 2, 8


def _inputs(tokens: int, batch: int, seed: int = 0) -> list[torch.Tensor]:
    """Query [s, b, n, d], key and value [s, b, g, d]."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(tokens, batch, heads, WIDTH) for heads in (HEADS, GROUPS, GROUPS)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def _reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor | None = None
) -> torch.Tensor:
    """softmax(q k^T / sqrt(d)) v over visible keys, head by head; causal, aligned at the end, by default."""
    key, value = (side.repeat_interleave(HEADS // GROUPS, 2) for side in (key, value))
    if visible is None:
        rows = torch.arange(len(key) - len(query), len(key))
        visible = rows[:, None] >= torch.arange(len(key))[None, :]
    scores = torch.einsum("sbnd,tbnd->bnst", query, key) / math.sqrt(WIDTH)
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("bnst,tbnd->sbnd", weights, value).flatten(2)


def _attention(cp_group: Any = None, dropout: float = 0.0) -> Any:
    from p3o_launch.runtime.mcore.attention import TorchCoreAttention

    config = SimpleNamespace(attention_dropout=dropout, kv_channels=WIDTH, sequence_parallel=False)
    groups = SimpleNamespace(cp=cp_group)
    return TorchCoreAttention(config, 1, None, "self", pg_collection=groups)


def _packed(edges: list[int], **more: Any) -> Any:
    bounds = torch.tensor(edges, dtype=torch.int32)
    settings = {"qkv_format": "thd", "cu_seqlens_q": bounds, "cu_seqlens_q_padded": None, "cp_group": None}
    return SimpleNamespace(**(settings | {"local_cp_size": None} | more))


def _single_process(env: RankEnv) -> None:
    attention = _attention()
    query, key, value = _inputs(12, 3)
    close = {"rtol": 1e-12, "atol": 1e-12}

    # Training: causal, with gradients.
    sides = [side.clone().requires_grad_() for side in (query, key, value)]
    others = [side.clone().requires_grad_() for side in (query, key, value)]
    found, wanted = attention(*sides, None), _reference(*others)
    torch.testing.assert_close(found, wanted, **close)
    probe = torch.linspace(-1, 1, wanted.numel(), dtype=torch.float64).view_as(wanted)
    (found * probe).sum().backward()
    (wanted * probe).sum().backward()
    for ours, theirs in zip(sides, others, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, **close)

    # A cache: one new token, and several after a prefix.
    whole = _reference(query, key, value)
    torch.testing.assert_close(attention(query[-1:], key, value, None), whole[-1:], **close)
    torch.testing.assert_close(attention(query[7:], key, value, None), whole[7:], **close)

    # A mask given replaces the causal one: left-padded prompts.
    hidden = torch.zeros(3, 1, 12, 12, dtype=torch.bool)
    hidden |= ~torch.ones(12, 12, dtype=torch.bool).tril()
    hidden[1, :, :, :4] = True
    found = attention(query, key, value, hidden)
    torch.testing.assert_close(found[4:, 1], _reference(query[4:, 1:2], key[4:, 1:2], value[4:, 1:2])[:, 0], **close)
    assert torch.isfinite(found).all(), "a row that sees nothing must not be nan"

    # Packed segments equal separate sequences.
    edges = [0, 5, 6, 12]
    rows = [side[:, 0] for side in (query, key, value)]
    pieces = [_reference(*(side[a:b, :1] for side in (query, key, value))) for a, b in pairwise(edges)]
    torch.testing.assert_close(
        attention(*rows, None, packed_seq_params=_packed(edges)), torch.cat(pieces)[:, 0], **close
    )


def test_dense_cached_masked_and_packed_attention_equal_the_formula() -> None:
    run_ranks(_single_process, 1)


def _dropout(env: RankEnv) -> None:
    from p3o_launch.runtime.mcore.groups import ParallelSizes, init_distributed
    from p3o_launch.runtime.mcore.rng import restore_rng_state, rng_state, seed_rank

    groups = init_distributed(ParallelSizes(), rank=0, world_size=1, init_method=env.new_init_method(), timeout_s=60)
    seed_rank(1, groups)
    attention, inputs = _attention(dropout=0.5), _inputs(12, 1)
    outer = torch.get_rng_state()
    before = rng_state()
    first, second = attention(*inputs, None), attention(*inputs, None)
    assert not torch.equal(first, second)
    assert torch.equal(outer, torch.get_rng_state()), "attention draws from the tensor-parallel stream"
    restore_rng_state(before)
    assert torch.equal(attention(*inputs, None), first)
    torch.testing.assert_close(attention.eval()(*inputs, None), _reference(*inputs))
    groups.destroy()


def test_dropout_draws_from_megatrons_stream_and_can_be_replayed() -> None:
    run_ranks(_dropout, 1)


def _context_parallel(env: RankEnv) -> dict[str, float]:
    """Largest deviation from the unsplit result, per case; ``control`` leaves out the reduction of gradients."""
    import torch.distributed as dist

    from p3o_launch.runtime.mcore.attention import _GatherSequence

    size, rank = env.world_size, env.rank
    dist.init_process_group("gloo", init_method=env.new_init_method(), rank=rank, world_size=size)
    attention = _attention(dist.group.WORLD)
    edges = [0, 8, 24, 32]
    dense, packed = zigzag_indices(32, rank, size), packed_zigzag_indices(edges, rank, size)
    found = {}

    def deviation(kept: torch.Tensor, params: Any) -> tuple[float, float]:
        leaves = [side.requires_grad_() for side in _inputs(32, 1)]
        mine = [side.detach()[kept].requires_grad_() for side in leaves]
        if params is None:
            wanted, ours = _reference(*leaves), attention(*mine, None)
        else:
            parts = [_reference(*(side[a:b] for side in leaves)) for a, b in pairwise(edges)]
            wanted = torch.cat(parts)
            ours = attention(*(side[:, 0] for side in mine), None, packed_seq_params=params)[:, None]
        probe = torch.linspace(-1, 1, wanted.numel(), dtype=torch.float64).view_as(wanted)
        (wanted * probe).sum().backward()
        (ours * probe[kept]).sum().backward()
        forward = float((ours - wanted[kept]).abs().max())
        backward = max(
            float((own.grad - whole.grad[kept]).abs().max()) for own, whole in zip(mine, leaves, strict=True)
        )
        return forward, backward

    found["dense"] = max(deviation(dense, None))
    found["packed"] = max(deviation(packed, _packed(edges)))
    # The groups of one micro-batch win over the module's: the path of dynamic context parallelism.
    attention.cp_group = None
    found["packed, own group"] = max(deviation(packed, _packed(edges, cp_group=dist.group.WORLD)))
    attention.cp_group = dist.group.WORLD
    whole = torch.arange(32)
    found["packed, unsplit"] = max(deviation(whole, _packed(edges, local_cp_size=1)))

    def keep_own_rows(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.chunk(size)[rank].contiguous(), None

    _GatherSequence.backward = staticmethod(keep_own_rows)
    found["control"] = deviation(dense, None)[1]
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_context_parallel_attention_equals_the_unsplit_one(world: int) -> None:
    for found in run_ranks(_context_parallel, world):
        control = found.pop("control")
        assert max(found.values()) < 1e-12, found
        assert control > 1e-3, "without the reduction of gradients the result must be wrong"


def test_zigzag_indices_cover_every_token_once_and_equal_megatrons_split() -> None:
    for size in (1, 2, 4):
        everything = torch.cat([zigzag_indices(16, rank, size) for rank in range(size)])
        assert sorted(everything.tolist()) == list(range(16))
    assert zigzag_indices(16, 0, 2).tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    assert packed_zigzag_indices([0, 4, 12], 1, 2).tolist() == [1, 2, 6, 7, 8, 9]
    with pytest.raises(ValueError, match="cannot be cut"):
        zigzag_indices(10, 0, 2)
    run_ranks(_same_split_as_megatron, 2)


def _same_split_as_megatron(env: RankEnv) -> None:
    import torch.distributed as dist

    from p3o_launch.runtime.mcore.compat import cp_batch_split

    dist.init_process_group("gloo", init_method=env.new_init_method(), rank=env.rank, world_size=2)
    tokens = torch.arange(48).view(3, 16)
    theirs = cp_batch_split({"tokens": tokens}, dist.group.WORLD)["tokens"]
    assert torch.equal(theirs, split_sequence(tokens, env.rank, 2))
    dist.barrier()  # a rank that leaves before the other has connected would fail it
    dist.destroy_process_group()
