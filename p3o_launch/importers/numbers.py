"""Numbers as OmegaConf reads them."""

from __future__ import annotations

import re
from typing import Any

_NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?", re.ASCII)


def number(value: Any) -> Any:
    """OmegaConf reads ``1e-6`` as a number, where YAML 1.1 sees text."""
    if isinstance(value, str) and len(value) <= 64 and _NUMBER.fullmatch(value):
        return float(value) if any(sign in value for sign in ".eE") else int(value)
    return value
