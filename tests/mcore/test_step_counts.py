"""What the statistics pass costs: no wait for the device per micro-batch, one all-reduce and one broadcast per step.

Waits are counted where torch makes them: methods that turn a tensor into Python numbers, and operators whose result has
a size that only the device knows. On a GPU each of them stops the host until the device has caught up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from p3o_launch.runtime.mcore.batch import forward_inputs
from p3o_launch.runtime.mcore.counting import counted
from p3o_launch.runtime.mcore.cpu_backend import device_backend
from p3o_launch.runtime.mcore.trainer import MegatronRank
from p3o_launch.runtime.replay import ReplayWindow
from tests.mcore.ranks import RankEnv, run_ranks
from tests.mcore.step_setup import step_preset, step_rank, step_samples
from tests.mcore.tiny import write_hf_checkpoint

WAITING_METHODS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__contains__")
WAITING_OPERATORS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2")


class _Methods(TorchFunctionMode):
    def __init__(self, waits: Counter[str]) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in WAITING_METHODS:
            self.waits[name] += 1
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    def __init__(self, waits: Counter[str]) -> None:
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func._schema.name.split("::")[1]
        if name in WAITING_OPERATORS:
            self.waits[name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def _waits() -> Iterator[Counter[str]]:
    waits: Counter[str] = Counter()
    with _Methods(waits), _Operators(waits):
        yield waits


def _windows(rank: MegatronRank) -> list[ReplayWindow[Any]]:
    micro_batches = rank.micro_batches(step_samples())
    return [ReplayWindow(micro_batches) for _ in rank.chunks]


def _count_waits(env: RankEnv, checkpoint: Path, cases: list[dict[str, Any]]) -> list[dict[str, Counter[str]]]:
    counts = []
    for case in cases:
        with step_rank(env, step_preset(checkpoint, env.world_size, **case)) as rank:
            with _waits() as statistics:
                rank.step.stats_pass(_windows(rank))
            with _waits() as whole:
                rank.step.frozen_context(_windows(rank), step=1)
            bare: Counter[str] = Counter()
            if env.world_size == 1:
                inputs = [forward_inputs(batch, None) for batch in rank.micro_batches(step_samples())]
                with device_backend("cpu"), torch.no_grad(), _waits() as bare:
                    for ready in inputs:
                        rank.chunks[0](**ready.model_kwargs)
        counts.append({"statistics": statistics, "whole": whole, "bare": bare})
    return counts


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf_checkpoint("qwen3", tmp_path_factory.mktemp("hf"))


ONE_HOST_CHECK = Counter({"tolist": 1})
LAYOUTS: dict[int, list[dict[str, Any]]] = {
    1: [{}],
    2: [{}, {"tp": 2}, {"tp": 2, "sp": True}, {"pp": 2}, {"pp": 2, "vpp_layers": 1}, {"cp": 2}],
}


def test_the_statistics_pass_never_waits_and_the_step_checks_once(checkpoint: Path) -> None:
    """Whatever the layout and the number of micro-batches, on every rank."""
    for world, layouts in LAYOUTS.items():
        cases = [layout | {"splits": splits} for layout in layouts for splits in (2, 8)]
        for rank, counts in enumerate(run_ranks(_count_waits, world, checkpoint, cases)):
            for case, waits in zip(cases, counts, strict=True):
                assert not waits["statistics"], (world, rank, case)
                assert waits["whole"] == ONE_HOST_CHECK, (world, rank, case)


def test_packed_rows_wait_only_in_megatrons_own_forward(checkpoint: Path) -> None:
    """Its unfused rotary embedding, and the attention that stands in for Transformer Engine's, read the row bounds."""
    cases = [{"packed": True, "splits": splits} for splits in (1, 8)]
    for waits in run_ranks(_count_waits, 1, checkpoint, cases)[0]:
        assert waits["bare"].total() > 0
        assert waits["statistics"] == waits["bare"]
        assert waits["whole"] == waits["bare"] + ONE_HOST_CHECK


def _count_messages(env: RankEnv, checkpoint: Path, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    seen = []
    for case in cases:
        with step_rank(env, step_preset(checkpoint, env.world_size, **case)) as rank:
            with counted() as forward:
                rank.step.stats_pass(_windows(rank))
            with (
                counted() as whole,
                patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduced,
                patch.object(dist, "broadcast", wraps=dist.broadcast) as sent,
            ):
                rank.step.frozen_context(_windows(rank), step=1)
            groups = rank.groups
            seen.append(
                {
                    "extra": Counter(whole.calls) - Counter(forward.calls),
                    "missing": Counter(forward.calls) - Counter(whole.calls),
                    "summed over": _groups_of_moments(reduced.call_args_list),
                    "sent over": _groups_of_moments(sent.call_args_list),
                    "dp_cp": dist.get_process_group_ranks(groups.dp_cp),
                    "pp": dist.get_process_group_ranks(groups.pp),
                    "last": groups.is_last_stage,
                }
            )
    return seen


def _groups_of_moments(calls: Sequence[Any]) -> list[list[int]]:
    """Ranks of every call on four doubles."""
    ours = [call for call in calls if call.args[0].dtype is torch.float64 and call.args[0].shape == (4,)]
    return [dist.get_process_group_ranks(call.kwargs["group"]) for call in ours]


def test_the_ess_costs_one_all_reduce_and_one_broadcast_of_32_bytes(checkpoint: Path) -> None:
    """Over DP x CP on the last stage, then over PP; groups of one are left out. TP ranks hold replicas: never added."""
    layouts = {
        2: [{}, {"tp": 2}, {"pp": 2}, {"cp": 2}],
        4: [{}, {"pp": 2}, {"tp": 2}, {"tp": 2, "pp": 2}, {"cp": 2}, {"cp": 2, "pp": 2, "vpp_layers": 1}],
    }
    for world, shapes in layouts.items():
        cases = [shape | {"splits": splits, "dtype": "float32"} for shape in shapes for splits in (2, 4)]
        for rank, results in enumerate(run_ranks(_count_messages, world, checkpoint, cases)):
            for case, seen in zip(cases, results, strict=True):
                sums = [seen["dp_cp"]] if seen["last"] and len(seen["dp_cp"]) > 1 else []
                sends = [seen["pp"]] if len(seen["pp"]) > 1 else []
                extra = {("allreduce", 32): len(sums), ("broadcast", 32): len(sends)}
                where = (world, rank, case)
                assert seen["summed over"] == sums, where
                assert seen["sent over"] == sends, where
                assert seen["extra"] == +Counter(extra), where
                assert not seen["missing"], where
