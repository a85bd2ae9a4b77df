"""Partition invariance as a measurement: which layouts are compared, how close they must be, and the verdict.

The claim: neither the micro-batch count nor the DP x CP split, nor TP, PP or EP, moves the cap, the loss or the
gradient of an optimizer step. ``runtime/mcore/probe.py`` measures one layout on real ranks; this module is plain
arithmetic and text, without torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, Literal

Dtype = Literal["float64", "float32"]


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to cut a step. ``ranks`` = TP x PP x CP x DP. ``splits``: micro-batches per DP rank.

    ``vpp_layers``: layers of one virtual stage. ``tokens``: budget of a dynamic micro-batch per rank. ``model``: which
    of the embedded models, ``dense`` or ``moe``. ``dtype``: of weights, activations and gradients.
    """

    name: str
    ranks: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    vpp_layers: int | None = None
    sequence_parallel: bool = False
    splits: int = 1
    packed: bool = False
    tokens: int | None = None
    model: Literal["dense", "moe"] = "dense"
    dtype: Dtype = "float64"

    @property
    def dp(self) -> int:
        """Data-parallel size."""
        return self.ranks // (self.tp * self.pp * self.cp)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest relative difference to the reference layout; N must be equal. ``reason``: why this much and no more."""

    cap: float
    loss: float
    gradient: float
    reason: str


TOLERANCES: dict[Dtype, Tolerance] = {
    "float64": Tolerance(
        1e-9,
        1e-9,
        1e-8,
        "only the order of sums differs between layouts, and float64 sums of this size round at about 1e-15",
    ),
    "float32": Tolerance(
        1e-6,
        1e-6,
        1e-5,
        "kernels sum in another order for another shape; float32 rounds at 6e-8 per operation, gradients add thousands",
    ),
}

REPLAY_LIMIT = 1e-12
"""Largest difference of the ESS between the two passes: their float64 sums may be added in another order."""

SAMPLES = 16
"""Samples of the step that every layout computes; a multiple of every DP x micro-batch count below."""


def default_layouts(world: int) -> list[Layout]:
    """The default matrix for up to ``world`` processes; the reference of each (model, dtype) comes first.

    Layouts that need more processes than there are, are left out.
    """
    layouts = [
        Layout("reference"),
        Layout("split 2", splits=2),
        Layout("split 4", splits=4),
        Layout("split 16", splits=16),
        Layout("packed", splits=2, packed=True),
        Layout("dynamic", tokens=32),
        Layout("dp2", 2),
        Layout("dp2 split 2", 2, splits=2),
        Layout("dp2 dynamic", 2, tokens=24),
        Layout("tp2", 2, tp=2, splits=2),
        Layout("tp2 sp", 2, tp=2, sequence_parallel=True, splits=2),
        Layout("pp2", 2, pp=2, splits=4),
        Layout("pp2 virtual", 2, pp=2, vpp_layers=1, splits=4),
        Layout("cp2", 2, cp=2, splits=2),
        Layout("cp2 packed", 2, cp=2, splits=2, packed=True),
        Layout("dp4", 4),
        Layout("dp4 split 4", 4, splits=4),
        Layout("tp2 dp2", 4, tp=2, splits=2),
        Layout("tp2 sp dp2", 4, tp=2, sequence_parallel=True, splits=2),
        Layout("pp2 dp2", 4, pp=2, splits=2),
        Layout("pp2 virtual dp2", 4, pp=2, vpp_layers=1, splits=2),
        Layout("pp4", 4, pp=4, splits=4),
        Layout("tp2 pp2", 4, tp=2, pp=2, splits=2),
        Layout("cp4", 4, cp=4),
        Layout("cp2 dp2", 4, cp=2, splits=2),
        Layout("cp2 dp2 dynamic", 4, cp=2, tokens=16),
        Layout("cp2 tp2", 4, cp=2, tp=2, splits=2),
        Layout("cp2 pp2", 4, cp=2, pp=2, splits=2),
        Layout("moe reference", model="moe"),
        Layout("moe dp2 ep2", 2, ep=2, splits=2, model="moe"),
        Layout("moe dp4 ep2", 4, ep=2, model="moe"),
        Layout("float32 reference", dtype="float32"),
        Layout("float32 split 4", splits=4, dtype="float32"),
        Layout("float32 dp2 split 2", 2, splits=2, dtype="float32"),
        Layout("float32 tp2 pp2", 4, tp=2, pp=2, splits=2, dtype="float32"),
        Layout("float32 cp2 dp2", 4, cp=2, splits=2, dtype="float32"),
    ]
    return [layout for layout in layouts if layout.ranks <= world]


def every_layout(world: int) -> list[Layout]:
    """The default matrix, then the whole grid of sizes, splits and row forms that ``world`` processes can hold."""
    default = default_layouts(world)
    known = {replace(layout, name="") for layout in default}
    return default + [layout for layout in _grid() if layout.ranks <= world and replace(layout, name="") not in known]


def _grid() -> list[Layout]:
    """{1, 2, 4} micro-batches x DP x CP x TP x PP on up to 4 ranks, padded and packed; virtual stages; experts."""
    cuts = [
        (tp, pp, cp, dp)
        for tp, pp, cp, dp in product((1, 2), (1, 2, 4), (1, 2, 4), (1, 2, 4))
        if tp * pp * cp * dp <= 4
    ]
    layouts = []
    for (tp, pp, cp, dp), splits, packed in product(cuts, (1, 2, 4), (False, True)):
        plain = Layout("", tp * pp * cp * dp, tp=tp, pp=pp, cp=cp, splits=splits, packed=packed)
        layouts += [plain, replace(plain, sequence_parallel=True)] if tp > 1 else [plain]
        if pp == 2 and splits % pp == 0:  # four layers: two virtual stages of one layer on each of two ranks
            layouts.append(replace(plain, vpp_layers=1, sequence_parallel=tp > 1))
    experts = [Layout("", 2, ep=2, packed=True, model="moe"), Layout("", 4, pp=2, ep=2, splits=2, model="moe")]
    experts += [Layout("", 4, cp=2, ep=2, model="moe"), Layout("", 4, tp=2, sequence_parallel=True, ep=2, model="moe")]
    return [replace(layout, name=_described(layout)) for layout in layouts + experts]


def _described(layout: Layout) -> str:
    sizes = {name: getattr(layout, name) for name in ("dp", "tp", "pp", "cp", "ep")}
    parts = ["grid", *(f"{name}{size}" for name, size in sizes.items() if size > 1)]
    parts += ["virtual"] if layout.vpp_layers else []
    parts += ["sp"] if layout.sequence_parallel else []
    parts += ["packed"] if layout.packed else []
    parts += ["moe"] if layout.model == "moe" else []
    return " ".join([*parts, f"split {layout.splits}"])


@dataclass(frozen=True, slots=True)
class Measurement:
    """What the ranks of one layout saw. ``gradient_error``: norm of the difference to the reference's gradient, over
    the reference's norm. ``ess_*``: what the statistics pass adds to a step besides the model's own forward.
    """

    tokens: int
    cap: float
    loss: float
    gradient_error: float
    replay_error: float
    micro_batches: int
    ess_collectives: int
    ess_bytes: int
    step_collectives: int
    step_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """One layout against its reference; ``faults`` is empty when it agrees."""

    layout: Layout
    measured: Measurement
    cap_error: float
    loss_error: float
    faults: tuple[str, ...]


def judge(layout: Layout, measured: Measurement, reference: Measurement) -> Verdict:
    """Compare with the reference of the same model and dtype."""
    tolerance = TOLERANCES[layout.dtype]
    cap_error = _relative(measured.cap, reference.cap)
    loss_error = _relative(measured.loss, reference.loss)
    faults = []
    if measured.tokens != reference.tokens:
        faults.append(f"N is {measured.tokens}, the reference has {reference.tokens}")
    for name, error, limit in (
        ("cap", cap_error, tolerance.cap),
        ("loss", loss_error, tolerance.loss),
        ("gradient", measured.gradient_error, tolerance.gradient),
    ):
        if not error <= limit:
            faults.append(f"{name} differs by {error:.1e}, allowed {limit:.0e}")
    if not measured.replay_error <= REPLAY_LIMIT:
        faults.append(f"the training pass saw another ESS than the statistics pass ({measured.replay_error:.1e})")
    return Verdict(layout, measured, cap_error, loss_error, tuple(faults))


def judge_all(layouts: Sequence[Layout], measurements: Sequence[Measurement]) -> list[Verdict]:
    """Each layout against the first one of its model and dtype."""
    references: dict[tuple[str, str], Measurement] = {}
    verdicts = []
    for layout, measured in zip(layouts, measurements, strict=True):
        reference = references.setdefault((layout.model, layout.dtype), measured)
        verdicts.append(judge(layout, measured, reference))
    return verdicts


def _relative(value: float, reference: float) -> float:
    if not math.isfinite(value):
        return math.inf
    return abs(value - reference) / abs(reference) if reference else abs(value)


_COLUMNS = ("layout", "ranks", "micro", "N", "cap", "loss", "d cap", "d loss", "d grad", "ESS comm", "step comm", "s")


def as_text(verdicts: Sequence[Verdict]) -> str:
    """A table for people, then what is out of tolerance, then the tolerances with their reasons."""
    rows = [_COLUMNS, *(_row(verdict) for verdict in verdicts)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for verdict in verdicts:
        lines += [f"{verdict.layout.name}: {fault}" for fault in verdict.faults]
    lines += [f"allowed in {dtype}: {_allowed(limit)}" for dtype, limit in TOLERANCES.items()]
    failed = sum(bool(verdict.faults) for verdict in verdicts)
    lines.append(f"{len(verdicts)} layouts, {failed} out of tolerance" if failed else f"{len(verdicts)} layouts agree")
    return "\n".join(lines) + "\n"


def _allowed(limit: Tolerance) -> str:
    return f"cap {limit.cap:.0e}, loss {limit.loss:.0e}, gradient {limit.gradient:.0e}, N exactly: {limit.reason}"


def _row(verdict: Verdict) -> tuple[str, ...]:
    m = verdict.measured
    return (
        verdict.layout.name,
        str(verdict.layout.ranks),
        str(m.micro_batches),
        str(m.tokens),
        f"{m.cap:.12f}",
        f"{m.loss:+.12f}",
        f"{verdict.cap_error:.1e}",
        f"{verdict.loss_error:.1e}",
        f"{m.gradient_error:.1e}",
        f"{m.ess_collectives} x {m.ess_bytes // max(m.ess_collectives, 1)} B",
        f"{m.step_collectives}, {m.step_bytes:,} B",
        f"{m.seconds:.2f}",
    )


def as_json(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """For programs: one object per layout, the tolerances, and the overall verdict."""
    return {
        "layouts": [
            asdict(v.layout)
            | asdict(v.measured)
            | {"dp": v.layout.dp, "cap_error": v.cap_error, "loss_error": v.loss_error, "faults": list(v.faults)}
            for v in verdicts
        ],
        "tolerances": {dtype: asdict(limit) for dtype, limit in TOLERANCES.items()},
        "agrees": not any(v.faults for v in verdicts),
    }
