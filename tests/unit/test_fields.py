"""The plain table of the schema, and the reading of a preset without pydantic, agree with the schema."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from p3o_launch.fields import FIELDS, TOP
from p3o_launch.quick import facts
from p3o_launch.schema import Preset

ROOT = Path(__file__).parents[2]
BASE: dict[str, Any] = yaml.safe_load((ROOT / "tests/data/base.yaml").read_text()) | {"name": "base"}
PATHS = [(group, field) for group, fields in FIELDS.items() for field in fields]
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 3),
    st.sampled_from([2**70, 10**400, -(10**400), 10**39]),
    st.floats(),
    st.sampled_from(
        [
            "",
            "a",
            "1e-5",
            "1E-5",
            "1",
            "-1",
            "-1e-5",
            "e",
            "1e",
            "--1",
            "0.5",
            "1.5e+3",
            ".5",
            "5.",
            "1e400",
            " 1",
            "٣",
            "1_0",
        ]
    ),
    st.sampled_from(["p3o", "grpo", "step", "none", "adam", "a b", "a\n", "-a", "é"]),
    st.dictionaries(st.sampled_from(["a", "b"]), st.one_of(st.none(), st.integers(0, 2), st.text(max_size=2))),
    st.lists(st.integers(), max_size=1),
)


def generator() -> Any:
    spec = importlib.util.spec_from_file_location("generate_fields", ROOT / "scripts/generate_fields.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_is_what_the_generator_writes() -> None:
    assert (ROOT / "p3o_launch/fields.py").read_text() == generator().table()


def plain(value: Any) -> Any:
    if isinstance(value, SimpleNamespace):
        return {key: plain(item) for key, item in vars(value).items() if key != "model_fields_set"}
    return value


def agrees(data: dict[str, Any]) -> bool:
    """True when the quick reading took the data; then the schema takes it too and reads the same."""
    quick = facts(copy.deepcopy(data))
    if quick is None:
        return False
    full = Preset.model_validate(data)
    assert repr(plain(quick)) == repr(full.model_dump())
    assert quick.model_fields_set == full.model_fields_set
    for group in FIELDS:
        assert getattr(quick, group).model_fields_set == (
            getattr(full, group).model_fields_set if group in data else set()
        )
    return True


def test_a_sound_preset_is_read_without_the_schema() -> None:
    assert agrees(BASE)


@pytest.mark.parametrize("path", PATHS, ids=".".join)
@settings(max_examples=40, deadline=None)
@given(value=ODD)
def test_a_value_is_taken_only_as_the_schema_takes_it(path: tuple[str, str], value: Any) -> None:
    agrees({**BASE, path[0]: {**BASE.get(path[0], {}), path[1]: value}})


@pytest.mark.parametrize("name", [*TOP, *FIELDS, "absent"])
@settings(max_examples=40, deadline=None)
@given(value=ODD)
def test_a_top_level_value_is_taken_only_as_the_schema_takes_it(name: str, value: Any) -> None:
    agrees({**BASE, name: value})


@pytest.mark.parametrize("path", PATHS, ids=".".join)
def test_a_missing_key_is_seen(path: tuple[str, str]) -> None:
    group = {key: value for key, value in BASE.get(path[0], {}).items() if key != path[1]}
    data = {**BASE, path[0]: group}
    if not agrees(data):
        with pytest.raises(ValidationError):
            Preset.model_validate(data)


def test_names_are_taken_as_the_schema_takes_them() -> None:
    for name in ("a", "A-1.b_c", "1", "", "-a", ".a", "_a", "a b", "a\n", "é", "a" * 64, "a" * 65, "a/b", "..."):
        agrees({**BASE, "name": name})
    assert agrees({**BASE, "name": "A-1.b_c"})
