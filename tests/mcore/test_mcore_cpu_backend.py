"""The CPU backend answers for CUDA only while it is asked to, and puts every name back."""

from typing import Any

import torch

from tests.mcore.ranks import RankEnv, run_ranks


def _names() -> dict[str, Any]:
    from megatron.core.tensor_parallel import random

    cuda = ("current_device", "synchronize", "current_stream", "default_stream", "Stream", "Event", "manual_seed")
    found: dict[str, Any] = {name: getattr(torch.cuda, name) for name in cuda}
    return found | {"Tensor.cuda": torch.Tensor.cuda, "get": random._get_cuda_rng_state}


def _backend(env: RankEnv) -> None:
    from p3o_launch.runtime.mcore.cpu_backend import (
        cpu_backend,
        device_backend,
        install,
        is_active,
        is_installed,
        uninstall,
    )

    before = _names()
    with device_backend("cuda"):
        assert _names() == before
        assert not is_active()

    with cpu_backend(), cpu_backend():
        assert is_active()
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.ones(2, device="cuda:1").device.type == "cpu"
        assert torch.tensor([1], device=torch.device("cuda", 0), pin_memory=True).device.type == "cpu"
        assert torch.empty(1, device=torch.cuda.current_device()).to("cuda").device.type == "cpu"
        assert torch.ones(1).cuda(non_blocking=True).device.type == "cpu"
        assert torch.ones(1).type() == "torch.cuda.FloatTensor"
        assert torch.ones(1, dtype=torch.float64).type() == "torch.cuda.FloatTensor"
        assert torch.ones(1, dtype=torch.int32).type() == "torch.IntTensor"
        assert torch.ones(1).type(torch.float64).dtype is torch.float64
        assert isinstance(torch.cuda.Event(enable_timing=True), torch.cuda.Event)
        torch.cuda.synchronize()
    assert not is_active()
    assert not is_installed()
    assert _names() == before
    assert torch.ones(1).type() == "torch.FloatTensor"

    install()
    install()
    with cpu_backend():
        pass
    assert is_installed(), "a backend that was installed before the block stays"
    uninstall()
    uninstall()
    assert _names() == before


def test_names_are_replaced_inside_and_restored_outside() -> None:
    run_ranks(_backend, 1)


def _streams(env: RankEnv) -> dict[str, list[float]]:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    from p3o_launch.runtime.mcore.groups import ParallelSizes, init_distributed
    from p3o_launch.runtime.mcore.rng import restore_rng_state, rng_state, seed_rank

    groups = init_distributed(
        ParallelSizes(tp=2), rank=env.rank, world_size=2, init_method=env.new_init_method(), timeout_s=60
    )
    seed_rank(11, groups)
    tracker = get_cuda_rng_tracker()
    state = rng_state()
    found = {"default": torch.rand(2).tolist()}
    with tracker.fork():
        found["forked"] = torch.rand(2).tolist()
    found["after"] = torch.rand(2).tolist()
    restore_rng_state(state)
    assert torch.rand(2).tolist() == found["default"]
    with tracker.fork():
        assert torch.rand(2).tolist() == found["forked"]
    assert torch.rand(2).tolist() == found["after"]
    seed_rank(11, groups)
    assert torch.rand(2).tolist() == found["default"]
    groups.destroy()
    groups.destroy()
    return found


def test_tensor_parallel_streams_differ_and_the_default_stream_does_not() -> None:
    first, second = run_ranks(_streams, 2)
    assert first["default"] == second["default"]
    assert first["after"] == second["after"]
    assert first["forked"] != second["forked"]
