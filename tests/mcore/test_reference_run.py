"""A long run on DP 2 and Megatron against a reference in plain PyTorch on one process: the same curves.

In float64 the two differ by the order of sums alone. In float32 that difference starts at 1e-7 and is carried from step
to step through the weights, which Adam moves by a fixed amount where a gradient is near zero: it grows slowly.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from p3o_launch.assets import resolve_checkpoint
from p3o_launch.schema import Preset
from tests.mcore.ranks import RankEnv, run_ranks
from tests.mcore.step_setup import SAMPLES, step_preset, step_rank
from tests.mcore.tiny import tiny_model
from tests.reference import AdamSettings, Qwen3, Step, Text, Trainer

OPTIMIZER = {
    "lr": 2e-4,
    "lr_decay_style": "cosine",
    "lr_warmup_fraction": 0.1,
    "weight_decay": 0.01,
    "clip_grad": 1.0,
}
# Largest difference over the run: loss and gradient norm against the largest of the run, ESS as it is (it lies in
# [0, 1]), weights by their norm. Measured over 200 steps: 8e-14 in float64, 4e-5 in float32 (1e-6 over 20 steps).
LIMITS = {"float64": 1e-11, "float32": 1e-4}


def _preset(steps: int, dtype: str, ranks: int) -> Preset:
    checkpoint = resolve_checkpoint("builtin:arithmetic")
    model = tiny_model(ffn_hidden_size=128, vocab_size=16)
    preset = step_preset(checkpoint, ranks, splits=2, dtype=dtype, model=model, optimizer=OPTIMIZER)
    return preset.model_copy(update={"batch": preset.batch.model_copy(update={"num_rollout": steps})})


def _megatron(env: RankEnv, preset: Preset, steps: int) -> tuple[list[Step], dict[str, torch.Tensor]]:
    from p3o_launch.runtime.mcore.probe import samples
    from p3o_launch.runtime.mcore.weights_hf import gathered

    with step_rank(env, preset) as rank:
        curve: list[Step] = []
        for step in range(steps):
            metrics = rank.train_step(samples(SAMPLES, seed=step))
            curve.append(Step(metrics["train/loss"], metrics["train/p3o/ess"], metrics["train/grad_norm"]))
        return curve, {name: weight.clone() for name, weight in gathered(rank.chunks, rank.groups)}


def _reference(preset: Preset, steps: int, dtype: str) -> tuple[list[Step], dict[str, torch.Tensor]]:
    from p3o_launch.runtime.mcore.probe import samples

    o = preset.optimizer
    settings = AdamSettings(
        lr=o.lr,
        steps=steps,
        warmup=int(o.lr_warmup_fraction * steps),
        weight_decay=o.weight_decay,
        beta1=o.adam_beta1,
        beta2=o.adam_beta2,
        eps=o.adam_eps,
        clip=o.clip_grad,
    )
    trainer = Trainer(Qwen3(Path(resolve_checkpoint("builtin:arithmetic")), getattr(torch, dtype)), settings)
    curve = []
    for step in range(steps):
        texts = [
            Text(s.prompt_ids, s.response_ids, s.behavior_log_probs, s.advantage) for s in samples(SAMPLES, seed=step)
        ]
        curve.append(trainer.step(texts))
    return curve, {name: weight.detach() for name, weight in trainer.model.weights.items()}


def _differences(steps: int, dtype: str) -> dict[str, float]:
    preset = _preset(steps, dtype, 2)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        reference, trained = _reference(preset, steps, dtype)
    finally:
        torch.set_num_threads(threads)
    (curve, ours), (other, _) = run_ranks(_megatron, 2, preset, steps, timeout=400.0)
    assert curve == other
    assert len({round(step.ess, 3) for step in reference}) > steps // 2  # a curve, not a constant
    found = {name: _largest([getattr(s, name) for s in curve], [getattr(s, name) for s in reference]) for name in NAMES}
    difference = sum(float((ours[name].double() - trained[name].double()).square().sum()) for name in trained)
    found["weights"] = (difference / sum(float(w.double().square().sum()) for w in trained.values())) ** 0.5
    return found


NAMES = ("loss", "ess", "grad_norm")


def _largest(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / max(map(abs, theirs))


def _faults(found: dict[str, Any], dtype: str) -> dict[str, float]:
    return {name: error for name, error in found.items() if not error <= LIMITS[dtype]}


def test_twenty_steps_follow_the_reference() -> None:
    assert _faults(_differences(20, "float64"), "float64") == {}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_two_hundred_steps_follow_the_reference(dtype: str) -> None:
    assert _faults(_differences(200, dtype), dtype) == {}


@pytest.mark.parametrize("fault", ["ess", "rate"])
def test_another_cap_or_learning_rate_leaves_the_curve(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: with an ESS that is 1 % lower, or without the warm-up, it is far outside the limit."""
    whole = Trainer._token_losses
    if fault == "rate":
        monkeypatch.setattr(AdamSettings, "rate", lambda self, step: self.lr)
    else:
        monkeypatch.setattr(Trainer, "_token_losses", lambda self, text, ess: whole(self, text, ess * 0.99))
    assert _faults(_differences(6, "float64"), "float64")
