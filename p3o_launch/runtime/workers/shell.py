"""What runs inside a rank's process: a thin shell around the class that does the work. No ray here.

The shell writes the process's output to the rank's log, builds the target once its rank is known, and turns every
exception into an ``Outcome``, because an exception of another library need not survive pickling.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import socket
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from p3o_launch.errors import P3OLaunchError, RankFailedError
from p3o_launch.runtime.plan import RunPlan

MEGATRON_RANK = "p3o_launch.runtime.mcore.trainer:MegatronRank"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call came to: ``error`` is None and ``value`` the answer, or ``error`` is what was raised."""

    value: Any = None
    error: P3OLaunchError | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where an actor's process is. ``node`` and ``gpu`` order the ranks; ``address`` is the node's own."""

    node: str
    address: str
    gpu: int
    pid: int


class RankShell:
    """One rank's process. ``launch`` must succeed before ``call``."""

    def __init__(self) -> None:
        self._rank = -1
        self._target: Any = None
        self._log = Path(os.devnull)

    def place(self, node: str, address: str, gpu: int) -> Place:
        """``node``, ``address``, ``gpu``: what the scheduler says about this process."""
        return Place(node=node, address=address, gpu=gpu, pid=os.getpid())

    def free_address(self, host: str) -> str:
        """An ``init_method`` on a port that is free on this machine now."""
        with socket.socket() as probe:
            probe.bind((host, 0))
            return f"tcp://{host}:{probe.getsockname()[1]}"

    def launch(self, target: str, plan: RunPlan, rank: int, init_method: str) -> Outcome:
        """Build ``target`` (``module:Class``) as this rank and set it up."""
        self._rank = rank
        self._log = plan.rank_log(rank)
        redirect_output(self._log)
        return self._guarded("setup", lambda: self._launch(target, plan, rank, init_method))

    def _launch(self, target: str, plan: RunPlan, rank: int, init_method: str) -> None:
        module, _, name = target.partition(":")
        self._target = getattr(import_module(module), name)(plan, rank, init_method)
        self._target.setup()

    def call(self, method: str, args: Sequence[Any], wanted: bool) -> Outcome:
        """``target.method(*args)``; the answer travels only when it is ``wanted``."""
        outcome = self._guarded(method, lambda: getattr(self._target, method)(*args))
        return outcome if wanted or outcome.error is not None else Outcome()

    def group_advantages(self, rewards: Sequence[float], group_ids: Sequence[int], normalize: bool) -> Outcome:
        """The objective's group-relative advantages, on this process because it has torch loaded."""
        return self._guarded("group_advantages", lambda: _group_advantages(rewards, group_ids, normalize))

    def _guarded(self, what: str, action: Any) -> Outcome:
        try:
            return Outcome(value=action())
        except Exception as error:
            traceback.print_exc()
            sys.stderr.flush()
            return Outcome(error=portable_error(error, self._rank, what, self._log))


def _group_advantages(rewards: Sequence[float], group_ids: Sequence[int], normalize: bool) -> list[float]:
    from p3o_launch.runtime.objective import group_advantages

    return [float(value) for value in group_advantages(list(rewards), list(group_ids), normalize).tolist()]


def portable_error(error: Exception, rank: int, what: str, log: Path) -> P3OLaunchError:
    """``error`` itself when it is one of ours and survives pickling, else a RankFailedError that quotes it."""
    if isinstance(error, P3OLaunchError) and _survives_pickling(error):
        return error
    message = str(error).strip() or "no message"
    kind = type(error).__name__
    return RankFailedError(
        f"rank {rank} failed in {what}: {kind}: {message.splitlines()[0]}",
        rank=rank,
        cause=kind,
        hint=f"the traceback is in {log}",
    )


def _survives_pickling(error: P3OLaunchError) -> bool:
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)
    except Exception:  # pickling raises whatever the object raises
        return False


def redirect_output(log: Path) -> None:
    """Append this process's standard output and error, native code's too, to ``log``."""
    log.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(descriptor, number)
    os.close(descriptor)
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
    faulthandler.enable(sys.stderr)
