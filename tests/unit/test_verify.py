"""The verdict on a layout: equal tokens, tolerances, and nothing that passes for lack of a number."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from p3o_launch.errors import UsageError
from p3o_launch.launch.verify_command import chosen, cuda_layouts
from p3o_launch.runtime.verify import (
    Layout,
    Measurement,
    as_json,
    as_text,
    default_layouts,
    every_layout,
    judge,
    judge_all,
)

MEASURED = Measurement(
    tokens=55,
    cap=0.8,
    loss=0.04,
    gradient_error=0.0,
    replay_error=0.0,
    micro_batches=2,
    ess_collectives=1,
    ess_bytes=32,
    step_collectives=5,
    step_bytes=1000,
    seconds=0.1,
)
LAYOUT = Layout("tp2", 2, tp=2)


def faults(**changes: float) -> tuple[str, ...]:
    return judge(LAYOUT, replace(MEASURED, **changes), MEASURED).faults  # type: ignore[arg-type]


def test_equal_figures_agree() -> None:
    assert faults() == ()


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"tokens": 110}, "N is 110, the reference has 55"),
        ({"cap": 0.8 * (1 + 2e-9)}, "cap differs by 2.0e-09, allowed 1e-09"),
        ({"loss": 0.04 * (1 - 2e-9)}, "loss differs by 2.0e-09, allowed 1e-09"),
        ({"gradient_error": 2e-8}, "gradient differs by 2.0e-08, allowed 1e-08"),
        ({"gradient_error": math.nan}, "gradient differs by nan, allowed 1e-08"),
        ({"cap": math.nan}, "cap differs by inf, allowed 1e-09"),
        ({"replay_error": 1e-6}, "the training pass saw another ESS than the statistics pass (1.0e-06)"),
    ],
)
def test_each_figure_can_fail_alone(changes: dict[str, float], fault: str) -> None:
    assert faults(**changes) == (fault,)


def test_float32_has_a_tolerance_of_its_own() -> None:
    measured = replace(MEASURED, cap=0.8 * (1 + 5e-7), gradient_error=5e-6)
    assert judge(replace(LAYOUT, dtype="float32"), measured, MEASURED).faults == ()
    assert len(judge(LAYOUT, measured, MEASURED).faults) == 2


def test_each_model_and_dtype_has_its_own_reference() -> None:
    layouts = [Layout("a"), Layout("b", model="moe"), Layout("c", 2), Layout("d", 2, model="moe")]
    other = replace(MEASURED, cap=0.5)
    verdicts = judge_all(layouts, [MEASURED, other, MEASURED, other])
    assert [v.faults for v in verdicts] == [(), (), (), ()]
    assert judge_all(layouts, [MEASURED, other, other, other])[2].faults


def test_the_default_matrix_covers_every_way_to_cut_a_step() -> None:
    layouts = default_layouts(4)
    assert len(layouts) >= 24
    assert len({layout.name for layout in layouts}) == len(layouts)
    for size, values in {"tp": {1, 2}, "pp": {1, 2, 4}, "cp": {1, 2, 4}, "dp": {1, 2, 4}, "ep": {1, 2}}.items():
        assert {getattr(layout, size) for layout in layouts} == values
    assert {layout.splits for layout in layouts} >= {1, 2, 4}
    assert all(layout.tp * layout.pp * layout.cp * layout.dp == layout.ranks for layout in layouts)
    assert all(layout.ranks <= 2 for layout in default_layouts(2))


def test_the_grid_adds_every_combination_of_sizes_once() -> None:
    layouts = every_layout(4)
    assert (
        len({layout.name for layout in layouts})
        == len({replace(layout, name="") for layout in layouts})
        == len(layouts)
    )
    held = {(lay.tp, lay.pp, lay.cp, lay.dp, lay.splits, lay.packed) for lay in layouts if lay.model == "dense"}
    for tp, pp, cp, dp in itertools.product((1, 2), (1, 2, 4), (1, 2, 4), (1, 2, 4)):
        for splits, packed in itertools.product((1, 2, 4), (False, True)):
            assert ((tp, pp, cp, dp, splits, packed) in held) == (tp * pp * cp * dp <= 4)
    assert all(layout.ranks <= 2 for layout in every_layout(2))
    # The interleaved schedule takes micro-batches in rounds of the pipeline's size.
    assert not [layout for layout in layouts if layout.vpp_layers and layout.splits % layout.pp]


def test_layouts_are_chosen_with_the_reference_they_need() -> None:
    layouts = default_layouts(4)
    assert [layout.name for layout in chosen(layouts, ["tp2 pp2"])] == ["reference", "tp2 pp2"]
    assert [layout.name for layout in chosen(layouts, ["moe dp4*"])] == ["moe reference", "moe dp4 ep2"]
    with pytest.raises(UsageError, match="no layout is called 'tp3'"):
        chosen(layouts, ["tp3"])


def test_the_gpu_matrix_holds_what_its_kernels_run() -> None:
    layouts = cuda_layouts(4)
    assert {layout.dtype for layout in layouts} == {"float32"}
    assert not [layout for layout in layouts if layout.packed or layout.cp > 1 or layout.tokens]
    assert {"reference", "tp2", "pp2", "dp4"} <= {layout.name for layout in layouts}


def test_reports_say_what_failed_and_what_is_allowed() -> None:
    verdicts = judge_all([Layout("reference"), LAYOUT], [MEASURED, replace(MEASURED, tokens=110)])
    text = as_text(verdicts)
    assert "tp2: N is 110, the reference has 55" in text
    assert "2 layouts, 1 out of tolerance" in text
    assert "allowed in float64" in text
    assert as_json(verdicts)["agrees"] is False
    assert as_json(verdicts[:1])["agrees"] is True
    assert as_json(verdicts)["layouts"][1]["faults"] == ["N is 110, the reference has 55"]
