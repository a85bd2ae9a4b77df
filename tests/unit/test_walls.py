"""The three walls: start-up stays light (tests/unit/test_cli.py), one importer each, imports go downwards."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "p3o_launch").rglob("*.py"))


def test_import_contracts_hold() -> None:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("package", "home"),
    [("megatron", "p3o_launch/runtime/mcore/"), ("ray", "p3o_launch/runtime/workers/")],
)
def test_a_heavy_package_is_named_by_its_one_importer_only(package: str, home: str) -> None:
    # Import contracts do not see imports by string, which mcore/ uses to keep Megatron's notices out of the logs.
    by_string = rf"""(import|import_module)\(["']{package}[."']"""
    pattern = re.compile(rf"^\s*(import|from)\s+{package}[.\s]|{by_string}", re.MULTILINE)
    named = {str(path.relative_to(ROOT)) for path in SOURCES if pattern.search(path.read_text())}
    assert named
    assert not [path for path in named if not path.startswith(home)]
