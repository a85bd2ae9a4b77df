"""How long `p3o-launch validate` takes, against importing its three dependencies: the ratio must stay at or below 1.5.

Runs both commands in turn, so that a busy machine slows both, and compares medians::

    python benchmarks/validate_startup.py [--runs 21] [--preset presets/temp_1p2.yaml] [--limit 1.5]

Exit code 1 when the ratio is above the limit.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]


def seconds(command: list[str]) -> float:
    """Wall time of one run [s]; a command that fails is an error."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)
    return time.perf_counter() - start


def installed_command() -> str:
    """The command of the interpreter that runs this script."""
    found = shutil.which("p3o-launch", path=sysconfig.get_path("scripts"))
    if found is None:
        sys.exit("p3o-launch is not installed in this environment: pip install -e .")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=21)
    parser.add_argument("--preset", default="presets/temp_1p2.yaml")
    parser.add_argument("--limit", type=float, default=1.5)
    options = parser.parse_args()
    commands = {
        "imports": [sys.executable, "-c", "import typer, pydantic, yaml"],
        "validate": [installed_command(), "validate", options.preset],
    }
    for command in commands.values():  # the first run of each fills the disk cache
        seconds(command)
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(options.runs):
        for name, command in commands.items():
            times[name].append(seconds(command))
    medians = {name: statistics.median(values) for name, values in times.items()}
    ratio = medians["validate"] / medians["imports"]
    for name, value in medians.items():
        print(f"{name:<9} median {1000 * value:6.1f} ms, fastest {1000 * min(times[name]):6.1f} ms")
    print(f"ratio     {ratio:.2f} (limit {options.limit})")
    return 0 if ratio <= options.limit else 1


if __name__ == "__main__":
    sys.exit(main())
