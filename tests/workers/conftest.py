"""One local Ray cluster for the file's tests: starting one takes seconds."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

if find_spec("ray") is None:  # importing it here would fix Ray's access settings before the cluster can
    pytest.skip("needs the runtime extra", allow_module_level=True)

from p3o_launch.runtime.plan import make_plan
from p3o_launch.runtime.workers.cluster import Cluster
from p3o_launch.schema import Preset

TINY = Path(__file__).parents[1] / "data" / "run" / "tiny.yaml"


@pytest.fixture
def plan(tmp_path):
    made = make_plan(Preset.model_validate(yaml.safe_load(TINY.read_text())), tmp_path)
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    return replace(made, env={**made.env, "PYTHONPATH": path})


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    preset = Preset.model_validate(yaml.safe_load(TINY.read_text()))
    started = Cluster.start(make_plan(preset, tmp_path_factory.mktemp("cluster")))
    yield started
    started.close()
