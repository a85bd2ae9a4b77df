"""What a shell offers when the user presses tab, asked as bash asks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from p3o_launch.fields import FIELDS
from p3o_launch.guards import all_guards
from p3o_launch.presets import names


def offered(line: str) -> list[str]:
    """What bash would show for ``line``, the cursor at its end."""
    environment = os.environ | {
        "_P3O_LAUNCH_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split(" ")) - 1),
    }
    code = "import sys; sys.argv = ['p3o-launch']; from p3o_launch.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("p3o-launch validate temp_", [name for name in names() if name.startswith("temp_")]),
        ("p3o-launch run --preset grpo_t", [name for name in names() if name.startswith("grpo_t")]),
        ("p3o-launch presets ", names()),
        ("p3o-launch diff on_policy grpo_on", ["grpo_on_policy"]),
        ("p3o-launch validate x.yaml --profile ", names("profiles")),
        ("p3o-launch validate x.yaml --recipe f", ["formal_0p6b", "formal_4b"]),
        ("p3o-launch explain P3O20", [code for code in all_guards() if code.startswith("P3O20")]),
        ("p3o-launch explain truncated", ["truncated-sampling"]),
        ("p3o-launch validate x.yaml --format s", ["sarif"]),
        ("p3o-launch lint --from n", ["nemo_rl"]),
        ("p3o-launch validate x.yaml --set seed.", [f"seed.{name}=" for name in FIELDS["seed"]]),
        ("p3o-launch valid", ["validate"]),
    ],
)
def test_bash_offers(line: str, wanted: list[str]) -> None:
    assert sorted(offered(line)) == sorted(wanted)


def test_what_is_not_known_is_left_to_the_shells_own_files() -> None:
    assert offered("p3o-launch validate ./pre") == []
