"""Every sample of a step lands on exactly one rank, once, whatever the cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p3o_launch.runtime.partition import partition_by_tokens, partition_fixed


def dealt(partition) -> list[int]:
    return sorted(i for rank in partition.micro_batches for indices in rank for i in indices)


@given(dp=st.integers(1, 4), size=st.integers(1, 4), count=st.integers(1, 5))
def test_fixed_micro_batches_deal_every_sample_once(dp: int, size: int, count: int) -> None:
    n = dp * size * count
    partition = partition_fixed(n, dp, size)
    assert dealt(partition) == list(range(n))
    assert partition.count == count
    assert {len(rank) for rank in partition.micro_batches} == {count}
    assert {len(indices) for rank in partition.micro_batches for indices in rank} == {size}


def test_fixed_micro_batches_refuse_a_remainder() -> None:
    with pytest.raises(ValueError, match="10 samples do not divide into 2 ranks x micro-batches of 3"):
        partition_fixed(10, 2, 3)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=40),
    dp=st.integers(1, 4),
    budget=st.integers(20, 80),
    multiple=st.integers(1, 4),
)
def test_token_budget_is_kept_and_counts_are_equal(lengths: list[int], dp: int, budget: int, multiple: int) -> None:
    partition = partition_by_tokens(lengths, dp, budget, count_multiple=multiple)
    assert dealt(partition) == list(range(len(lengths)))
    assert {len(rank) for rank in partition.micro_batches} == {partition.count}
    assert partition.count % multiple == 0
    for rank in partition.micro_batches:
        for indices in rank:
            assert sum(lengths[i] for i in indices) <= budget or len(indices) == 1


def test_ranks_without_samples_get_dummies() -> None:
    partition = partition_by_tokens([5], 3, 10)
    assert partition.micro_batches == (((0,),), ((),), ((),))
