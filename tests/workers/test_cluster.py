"""The private cluster: loopback only, a token of its own, nothing left behind."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import psutil
import pytest

from p3o_launch.errors import RunError
from p3o_launch.runtime.workers import cluster as module
from p3o_launch.runtime.workers.cluster import Cluster, _no_proxy, require_answer
from p3o_launch.runtime.workers.processes import cluster_processes


def test_every_port_of_the_cluster_is_on_loopback(cluster):
    members = cluster_processes(cluster.mark, cluster.temp_dir)
    assert {"gcs_server", "raylet"} <= {process.name() for process in members}
    addresses = {
        connection.laddr.ip
        for process in [*members, psutil.Process()]
        for connection in process.net_connections()
        if connection.status == psutil.CONN_LISTEN
    }
    assert addresses <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}


def test_the_token_is_random_and_in_no_file_of_the_cluster(cluster):
    token = os.environ["RAY_AUTH_TOKEN"]
    assert len(token) == 64
    files = [path for path in cluster.temp_dir.rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if token.encode() in path.read_bytes()]
    assert cluster.temp_dir.stat().st_mode & 0o077 == 0


def test_closing_ends_every_process_and_removes_the_files(plan, cluster):
    cluster.close()  # one cluster per process: this one makes room, and the fixture's close then does nothing
    own = Cluster.start(plan)
    members = cluster_processes(own.mark, own.temp_dir)
    watchdog = psutil.Process(own._watchdog._process.pid)
    own.close()
    own.close()
    assert not [process for process in [*members, watchdog] if still_runs(process)]
    assert not own.temp_dir.exists()


def test_ray_imported_too_early_is_a_clear_error(monkeypatch, plan):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    before = set(Path("/tmp").glob("p3o-*"))
    with pytest.raises(RunError, match="ray was imported before"):
        Cluster.start(plan)
    assert set(Path("/tmp").glob("p3o-*")) <= before


def test_loopback_is_exempt_from_proxies_when_there_are_any():
    assert _no_proxy({}) == {}
    both = _no_proxy({"http_proxy": "http://p", "NO_PROXY": "a.b,localhost"})
    assert both == dict.fromkeys(("no_proxy", "NO_PROXY"), "a.b,localhost,127.0.0.1")


def test_settings_for_the_local_cluster_do_not_reach_a_cluster_that_exists(monkeypatch, plan):
    seen = {}

    def refuse(**options):
        seen.update(options, mode=os.environ.get("RAY_AUTH_MODE"))
        raise ConnectionError("nobody there\nmore")

    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.setattr(module, "require_answer", lambda address: None)
    monkeypatch.delenv("RAY_AUTH_MODE")
    with pytest.raises(RunError, match=r"cannot connect to the Ray cluster at ray://x:1: nobody there$"):
        module.Cluster.connect("ray://x:1", plan)
    assert (seen["address"], seen["mode"]) == ("ray://x:1", None)


def still_runs(process: psutil.Process) -> bool:
    """A zombie has ended; only its new parent has not noticed yet."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_cluster_that_comes_up_too_slowly_is_tried_once_more(monkeypatch, plan):
    started = []

    def start_local(plan):
        started.append(plan)
        if len(started) == 1:
            raise RunError("the local Ray cluster did not start")
        return "cluster"

    monkeypatch.setattr(Cluster, "start_local", start_local)
    assert Cluster.start(plan) == "cluster"
    monkeypatch.setattr(Cluster, "start_local", lambda plan: (_ for _ in ()).throw(RunError("never")))
    with pytest.raises(RunError, match="never"):
        Cluster.start(plan)


def test_an_address_where_nothing_listens_is_said_at_once():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = time.monotonic()
    for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}", "127.0.0.1:99999"):
        with pytest.raises(RunError, match="no Ray cluster answers at"):
            require_answer(address)
    assert time.monotonic() - started < 10
    require_answer("auto")
