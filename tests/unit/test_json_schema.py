"""The JSON Schema for editors: valid itself, true for every preset, and false for what it can know to be wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from p3o_launch.check import check_file
from p3o_launch.json_schema import preset_schema

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
VALIDATOR = jsonschema.Draft202012Validator(preset_schema())
SHIPPED = sorted((ROOT / "presets").rglob("*.yaml"))
# A byte order mark is no fault of the schema's; everything else in ok/ is read as an editor would.
OK = sorted((DATA / "ok").glob("*.yaml"))


def loaded(path: Path) -> Any:
    return yaml.safe_load(path.read_text("utf-8-sig"))


def faults(data: Any) -> list[str]:
    return [error.message for error in VALIDATOR.iter_errors(data)]


def test_the_schema_is_valid_and_every_setting_is_described() -> None:
    schema = preset_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    for group in schema["$defs"].values():
        assert group["description"]
        assert group["additionalProperties"] is False
        assert [name for name, field in group["properties"].items() if not field.get("description")] == []


@pytest.mark.parametrize("path", SHIPPED + OK, ids=lambda path: path.stem)
def test_every_sound_preset_is_valid(path: Path) -> None:
    assert faults(loaded(path)) == []


@pytest.mark.parametrize("path", [path for path in SHIPPED if path.parent.name == "presets"], ids=lambda p: p.stem)
def test_a_resolved_preset_is_valid(path: Path) -> None:
    assert faults(check_file(str(path)).resolved) == []


def test_every_directive_is_known() -> None:
    sound = {
        "schema_version": 1,
        "extends": ["on_policy", "../x.yaml"],
        "profile": "cpu",
        "recipe": "smoke",
        "partial": True,
        "ignore": {"P3O113": "a parity test"},
        "optimizer": {"lr": "1e-5"},
        "rollout": {"extra": {"a": [1]}, "top_p": None},
        "cluster": {"env": {"A": "1"}},
    }
    assert faults(sound) == []
    assert faults({"extends": "on_policy"}) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"modle": {}},
        {"rollout": {"temprature": 1}},
        {"rollout": {"temperature": "warm"}},
        {"rollout": {"temperature": True}},
        {"batch": {"global_batch_size": 0}},
        {"batch": {"global_batch_size": 1.5}},
        {"batch": {"global_batch_size": "64"}},
        {"optimizer": {"lr": -1}},
        {"algorithm": {"ess_scope": "epoch"}},
        {"cluster": {"env": {"A": 1}}},
        {"ignore": {"P3O113": ""}},
        {"ignore": {"group-of-one": "a reason"}},
        {"schema_version": 2},
        {"name": "a b"},
        {"partial": "yes"},
        [],
    ],
    ids=str,
)
def test_what_one_setting_shows_to_be_wrong_is_refused(wrong: Any) -> None:
    assert faults(wrong)


def test_the_command_prints_it() -> None:
    code = "import sys; sys.argv = ['p3o-launch', 'schema']; from p3o_launch.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout) == preset_schema()
