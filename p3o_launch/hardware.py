"""GPU product names -> compute capability and memory. Decided from the *declared* name; no GPU is looked at.

A name is read the way people and ``nvidia-smi`` write it: ``A100-40GB``, ``NVIDIA A100-SXM4-80GB``, ``RTX 4090``,
``h100``. An unknown name gives None and no rule draws a conclusion from it.
Source: NVIDIA's compute-capability list and product data sheets. Memory in GiB as sold.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

Capability = tuple[int, int]


class Gpu(NamedTuple):
    """``capability``: (major, minor). ``memory_gib`` is None where the product comes in several sizes."""

    name: str
    capability: Capability
    memory_gib: int | None


_VOLTA, _TURING, _AMPERE, _AMPERE_SMALL = (7, 0), (7, 5), (8, 0), (8, 6)
_ADA, _HOPPER, _BLACKWELL, _BLACKWELL_ULTRA, _BLACKWELL_SMALL = (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)

_GPUS = {
    "P100": ((6, 0), 16),
    "V100": (_VOLTA, None),
    "T4": (_TURING, 16),
    "RTX 2080 Ti": (_TURING, 11),
    "A100": (_AMPERE, None),
    "A800": (_AMPERE, None),
    "A30": (_AMPERE, 24),
    "A10": (_AMPERE_SMALL, 24),
    "A10G": (_AMPERE_SMALL, 24),
    "A40": (_AMPERE_SMALL, 48),
    "A6000": (_AMPERE_SMALL, 48),
    "RTX A6000": (_AMPERE_SMALL, 48),
    "RTX A5000": (_AMPERE_SMALL, 24),
    "RTX 3080": (_AMPERE_SMALL, None),
    "RTX 3090": (_AMPERE_SMALL, 24),
    "RTX 3090 Ti": (_AMPERE_SMALL, 24),
    "L4": (_ADA, 24),
    "L40": (_ADA, 48),
    "L40S": (_ADA, 48),
    "L20": (_ADA, 48),
    "RTX 4080": (_ADA, 16),
    "RTX 4090": (_ADA, 24),
    "RTX 4090 D": (_ADA, 24),
    "RTX 5000 Ada": (_ADA, 32),
    "RTX 6000 Ada": (_ADA, 48),
    "H100": (_HOPPER, None),
    "H100 NVL": (_HOPPER, 94),
    "H800": (_HOPPER, 80),
    "H20": (_HOPPER, None),
    "H200": (_HOPPER, 141),
    "GH200": (_HOPPER, None),
    "B100": (_BLACKWELL, None),
    "B200": (_BLACKWELL, None),
    "GB200": (_BLACKWELL, None),
    "B300": (_BLACKWELL_ULTRA, None),
    "GB300": (_BLACKWELL_ULTRA, None),
    "RTX 5080": (_BLACKWELL_SMALL, 16),
    "RTX 5090": (_BLACKWELL_SMALL, 32),
    "RTX PRO 6000": (_BLACKWELL_SMALL, 96),
    "GB10": ((12, 1), None),
}
# What people leave out or write in another way.
_ALIASES = {
    "3080": "RTX 3080",
    "3090": "RTX 3090",
    "4080": "RTX 4080",
    "4090": "RTX 4090",
    "5080": "RTX 5080",
    "5090": "RTX 5090",
    "6000ada": "RTX 6000 Ada",
    "rtx6000adageneration": "RTX 6000 Ada",
}
_LONGEST = 4
_LARGEST_GIB = 320


@lru_cache(maxsize=256)
def find_gpu(name: str | None) -> Gpu | None:
    """The product a declared name means; None when the name is absent or unknown."""
    if name is None:
        return None
    words = re.findall(r"[a-z0-9]+", name.lower())
    found = max(_products(words), key=len, default=None)
    if found is None:
        return None
    product = _names()[found]
    capability, memory = _GPUS[product]
    return Gpu(product, capability, _written_memory(words) or memory)


def _products(words: list[str]) -> list[str]:
    # Vendors glue or split the parts of a name at will, so neighbouring words are tried together.
    spans = ("".join(words[i : i + n]) for i in range(len(words)) for n in range(1, _LONGEST + 1))
    names = _names()
    return [span for span in spans if span in names]


def _names() -> dict[str, str]:
    if not _NAMES:
        _NAMES.update({product.lower().replace(" ", ""): product for product in _GPUS})
        _NAMES.update(_ALIASES)
    return _NAMES


_NAMES: dict[str, str] = {}


def _written_memory(words: list[str]) -> int | None:
    text = " ".join(words)
    match = re.search(r"\b(\d{2,3}) ?(?:g|gb|gib)\b", text)
    # "GH200 480GB" names the memory of the CPU beside the GPU.
    return int(match[1]) if match and int(match[1]) <= _LARGEST_GIB else None
