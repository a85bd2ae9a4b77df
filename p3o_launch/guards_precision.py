"""5xx: number formats and determinism, judged by the declared hardware."""

from __future__ import annotations

from collections.abc import Iterator

from p3o_launch.diagnostics import Finding, Severity
from p3o_launch.guard_tools import ARGUMENTS, actor_env, both, either, named, shown, version_of
from p3o_launch.guards import GuardContext, guard
from p3o_launch.hardware import Capability, find_gpu, similar_gpu

_FP8_NEEDS: dict[str, tuple[Capability, str]] = {
    "delayed": ((8, 9), "per-tensor FP8"),
    "tensorwise": ((8, 9), "per-tensor FP8"),
    "blockwise": ((9, 0), "block-scaled FP8"),
    "mxfp8": ((10, 0), "MXFP8"),
}


@guard(
    "P3O501",
    "fp8-on-this-gpu",
    why="FP8 matrix units come with a compute capability: per-tensor scaling from 8.9, block scaling from 9.0, MXFP8 "
    "from 10.0. On an older GPU the model is built and the first FP8 region fails.",
    fix="Remove precision.fp8, choose a recipe the GPU has, or declare the GPU the run will use in cluster.gpu.",
    source="https://github.com/NVIDIA/TransformerEngine/issues/1159; "
    "https://github.com/MakazhanAlpamys/Soup/issues/835",
    allows="Per-tensor FP8 on 8.9 (L40S, RTX 4090); a GPU that is not declared or not known; FP8 rollout weights, "
    "which the trainer does not compute with.",
    ignorable=True,
)
def fp8_on_this_gpu(context: GuardContext) -> Iterator[Finding]:
    precision, cluster = context.preset.precision, context.preset.cluster
    gpu = find_gpu(cluster.gpu)
    if precision.fp8 is None or cluster.device != "cuda" or gpu is None:
        return
    recipe = precision.fp8_recipe or "delayed"
    needed, feature = _FP8_NEEDS[recipe]
    if gpu.capability >= needed:
        return
    usable = [name for name, (least, _) in _FP8_NEEDS.items() if name != "delayed" and gpu.capability >= least]
    blamed = "precision.fp8_recipe" if usable and precision.fp8_recipe is not None else "precision.fp8"
    yield Finding(
        blamed,
        f"{named(context.preset, blamed)} needs compute capability {_dotted(needed)} for {feature}, but "
        f"{named(context.preset, 'cluster.gpu')} has {_dotted(gpu.capability)}",
        f"use precision.fp8_recipe {either(usable)}" if usable else "set precision.fp8: null",
        related=("cluster.gpu", "precision.fp8" if blamed != "precision.fp8" else "precision.fp8_recipe"),
    )


def _dotted(capability: Capability) -> str:
    return ".".join(map(str, capability))


@guard(
    "P3O502",
    "fp16-and-bf16",
    why="A model has one half-precision format. Megatron refuses both flags after the processes have started.",
    fix="Keep precision.bf16 and remove precision.fp16.",
    source=f"--fp16 and --bf16 in {ARGUMENTS}",
)
def fp16_and_bf16(context: GuardContext) -> Iterator[Finding]:
    precision = context.preset.precision
    if precision.fp16 and precision.bf16:
        yield Finding(
            "precision.fp16",
            "precision.fp16 and precision.bf16 are both true",
            "set precision.fp16: false",
            related=("precision.bf16",),
        )


_CUBLAS = (":4096:8", ":16:8")
_DETERMINISTIC = {"NCCL_ALGO": "Ring", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


@guard(
    "P3O503",
    "deterministic-env",
    why="Megatron's deterministic mode only promises what the libraries below it keep: NCCL must sum in one order "
    "(Ring, never Tree), Transformer Engine and cuBLAS must use deterministic kernels, and fused cross-entropy has "
    "none.",
    fix="cluster.env: {NCCL_ALGO: Ring, NVTE_ALLOW_NONDETERMINISTIC_ALGO: '0', CUBLAS_WORKSPACE_CONFIG: ':4096:8'}, "
    "and precision.cross_entropy_loss_fusion: false.",
    source=f"--deterministic-mode in {ARGUMENTS}; https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/3543",
    allows="Flash attention, whose backward pass is deterministic; either cuBLAS workspace; runs on the CPU.",
)
def deterministic_env(context: GuardContext) -> Iterator[Finding]:
    preset = context.preset
    if not preset.precision.deterministic_mode or preset.cluster.device != "cuda":
        return
    env = actor_env(preset)
    absent = [name for name in _DETERMINISTIC if name not in env]
    if absent:
        lines = both(f'{name}: "{_DETERMINISTIC[name]}"' for name in absent)
        yield Finding(
            "precision.deterministic_mode",
            f"precision.deterministic_mode is true, but cluster.env does not set {both(absent)}",
            f"add to cluster.env: {lines}",
            related=("cluster.env",),
        )
    for name, wanted in _DETERMINISTIC.items():
        if name in env and not _keeps_order(name, env[name].value):
            yield Finding(
                env[name].path,
                f"{env[name].path} ({shown(env[name].value)}) is not deterministic, but "
                "precision.deterministic_mode is true",
                f'use "{wanted}"',
                related=("precision.deterministic_mode",),
            )
    if preset.precision.cross_entropy_loss_fusion:
        yield Finding(
            "precision.cross_entropy_loss_fusion",
            "precision.cross_entropy_loss_fusion is true, but precision.deterministic_mode is true and the fused "
            "kernel is not deterministic",
            "set precision.cross_entropy_loss_fusion: false",
            related=("precision.deterministic_mode",),
        )


def _keeps_order(name: str, value: str) -> bool:
    if name == "NVTE_ALLOW_NONDETERMINISTIC_ALGO":
        return value.strip() == "0"
    if name == "CUBLAS_WORKSPACE_CONFIG":
        return value.strip() in _CUBLAS
    return _is_ring(value)


def _is_ring(value: str) -> bool:
    """NCCL_ALGO: a list, ``^`` in front for "all but"; newer versions take ``function:list;...``."""
    for part in value.lower().replace(" ", "").split(";"):
        algorithms = part.rpartition(":")[2]
        listed = algorithms.lstrip("^").split(",")
        excluded = algorithms.startswith("^")
        if excluded != ("tree" in listed) or (not excluded and "ring" not in listed):
            return False
    return True


@guard(
    "P3O504",
    "batch-invariant-on-this-gpu",
    why="Batch-invariant kernels of vLLM exist from compute capability 8.0 on, and before vLLM 0.20 from 9.0 on. On an "
    "older GPU the engine does not start.",
    fix="Remove VLLM_BATCH_INVARIANT, or declare the GPU and the engine version the run will use.",
    source="https://docs.vllm.ai/en/v0.32.0/features/batch_invariance/; "
    "https://github.com/vllm-project/vllm/issues/29571; https://github.com/vllm-project/vllm/pull/50993",
    allows="Hopper and later; Ampere with vLLM 0.20 or later, or with a version that is not declared; a GPU that is "
    "not declared or not known.",
    ignorable=True,
)
def batch_invariant_on_this_gpu(context: GuardContext) -> Iterator[Finding]:
    preset, rollout = context.preset, context.preset.rollout
    entry = actor_env(preset).get("VLLM_BATCH_INVARIANT")
    gpu, version = find_gpu(preset.cluster.gpu), version_of(rollout.engine_version)
    if entry is None or entry.value.strip() != "1" or rollout.engine != "vllm":
        return
    if preset.cluster.device != "cuda" or gpu is None:
        return
    needed = (9, 0) if version is not None and version < (0, 20) else (8, 0)
    if gpu.capability < needed:
        engine = "vllm" if version is None else f"vllm {shown(rollout.engine_version)}"
        yield Finding(
            entry.path,
            f"{entry.path} (1) needs compute capability {_dotted(needed)} with {engine}, but "
            f"{named(preset, 'cluster.gpu')} has {_dotted(gpu.capability)}",
            "remove it" if gpu.capability < (8, 0) else "remove it, or use vllm 0.20 or later",
            related=("rollout.engine", "rollout.engine_version", "cluster.gpu"),
        )


@guard(
    "P3O509",
    "attention-backend-unavailable",
    why="The flash and fused kernels compute in fp16 or bf16, and on Ampere or later. Asked for anything else, the "
    "attention layer finds no kernel in its first forward pass.",
    fix="Set precision.bf16: true, or model.attention_backend: unfused.",
    source="kernel selection of Transformer Engine's DotProductAttention; https://github.com/redai-studio/Relax/issues/233",
    allows="auto, unfused and local; runs on the CPU; a GPU that is not declared or not known.",
    ignorable=True,
)
def attention_backend_unavailable(context: GuardContext) -> Iterator[Finding]:
    preset, path = context.preset, "model.attention_backend"
    precision, gpu = preset.precision, find_gpu(preset.cluster.gpu)
    if preset.cluster.device != "cuda" or preset.model.attention_backend not in ("flash", "fused"):
        return
    if not precision.bf16 and not precision.fp16:
        yield Finding(
            path,
            f"{named(preset, path)} computes in fp16 or bf16, but precision.bf16 and precision.fp16 are false",
            "set precision.bf16: true, or model.attention_backend: unfused",
            related=("precision.bf16", "precision.fp16"),
        )
    elif gpu is not None and gpu.capability < (8, 0):
        yield Finding(
            path,
            f"{named(preset, path)} needs compute capability 8.0, but {named(preset, 'cluster.gpu')} has "
            f"{_dotted(gpu.capability)}",
            "use unfused",
            related=("cluster.gpu",),
        )


@guard(
    "P3O508",
    "half-precision-on-cpu",
    why="On the CPU the runtime computes in float32, or in float64 for verification: bf16 matrix products are about a "
    "hundred times slower there, and there is no FP8.",
    fix="Set precision.bf16, precision.fp16 and precision.fp8 off, as the profile cpu does.",
    source="megatron-core 0.16 on torch's CPU kernels, measured",
    allows="Rounded rollout weights, which are stored in float32.",
)
def half_precision_on_cpu(context: GuardContext) -> Iterator[Finding]:
    preset, offs = context.preset, {"bf16": "false", "fp16": "false", "fp8": "null"}
    on = [f"precision.{field}" for field in offs if getattr(preset.precision, field)]
    if preset.cluster.device == "cpu" and on:
        yield Finding(
            on[0],
            f"{both(named(preset, path) for path in on)} with cluster.device (cpu): the CPU computes in float32 or "
            "float64",
            "set " + both(f"{path}: {offs[path.partition('.')[2]]}" for path in on),
            related=(*on[1:], "cluster.device"),
        )


@guard(
    "P3O510",
    "bf16-on-this-gpu",
    why="Matrix units compute in bfloat16 from compute capability 8.0 on. On an older GPU compiled kernels and engines "
    "refuse it when they start, and what does run is emulated in float32.",
    fix="Use precision.fp16, train in float32, or declare the GPU the run will use in cluster.gpu.",
    source="https://github.com/vllm-project/vllm/issues/946; https://github.com/verl-project/verl/issues/2594",
    allows="fp16 and float32 on any GPU; bf16 on Ampere and later; a GPU that is not declared or not known; the CPU, "
    "which is P3O508's matter.",
    ignorable=True,
)
def bf16_on_this_gpu(context: GuardContext) -> Iterator[Finding]:
    preset, path = context.preset, "precision.bf16"
    gpu = find_gpu(preset.cluster.gpu)
    if not preset.precision.bf16 or preset.cluster.device != "cuda" or gpu is None or gpu.capability >= (8, 0):
        return
    yield Finding(
        path,
        f"{named(preset, path)} needs compute capability 8.0, but {named(preset, 'cluster.gpu')} has "
        f"{_dotted(gpu.capability)}",
        # With both formats on, one of them must go anyway: P3O502.
        "set precision.bf16: false" + ("" if preset.precision.fp16 else " and precision.fp16: true"),
        related=("cluster.gpu",),
    )


@guard(
    "P3O511",
    "gpu-not-known",
    Severity.WARNING,
    why="The rules about number formats, memory and hardware queues look the declared GPU up by its name. A name that "
    "is not in their list switches them off, and nothing else would say so.",
    fix="Write the product name as nvidia-smi prints it, such as A100-80GB.",
    source="p3o_launch/hardware.py: product names, compute capabilities and memory",
    allows="The names of NVIDIA's data-centre, workstation and consumer GPUs in any spelling, with memory, form factor "
    "or vendor beside them; no declared GPU; the CPU.",
    ignorable=True,
)
def gpu_not_known(context: GuardContext) -> Iterator[Finding]:
    cluster = context.preset.cluster
    if cluster.device != "cuda" or cluster.gpu is None or find_gpu(cluster.gpu) is not None:
        return
    similar = similar_gpu(cluster.gpu)
    yield Finding(
        "cluster.gpu",
        f"{named(context.preset, 'cluster.gpu')} is no GPU that is known here: whether it has bf16 and FP8, enough "
        "memory and one hardware queue is not checked",
        f"did you mean {similar}?" if similar else "set cluster.gpu: null, or ignore P3O511 with the reason",
    )
