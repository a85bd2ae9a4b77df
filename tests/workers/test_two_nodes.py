"""A run over several nodes of a cluster that exists: one bundle of ranks per node, and the real step across them."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from heads import BIN, Head

TINY = Path(__file__).parents[1] / "data" / "run" / "tiny.yaml"
RUN_S = 150


@pytest.fixture
def two_nodes(tmp_path):
    head = Head(tmp_path, num_cpus=1, RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="1")
    try:
        head.add_node()
        yield head
    finally:
        head.close()


def start(head: Head, directory: Path, *settings: str) -> subprocess.Popen[str]:
    words = [str(BIN / "p3o-launch"), "run", "--preset", str(TINY), "--ray-address", head.address]
    for setting in ("logging.tensorboard=false", f"logging.output_root={directory / 'runs'}", *settings):
        words += ["--set", setting]
    return subprocess.Popen(
        words, cwd=directory, env=head.environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def raylets_of_actors(head: Head) -> set[int]:
    """The node each rank lives on, as the process of its raylet."""
    found = set()
    for process in head.processes():
        try:
            if any("RankActor" in part for part in process.cmdline()[:1]):
                found.add(process.ppid())
        except psutil.Error:
            continue
    return found


@pytest.mark.slow
def test_two_nodes_train_together_with_their_ranks_apart(two_nodes, tmp_path):
    run = start(two_nodes, tmp_path, "cluster.num_nodes=2", "cluster.gpus_per_node=1", "batch.num_rollout=8")
    nodes: set[int] = set()
    deadline = time.monotonic() + RUN_S
    while run.poll() is None and time.monotonic() < deadline:
        nodes |= raylets_of_actors(two_nodes)
        time.sleep(0.3)
    output = run.communicate(timeout=10)[0]
    assert run.returncode == 0, output
    assert len(nodes) == 2
    (metrics,) = tmp_path.glob("runs/*/*/*/metrics.jsonl")
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == list(range(1, 9))


@pytest.mark.slow
def test_a_node_that_is_not_there_is_named_in_time(two_nodes, tmp_path):
    run = start(
        two_nodes,
        tmp_path,
        "cluster.num_nodes=3",
        "cluster.gpus_per_node=1",
        "batch.rollout_batch_size=3",
        "batch.global_batch_size=6",
        "cluster.timeout_s=5",
    )
    output = run.communicate(timeout=RUN_S)[0]
    assert run.returncode == 1, output
    assert "the cluster could not place the ranks within 5 s" in output
    assert "3 ranks on 3 node(s)" in output
