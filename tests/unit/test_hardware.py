"""GPU names as people and nvidia-smi write them."""

from __future__ import annotations

import pytest

from p3o_launch.hardware import find_gpu


@pytest.mark.parametrize(
    ("name", "capability", "memory"),
    [
        ("A100-40GB", (8, 0), 40),
        ("A100-80GB", (8, 0), 80),
        ("a100", (8, 0), None),
        ("NVIDIA A100-SXM4-80GB", (8, 0), 80),
        ("NVIDIA A100 80GB PCIe", (8, 0), 80),
        ("A100_40G", (8, 0), 40),
        ("NVIDIA A10G", (8, 6), 24),
        ("A10", (8, 6), 24),
        ("NVIDIA RTX A6000", (8, 6), 48),
        ("NVIDIA L40S", (8, 9), 48),
        ("L4", (8, 9), 24),
        ("NVIDIA GeForce RTX 4090", (8, 9), 24),
        ("rtx4090", (8, 9), 24),
        ("4090", (8, 9), 24),
        ("NVIDIA RTX 6000 Ada Generation", (8, 9), 48),
        ("NVIDIA H100 80GB HBM3", (9, 0), 80),
        ("H100 NVL", (9, 0), 94),
        ("H100", (9, 0), None),
        ("NVIDIA H200", (9, 0), 141),
        ("NVIDIA GH200 480GB", (9, 0), None),
        ("B200", (10, 0), None),
        ("NVIDIA B200 180GB", (10, 0), 180),
        ("GB300", (10, 3), None),
        ("NVIDIA GeForce RTX 5090", (12, 0), 32),
        ("Tesla V100-SXM2-32GB", (7, 0), 32),
        ("Tesla T4", (7, 5), 16),
    ],
)
def test_known(name: str, capability: tuple[int, int], memory: int | None) -> None:
    gpu = find_gpu(name)
    assert gpu is not None
    assert (gpu.capability, gpu.memory_gib) == (capability, memory)


@pytest.mark.parametrize(
    "name", [None, "", "GPU", "MI300X", "Gaudi 3", "A1000", "A100x4", "H1000", "80GB", "RTX", "NVIDIA"]
)
def test_unknown(name: str | None) -> None:
    assert find_gpu(name) is None
