"""GPU names as people and nvidia-smi write them."""

from __future__ import annotations

import pytest

from p3o_launch.hardware import find_gpu, similar_gpu


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
        ("NVIDIA H20", (9, 0), None),
        ("H20-96GB", (9, 0), 96),
        ("NVIDIA H20-3e 141GB", (9, 0), 141),
        ("H800", (9, 0), 80),
        ("NVIDIA A800-SXM4-80GB", (8, 0), 80),
        ("A800", (8, 0), None),
        ("RTX 4090D", (8, 9), None),
        ("GeForce RTX 4070 Ti SUPER", (8, 9), 16),
        ("4070 Ti", (8, 9), 12),
        ("NVIDIA GB200 NVL72", (10, 0), None),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", (12, 0), 96),
        ("NVIDIA GeForce GTX 1080 Ti", (6, 1), 11),
        ("Quadro RTX 8000", (7, 5), 48),
        ("NVIDIA TITAN RTX", (7, 5), 24),
        ("Tesla V100S-PCIE-32GB", (7, 0), 32),
        ("A10G-24GB", (8, 6), 24),
        ("RTX A5000", (8, 6), 24),
        ("A4000", (8, 6), 16),
        ("NVIDIA DGX Spark", (12, 1), None),
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


@pytest.mark.parametrize(
    ("name", "product"),
    [
        ("H1000", "H100"),
        ("A100x4", "A100"),
        ("8xH100", "H100"),
        ("NVIDIA HH200-SXM5-141GB", "H200"),
        ("RTX 6000", "RTX A6000"),
        ("L40SS", "L40S"),
    ],
)
def test_an_unknown_name_has_a_nearest_one(name: str, product: str) -> None:
    assert find_gpu(name) is None
    assert similar_gpu(name) == product


@pytest.mark.parametrize("name", ["Gaudi 3", "Ponte Vecchio", "Ascend 910B", "", "??"])
def test_a_name_like_no_other_has_none(name: str) -> None:
    assert similar_gpu(name) is None
