"""Run a pass over the data of a step and leave no trace: iterator positions and random streams are put back.

The stats pass and the train pass read the same window of micro-batches. After the stats pass, whether it returned or
raised, the next pass must see the tokens and the random numbers of a run that never had it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Generic, Protocol, TypeVar

import torch

T = TypeVar("T")


class Replayable(Protocol):
    """An iterator that can say where it is and go back there."""

    @property
    def position(self) -> int: ...

    def restore(self, position: int) -> None: ...


class ReplayWindow(Generic[T]):
    """Iterator over the materialised micro-batches of one optimizer step on one rank."""

    def __init__(self, micro_batches: Sequence[T]) -> None:
        self._micro_batches = tuple(micro_batches)
        self._position = 0

    @property
    def position(self) -> int:
        """Number of micro-batches already handed out."""
        return self._position

    def restore(self, position: int) -> None:
        """Continue at ``position``. Raises ``ValueError`` outside [0, len]."""
        if not 0 <= position <= len(self._micro_batches):
            raise ValueError(f"position {position} is outside the window of {len(self._micro_batches)} micro-batches")
        self._position = position

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._position == len(self._micro_batches):
            raise StopIteration
        item = self._micro_batches[self._position]
        self._position += 1
        return item

    def __len__(self) -> int:
        return len(self._micro_batches)

    @property
    def items(self) -> tuple[T, ...]:
        """Every micro-batch of the window, wherever the iterator stands."""
        return self._micro_batches

    def peek(self) -> T:
        """The first micro-batch of the window, without moving."""
        return self._micro_batches[0]


StatePair = tuple[Callable[[], Any], Callable[[Any], object]]
"""(get, set) of one random stream, such as Megatron's tracker. ``get`` must return a copy."""


def unique_iterators(data_iterators: Replayable | Iterable[Replayable | None] | None) -> list[Replayable]:
    """The distinct iterators among what Megatron's schedules accept: one, a list of one per model chunk, or None.

    By identity: virtual pipeline parallelism may pass one object once per chunk, and two windows may be equal.
    """
    if data_iterators is None:
        return []
    candidates = data_iterators if isinstance(data_iterators, (list, tuple)) else [data_iterators]
    distinct: dict[int, Any] = {id(iterator): iterator for iterator in candidates if iterator is not None}
    return list(distinct.values())


@contextmanager
def replay_guard(
    data_iterators: Replayable | Iterable[Replayable | None] | None,
    rng_states: Iterable[StatePair] = (),
) -> Iterator[None]:
    """Put iterator positions and random streams back at the end, also when the body raises.

    Guards torch's CPU stream, the stream of the current CUDA device when there is one, and every (get, set) pair
    given. Raises ``TypeError`` before the body when an iterator cannot be put back.
    """
    with ExitStack() as restores:
        for get, set_ in (*_torch_streams(), *rng_states):
            restores.callback(set_, get())
        for iterator in unique_iterators(data_iterators):
            if not hasattr(iterator, "restore"):
                raise TypeError(
                    f"a {type(iterator).__name__} cannot report and restore its position: use a ReplayWindow"
                )
            restores.callback(iterator.restore, iterator.position)
        yield


@contextmanager
def undo_on_error(rng_states: Iterable[StatePair] = ()) -> Iterator[None]:
    """Put the random streams of :func:`replay_guard` back when the body raises, and only then."""
    streams = [(set_, get()) for get, set_ in (*_torch_streams(), *rng_states)]
    try:
        yield
    except BaseException:
        for set_, state in streams:
            set_(state)
        raise


def _torch_streams() -> list[StatePair]:
    streams: list[StatePair] = [(torch.get_rng_state, torch.set_rng_state)]
    if torch.cuda.is_available():
        streams.append((torch.cuda.get_rng_state, torch.cuda.set_rng_state))
    return streams
