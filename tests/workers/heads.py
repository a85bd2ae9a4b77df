"""A Ray head of the tests' own on loopback, behind a random token, and further nodes of it on this machine."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

BIN = Path(sys.executable).parent
START_S = 90


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Head:
    """``ray start --head``, up when the constructor returns. ``environment``: what a driver needs to join.

    ``jobs_port``: of its Jobs server, if it shall have one. ``variables``: what its processes see beside that.
    """

    def __init__(self, log_dir: Path, num_cpus: int = 2, jobs_port: int | None = None, **variables: str) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self.environment = inherited | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "no_proxy": "127.0.0.1,localhost",
            "NO_PROXY": "127.0.0.1,localhost",
            **variables,
        }
        # A socket path may have 107 bytes.
        self.temp = Path(tempfile.mkdtemp(prefix="p3o-head-", dir="/tmp"))
        self.log_dir = log_dir
        self.nodes: list[subprocess.Popen[bytes]] = []
        self.address = f"127.0.0.1:{free_port()}"
        words = ["--head", f"--port={self.address.rpartition(':')[2]}", f"--temp-dir={self.temp}"]
        jobs = jobs_port is not None
        words += [f"--include-dashboard={str(jobs).lower()}", "--dashboard-host=127.0.0.1"]
        self._start(num_cpus, *words, *([f"--dashboard-port={jobs_port}"] if jobs else []))

    def add_node(self, num_cpus: int = 1) -> None:
        self._start(num_cpus, f"--address={self.address}")

    def _start(self, num_cpus: int, *words: str) -> None:
        # The agent's port is fixed unless it is named: two nodes on one machine would fight for it.
        common = ["--block", "--node-ip-address=127.0.0.1", f"--num-cpus={num_cpus}", "--disable-usage-stats"]
        common += ["--object-store-memory=200000000", f"--dashboard-agent-listen-port={free_port()}"]
        path = self.log_dir / f"node{len(self.nodes)}.log"
        with path.open("wb") as log:
            command = [str(BIN / "ray"), "start", *words, *common]
            node = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log, start_new_session=True)
        self.nodes.append(node)
        deadline = time.monotonic() + START_S
        while "Ray runtime started" not in path.read_text():
            if node.poll() is not None or time.monotonic() > deadline:
                self.close()
                raise AssertionError(path.read_text())
            time.sleep(0.2)

    def processes(self) -> list[psutil.Process]:
        """Everything that belongs to a node, the actors too."""
        running = [psutil.Process(node.pid) for node in self.nodes if node.poll() is None]
        return [*running, *(child for process in running for child in process.children(recursive=True))]

    def close(self) -> None:
        family = self.processes()
        for process in family:
            if process.is_running():
                process.terminate()
        _, alive = psutil.wait_procs(family, timeout=15)
        for process in alive:
            process.kill()
        psutil.wait_procs(alive, timeout=5)
        for node in self.nodes:
            node.wait(timeout=10)
        shutil.rmtree(self.temp, ignore_errors=True)
