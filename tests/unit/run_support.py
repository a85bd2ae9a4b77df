"""A small preset and parts of a run that need no process: for the tests of loop, driver and launch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import yaml

from p3o_launch.errors import NonFiniteRatioError
from p3o_launch.runtime.loop import Sink, Texts
from p3o_launch.runtime.plan import make_plan
from p3o_launch.runtime.types import Completion, Prompt
from p3o_launch.schema import Preset

TINY = Path(__file__).parents[1] / "data" / "run" / "tiny.yaml"


def tiny_preset(**groups) -> Preset:
    """The tiny preset with groups updated: ``tiny_preset(batch={"num_rollout": 2})``."""
    data = yaml.safe_load(TINY.read_text())
    for group, values in groups.items():
        data.setdefault(group, {}).update(values)
    return Preset.model_validate(data)


def tiny_plan(run_dir=Path("unused"), **groups):
    plan = make_plan(tiny_preset(**groups), run_dir)
    return plan if run_dir.is_absolute() else replace(plan, run_dir=run_dir)


class Prompts:
    """Prompt i of rollout r has the tokens (r, i) and the label ``str(i)``."""

    def __init__(self, count=8):
        self.count = count

    def __len__(self):
        return self.count

    def batch(self, rollout_id, count):
        return [Prompt(i, f"p{i}", (rollout_id, i), str(i)) for i in range(count)]


class Ranks:
    """Remembers its calls. Response token: number of completed steps. ``bad_step``: this step raises."""

    def __init__(self, events=None, bad_step=None):
        self.events = [] if events is None else events
        self.bad_step = bad_step
        self.steps = 0
        self.requests = []
        self.samples = []

    def generate(self, requests, sampling):
        self.events.append("generate")
        self.requests.append((requests, sampling))
        return [Completion(r.request_id, (self.steps, 1), (-0.5, -0.25), False) for r in requests]

    def update_rollout_weights(self, snapshot_id):
        self.events.append(f"sync {snapshot_id}")

    def group_advantages(self, rewards, group_ids):
        return [reward - 0.5 for reward in rewards]

    def train_step(self, samples):
        self.steps += 1
        self.events.append(f"step {self.steps}")
        self.samples.append(list(samples))
        if self.steps == self.bad_step:
            raise NonFiniteRatioError
        return {"train/loss": 1.0, "train/p3o/ess": 0.5}

    def save_checkpoint(self, directory, extra):
        """Complete the way ``checkpoint_dirs`` knows it; the loop's state lies beside the manifest."""
        self.events.append(f"save {directory.name} {extra['next_rollout']}")
        if directory.is_absolute():
            directory.mkdir(parents=True)
            (directory / "checkpoint.json").write_text('{"format": 1}')
            (directory / "extra").write_text(json.dumps(extra))

    def load_checkpoint(self, directory):
        self.events.append(f"load {directory.name}")
        return json.loads((directory / "extra").read_text())

    def close(self):
        self.events.append("ranks closed")

    def kill(self):
        self.events.append("ranks killed")


class Recorder(Sink):
    """Keeps everything it is told."""

    def __init__(self, events=None):
        self.events = events
        self.rows = []
        self.rollouts = []
        self.evaluations = []
        self.checkpoints = []

    def on_rollout(self, rollout_id, records):
        self.rollouts.append((rollout_id, list(records)))

    def on_step(self, step, rollout_id, row):
        self.rows.append((step, rollout_id, row))

    def on_evaluation(self, step, rollout_id, row):
        self.evaluations.append((step, rollout_id, row))

    def on_checkpoint(self, directory, state):
        self.checkpoints.append((directory.name, state))

    def close(self):
        if self.events is not None:
            self.events.append("sink closed")


TEXTS = Texts(decode=lambda ids: " ".join(map(str, ids)), score=lambda text, label: float(label == "1"))


class Clock:
    """Every look takes one second."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now
