"""How long 1,000 presets take after start-up: at most 2 ms each. They build on shipped ones, each with its own change.

    python benchmarks/validate_many.py [--presets 1000] [--limit-ms 2.0]

One in ten holds a fault, so that the slow way through the schema is part of the figure. Exit code 1 above the limit.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

from p3o_launch.check import check_file
from p3o_launch.guards import all_guards
from p3o_launch.presets import names

FAULTS = (
    "algorithm:\n  use_rollout_logprobs: false\n",
    "rollout:\n  top_p: 0.95\n",
    "rollout:\n  temprature: 1.2\n",
    "batch:\n  global_batch_size: 1e3\n",
)


def write(directory: Path, count: int) -> list[str]:
    """``count`` presets; the paths."""
    parents = names()
    paths = []
    for index in range(count):
        body = f"extends: {parents[index % len(parents)]}\nschema_version: 1\n"
        body += FAULTS[index // 10 % len(FAULTS)] if index % 10 == 9 else f"seed:\n  seed: {index}\n"
        path = directory / f"preset_{index}.yaml"
        path.write_text(body, encoding="utf-8")
        paths.append(str(path))
    return paths


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--presets", type=int, default=1000)
    parser.add_argument("--limit-ms", type=float, default=2.0)
    options = parser.parse_args()
    all_guards()
    with tempfile.TemporaryDirectory() as directory:
        paths = write(Path(directory), options.presets)
        for path in paths[: 10 * len(FAULTS)]:  # start-up: modules and patterns that each kind of fault needs
            check_file(path)
        times, findings = [], 0
        start = time.process_time()
        for path in paths:
            before = time.perf_counter()
            findings += len(check_file(path).findings)
            times.append(time.perf_counter() - before)
        each = (time.process_time() - start) / len(paths)  # what others do on the machine is not ours
    assert findings >= len(paths) // 10, "the faults were not found"
    times.sort()
    print(f"{len(paths)} presets, {findings} findings")
    print(f"processor time {1000 * each:.2f} ms each")
    print(f"wall time: median {1000 * statistics.median(times):.2f} ms, slowest {1000 * times[-1]:.2f} ms")
    print(f"limit {options.limit_ms:.2f} ms: {'kept' if 1000 * each <= options.limit_ms else 'exceeded'}")
    return 0 if 1000 * each <= options.limit_ms else 1


if __name__ == "__main__":
    sys.exit(main())
