"""6xx: memory, environment and assets. The offline half; 609 and 610 are raised by preflight on the machine."""

from __future__ import annotations

from collections.abc import Iterator

from p3o_launch.diagnostics import Finding, Severity
from p3o_launch.guard_tools import ARGUMENTS, actor_env, both, named, printable, shown, up_to, version_of
from p3o_launch.guards import GuardContext, Rule, guard, register
from p3o_launch.guards_evaluation import length_is_refused
from p3o_launch.hardware import find_gpu
from p3o_launch.memory import GIB, LOGITS_COPIES, logits_bytes

# Weights, gradients, optimizer state and activations need the other half.
LOGITS_SHARE = 0.5


@guard(
    "P3O602",
    "logits-memory",
    Severity.WARNING,
    why="The output layer turns every token of a micro-batch into vocabulary / TP float32 numbers, kept about three "
    "times over: logits, softmax, gradient. With a vocabulary of 150,000 a few long samples fill a GPU, and the "
    "run ends the first time responses reach their cap.",
    fix="Lower micro_batch_size or max_tokens_per_gpu, or raise the tensor- or context-parallel size.",
    source="https://github.com/THUDM/slime/issues/2253",
    allows="An estimate of at most half of the declared GPU's memory; a GPU that is not declared, not known, or sold "
    "in several sizes without one in its name.",
    ignorable=True,
)
def logits_memory(context: GuardContext) -> Iterator[Finding]:
    preset = context.preset
    gpu = find_gpu(preset.cluster.gpu)
    if preset.cluster.device != "cuda" or gpu is None or gpu.memory_gib is None or context.topology.dp is None:
        return
    if not preset.batch.use_dynamic_batch_size and length_is_refused(context):
        return
    needed, room = logits_bytes(preset, context.topology), gpu.memory_gib * GIB * LOGITS_SHARE
    if needed <= room:
        return
    dynamic = preset.batch.use_dynamic_batch_size
    path = "batch.max_tokens_per_gpu" if dynamic else "batch.micro_batch_size"
    value = preset.batch.max_tokens_per_gpu if dynamic else preset.batch.micro_batch_size
    assert value is not None
    fitting = int(value * room / needed)
    yield Finding(
        path,
        f"{named(preset, path)} can need about {needed / GIB:.1f} GiB for logits ({named(preset, 'model.vocab_size')}, "
        f"float32, {LOGITS_COPIES} copies); {named(preset, 'cluster.gpu')} has {gpu.memory_gib} GiB for everything",
        f"use {up_to(fitting)}" if fitting >= 1 else "raise parallel.tensor_model_parallel_size",
        related=(
            "cluster.gpu",
            "model.vocab_size",
            "parallel.tensor_model_parallel_size",
            "parallel.context_parallel_size",
            "rollout.max_prompt_len",
            "rollout.max_response_len",
        ),
    )


_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


@guard(
    "P3O606",
    "cuda-device-max-connections",
    why="Before Blackwell, Megatron overlaps the collectives of tensor and context parallelism with computation by the "
    "order in which one hardware queue receives them. With more queues the order is lost; Megatron refuses to start.",
    fix='Set cluster.env: {CUDA_DEVICE_MAX_CONNECTIONS: "1"}.',
    source=f"CUDA_DEVICE_MAX_CONNECTIONS check in {ARGUMENTS}",
    allows="TP 1 with CP 1; Blackwell (compute capability 10.0 and above); the CPU; a GPU that is not declared or not "
    "known.",
    ignorable=True,
)
def cuda_device_max_connections(context: GuardContext) -> Iterator[Finding]:
    preset, sizes = context.preset, context.topology
    gpu = find_gpu(preset.cluster.gpu)
    if preset.cluster.device != "cuda" or gpu is None or gpu.capability >= (10, 0) or sizes.dp is None:
        return
    spread = [
        f"parallel.{field}"
        for field in ("tensor_model_parallel_size", "context_parallel_size")
        if getattr(preset.parallel, field) > 1
    ]
    entry = actor_env(preset).get(_CONNECTIONS)
    if not spread or (entry is not None and entry.value.strip() == "1"):
        return
    reason = f"{both(named(preset, path) for path in spread)} on {named(preset, 'cluster.gpu')}"
    if entry is None:
        message = f"cluster.env does not set {_CONNECTIONS}, which {reason} needs to be 1"
    else:
        message = f"{entry.path} ({shown(entry.value)}) must be 1 for {reason}"
    yield Finding(
        entry.path if entry is not None else spread[0],
        message,
        f'add to cluster.env: {_CONNECTIONS}: "1"' if entry is None else 'use "1"',
        related=(*spread, "cluster.gpu", "cluster.env"),
    )


_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


@guard(
    "P3O601",
    "expandable-segments-with-offload",
    why="A colocated engine frees its memory for the trainer through an allocator hook. Expandable segments come from "
    "another path the hook does not see, so the pause frees nothing and the next phase runs out of memory.",
    fix="Remove expandable_segments:True from the allocator variable.",
    source="https://github.com/fzyzcjy/torch_memory_saver/issues/24",
    allows="Engines on GPUs of their own; vLLM 0.20.1 and later, or of a version that is not declared; the megatron "
    "engine, which shares the trainer's allocator.",
    ignorable=True,
)
def expandable_segments_with_offload(context: GuardContext) -> Iterator[Finding]:
    preset, rollout = context.preset, context.preset.rollout
    version = version_of(rollout.engine_version)
    old_vllm = rollout.engine == "vllm" and version is not None and version < (0, 20, 1)
    if not rollout.colocate or not (rollout.engine == "sglang" or old_vllm):
        return
    env = actor_env(preset)
    for name in _ALLOCATOR:
        if name in env and "expandable_segments:true" in env[name].value.lower().replace(" ", ""):
            engine = rollout.engine if rollout.engine == "sglang" else f"vllm {shown(rollout.engine_version)}"
            yield Finding(
                env[name].path,
                f"{env[name].path} ({shown(env[name].value)}) keeps the colocated {engine} engine from "
                "freeing its memory",
                "remove expandable_segments:True",
                related=("rollout.engine", "rollout.engine_version", "rollout.colocate"),
            )


_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_NEVER_PROXIED = ("localhost", "127.0.0.1")


@guard(
    "P3O605",
    "proxy-reaches-the-engine",
    Severity.WARNING,
    why="The rollout engine is an HTTP server on the cluster's own nodes, and its clients honour proxy variables. "
    "Calls that go through a proxy answer 503 although every server is alive; the client does not "
    "understand ranges such as 10.0.0.0/8 in no_proxy.",
    fix="List localhost, 127.0.0.1 and the exact addresses of the nodes in no_proxy.",
    source="https://github.com/THUDM/slime/pull/1714",
    allows="no_proxy with localhost, 127.0.0.1 and node addresses, or *; no proxy; the megatron engine, which has no "
    "server.",
    ignorable=True,
)
def proxy_reaches_the_engine(context: GuardContext) -> Iterator[Finding]:
    preset, env = context.preset, actor_env(context.preset)
    spellings = [name for proxy in _PROXIES for name in (proxy, proxy.upper())]
    proxy = next((env[name] for name in spellings if name in env and env[name].value), None)
    if preset.rollout.engine == "megatron" or proxy is None:
        return
    exempt = env.get("no_proxy") or env.get("NO_PROXY")
    hosts = [host.strip() for host in exempt.value.split(",")] if exempt is not None else []
    missing = [host for host in _NEVER_PROXIED if host not in hosts]
    ranges = [host for host in hosts if "/" in host]
    if "*" in hosts or not (missing or (ranges and len(hosts) == len(ranges) + len(_NEVER_PROXIED))):
        return
    reason = (
        f"no_proxy does not list {both(missing)}"
        if missing
        else f"no_proxy names nodes only by range ({shown(ranges[0])})"
    )
    yield Finding(
        exempt.path if exempt is not None else proxy.path,
        f"{proxy.path} is set and {reason}: calls to {named(preset, 'rollout.engine')} go through the proxy",
        "list localhost, 127.0.0.1 and the exact node addresses in cluster.env.no_proxy",
        related=("rollout.engine", proxy.path),
    )


_RUNTIME_ENV_KEYS = frozenset(
    (
        *("working_dir", "py_modules", "py_executable", "excludes", "env_vars", "config", "pip", "uv", "conda"),
        *("container", "image_uri", "java_jars", "worker_process_setup_hook", "nsight", "rocprof_sys"),
    )
)


@guard(
    "P3O607",
    "ray-runtime-env",
    why="Ray drops a top-level key it does not know with a warning in a log, and refuses an environment value that is "
    "no text after the job has been submitted.",
    fix="Use the keys of Ray's runtime environment, and quote numbers and booleans in env_vars.",
    source="https://docs.ray.io/en/latest/ray-core/api/doc/ray.runtime_env.RuntimeEnv.html",
    allows="Every key Ray 2.60 knows, with any content but that of env_vars.",
)
def ray_runtime_env(context: GuardContext) -> Iterator[Finding]:
    runtime_env = context.preset.cluster.runtime_env
    for key in runtime_env:
        if key not in _RUNTIME_ENV_KEYS:
            from difflib import get_close_matches  # start-up must not pay for it

            close = get_close_matches(str(key), _RUNTIME_ENV_KEYS, n=1)
            yield Finding(
                f"cluster.runtime_env.{key}",
                f"cluster.runtime_env has no key {shown(key)}: Ray would drop it",
                f"did you mean {close[0]}?" if close else "variables belong in cluster.env",
                key=True,
            )
    env_vars = runtime_env.get("env_vars", {})
    if not isinstance(env_vars, dict):
        yield Finding(
            "cluster.runtime_env.env_vars", "cluster.runtime_env.env_vars is not a mapping", "write NAME: value"
        )
        return
    for name, value in env_vars.items():
        if not isinstance(value, str):
            path = f"cluster.runtime_env.env_vars.{name}"
            kind = "empty" if value is None else _KINDS.get(type(value), "no scalar")
            yield Finding(path, f"{printable(path)} is {kind}, not text: Ray refuses it", "put the value in quotes")


_KINDS = {bool: "a boolean", int: "a number", float: "a number"}


register(
    Rule(
        "P3O604",
        "disk-nearly-full",
        Severity.WARNING,
        why="Checkpoints hold weights and Adam's state: several times the model. A disk that fills up ends the run at "
        "a save. A striped file system fails earlier, when one of its targets is full while the whole still has room; "
        "and Ray refuses a node whose disk is above 95 % full.",
        fix="Free space, choose another logging.output_root, or lower checkpoint.keep.",
        source="https://github.com/awslabs/awsome-distributed-ai/pull/1225; RAY_local_fs_capacity_threshold (0.95) of "
        "Ray; parameter and optimizer bytes of docs/memory.md",
        allows="validate, which looks at no machine; a disk with room for checkpoint.keep + 1 checkpoints that stays "
        "below 90 % full.",
        ignorable=True,
    )
)
register(
    Rule(
        "P3O608",
        "working-dir-too-large",
        Severity.ERROR,
        why="Ray packs cluster.runtime_env.working_dir, sends it to the cluster in one message, and unpacks it on "
        "every node. It refuses a message that is too large only after packing all of it: from 100 MiB on where a job "
        "is submitted (its Jobs server), from 512 MiB on where a driver connects.",
        fix="List data, checkpoints and environments in cluster.runtime_env.excludes, or name a smaller directory.",
        source="https://github.com/TideDra/lmm-r1/issues/66; DASHBOARD_CLIENT_MAX_SIZE in "
        "ray/_private/ray_constants.py, GCS_STORAGE_MAX_SIZE in ray/_private/runtime_env/packaging.py (Ray 2.60)",
        allows="Any size of what is excluded: repositories, environments, caches, this preset's runs, and the preset's "
        "own excludes; a working_dir that is a package elsewhere (a URL).",
    )
)
register(
    Rule(
        "P3O609",
        "not-enough-gpus",
        Severity.ERROR,
        why="The preset asks for more GPUs than this machine, or the Ray cluster it names, has. Actors would wait for "
        "them without end.",
        fix="Run where the GPUs are, or choose a profile that fits: `--profile cpu` runs the same scenario here.",
        source="Ray placement groups wait for resources that do not exist",
        allows="validate and run --dry-run, which judge by the declared hardware and look at no machine.",
    )
)
register(
    Rule(
        "P3O610",
        "missing-asset",
        Severity.ERROR,
        why="A checkpoint, a prompt file or a file beside them is named in the preset and is not there. The first "
        "actor would find out minutes after the start.",
        fix="Download the file, correct the path, or use builtin:arithmetic.",
        source="preflight of p3o-launch",
        allows="validate and run --dry-run on another machine than the one that holds the files.",
    )
)
