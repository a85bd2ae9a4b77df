"""Composition and lifecycle of one run: cluster, ranks, sinks and loop; closed in reverse order, whatever happened.

No torch and no megatron in this process: what needs them runs on the ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

from p3o_launch.errors import P3OLaunchError, RunInterrupted
from p3o_launch.runtime.loop import Loop, LoopState, PromptSource, Ranks, Sink, Texts
from p3o_launch.runtime.plan import RunPlan


class ClusterLike(Protocol):
    """What the driver needs of a cluster."""

    @property
    def job_id(self) -> str: ...

    def close(self) -> None: ...

    def kill(self) -> None: ...


class RanksLike(Ranks, Protocol):
    """The loop's ranks, with an end: ``close`` lets them finish, ``kill`` does not."""

    def load_checkpoint(self, directory: Path) -> dict[str, Any]: ...

    def close(self) -> None: ...

    def kill(self) -> None: ...


ClusterStart = Callable[[RunPlan], ClusterLike]
RanksStart = Callable[[RunPlan, Any, Callable[[], bool]], RanksLike]


def ray_cluster(plan: RunPlan) -> ClusterLike:
    """A Ray cluster: the preset's, or one of the run's own."""
    from p3o_launch.runtime.workers.cluster import Cluster

    return Cluster.start(plan)


def megatron_ranks(plan: RunPlan, cluster: Any, should_stop: Callable[[], bool]) -> RanksLike:
    """Megatron ranks as Ray actors."""
    from p3o_launch.runtime.workers.actors import RankActors

    return RankActors.start(plan, cluster, should_stop)


@dataclass(frozen=True, slots=True)
class Inputs:
    """What was checked and loaded before any process started. ``skipped``: records left out, by file and reason.
    ``warnings``: what is odd about the others.
    """

    prompts: PromptSource
    texts: Texts
    eval_prompts: PromptSource | None = None
    skipped: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


@dataclass
class Driver:
    """One run. ``run`` may be called once; ``close`` any number of times, also before ``run``.

    ``checkpoint``: go on from there; ``restart``: begin a run again that came to none. The sinks are told where the
    loop stands. ``announce`` is told in a few words what is being done. ``on_started`` is told the Ray job id, before
    the first rollout. ``after_cluster`` runs once the cluster is up: Ray replaces signal handlers when it starts.
    """

    plan: RunPlan
    inputs: Inputs
    sinks: Sequence[Sink] = ()
    checkpoint: Path | None = None
    restart: bool = False
    should_stop: Callable[[], bool] = lambda: False
    announce: Callable[[str], None] = lambda text: None
    on_started: Callable[[str], None] = lambda job_id: None
    after_cluster: Callable[[], None] = lambda: None
    start_cluster: ClusterStart = ray_cluster
    start_ranks: RanksStart = megatron_ranks
    _open: list[tuple[str, Callable[[], None]]] = field(default_factory=list)
    _cluster: ClusterLike | None = None
    _ranks: RanksLike | None = None

    def run(self) -> LoopState:
        """Start everything, train, close everything. Raises what the run failed with, RunInterrupted when stopped."""
        try:
            for sink in self.sinks:
                self._open.append(("sink", sink.close))
            state = self._start().run()
        except BaseException:
            self._abandon()
            with contextlib.suppress(Exception):  # what the run failed with is what the user must see
                self.close()
            raise
        self.close()
        return state

    def _start(self) -> Loop:
        plan = self.plan
        self._check_stop()
        self.announce("connecting to the Ray cluster" if not plan.local else "starting a local Ray cluster")
        cluster = self._cluster = self.start_cluster(plan)
        self._open.append(("cluster", cluster.close))
        self.after_cluster()
        self._check_stop()
        self.announce(f"starting {plan.world_size} ranks ({plan.device}): processes, Megatron, weights")
        ranks = self.start_ranks(plan, cluster, self.should_stop)
        self._open.append(("ranks", ranks.close))
        self._ranks = ranks
        self.on_started(cluster.job_id)
        return Loop(
            plan=plan,
            ranks=ranks,
            prompts=self.inputs.prompts,
            texts=self.inputs.texts,
            sinks=self.sinks,
            eval_prompts=self.inputs.eval_prompts,
            should_stop=self.should_stop,
            state=self._initial_state(ranks),
        )

    def _initial_state(self, ranks: RanksLike) -> LoopState:
        state = LoopState()
        if self.checkpoint is None and not self.restart:
            return state
        if self.checkpoint is not None:
            self.announce(f"loading {self.checkpoint.name}")
            extra = ranks.load_checkpoint(self.checkpoint)
            state = LoopState(**{name.name: int(extra[name.name]) for name in fields(LoopState)})
        for sink in self.sinks:
            sink.on_resume(state)
        return state

    def _abandon(self) -> None:
        """After a failure the ranks may wait for each other for ever: end them instead of asking them to close."""
        self._open = [(name, close) for name, close in self._open if name != "ranks"]
        if self._ranks is not None:
            self._open.append(("ranks", self._ranks.kill))

    def close(self) -> None:
        """Close what is open, last first. One part that cannot close does not keep the others from it."""
        failures: list[Exception] = []
        while self._open:
            _, close = self._open.pop()
            try:
                close()
            except Exception as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def force(self) -> None:
        """End the cluster's processes now; nothing is asked and nothing is waited for."""
        if self._cluster is not None:
            self._cluster.kill()

    def _check_stop(self) -> None:
        if self.should_stop():
            raise RunInterrupted("the run was asked to stop")


def failure_facts(error: BaseException) -> dict[str, Any]:
    """What ``run.json`` says about the end of a failed run: class, message, rank."""
    rank = getattr(error, "rank", None)
    ranks: Sequence[int] = getattr(error, "ranks", ())
    if rank is None and ranks:
        rank = ranks[0]
    message = error.message if isinstance(error, P3OLaunchError) else str(error)
    return {"class": getattr(error, "cause", type(error).__name__), "message": message, "rank": rank}
