"""Facts of a Megatron argument list that no rule needs and the summary shows: experts, FP8 details, odd flags."""

from __future__ import annotations

from typing import Any

from p3o_launch.importers.megatron import Reader, single


def argument_record(read: Reader) -> None:
    """Add them to the draft's extra facts."""
    extra, arguments = read.draft.extra, read.arguments
    fp8 = bool(read.get("fp8"))
    extra.update(
        {
            "fp8.amax_history_len": read.get("fp8_amax_history_len") if fp8 else None,
            "fp8.param_gather": bool(read.get("fp8_param_gather")),
            "fp8.first_last_bf16": bool(read.get("first_last_layers_bf16")),
            "moe": _experts(read),
            "mtp.num_layers": read.get("mtp_num_layers"),
            "mtp.loss_scale": read.get("mtp_loss_scaling_factor") if read.get("mtp_num_layers") else None,
            "deterministic.batch_invariant": bool(read.get("batch_invariant_mode")),
            "flags_not_in_table": sorted(set(arguments.unknown)),
            "repeated_flags": arguments.repeated(),
            "invalid_choices": dict(arguments.invalid),
            "dynamic_global_batch": bool(read.get("use_dynamic_global_batch_size")),
        }
    )


def _experts(read: Reader) -> dict[str, Any]:
    # A checkpoint may bring the experts; flags about them are then the only sign.
    moe = read.get("num_experts") is not None or read.given("moe_router_load_balancing_type")
    biased = bool(read.get("moe_router_enable_expert_bias"))
    record: dict[str, Any] = {
        "num_experts": read.get("num_experts"),
        "topk": read.get("moe_router_topk") if read.get("num_experts") is not None else None,
        "load_balancing": single(read.get("moe_router_load_balancing_type")) if moe else None,
        "aux_loss_coeff": single(read.get("moe_aux_loss_coeff")) if moe else None,
        "expert_bias": biased,
        "bias_update_rate": read.get("moe_router_bias_update_rate") if biased else None,
        "input_jitter_eps": read.get("moe_input_jitter_eps"),
        "capacity_factor": read.get("moe_expert_capacity_factor"),
        "dispatcher": read.get("moe_token_dispatcher_type") if read.given("moe_token_dispatcher_type") else None,
        "router_dtype": read.get("moe_router_dtype"),
        "overlap_ep_1f1b": bool(read.get("overlap_moe_expert_parallel_comm")),
        "routing_replay": bool(read.get("use_routing_replay") or read.get("moe_enable_routing_replay")),
    }
    return record
