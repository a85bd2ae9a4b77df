"""GPU product names -> compute capability and memory. Decided from the *declared* name; no GPU is looked at.

A name is read the way people and ``nvidia-smi`` write it: ``A100-40GB``, ``NVIDIA A100-SXM4-80GB``, ``RTX 4090``,
``h100``. An unknown name gives None; no rule draws a conclusion from it, and P3O511 says so.
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


_PASCAL, _VOLTA, _TURING, _AMPERE, _AMPERE_SMALL = (6, 1), (7, 0), (7, 5), (8, 0), (8, 6)
_ADA, _HOPPER, _BLACKWELL, _BLACKWELL_ULTRA, _BLACKWELL_SMALL = (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)

_GPUS = {
    "K80": ((3, 7), 12),
    "M40": ((5, 2), None),
    "P100": ((6, 0), 16),
    "P40": (_PASCAL, 24),
    "P4": (_PASCAL, 8),
    "GTX 1080": (_PASCAL, 8),
    "GTX 1080 Ti": (_PASCAL, 11),
    "TITAN Xp": (_PASCAL, 12),
    "V100": (_VOLTA, None),
    "V100S": (_VOLTA, 32),
    "GV100": (_VOLTA, 32),
    "TITAN V": (_VOLTA, 12),
    "T4": (_TURING, 16),
    "T4G": (_TURING, 16),
    "TITAN RTX": (_TURING, 24),
    "RTX 2060": (_TURING, None),
    "RTX 2070": (_TURING, 8),
    "RTX 2080": (_TURING, 8),
    "RTX 2080 Ti": (_TURING, 11),
    "Quadro RTX 5000": (_TURING, 16),
    "Quadro RTX 6000": (_TURING, 24),
    "Quadro RTX 8000": (_TURING, 48),
    "RTX 8000": (_TURING, 48),
    "A100": (_AMPERE, None),
    "A800": (_AMPERE, None),
    "A30": (_AMPERE, 24),
    "A2": (_AMPERE_SMALL, 16),
    "A10": (_AMPERE_SMALL, 24),
    "A10G": (_AMPERE_SMALL, 24),
    "A16": (_AMPERE_SMALL, 16),
    "A40": (_AMPERE_SMALL, 48),
    "A4000": (_AMPERE_SMALL, 16),
    "A4500": (_AMPERE_SMALL, 20),
    "A5000": (_AMPERE_SMALL, 24),
    "A5500": (_AMPERE_SMALL, 24),
    "A6000": (_AMPERE_SMALL, 48),
    "RTX A4000": (_AMPERE_SMALL, 16),
    "RTX A4500": (_AMPERE_SMALL, 20),
    "RTX A5000": (_AMPERE_SMALL, 24),
    "RTX A5500": (_AMPERE_SMALL, 24),
    "RTX A6000": (_AMPERE_SMALL, 48),
    "RTX 3060": (_AMPERE_SMALL, None),
    "RTX 3060 Ti": (_AMPERE_SMALL, 8),
    "RTX 3070": (_AMPERE_SMALL, 8),
    "RTX 3070 Ti": (_AMPERE_SMALL, 8),
    "RTX 3080": (_AMPERE_SMALL, None),
    "RTX 3080 Ti": (_AMPERE_SMALL, 12),
    "RTX 3090": (_AMPERE_SMALL, 24),
    "RTX 3090 Ti": (_AMPERE_SMALL, 24),
    "AGX Orin": ((8, 7), None),
    "L4": (_ADA, 24),
    "L20": (_ADA, 48),
    "L40": (_ADA, 48),
    "L40S": (_ADA, 48),
    "RTX 4060": (_ADA, 8),
    "RTX 4060 Ti": (_ADA, None),
    "RTX 4070": (_ADA, 12),
    "RTX 4070 Super": (_ADA, 12),
    "RTX 4070 Ti": (_ADA, 12),
    "RTX 4070 Ti Super": (_ADA, 16),
    "RTX 4080": (_ADA, 16),
    "RTX 4080 Super": (_ADA, 16),
    "RTX 4090": (_ADA, 24),
    "RTX 4090 D": (_ADA, None),
    "RTX 2000 Ada": (_ADA, 16),
    "RTX 4000 Ada": (_ADA, 20),
    "RTX 4000 SFF Ada": (_ADA, 20),
    "RTX 4500 Ada": (_ADA, 24),
    "RTX 5000 Ada": (_ADA, 32),
    "RTX 5880 Ada": (_ADA, 48),
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
    "RTX 5060": (_BLACKWELL_SMALL, 8),
    "RTX 5060 Ti": (_BLACKWELL_SMALL, None),
    "RTX 5070": (_BLACKWELL_SMALL, 12),
    "RTX 5070 Ti": (_BLACKWELL_SMALL, 16),
    "RTX 5080": (_BLACKWELL_SMALL, 16),
    "RTX 5090": (_BLACKWELL_SMALL, 32),
    "RTX 5090 D": (_BLACKWELL_SMALL, None),
    "RTX PRO 4000": (_BLACKWELL_SMALL, 24),
    "RTX PRO 4500": (_BLACKWELL_SMALL, 32),
    "RTX PRO 5000": (_BLACKWELL_SMALL, None),
    "RTX PRO 6000": (_BLACKWELL_SMALL, 96),
    "GB10": ((12, 1), None),
}
# What people write in another way. ``RTX`` and ``GTX`` in front of a number may be left out.
_ALIASES = {
    "dgxspark": "GB10",
    "jetsonorin": "AGX Orin",
    "quadrogv100": "GV100",
}
_LONGEST = 4
_SAID_BESIDE = ("nvidia", "geforce", "tesla", "gpu", "sxm", "sxm2", "sxm4", "sxm5", "pcie", "hbm2", "hbm3")
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


def similar_gpu(name: str) -> str | None:
    """The known product whose name is most like an unknown one; None when nothing is."""
    from difflib import get_close_matches  # start-up must not pay for it

    words = [word for word in re.findall(r"[a-z0-9]+", name.lower()) if word not in _SAID_BESIDE]
    names = _names()
    for text in ("".join(words), *words):
        close = get_close_matches(text, names, n=1, cutoff=0.7)
        if close:
            return names[close[0]]
    return None


def _products(words: list[str]) -> list[str]:
    # Vendors glue or split the parts of a name at will, so neighbouring words are tried together.
    spans = ("".join(words[i : i + n]) for i in range(len(words)) for n in range(1, _LONGEST + 1))
    names = _names()
    return [span for span in spans if span in names]


def _names() -> dict[str, str]:
    if not _NAMES:
        for product in _GPUS:
            glued = product.lower().replace(" ", "")
            _NAMES[glued] = product
            if glued[:3] in ("rtx", "gtx") and glued[3].isdigit():
                _NAMES[glued[3:]] = product
        _NAMES.update(_ALIASES)
    return _NAMES


_NAMES: dict[str, str] = {}


def _written_memory(words: list[str]) -> int | None:
    text = " ".join(words)
    match = re.search(r"\b(\d{2,3}) ?(?:g|gb|gib)\b", text)
    # "GH200 480GB" names the memory of the CPU beside the GPU.
    return int(match[1]) if match and int(match[1]) <= _LARGEST_GIB else None
