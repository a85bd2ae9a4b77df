"""6xx: memory, environment and assets. The offline half; 609 and 610 are raised by preflight on the machine."""

from __future__ import annotations

from collections.abc import Iterator

from p3o_launch.diagnostics import Finding, Severity
from p3o_launch.guard_tools import ARGUMENTS, actor_env, both, named
from p3o_launch.guards import GuardContext, Rule, guard, register
from p3o_launch.hardware import find_gpu

GIB = 2**30
# float32 logits, the softmax that the backward pass reads, and the gradient.
LOGITS_COPIES = 3
# Weights, gradients, optimizer state and activations need the other half.
LOGITS_SHARE = 0.5


def logits_bytes(context: GuardContext) -> int:
    """Float32 blocks [tokens, vocabulary / TP] that one micro-batch of the longest samples holds at once [bytes]."""
    preset, sizes = context.preset, context.topology
    batch = preset.batch
    tokens = batch.micro_batch_size * -(-sizes.max_tokens_per_sample // sizes.cp)
    if batch.use_dynamic_batch_size:
        tokens = batch.max_tokens_per_gpu or 0
    return tokens * -(-preset.model.vocab_size // sizes.tp) * 4 * LOGITS_COPIES


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
    needed, room = logits_bytes(context), gpu.memory_gib * GIB * LOGITS_SHARE
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
        f"use {fitting} or less" if fitting >= 1 else "raise parallel.tensor_model_parallel_size",
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
        message = f"{entry.path} ({entry.value}) must be 1 for {reason}"
    yield Finding(
        entry.path if entry is not None else spread[0],
        message,
        f'add to cluster.env: {_CONNECTIONS}: "1"' if entry is None else 'use "1"',
        related=(*spread, "cluster.gpu", "cluster.env"),
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
