"""Count what a rank sends: every collective that Python code asks of a process group, with its bytes.

The methods of ``ProcessGroup`` are wrapped, because Megatron keeps aliases of the functions above them. A collective is
counted once on each rank that takes part; its bytes are those of this rank's input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed import ProcessGroup

_METHODS = (
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "allgather",
    "_allgather_base",
    "allgather_into_tensor_coalesced",
    "reduce",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "alltoall",
    "alltoall_base",
    "gather",
    "scatter",
    "send",
)


@dataclass
class Traffic:
    """``calls``: (method, bytes) of every collective, in order."""

    calls: list[tuple[str, int]] = field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.calls)

    @property
    def bytes(self) -> int:
        return sum(size for _, size in self.calls)


@contextmanager
def counted() -> Iterator[Traffic]:
    """Count the collectives of the block. Blocks may be nested; each counts all of its own."""
    traffic = Traffic()
    # From __dict__: what getattr gives is already unbound, and would stay so when put back.
    originals = {name: vars(ProcessGroup)[name] for name in _METHODS if name in vars(ProcessGroup)}
    for name, method in originals.items():
        setattr(ProcessGroup, name, _wrapped(name, method, traffic))
    try:
        yield traffic
    finally:
        for name, method in originals.items():
            setattr(ProcessGroup, name, method)


def _wrapped(name: str, method: Any, traffic: Traffic) -> Callable[..., Any]:
    # Gathers and exchanges take (output, input): what this rank sends is the input.
    position = 1 if name in ("allgather", "_allgather_base", "_reduce_scatter_base", "alltoall_base", "alltoall") else 0

    def call(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        traffic.calls.append((name, _bytes(args[position] if len(args) > position else args)))
        return method.__get__(group, type(group))(*args, **kwargs)

    return call


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes, value)) if isinstance(value, (list, tuple)) else 0
