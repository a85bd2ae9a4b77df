"""Which rank and which micro-batch each sample of an optimizer step goes to. Integers only: no torch.

Every rank holds the step's whole sample list and computes the whole plan, so ranks agree on the number of
micro-batches without a collective. The plan moves no figure of the step: moments and gradients are sums over tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepPartition:
    """``micro_batches[d][m]``: indices of the samples of DP rank d's micro-batch m; an empty tuple is a dummy.

    Every DP rank has the same number of micro-batches.
    """

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def count(self) -> int:
        """Micro-batches per DP rank."""
        return len(self.micro_batches[0])


def partition_fixed(n_samples: int, dp_size: int, micro_batch_size: int) -> StepPartition:
    """Deal samples to DP ranks in turn, then cut each rank's share into micro-batches of a fixed sample count.

    Raises ValueError when ``n_samples`` is not a multiple of ``dp_size * micro_batch_size`` (guard P3O302).
    """
    if n_samples % (dp_size * micro_batch_size):
        shares = f"{dp_size} ranks x micro-batches of {micro_batch_size}"
        raise ValueError(f"{n_samples} samples do not divide into {shares}")
    dealt = [range(rank, n_samples, dp_size) for rank in range(dp_size)]
    return StepPartition(
        tuple(
            tuple(tuple(share[start : start + micro_batch_size]) for start in range(0, len(share), micro_batch_size))
            for share in dealt
        )
    )


def partition_by_tokens(
    lengths: Sequence[int], dp_size: int, max_tokens: int, *, count_multiple: int = 1
) -> StepPartition:
    """Deal samples to the least loaded DP rank, longest first, then fill micro-batches up to a token budget.

    ``lengths`` [tokens]: padded length per sample. ``max_tokens``: budget of one micro-batch on all its CP ranks
    together. A sample above the budget gets a micro-batch of its own (guard P3O312 says so beforehand). Ranks with
    fewer micro-batches are filled up with dummies, and the count is raised to a multiple of ``count_multiple`` (the
    interleaved schedule needs a multiple of PP).
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    loads = [0] * dp_size
    shares: list[list[int]] = [[] for _ in range(dp_size)]
    for index in order:
        rank = min(range(dp_size), key=lambda r: (loads[r], r))
        loads[rank] += lengths[index]
        shares[rank].append(index)
    packed = [_first_fit(share, lengths, max_tokens) for share in shares]
    count = max(1, max(len(bins) for bins in packed))
    count += -count % count_multiple
    return StepPartition(tuple(tuple(bins + [()] * (count - len(bins))) for bins in packed))


def _first_fit(share: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[tuple[int, ...]]:
    """First-fit decreasing; ``share`` comes longest first."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index in share:
        for b, free in enumerate(room):
            if lengths[index] <= free:
                bins[b].append(index)
                room[b] -= lengths[index]
                break
        else:
            bins.append([index])
            room.append(max_tokens - lengths[index])
    return [tuple(sorted(b)) for b in bins]
