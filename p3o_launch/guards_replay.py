"""2xx: what makes the statistics pass and the train pass of one optimizer step see two networks or two batches.

Only P3O with ``ess_scope: step`` reads its window twice; every rule here is silent otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator

from p3o_launch.diagnostics import Finding, Severity
from p3o_launch.guard_tools import ARGUMENTS, CONFIG, PAPER, both, dropout_findings, named, replays
from p3o_launch.guards import GuardContext, guard
from p3o_launch.hardware import find_gpu

RELAX_P3O = "https://github.com/redai-studio/Relax/pull/272"
LIFTED = "algorithm.ess_scope: micro_batch and grpo, which read each micro-batch once."


@guard(
    "P3O201",
    "dropout-in-replay",
    why="The engine samples without dropout, so with it the ratio, and the ESS, measure dropout noise. The noise is "
    "drawn per micro-batch: the cap comes to depend on how the step is cut. Where random streams are not put back "
    "between the two passes, these even run two networks. Megatron's default is 0.1: leaving it out is enough.",
    fix="Write model.attention_dropout: 0 and model.hidden_dropout: 0.",
    source=f"https://github.com/Human-Agent-Society/reef/pull/536; defaults in {ARGUMENTS}",
    allows=f"Dropout of an inactive block, such as an adapter of rank 0. {LIFTED}",
)
def dropout_in_replay(context: GuardContext) -> Iterator[Finding]:
    if replays(context.preset):
        yield from dropout_findings(
            context.preset, "the ESS measures dropout noise, and the cap depends on how the step is cut"
        )


@guard(
    "P3O202",
    "fp8-amax-history",
    why="Delayed scaling takes its factors from a history of maxima that every forward pass writes. The statistics "
    "pass moves the scales the train pass then uses. Delayed is what an FP8 format without a recipe means.",
    fix="Set precision.fp8_recipe to tensorwise, blockwise or mxfp8, or remove precision.fp8.",
    source="https://github.com/NVIDIA/TransformerEngine/pull/825; accepted recipes: "
    "https://github.com/NVIDIA/TransformerEngine/pull/1471",
    allows=f"tensorwise (current), blockwise and mxfp8 scaling, which keep no history; FP8 rollout weights. {LIFTED}",
)
def fp8_amax_history(context: GuardContext) -> Iterator[Finding]:
    precision = context.preset.precision
    if not replays(context.preset) or precision.fp8 is None or precision.fp8_recipe not in (None, "delayed"):
        return
    if precision.fp8_recipe is None:
        path, related = "precision.fp8", ("precision.fp8_recipe",)
        subject = f"{named(context.preset, path)} without precision.fp8_recipe means delayed scaling"
    else:
        path, related = "precision.fp8_recipe", ("precision.fp8",)
        subject = f"{named(context.preset, path)} scales by a history of maxima"
    yield Finding(
        path,
        f"{subject}: the statistics pass changes the scales of the train pass",
        "set precision.fp8" + ("_recipe: tensorwise, which keeps no history" if _has_fp8(context) else ": null"),
        related=related,
    )


def _has_fp8(context: GuardContext) -> bool:
    gpu = find_gpu(context.preset.cluster.gpu)
    return gpu is None or gpu.capability >= (8, 9)


@guard(
    "P3O203",
    "lora-dropout",
    why="Dropout inside the adapter does what dropout in the model does: the ESS measures its noise, and the cap "
    "depends on how the step is cut into micro-batches.",
    fix="Set model.lora_dropout: 0.",
    source="https://github.com/ISEEKYAN/Megatron-LM/pull/75",
    allows=f"lora_dropout with lora_rank 0: there is no adapter. {LIFTED}",
)
def lora_dropout(context: GuardContext) -> Iterator[Finding]:
    preset = context.preset
    if replays(preset) and preset.model.lora_rank > 0 and preset.model.lora_dropout > 0:
        yield Finding(
            "model.lora_dropout",
            f"{named(preset, 'model.lora_dropout')} with {named(preset, 'model.lora_rank')}: the ESS "
            "measures its noise, and the cap depends on how the step is cut",
            "set model.lora_dropout: 0",
            related=("model.lora_rank",),
        )


@guard(
    "P3O204",
    "fully-async-window",
    why="The step's window must be complete before its first backward pass, and readable twice. A streaming rollout "
    "hands samples to the trainer while the step is under way; they cannot be read again.",
    fix="Set rollout.fully_async: false. For older samples use rollout.update_weights_interval.",
    source=f"{PAPER} Eq. 7; {RELAX_P3O}",
    allows=f"Periodic refresh of the rollout weights, and colocated rollouts. {LIFTED}",
)
def fully_async_window(context: GuardContext) -> Iterator[Finding]:
    if replays(context.preset) and context.preset.rollout.fully_async:
        yield Finding(
            "rollout.fully_async",
            "rollout.fully_async is true: the step's window is a stream that cannot be read twice",
            "set rollout.fully_async: false; rollout.update_weights_interval gives older samples",
            related=("rollout.max_staleness",),
        )


@guard(
    "P3O205",
    "mtp-training",
    why="Training the multi-token-prediction layers adds a loss and forward state of its own to each pass; the "
    "statistics pass would move it, and its tokens are not the ones the ESS counts.",
    fix="Set model.enable_mtp_training: false.",
    source=RELAX_P3O,
    allows=f"Multi-token-prediction layers that are present and not trained. {LIFTED}",
)
def mtp_training(context: GuardContext) -> Iterator[Finding]:
    if replays(context.preset) and context.preset.model.enable_mtp_training:
        yield Finding(
            "model.enable_mtp_training",
            "model.enable_mtp_training is true: its loss is part of the train pass and not of the statistics pass",
            "set model.enable_mtp_training: false",
        )


@guard(
    "P3O206",
    "routing-replay",
    why="Routing replay records the experts chosen in one forward pass and forces them in a later one. The extra "
    "statistics pass consumes or overwrites the record.",
    fix="Set parallel.use_routing_replay: false.",
    source=RELAX_P3O,
    allows=LIFTED,
)
def routing_replay(context: GuardContext) -> Iterator[Finding]:
    if replays(context.preset) and context.preset.parallel.use_routing_replay:
        yield Finding(
            "parallel.use_routing_replay",
            "parallel.use_routing_replay is true: the statistics pass consumes the recorded routes",
            "set parallel.use_routing_replay: false",
        )


@guard(
    "P3O207",
    "rollout-routing-replay",
    why="The engine's routes are handed to the trainer's forward once. Two forward passes need them twice, and the "
    "second would route by itself.",
    fix="Set parallel.use_rollout_routing_replay: false.",
    source=RELAX_P3O,
    allows=LIFTED,
)
def rollout_routing_replay(context: GuardContext) -> Iterator[Finding]:
    if replays(context.preset) and context.preset.parallel.use_rollout_routing_replay:
        yield Finding(
            "parallel.use_rollout_routing_replay",
            "parallel.use_rollout_routing_replay is true: the engine's routes serve one forward pass, the step has two",
            "set parallel.use_rollout_routing_replay: false",
        )


@guard(
    "P3O208",
    "combined-1f1b",
    why="Overlapping expert communication makes the schedule ask the model for a schedule plan and merge the forward "
    "of one micro-batch with the backward of another. A forward-only statistics pass takes another path.",
    fix="Set parallel.overlap_moe_expert_parallel_comm: false.",
    source=f"--overlap-moe-expert-parallel-comm in {ARGUMENTS}; {RELAX_P3O}",
    allows=LIFTED,
)
def combined_1f1b(context: GuardContext) -> Iterator[Finding]:
    if replays(context.preset) and context.preset.parallel.overlap_moe_expert_parallel_comm:
        yield Finding(
            "parallel.overlap_moe_expert_parallel_comm",
            "parallel.overlap_moe_expert_parallel_comm is true: the train pass takes a forward path that the "
            "statistics pass does not",
            "set parallel.overlap_moe_expert_parallel_comm: false",
        )


@guard(
    "P3O209",
    "full-iteration-cuda-graph",
    why="A graph of the full iteration captures one fixed sequence of forward and backward passes. A statistics pass "
    "before it runs outside the capture, by other kernels and other random state.",
    fix="Set parallel.cuda_graph_scope: none or attn.",
    source=f"--cuda-graph-scope in {CONFIG}; {RELAX_P3O}",
    allows=f"Graphs of the attention block alone. {LIFTED}",
)
def full_iteration_cuda_graph(context: GuardContext) -> Iterator[Finding]:
    if replays(context.preset) and context.preset.parallel.cuda_graph_scope == "full_iteration":
        yield Finding(
            "parallel.cuda_graph_scope",
            "parallel.cuda_graph_scope (full_iteration) captures the train pass without the statistics pass",
            "use none" if context.preset.cluster.device == "cpu" else "use none or attn",
        )


@guard(
    "P3O210",
    "nondeterministic-router",
    why="Random jitter, random biases, forced balancing and the sinkhorn iteration route a token by its neighbours in "
    "the micro-batch or by chance: the cap depends on how the step is cut, and the engine routes otherwise. A custom "
    "forward hook may do anything between the two passes.",
    fix="Remove the setting the message names.",
    source=f"moe_* settings in {CONFIG}; {RELAX_P3O}",
    allows="Auxiliary and z losses, which leave routes, ratios and cap as they are; what they do to the gradient is "
    f"P3O212. Router settings of a model without experts. {LIFTED}",
)
def nondeterministic_router(context: GuardContext) -> Iterator[Finding]:
    preset = context.preset
    if not replays(preset):
        return
    if preset.model.custom_forward_hook_path is not None:
        path = "model.custom_forward_hook_path"
        yield Finding(
            path,
            f"{named(preset, path)} runs in both passes of the step and may change what the second one computes",
            f"remove {path}",
        )
    if preset.model.num_experts is None:
        return
    for path, hint in _random_routing(context):
        yield Finding(
            path,
            f"{named(preset, path)} routes the same tokens differently in the statistics pass and the train pass",
            hint,
            related=("model.num_experts",),
        )


def _random_routing(context: GuardContext) -> Iterator[tuple[str, str]]:
    model = context.preset.model
    if model.moe_input_jitter_eps:
        yield "model.moe_input_jitter_eps", "remove model.moe_input_jitter_eps"
    if model.moe_router_load_balancing_type == "sinkhorn":
        balanced = "aux_loss, seq_aux_loss, global_aux_loss or " if model.moe_aux_loss_coeff > 0 else ""
        yield "model.moe_router_load_balancing_type", f"use {balanced}none"
    if model.moe_router_force_load_balancing:
        yield "model.moe_router_force_load_balancing", "set model.moe_router_force_load_balancing: false"
    if model.moe_router_force_biased:
        yield "model.moe_router_force_biased", "remove model.moe_router_force_biased"


@guard(
    "P3O315",
    "kernel-may-differ-between-passes",
    Severity.WARNING,
    why="With tensor and context parallelism together, Transformer Engine chooses among several attention kernels by "
    "shape and by whether gradients are wanted. The statistics pass wants none, so it may get another kernel than the "
    "training pass, and the frozen cap then belongs to slightly other ratios.",
    fix="Set model.attention_backend to one kernel: flash, fused or unfused.",
    source="NVTE_FLASH_ATTN, NVTE_FUSED_ATTN and --attention-backend in " + ARGUMENTS,
    allows="Any written backend but auto; TP 1 or CP 1; the CPU; objectives with one forward.",
    ignorable=True,
)
def kernel_may_differ_between_passes(context: GuardContext) -> Iterator[Finding]:
    preset, sizes = context.preset, context.topology
    path = "model.attention_backend"
    if not replays(preset) or preset.cluster.device != "cuda" or sizes.dp is None:
        return
    if sizes.tp > 1 and sizes.cp > 1 and preset.model.attention_backend == "auto":
        spread = [f"parallel.{field}" for field in ("tensor_model_parallel_size", "context_parallel_size")]
        yield Finding(
            path,
            f"{named(preset, path)} with {both(named(preset, size) for size in spread)}: the statistics pass may use "
            "another attention kernel than the training pass",
            "set model.attention_backend: flash",
            related=tuple(spread),
        )
