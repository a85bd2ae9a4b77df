"""The registry of engines costs nothing to import."""

from __future__ import annotations

import subprocess
import sys


def test_the_registry_loads_no_engine() -> None:
    program = "import sys, p3o_launch.runtime.rollout.engines; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0
