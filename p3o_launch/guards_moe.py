"""2xx and 3xx about mixture-of-experts layers: what Megatron refuses, and what routers do to P3O's step.

Every rule is silent for a dense model, but for sizes that spread experts which are not there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from p3o_launch.diagnostics import Finding, Severity
from p3o_launch.guard_tools import ARGUMENTS, CONFIG, both, counted, divisors, either, named, replays, up_to
from p3o_launch.guards import GuardContext, guard
from p3o_launch.guards_replay import (
    LIFTED,
    combined_1f1b,
    nondeterministic_router,
    rollout_routing_replay,
    routing_replay,
)
from p3o_launch.guards_topology import width_not_divisible

if TYPE_CHECKING:
    from p3o_launch.schema import Preset

_MOE = "https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/transformer/moe"
_EP, _ETP = "parallel.expert_model_parallel_size", "parallel.expert_tensor_parallel_size"
_EXPERTS, _TOPK = "model.num_experts", "model.moe_router_topk"
_BALANCING, _AUXILIARY = "model.moe_router_load_balancing_type", "model.moe_aux_loss_coeff"


@guard(
    "P3O311",
    "experts-not-divisible",
    why="Expert parallelism gives each rank a whole number of experts, and needs ranks of its own to spread them over; "
    "expert tensor parallelism cuts each expert over some of them.",
    fix="Choose an expert-parallel size that divides num_experts, and together with the expert tensor-parallel size "
    "the ranks of one pipeline stage.",
    source=f"--expert-model-parallel-size in {ARGUMENTS}; initialize_model_parallel of megatron/core/parallel_state.py",
)
def experts_not_divisible(context: GuardContext) -> Iterator[Finding]:
    preset, sizes = context.preset, context.topology
    ep, experts = preset.parallel.expert_model_parallel_size, preset.model.num_experts
    if sizes.dp is None:
        return
    if experts is None and ep > 1:
        yield Finding(
            _EP,
            f"{named(preset, _EP)} with {_EXPERTS} absent: a dense model has no experts to spread",
            f"set {_EP}: 1",
            related=(_EXPERTS,),
        )
        return
    etp = preset.parallel.expert_tensor_parallel_size or sizes.tp
    ranks = sizes.world_size // sizes.pp
    if ranks % etp != 0:
        yield _uneven_expert_tensor_size(preset, ranks)
    elif experts is not None and (experts % ep != 0 or ranks % (ep * etp) != 0):
        relation = named(preset, _EXPERTS)
        if experts % ep == 0:
            relation = f"{_ranks_of_a_stage(ranks)} with expert tensor-parallel size {etp}"
        yield Finding(
            _EP,
            f"{named(preset, _EP)} does not divide {relation}",
            f"use {either(size for size in divisors(experts) if ranks % (size * etp) == 0)}",
            related=(_EXPERTS, _ETP),
        )


def _ranks_of_a_stage(ranks: int) -> str:
    return f"the {counted(ranks, 'rank')} of a pipeline stage"


def _uneven_expert_tensor_size(preset: Preset, ranks: int) -> Finding:
    legal = [size for size in divisors(ranks) if ranks % (size * preset.parallel.expert_model_parallel_size) == 0]
    dense = preset.model.num_experts is None
    if preset.cluster.device == "cpu":
        legal = [size for size in legal if size == 1]  # P3O322
    return Finding(
        _ETP,
        f"{named(preset, _ETP)} does not divide {_ranks_of_a_stage(ranks)}",
        f"remove {_ETP}" if dense or not legal else f"use {either(legal)}",
        related=(_EP,) if dense else (_EP, _EXPERTS),
    )


@guard(
    "P3O319",
    "experts-without-sequence-parallel",
    why="A mixture-of-experts layer under tensor parallelism trains only with sequence parallelism: without it every "
    "tensor-parallel rank would route the same tokens, and Megatron stops in the first training forward.",
    fix="Set parallel.sequence_parallel: true and pad sequences to a multiple of the tensor-parallel size, or use "
    "tensor-parallel size 1.",
    source=f"MoELayer.forward in {_MOE}/moe_layer.py; --sequence-parallel in {ARGUMENTS}",
    allows="Experts without tensor parallelism; a dense model; expert tensor parallelism of any size.",
)
def experts_without_sequence_parallel(context: GuardContext) -> Iterator[Finding]:
    preset, sizes = context.preset, context.topology
    if preset.model.num_experts is None or sizes.tp == 1 or preset.parallel.sequence_parallel or sizes.dp is None:
        return
    if preset.model.num_experts == 1:
        return  # P3O320 and 321: a dense model
    path, padding = "parallel.sequence_parallel", "batch.sequence_padding_multiple"
    needed = sizes.sequence_multiple * sizes.tp
    multiple = preset.batch.sequence_padding_multiple
    fits = multiple % needed == 0
    yield Finding(
        "parallel.tensor_model_parallel_size",
        f"{named(preset, 'parallel.tensor_model_parallel_size')} with {named(preset, _EXPERTS)} needs {path}",
        f"set {path}: true" + ("" if fits else f" and {padding}: {-(-multiple // needed) * needed}"),
        related=(path, _EXPERTS),
    )


@guard(
    "P3O320",
    "router-out-of-range",
    why="The router picks moe_router_topk of num_experts experts for a token, so it cannot pick more than there are. "
    "Sinkhorn balances by itself, and Megatron refuses an auxiliary loss beside it. Both fail in the first forward.",
    fix="Write the checkpoint's figures (num_experts_per_tok, num_experts), and no auxiliary loss with sinkhorn.",
    source=f"TopKRouter in {_MOE}/router.py",
    allows="Every expert for every token (moe_router_topk equal to num_experts); router settings of a dense model.",
)
def router_out_of_range(context: GuardContext) -> Iterator[Finding]:
    preset, model = context.preset, context.preset.model
    if model.num_experts is None:
        return
    if model.moe_router_topk > model.num_experts:
        single = model.num_experts == 1
        yield Finding(
            _EXPERTS if single else _TOPK,
            f"{named(preset, _TOPK)} is more than {named(preset, _EXPERTS)}",
            f"set {_EXPERTS}: null, which makes the model dense"
            if single
            else f"use {up_to(model.num_experts, 'fewer')}",
            related=(_TOPK if single else _EXPERTS,),
        )
    # Under p3o's step scope sinkhorn itself is refused: P3O210.
    sinkhorn = model.moe_router_load_balancing_type == "sinkhorn" and not replays(preset)
    if sinkhorn and model.moe_aux_loss_coeff > 0:
        yield Finding(
            _AUXILIARY,
            f"{named(preset, _AUXILIARY)} with {named(preset, _BALANCING)}, which takes no auxiliary loss",
            f"set {_AUXILIARY}: 0",
            related=(_BALANCING, _EXPERTS),
        )


@guard(
    "P3O321",
    "one-expert-per-token",
    why="The router's weights are a softmax over the chosen experts. Over a single one it is always 1 and its gradient "
    "0: the router would never learn, and Megatron refuses to build it unless the softmax comes before the choice, "
    "which is a setting this schema does not have.",
    fix="Write the checkpoint's num_experts_per_tok, 2 or more; models with one expert per token are not supported.",
    source=f"moe_router_pre_softmax in {CONFIG}",
    allows="Sinkhorn routing, whose weights are sigmoids; router settings of a dense model; other frameworks, which "
    "have --moe-router-pre-softmax.",
)
def one_expert_per_token(context: GuardContext) -> Iterator[Finding]:
    preset, model = context.preset, context.preset.model
    if model.num_experts is None or model.moe_router_topk != 1 or model.moe_router_load_balancing_type == "sinkhorn":
        return
    single = model.num_experts == 1
    yield Finding(
        _EXPERTS if single else _TOPK,
        f"{named(preset, _TOPK)} with {named(preset, _EXPERTS)}: a softmax over one expert is constant, and Megatron "
        "refuses it",
        f"set {_EXPERTS}: null, which makes the model dense"
        if single
        else "use 2, as the checkpoint's num_experts_per_tok",
        related=(_TOPK if single else _EXPERTS,),
    )


@guard(
    "P3O322",
    "experts-split-on-cpu",
    why="Cutting one expert over ranks makes them gather pieces of unequal size, which gloo does not do. The model is "
    "refused when it is built, after every rank has started.",
    fix="Set parallel.expert_tensor_parallel_size: 1; expert parallelism itself works.",
    source="the builtin runtime: p3o_launch/runtime/mcore/model.py",
    allows="Experts spread over ranks whole, at any tensor-parallel size; the same on GPUs.",
)
def experts_split_on_cpu(context: GuardContext) -> Iterator[Finding]:
    preset, sizes = context.preset, context.topology
    etp = preset.parallel.expert_tensor_parallel_size
    if preset.model.num_experts is None or preset.cluster.device != "cpu" or (etp or sizes.tp) == 1:
        return
    if sizes.dp is None or any(experts_not_divisible(context)):
        return
    tp = "parallel.tensor_model_parallel_size"
    subject = f"{_ETP} is absent, which means {named(preset, tp)}," if etp is None else named(preset, _ETP)
    yield Finding(
        tp if etp is None else _ETP,
        f"{subject} with cluster.device (cpu): experts cannot be cut over ranks there",
        f"set {_ETP}: 1",
        related=(_ETP, _EXPERTS, "cluster.device"),
    )


# Errors that may be about the mixture of experts: beside one that is, what routers do in general is no news.
_FAULTS = (
    *(nondeterministic_router, routing_replay, rollout_routing_replay, combined_1f1b, width_not_divisible),
    *(experts_not_divisible, experts_without_sequence_parallel, router_out_of_range, one_expert_per_token),
    experts_split_on_cpu,
)
_ROUTING = (
    "parallel.use_routing_replay",
    "parallel.use_rollout_routing_replay",
    "parallel.overlap_moe_expert_parallel_comm",
)


def _has_fault(context: GuardContext) -> bool:
    found = (finding for body in _FAULTS for finding in body(context))
    return any(finding.path in _ROUTING or _EXPERTS in (finding.path, *finding.related) for finding in found)


@guard(
    "P3O211",
    "moe-numerics",
    Severity.WARNING,
    why="Engine and trainer compute router scores with other kernels; near ties go to other experts, so log-probs "
    "differ token by token and the ESS is low before the policy has moved.",
    fix="Compare train/p3o/ess of the first on-policy step with 1, and ignore P3O211 with that figure.",
    source="arXiv:2510.11370 (routers of the training and the inference engine compared)",
    allows=f"A mixture of experts that another rule refuses already. {LIFTED}",
    ignorable=True,
)
def moe_numerics(context: GuardContext) -> Iterator[Finding]:
    preset = context.preset
    if replays(preset) and preset.model.num_experts is not None and not _has_fault(context):
        yield Finding(
            _EXPERTS,
            f"{named(preset, _EXPERTS)}: engine and trainer route near ties differently, which lowers the ESS for "
            "numerical reasons",
            "check train/p3o/ess of the first step, then ignore P3O211 with that figure",
        )


@guard(
    "P3O212",
    "router-loss-depends-on-cut",
    Severity.WARNING,
    why="Megatron takes each router loss as a mean over one micro-batch of one rank, padding and prompts included, and "
    "scales it by that micro-batch's tokens. N, the ratios and the cap stay as they are, but the gradient depends on "
    "how the step is cut: at a coefficient of 0.1, one micro-batch or four differ by 1e-2 of its norm.",
    fix="Keep micro-batches and the data-parallel size the same between runs that are compared, or set the coefficient "
    "to 0; then ignore P3O212 with the reason.",
    source=f"_apply_aux_loss and apply_z_loss in {_MOE}/router.py; docs/invariance.md",
    allows="A coefficient of 0, or one that the balancing type does not read; a step that is not cut: one micro-batch "
    f"on one rank. {LIFTED}",
    ignorable=True,
)
def router_loss_depends_on_cut(context: GuardContext) -> Iterator[Finding]:
    preset, model, sizes = context.preset, context.preset.model, context.topology
    if not replays(preset) or model.num_experts is None:
        return
    if sizes.dp == 1 and sizes.cp == 1 and sizes.micro_batches_per_step == 1:
        return
    balanced = model.moe_router_load_balancing_type not in ("none", "sinkhorn")
    on = [_AUXILIARY] if balanced and model.moe_aux_loss_coeff > 0 else []
    on += ["model.moe_z_loss_coeff"] if model.moe_z_loss_coeff else []
    if on and not _has_fault(context):
        yield Finding(
            on[0],
            f"{both(named(preset, path) for path in on)} {'enters' if len(on) == 1 else 'enter'} the gradient as means "
            "over micro-batches: the step depends on how it is cut",
            f"set {' and '.join(f'{path}: 0' for path in on)}, or ignore P3O212 with the reason",
            related=(*on[1:], _EXPERTS),
        )
