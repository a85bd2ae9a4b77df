"""603: what recomputation leaves to be kept. The figures of whole runs are compared in tests/mcore/test_memory.py."""

from __future__ import annotations

from typing import Any

from guard_presets import findings, make

from p3o_launch.memory import activation_bytes, layer_activations
from p3o_launch.topology import topology

FULL = {"parallel.recompute_granularity": "full"}
LAYERS, HIDDEN, TOKENS, BF16 = 28, 1024, 512 + 4096, 2


def activations(**parallel: Any) -> float:
    """Numbers per token that one stage keeps."""
    preset = make({f"parallel.{name}": value for name, value in parallel.items()})
    return activation_bytes(preset, topology(preset)) / (TOKENS * BF16)


def test_each_way_of_recomputing_keeps_what_it_says() -> None:
    kept = layer_activations(make())
    full = {"recompute_granularity": "full"}
    assert activations() == LAYERS * kept
    assert activations(**full, recompute_method="uniform", recompute_num_layers=1) == LAYERS * HIDDEN + kept
    assert activations(**full, recompute_method="uniform", recompute_num_layers=7) == 4 * HIDDEN + 7 * kept
    assert activations(**full, recompute_method="uniform", recompute_num_layers=99) == HIDDEN + LAYERS * kept
    assert activations(**full, recompute_method="block", recompute_num_layers=28) == LAYERS * HIDDEN + kept
    assert activations(**full, recompute_method="block", recompute_num_layers=8) == 8 * HIDDEN + 21 * kept


def test_blocks_that_recompute_a_few_layers_only_are_told_to_recompute_more() -> None:
    changes = {"model.num_layers": 100, "parallel.use_distributed_optimizer": True, **FULL}
    changes |= {"parallel.recompute_method": "block", "parallel.recompute_num_layers": 1}
    ((code, finding),) = findings(changes)
    assert (code, finding.path) == ("P3O603", "parallel.recompute_num_layers")
    assert finding.hint == "raise parallel.recompute_num_layers"
    assert findings({**changes, "parallel.recompute_num_layers": 100}) == []
