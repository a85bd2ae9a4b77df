"""The ranks of a run as Ray actors, behind the one face the loop sees.

Every call goes to all ranks. The first sign of trouble ends it: a rank whose process is gone, or one that raised; the
others may then wait in a collective for ever, so nobody waits for them.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from p3o_launch.errors import P3OLaunchError, RankDiedError, RankFailedError, RunError, RunInterrupted
from p3o_launch.runtime.loop import Row
from p3o_launch.runtime.plan import RunPlan
from p3o_launch.runtime.types import Completion, GenerationRequest, Sample, SamplingParams
from p3o_launch.runtime.workers.cluster import Cluster
from p3o_launch.runtime.workers.shell import MEGATRON_RANK, Outcome, Place, RankShell

POLL_S = 0.25
VERDICT_S = 3.0
CLOSE_S = 5.0
CPU_SHARE = 0.1
# Ray explains a death in up to a page; the sentence that counts comes first.
REASON_LENGTH = 200


@dataclass
class RankActors:
    """All ranks. Made by ``start``; ``close`` may be called twice and in any state."""

    plan: RunPlan
    should_stop: Callable[[], bool]
    cluster: Cluster
    _actors: list[Any] = field(default_factory=list)
    _group: Any = None

    @classmethod
    def start(
        cls,
        plan: RunPlan,
        cluster: Cluster,
        should_stop: Callable[[], bool] = lambda: False,
        target: str = MEGATRON_RANK,
    ) -> RankActors:
        """Place one actor per rank of the plan on ``cluster`` and set every rank up.

        ``target``: import path of the class a rank runs. Raises RunError when the cluster has no room for the ranks
        within ``cluster.timeout_s``, and what a rank raised.
        """
        ranks = cls(plan, should_stop, cluster)
        try:
            ranks._place()
            ranks._launch(target)
        except BaseException:
            ranks.kill()
            raise
        return ranks

    def _place(self) -> None:
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        share = {"CPU": CPU_SHARE} if self.plan.device == "cpu" else {"CPU": 1.0, "GPU": 1.0}
        per_node = self.plan.ranks_per_node
        # One bundle per node holds all its ranks: a node's ranks are together, and no two nodes are one machine.
        node = {kind: amount * per_node for kind, amount in share.items()}
        strategy = "STRICT_PACK" if self.plan.num_nodes == 1 else "STRICT_SPREAD"
        self._group = placement_group([node] * self.plan.num_nodes, strategy=strategy)
        self._wait([self._group.ready()], "place the ranks", self.plan.preset.cluster.timeout_s)
        actor_class = ray.remote(_RankActor)
        unordered = [
            actor_class.options(
                num_cpus=share["CPU"],
                num_gpus=share.get("GPU", 0),
                max_restarts=0,
                runtime_env={"env_vars": dict(self.plan.env)},
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=index // per_node
                ),
            ).remote()
            for index in range(self.plan.world_size)
        ]
        self._actors = unordered
        places: list[Place] = self._wait([a.where.remote() for a in unordered], "start the ranks' processes")
        # Megatron's tensor-parallel neighbours have consecutive ranks: they must share a node.
        order = sorted(range(len(places)), key=lambda i: (places[i].node, places[i].gpu, i))
        self._actors = [unordered[i] for i in order]
        self._host = places[order[0]].address

    def _launch(self, target: str) -> None:
        host = "127.0.0.1" if self.plan.local else self._host
        init_method = self._wait([self._actors[0].free_address.remote(host)], "find a free port")[0]
        self._all(
            "setup",
            [actor.launch.remote(target, self.plan, rank, init_method) for rank, actor in enumerate(self._actors)],
        )

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> list[Completion]:
        """Sample from the rollout policy; in the order of ``requests``."""
        return list(self._call("generate", list(requests), sampling))

    def update_rollout_weights(self, snapshot_id: int) -> None:
        """Make the trainer's present weights the rollout policy."""
        self._call("update_rollout_weights", snapshot_id)

    def group_advantages(self, rewards: Sequence[float], group_ids: Sequence[int]) -> list[float]:
        """Computed on rank 0: one formula, one place, and the driver stays without torch."""
        normalize = self.plan.preset.algorithm.normalize_advantages
        reference = self._actors[0].group_advantages.remote(list(rewards), list(group_ids), normalize)
        return list(self._all("group_advantages", [reference]))

    def train_step(self, samples: Sequence[Sample]) -> Row:
        """One optimizer step over the whole list."""
        return dict(self._call("train_step", list(samples)))

    def save_checkpoint(self, directory: Path, extra: Mapping[str, Any]) -> None:
        """Write a checkpoint that is complete or absent."""
        self._call("save_checkpoint", directory, dict(extra))

    def load_checkpoint(self, directory: Path) -> dict[str, Any]:
        """Restore every rank; the ``extra`` that was saved."""
        return dict(self._call("load_checkpoint", directory))

    def _call(self, method: str, *args: Any) -> Any:
        import ray

        shared = ray.put(args)
        return self._all(method, [a.call.remote(method, shared, rank == 0) for rank, a in enumerate(self._actors)])

    def _all(self, what: str, references: list[Any]) -> Any:
        """Rank 0's value once every outcome is in. A failure gives the other ranks VERDICT_S to say what they know.

        When a rank dies, its neighbours' collectives fail too, often first; the rank that died is the cause.
        """
        outcomes: dict[int, Outcome] = {}
        pending = {reference: rank for rank, reference in enumerate(references)}
        deadline = float("inf")
        while pending and time.monotonic() < deadline:
            self._check()
            for reference in self._done(list(pending)):
                rank = pending.pop(reference)
                outcomes[rank] = self._fetch(reference, rank, what)
                if outcomes[rank].error is not None and deadline == float("inf"):
                    deadline = time.monotonic() + VERDICT_S
        errors = [outcome.error for _, outcome in sorted(outcomes.items()) if outcome.error is not None]
        if errors:
            raise min(errors, key=_blame)
        return outcomes[0].value

    def _fetch(self, reference: Any, rank: int, what: str) -> Outcome:
        import ray

        try:
            outcome: Outcome = ray.get(reference)
            return outcome
        except ray.exceptions.RayActorError as error:
            log = self.plan.rank_log(rank)
            return Outcome(error=RankDiedError(_death(rank, what, error), rank=rank, hint=f"its output is in {log}"))
        except ray.exceptions.RayError as error:
            kind = type(error).__name__
            return Outcome(error=RankFailedError(f"rank {rank} failed in {what}: {kind}", rank=rank, cause=kind))

    def _wait(self, references: list[Any], what: str, timeout_s: float | None = None) -> list[Any]:
        """Plain answers of all references, asking ``should_stop`` meanwhile."""
        import ray

        limit = self.plan.preset.cluster.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit
        while len(ray.wait(references, num_returns=len(references), timeout=POLL_S)[0]) < len(references):
            self._check()
            if time.monotonic() > deadline:
                raise RunError(
                    f"the cluster could not {what} within {limit:g} s",
                    hint=f"the run needs {self.plan.world_size} ranks on {self.plan.num_nodes} node(s); "
                    "look at the cluster's free resources, or raise cluster.timeout_s",
                )
        try:
            return list(ray.get(references))
        except ray.exceptions.RayError as error:
            raise RunError(f"the cluster could not {what}: {_first_line(error)}") from error

    def _done(self, references: list[Any]) -> list[Any]:
        import ray

        ready, _ = ray.wait(references, num_returns=1, timeout=POLL_S)
        return list(ready)

    def _check(self) -> None:
        if self.should_stop():
            raise RunInterrupted("the run was asked to stop")
        server = self.cluster.dead_server()
        if server is not None:
            raise RunError(f"the local Ray cluster lost its {server}", hint="was it killed for want of memory?")

    def close(self) -> None:
        """Let every rank close its process groups, for up to CLOSE_S, then end the processes."""
        import ray

        if self._actors and ray.is_initialized():
            references = [actor.call.remote("close", (), False) for actor in self._actors]
            ray.wait(references, num_returns=len(references), timeout=CLOSE_S)
        self.kill()

    def kill(self) -> None:
        """End the ranks' processes at once."""
        import ray
        from ray.util.placement_group import remove_placement_group

        actors, self._actors = self._actors, []
        group, self._group = self._group, None
        if not ray.is_initialized() or self.cluster.dead_server() is not None:
            return
        for actor in actors:
            ray.kill(actor, no_restart=True)
        if group is not None:
            remove_placement_group(group)


class _RankActor(RankShell):
    """The shell, plus what only Ray can tell it."""

    def where(self) -> Place:
        import ray

        context = ray.get_runtime_context()
        gpus = [int(gpu) for gpu in context.get_accelerator_ids().get("GPU", [])]
        return self.place(context.get_node_id(), ray.util.get_node_ip_address(), gpus[0] if gpus else 0)


def _blame(error: P3OLaunchError) -> int:
    """Order of guilt: a process that is gone, an error we can name, anything else."""
    if isinstance(error, RankDiedError):
        return 0
    return 2 if isinstance(error, RankFailedError) else 1


def _death(rank: int, what: str, error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    reason = next((line for line in lines if "exit" in line or "killed" in line or "OOM" in line), "")
    reason = textwrap.shorten(reason, REASON_LENGTH, placeholder=" ...")
    return f"the process of rank {rank} died during {what}" + (f" ({reason})" if reason else "")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
