"""The process harness itself: results in order, and no failure that hangs or is swallowed."""

import os
import time

import pytest

from tests.mcore.ranks import RankEnv, RankFailedError, run_ranks


def _sum_of_ranks(env: RankEnv, offset: int) -> tuple[int, float]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=env.new_init_method(), rank=env.rank, world_size=env.world_size)
    total = torch.tensor([float(env.rank + offset)])
    dist.all_reduce(total)
    dist.destroy_process_group()
    return env.rank, total.item()


def _fail_on_rank_one(env: RankEnv) -> None:
    if env.rank == 1:
        raise ValueError("only rank one complains")
    time.sleep(60)


def _die(env: RankEnv) -> None:
    if env.rank == 0:
        os._exit(7)
    time.sleep(60)


def _hang(env: RankEnv) -> None:
    time.sleep(60)


def test_results_come_back_in_rank_order() -> None:
    assert run_ranks(_sum_of_ranks, 2, 10) == [(0, 21.0), (1, 21.0)]


def test_a_rank_that_raises_fails_the_call_with_its_traceback() -> None:
    started = time.monotonic()
    with pytest.raises(RankFailedError, match="only rank one complains"):
        run_ranks(_fail_on_rank_one, 2)
    assert time.monotonic() - started < 30


def test_a_rank_that_dies_or_hangs_fails_the_call() -> None:
    with pytest.raises(RankFailedError, match="exit code 7"):
        run_ranks(_die, 2)
    with pytest.raises(RankFailedError, match="did not end in time"):
        run_ranks(_hang, 1, timeout=4.0)
