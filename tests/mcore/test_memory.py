"""The memory estimate against bytes that a real Megatron model, optimizer and engine hold on the CPU."""

from __future__ import annotations

from typing import Any

import pytest

from p3o_launch import memory
from p3o_launch.schema import Preset
from p3o_launch.topology import topology
from tests.mcore.ranks import RankEnv, run_ranks
from tests.mcore.tiny import tiny_model

LAYOUTS = {"one rank": (1, 1, False), "tp2": (2, 1, False), "pp2": (1, 2, False), "untied": (1, 1, True)}
ROW = 24


def preset_of(tp: int, pp: int, untied: bool) -> Preset:
    model = tiny_model(untie_embeddings_and_output_weights=untied, hf_checkpoint="builtin:arithmetic")
    return Preset.model_validate(
        {
            "schema_version": 1,
            "name": "tiny",
            "algorithm": {"advantage_estimator": "p3o"},
            "model": model.model_dump(exclude_unset=True),
            "precision": {"params_dtype": "float32"},
            "parallel": {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp},
            "batch": {
                "num_rollout": 1,
                "rollout_batch_size": 4,
                "n_samples_per_prompt": 2,
                "global_batch_size": 8,
                "micro_batch_size": 2,
            },
            "optimizer": {"lr": 1e-3},
            "rollout": {"max_prompt_len": 8, "max_response_len": ROW - 8},
            "data": {"prompt_data": "builtin:arithmetic"},
            "cluster": {"device": "cpu", "gpus_per_node": tp * pp},
        }
    )


def _bytes(tensors: Any) -> int:
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _measure(env: RankEnv, tp: int, pp: int, untied: bool) -> dict[str, int]:
    import torch

    from p3o_launch.runtime.mcore.cpu_backend import device_backend
    from p3o_launch.runtime.mcore.groups import ParallelSizes, init_distributed
    from p3o_launch.runtime.mcore.model import build_model, wrap_ddp
    from p3o_launch.runtime.mcore.optimizer import build_optimizer
    from p3o_launch.runtime.mcore.rng import seed_rank
    from p3o_launch.runtime.mcore.snapshot import build_rollout_chunks

    preset = preset_of(tp, pp, untied)
    groups = init_distributed(
        ParallelSizes.from_preset(preset),
        rank=env.rank,
        world_size=env.world_size,
        init_method=env.new_init_method(),
        timeout_s=60,
    )
    seed_rank(1, groups)
    chunks = wrap_ddp(
        build_model(preset.model, preset.parallel, preset.precision, groups), preset.parallel, preset.precision, groups
    )
    with device_backend("cpu"):
        optimizer = build_optimizer(chunks, preset.optimizer, preset.precision, preset.parallel, "cpu")
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.main_grad.fill_(1.0)
        optimizer.step()
    states = optimizer.optimizer.state if hasattr(optimizer, "optimizer") else optimizer.state
    moments = [value for state in states.values() for value in state.values() if torch.is_tensor(value) and value.dim()]
    gradients = [parameter.main_grad for chunk in chunks for parameter in chunk.parameters()]
    measured = {
        "weights": sum(p.numel() * p.element_size() for chunk in chunks for p in chunk.parameters()),
        "gradients": sum(gradient.numel() * gradient.element_size() for gradient in gradients),
        "optimizer": sum(tensor.numel() * tensor.element_size() for tensor in moments),
        "rollout weights": sum(
            p.numel() * p.element_size() for chunk in build_rollout_chunks(preset, groups) for p in chunk.parameters()
        ),
    }
    if env.world_size == 1:
        measured |= _activations(chunks, preset)
    groups.destroy()
    return measured


def _activations(chunks: Any, preset: Preset) -> dict[str, int]:
    """Bytes that autograd keeps for one micro-batch's backward pass, by two lengths: linear and quadratic parts."""
    kept = {length: _kept(chunks[0], length) for length in (ROW, 2 * ROW)}
    quadratic = (kept[2 * ROW] - 2 * kept[ROW]) / (2 * ROW**2)
    linear = (kept[ROW] - quadratic * ROW**2) / ROW
    return {"linear per token": round(linear), "quadratic": round(quadratic)}


def _kept(chunk: Any, length: int) -> int:
    import torch

    rows = 1
    tokens = torch.ones(rows, length, dtype=torch.long)
    positions = torch.arange(length).unsqueeze(0).expand(rows, -1)
    weights = {parameter.untyped_storage().data_ptr() for parameter in chunk.parameters()}
    kept: dict[int, Any] = {}

    def keep(tensor: Any) -> Any:
        if tensor.untyped_storage().data_ptr() not in weights and tensor.is_floating_point():
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = chunk(tokens, positions, None)
    size = _bytes(kept.values())
    del out
    return size


@pytest.fixture(scope="module")
def measured() -> dict[str, list[dict[str, int]]]:
    return {name: run_ranks(_measure, tp * pp, tp, pp, untied) for name, (tp, pp, untied) in LAYOUTS.items()}


@pytest.mark.parametrize("part", ["weights", "gradients", "optimizer", "rollout weights"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_resident_bytes_are_what_the_formula_says(name: str, part: str, measured: Any) -> None:
    preset = preset_of(*LAYOUTS[name])
    training, _ = memory.bars(preset, topology(preset))
    # The fullest rank; with PP the formula gives both ends the embedding and the final norm.
    fullest = max(rank[part] for rank in measured[name])
    assert dict(training.parts)[part] == pytest.approx(fullest, rel=0.005 if LAYOUTS[name][1] > 1 else 0)


def test_activations_per_token_are_a_lower_bound_of_what_is_kept(measured: Any) -> None:
    # The formula counts what fused GPU kernels keep. On the CPU each norm keeps its quotient too, SwiGLU its factor,
    # and attention the repeated key/value heads and a second copy of its output: 1.73 times as much here.
    preset = preset_of(*LAYOUTS["one rank"])
    formula = preset.model.num_layers * memory.layer_activations(preset) * memory.parameter_bytes(preset)
    (rank,) = measured["one rank"]
    assert formula <= rank["linear per token"] <= 1.8 * formula
    assert rank["quadratic"] == 0  # as with a flash kernel, no score matrix is kept


def test_the_cache_limit_is_the_engines() -> None:
    from p3o_launch.runtime.mcore.engine import CACHE_TOKENS

    assert memory.CACHE_TOKENS == CACHE_TOKENS
