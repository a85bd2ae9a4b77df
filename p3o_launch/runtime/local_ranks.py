"""Run a function on several processes of this machine that can form a process group, without Ray.

``run_local_ranks(function, 4, ...)`` starts four processes, calls ``function(env, ...)`` in each and returns the four
results in rank order. A rank that raises, dies or takes too long fails the call with its traceback, and no process
outlives the call.

Processes are forked from a server that has imported torch and megatron-core once: importing them takes 8 s, a fork a
few milliseconds. ``function`` must be importable (module level), its arguments and results picklable. On GPUs the
server must not touch CUDA, and does not: importing torch and megatron-core creates no CUDA context.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from p3o_launch.errors import RunError

_SERVER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron asks for it with TP or CP above 1
    "PYTHONWARNINGS": "ignore",  # Megatron's notices about absent packages, once per rank
}


class LocalRankError(RunError):
    """A rank raised, died or hung; the message holds its traceback."""


@dataclass
class RankEnv:
    """Who this process is. ``new_init_method`` gives a fresh rendezvous, the n-th call the same one on every rank."""

    rank: int
    world_size: int
    directory: Path
    _rendezvous: int = field(default=0, repr=False)

    def new_init_method(self) -> str:
        """An ``init_method`` for ``torch.distributed``: a file store, so no port is taken."""
        self._rendezvous += 1
        return f"file://{self.directory}/store-{self._rendezvous}"


def run_local_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0, preload: Sequence[str] = ()
) -> list[Any]:
    """Call ``function(env, *args)`` on ``world_size`` processes; results in rank order.

    ``timeout`` [s] covers the whole call. ``preload``: modules the fork server imports, if it does not run yet.
    Raises LocalRankError.
    """
    context = _context(preload)
    with tempfile.TemporaryDirectory(prefix="ranks-") as directory:
        processes: list[BaseProcess] = []
        pipes: list[Connection] = []
        try:
            for rank in range(world_size):
                receive, send = context.Pipe(duplex=False)
                env = RankEnv(rank, world_size, Path(directory))
                process = context.Process(target=_child, args=(send, env, function, args, timeout), daemon=True)
                process.start()
                send.close()
                processes.append(process)
                pipes.append(receive)
            return _collect(processes, pipes, Path(directory), time.monotonic() + timeout)
        finally:
            _stop(processes)


def _context(preload: Sequence[str]) -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    before = {name: os.environ.get(name) for name in _SERVER_ENVIRONMENT}
    os.environ.update(_SERVER_ENVIRONMENT)
    try:
        forkserver.ensure_running()  # the server keeps this environment, the caller gets its own back
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return context


def _child(pipe: Connection, env: RankEnv, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> None:
    import torch

    torch.set_num_threads(1)
    stacks = (env.directory / f"stacks-{env.rank}").open("w")
    faulthandler.dump_traceback_later(max(timeout - 3.0, 1.0), file=stacks)
    try:
        payload = pickle.dumps((True, function(env, *args)))
    except BaseException:  # everything a rank raises must reach the caller, also SystemExit
        payload = pickle.dumps((False, traceback.format_exc()))
    pipe.send_bytes(payload)
    pipe.close()
    faulthandler.cancel_dump_traceback_later()
    # A rank that failed half way leaves gloo threads behind; interpreter shutdown would wait for them.
    os._exit(0)


def _collect(processes: list[BaseProcess], pipes: list[Connection], directory: Path, deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    pending = dict(enumerate(pipes))
    while pending:
        ready = wait(list(pending.values()), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise LocalRankError(_hang_report(sorted(pending), directory))
        for rank in [rank for rank, pipe in pending.items() if pipe in ready]:
            try:
                succeeded, value = pickle.loads(pending.pop(rank).recv_bytes())
            except EOFError:
                processes[rank].join(5.0)
                raise LocalRankError(f"rank {rank} died with exit code {processes[rank].exitcode}") from None
            if not succeeded:
                raise LocalRankError(f"rank {rank} of {len(processes)} raised\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(processes))]


def _hang_report(ranks: list[int], directory: Path) -> str:
    stacks = [path.read_text() for rank in ranks if (path := directory / f"stacks-{rank}").exists()]
    return f"ranks {ranks} did not end in time; their stacks:\n" + "\n".join(stacks)


def _stop(processes: list[BaseProcess]) -> None:
    for process in processes:
        if process.is_alive():
            process.kill()
    for process in processes:
        process.join(5.0)
