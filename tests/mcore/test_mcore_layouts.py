"""No parallel layout moves the loss, the gradient or the weights after a step: real processes, Megatron throughout.

float64 leaves nothing but the order of sums between two layouts; float32 adds rounding in kernels of other shapes.
"""

from pathlib import Path

import pytest
import torch

from p3o_launch.schema import Precision
from tests.mcore.layouts import Layout, Outcome, train_steps
from tests.mcore.ranks import RankEnv, run_ranks
from tests.mcore.tiny import FLOAT32, FLOAT64, model_of, write_hf_checkpoint

TWO = [
    Layout(),
    Layout(tp=2),
    Layout(tp=2, sp=True),
    Layout(pp=2),
    Layout(pp=2, vpp=2),
    Layout(cp=2),
    Layout(cp=2, packed=True),
    Layout(cp=2, mixed=True),
    Layout(tp=2, sp=True, packed=True),
    Layout(tp=2, recompute="full"),
    Layout(cp=2, recompute="selective"),
    Layout(overlap=True),
]
FOUR = [
    Layout(),
    Layout(pp=4),
    Layout(cp=4),
    Layout(tp=2, pp=2),
    Layout(tp=2, pp=2, vpp=2, sp=True),
    Layout(tp=2, cp=2, sp=True),
    Layout(tp=2, cp=2, packed=True),
    Layout(pp=2, cp=2),
    Layout(pp=2, cp=2, vpp=2, packed=True),
]
SOME = {2: [Layout(tp=2, sp=True), Layout(cp=2, packed=True)], 4: [Layout(tp=2, pp=2, vpp=2, sp=True), Layout(cp=4)]}
EXPERTS = {
    2: [Layout(), Layout(ep=2), Layout(ep=2, packed=True)],
    4: [Layout(ep=4), Layout(ep=2, pp=2), Layout(tp=2, sp=True, ep=2), Layout(cp=2, ep=2)],
}
# Loss relative; gradients, their norm and weights relative to the norm of the whole tensor set.
TOLERANCE = {"float64": (1e-12, 1e-11), "float32": (1e-6, 1e-5)}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf_checkpoint("qwen3", tmp_path_factory.mktemp("hf"))


def _train(env: RankEnv, layouts: list[Layout], precision: Precision, hf_dir: Path, kind: str) -> list[Outcome]:
    return [train_steps(env, model_of(kind), layout, precision, hf_dir, steps=2) for layout in layouts]


def _distance(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Norm of the difference over the norm, over all tensors together."""
    assert ours.keys() == theirs.keys()
    difference = sum(float((ours[name].double() - theirs[name].double()).square().sum()) for name in theirs)
    whole = sum(float(tensor.double().square().sum()) for tensor in theirs.values())
    return (difference / whole) ** 0.5


def _compare(outcome: Outcome, reference: Outcome, precision: str) -> dict[str, float]:
    assert outcome.tokens == reference.tokens
    return {
        "loss": abs(outcome.loss - reference.loss) / abs(reference.loss),
        "grad_norm": abs(outcome.grad_norm - reference.grad_norm) / reference.grad_norm,
        "gradients": _distance(outcome.gradients, reference.gradients),
        "weights": _distance(outcome.weights, reference.weights),
    }


@pytest.mark.parametrize("precision", [FLOAT64, FLOAT32], ids=["float64", "float32"])
def test_layouts_agree(checkpoint: Path, precision: Precision) -> None:
    name = precision.params_dtype or "float32"
    _assert_agreement(checkpoint, "qwen3", precision, {2: TWO, 4: FOUR} if name == "float64" else SOME)


def test_expert_parallel_layouts_agree(tmp_path: Path) -> None:
    _assert_agreement(write_hf_checkpoint("qwen3_moe", tmp_path, tied=False), "qwen3_moe", FLOAT64, EXPERTS)


def _assert_agreement(hf_dir: Path, kind: str, precision: Precision, cases: dict[int, list[Layout]]) -> None:
    name = precision.params_dtype or "float32"
    single = run_ranks(_train, 1, [Layout(), Layout(packed=True)], precision, hf_dir, kind)[0]
    reference = single[0]
    assert all(gradient.dtype is getattr(torch, name) for gradient in reference.gradients.values())
    found = {"1 packed": _compare(single[1], reference, name)}
    for world, layouts in cases.items():
        ranks = run_ranks(_train, world, layouts, precision, hf_dir, kind)
        for index, layout in enumerate(layouts):
            for rank in range(world):
                found[f"{world} {layout} rank {rank}"] = _compare(ranks[rank][index], reference, name)
    loss, rest = TOLERANCE[name]
    limits = {"loss": loss, "grad_norm": rest, "gradients": rest, "weights": rest}
    outside = {
        key: {what: value for what, value in values.items() if not value <= limits[what]}
        for key, values in found.items()
    }
    assert not any(outside.values()), {key: value for key, value in outside.items() if value}
