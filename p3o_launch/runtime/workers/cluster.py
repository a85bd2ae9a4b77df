"""The Ray cluster of a run: one of its own on loopback, or an existing one.

The local cluster is private: bound to 127.0.0.1, behind a random token, with its files in a directory of its own, and
ended by process when it does not end when asked.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from p3o_launch.errors import RunError
from p3o_launch.runtime.packaging import packed_env
from p3o_launch.runtime.plan import RunPlan
from p3o_launch.runtime.workers.processes import MARK_VARIABLE, cluster_processes, end_processes
from p3o_launch.runtime.workers.watchdog import Watchdog

OBJECT_STORE_BYTES = 256 * 2**20
SHUTDOWN_S = 10.0
KILL_GRACE_S = 3.0
ANSWER_S = 10.0
START_ATTEMPTS = 2
_INSIDE_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
_SERVERS = ("gcs_server", "raylet")
_TOKENS: dict[str, str] = {}

_LOCAL_SETTINGS = {
    "RAY_AUTH_MODE": "token",
    # Despite its name: without clusters of several machines Ray binds its servers to loopback, on Linux too.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "false",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_NUM_REDIS_GET_RETRIES": "60",
}


@dataclass
class Cluster:
    """A connection to Ray. ``close`` ends a local cluster with all its processes; it may be called twice."""

    address: str
    local: bool
    mark: str = ""
    temp_dir: Path | None = None
    _watchdog: Watchdog | None = field(default=None, repr=False)
    _servers: dict[str, psutil.Process] = field(default_factory=dict, repr=False)
    _closed: bool = field(default=False, repr=False)

    @classmethod
    def start(cls, plan: RunPlan) -> Cluster:
        """Connect to ``cluster.ray_address``, or start a cluster for the ranks of ``plan`` on this machine.

        Raises RunError when Ray does not come up.
        """
        address = plan.preset.cluster.ray_address
        if address is not None:
            return cls.connect(address, plan)
        for _ in range(START_ATTEMPTS - 1):
            # Ray gives its servers a fixed half minute, which a busy machine can exceed.
            with contextlib.suppress(RunError):
                return cls.start_local(plan)
        return cls.start_local(plan)

    @classmethod
    def connect(cls, address: str, plan: RunPlan) -> Cluster:
        """Join an existing cluster as a driver. Its token, if any, comes from the user's environment."""
        import ray

        # Inside a job, Ray has applied the preset's environment to the whole job already.
        own = {} if _INSIDE_JOB in os.environ else plan.preset.cluster.runtime_env
        runtime_env = packed_env(own, plan.preset.logging.output_root)
        require_answer(address)
        with _as_run_error(f"cannot connect to the Ray cluster at {address}"):
            ray.init(address=address, runtime_env=runtime_env, log_to_driver=False, configure_logging=False)
        return cls(address=address, local=False)

    @classmethod
    def start_local(cls, plan: RunPlan) -> Cluster:
        """Start Ray on loopback with one logical CPU per rank and, on CUDA, this machine's GPUs."""
        mark = secrets.token_hex(16)
        environment = _local_environment(mark)
        # Ray's sockets live below this directory, and a socket path may have 107 bytes: keep it short.
        temp_dir = Path(tempfile.mkdtemp(prefix="p3o-", dir="/tmp" if os.path.isdir("/tmp") else None))
        cluster = cls(address="local", local=True, mark=mark, temp_dir=temp_dir)
        cluster._watchdog = Watchdog(mark, temp_dir)
        os.environ.update(environment)
        # Registered before Ray registers its own, so it runs after them: a failed start writes there once more.
        atexit.register(shutil.rmtree, temp_dir, ignore_errors=True)
        import ray

        try:
            with _as_run_error("the local Ray cluster did not start"):
                ray.init(
                    address="local",
                    num_cpus=plan.world_size,
                    num_gpus=plan.ranks_per_node if plan.device == "cuda" else 0,
                    object_store_memory=OBJECT_STORE_BYTES,
                    include_dashboard=False,
                    log_to_driver=False,
                    configure_logging=False,
                    _node_ip_address="127.0.0.1",
                    _temp_dir=str(temp_dir / "r"),  # Ray opens its directory to everybody; the one above stays ours
                )
        except BaseException:
            cluster.close()
            raise
        members = cluster_processes(mark, temp_dir)
        cluster._servers = {process.name(): process for process in members if process.name() in _SERVERS}
        return cluster

    @property
    def job_id(self) -> str:
        """Ray's id of this driver."""
        import ray

        return str(ray.get_runtime_context().get_job_id())

    def dead_server(self) -> str | None:
        """Name of a server of the local cluster that has ended. Ray itself would wait a minute for it to come back."""
        return next((name for name, process in self._servers.items() if _ended(process)), None)

    def close(self) -> None:
        """Disconnect; for a local cluster, also end every process of it and remove its files. Bounded in time."""
        if self._closed:
            return
        self._closed = True
        if self.dead_server() is None:
            _shutdown_ray(SHUTDOWN_S)
        self.kill()

    def kill(self, grace_s: float = KILL_GRACE_S) -> None:
        """End the local cluster's processes without asking Ray, then remove its files."""
        if self.temp_dir is None:
            return
        end_processes(cluster_processes(self.mark, self.temp_dir), grace_s)
        shutil.rmtree(self.temp_dir, ignore_errors=True)
        if self._watchdog is not None:
            self._watchdog.dismiss()
        os.environ.pop(MARK_VARIABLE, None)


def require_answer(address: str) -> None:
    """Raise RunError when nothing listens at ``address``: Ray itself would try again for a quarter of an hour.

    ``HOST:PORT`` or ``ray://HOST:PORT``; a name such as ``auto`` is Ray's to resolve.
    """
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if not colon or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_S).close()
    except (OSError, OverflowError) as error:
        raise RunError(
            f"no Ray cluster answers at {address}: {error}",
            hint="give the address that `ray start --head` printed, HOST:6379 unless another port was chosen",
        ) from error


def _local_environment(mark: str) -> dict[str, str]:
    """Variables Ray reads when it is imported or when it starts processes."""
    if "ray" in sys.modules and os.environ.get("RAY_AUTH_MODE") != "token":
        raise RunError("ray was imported before the run could set its access token", hint="start the run first")
    # One token per process: Ray caches the first it sees. A user's own token is for the user's cluster, not for ours.
    token = _TOKENS.setdefault("local", secrets.token_hex(32))
    return _LOCAL_SETTINGS | {MARK_VARIABLE: mark, "RAY_AUTH_TOKEN": token} | _no_proxy(os.environ)


def _ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _no_proxy(environ: Mapping[str, str]) -> dict[str, str]:
    """Loopback must not go through a proxy; both spellings, because readers differ."""
    if not any(environ.get(name) for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")):
        return {}
    present = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    hosts = [host for host in present.split(",") if host]
    hosts += [host for host in ("127.0.0.1", "localhost") if host not in hosts]
    return {"no_proxy": ",".join(hosts), "NO_PROXY": ",".join(hosts)}


def _shutdown_ray(timeout_s: float) -> None:
    """``ray.shutdown`` in a thread of its own, because it can hang on a cluster that has died."""
    import ray

    thread = threading.Thread(target=ray.shutdown, name="ray-shutdown", daemon=True)
    thread.start()
    thread.join(timeout_s)


@contextlib.contextmanager
def _as_run_error(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # Ray raises bare Exception when its servers are slow to come up
        reason = str(error).strip().splitlines()
        raise RunError(
            f"{what}: {reason[0] if reason else type(error).__name__}",
            hint="Ray's servers get 30 s to come up: look at this machine's load and free memory, then try again",
        ) from error
