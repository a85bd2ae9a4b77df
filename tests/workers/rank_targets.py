"""Ranks that do what a test asks of them, without torch. Imported inside actors by path."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from p3o_launch.errors import NonFiniteRatioError, RunError
from p3o_launch.runtime.types import Completion


class ScriptedRank:
    """Echoes requests as completions. ``train_step`` follows the orders in the file ``orders`` of the run directory.

    An order is ``RANK ACTION``: die, raise, unpicklable, typed, hang, print. Ranks without an order answer at once.
    """

    def __init__(self, plan, rank, init_method):
        self.plan = plan
        self.rank = rank
        self.init_method = init_method
        self.snapshot = None

    def setup(self):
        sys.stdout.write(f"rank {self.rank} is up\n")
        if "setup" in self._orders():
            raise RuntimeError("this rank cannot be set up")

    def _orders(self):
        path = self.plan.run_dir / "orders"
        lines = path.read_text().splitlines() if path.exists() else []
        return [action for rank, action in (line.split() for line in lines) if int(rank) == self.rank]

    def generate(self, requests, sampling):
        return [Completion(r.request_id, (self.rank, 1), (-0.5, -0.25), False) for r in requests]

    def update_rollout_weights(self, snapshot_id):
        self.snapshot = snapshot_id

    def train_step(self, samples):
        for order in self._orders():
            self._obey(order)
        return {"pid": os.getpid(), "rank": self.rank, "snapshot": self.snapshot, "samples": len(samples)}

    def _obey(self, order):
        if order == "die":
            os._exit(7)
        if order == "raise":
            raise RuntimeError("connection closed by peer")
        if order == "typed":
            raise NonFiniteRatioError(step=3, ranks=(self.rank,))
        if order == "unpicklable":
            raise Unpicklable(lambda: None)
        if order == "hang":
            time.sleep(600)
        if order == "print":
            os.write(1, b"a word from native code\n")

    def save_checkpoint(self, directory, extra):
        path = Path(directory)
        path.mkdir(parents=True, exist_ok=True)
        (path / f"rank_{self.rank}").write_text(repr(sorted(extra.items())))

    def close(self):
        (self.plan.run_dir / f"closed_{self.rank}").touch()


class Unpicklable(RunError):
    """Holds a lambda, which pickle refuses."""

    def __init__(self, thing):
        super().__init__("an error that holds a lambda")
        self.thing = thing


class EnvironmentRank(ScriptedRank):
    """Reports its environment and its modules instead of training."""

    def train_step(self, samples):
        return {name: os.environ.get(name, "") for name in self.plan.env} | {"torch": "torch" in sys.modules}


class SlowRank(ScriptedRank):
    """Trains for ever, a fifth of a second per step, and keeps a child process as a data loader would."""

    def train_step(self, samples):
        time.sleep(0.2)
        return {"train/loss": 0.0}

    def save_checkpoint(self, directory, extra):
        """Nothing to save."""
