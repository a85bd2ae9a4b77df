"""Hydra and OmegaConf: parents, overrides, interpolations, and where a value was written."""

from __future__ import annotations

from pathlib import Path

import pytest

from p3o_launch.importers.settings import UNKNOWN, Settings, load_tree


def tree(text: str, *overrides: str, framework: str = "nemo_rl", file: str = "f.yaml") -> Settings:
    settings, _ = load_tree(text, framework, file, overrides)
    assert settings is not None
    return settings


def test_the_child_wins_over_its_parents_and_places_stay_with_the_file(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "a.yaml").write_text("policy:\n  lr: 1\n  seed: 1\n  tp: 1\n", "utf-8")
    (tmp_path / "base" / "b.yaml").write_text("defaults: a.yaml\npolicy:\n  seed: 2\n", "utf-8")
    child = tmp_path / "child.yaml"
    text = "defaults:\n  - base/b\n  - _self_\npolicy:\n  tp: 3\n"
    settings = tree(text, file=str(child))
    assert [settings.get(f"policy.{name}") for name in ("lr", "seed", "tp")] == [1, 2, 3]
    places = [settings.place(f"policy.{name}") for name in ("lr", "seed", "tp")]
    assert [(Path(place.file).name, place.line) for place in places if place] == [
        ("a.yaml", 2),
        ("b.yaml", 3),
        ("child.yaml", 5),
    ]
    assert settings.findings == []


def test_a_parent_that_is_not_there_is_a_finding_and_the_rest_is_read() -> None:
    settings = tree("defaults: nowhere.yaml\ngrpo: {seed: 1}\n")
    assert [(item.code, item.position.line, item.position.column) for item in settings.findings] == [("P3O008", 1, 11)]
    assert settings.get("grpo.seed") == 1


def test_a_parent_that_leads_back_is_a_finding(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("defaults: b.yaml\n", "utf-8")
    (tmp_path / "b.yaml").write_text("defaults: a.yaml\nx: 1\n", "utf-8")
    settings = tree("defaults: a.yaml\n", file=str(tmp_path / "c.yaml"))
    assert [item.code for item in settings.findings] == ["P3O008"]
    assert settings.get("x") == 1


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("${other.x}", 3),
        ("${.near}", 4),
        ("${..other.x}", 3),
        ("${oc.select:other.x,9}", 3),
        ("${oc.select:absent,9}", 9),
        ("${oc.select:absent}", None),
        ("${oc.select:absent,null}", None),
        ("${mul:${other.x}, ${a.near}}", 12),
        ("${mul:2, 1e3}", 2000.0),
        ("${oc.env:HOME}", UNKNOWN),
        ("${absent}", UNKNOWN),
        ("${a.value}", UNKNOWN),
        ("x${other.x}y", "x3y"),
        ("${other.chain}", 3),
        ("${mul:${absent}, 2}", UNKNOWN),
    ],
)
def test_interpolations(text: str, value: object) -> None:
    settings = tree(f"a:\n  value: {text!r}\n  near: 4\nother: {{x: 3, chain: '${{other.x}}'}}\n")
    assert settings.get("a.value") == value or settings.get("a.value") is value


def test_numbers_are_read_as_omegaconf_reads_them() -> None:
    settings = tree("a: 1e-6\nb: 010\nc: 1_000\nd: '5'\ne: text\n")
    assert (settings.get("a"), settings.get("c"), settings.get("e")) == (1e-6, 1000, "text")


def test_overrides_set_add_and_delete() -> None:
    settings = tree(
        "a: {x: 1, y: 2}\nb: {z: 3}\n",
        "a.x=10",
        "+a.new.deep=true",
        "~a.y",
        "b.z='quoted text'",
        "++c=null",
        "d=[1,2]",
        "e=1e-5",
        "f=",
    )
    assert settings.get("a") == {"x": 10, "new": {"deep": True}}
    assert settings.get("b.z") == "quoted text"
    assert settings.has("c")
    assert settings.get("c") is None
    assert settings.get("e") == 1e-5
    assert settings.get("f") is None
    place = settings.place("a.x")
    assert place is not None
    assert (place.file, place.line, place.column) == ("<overrides>", 1, 5)


def test_a_word_that_is_no_override_is_a_finding() -> None:
    settings = tree("a: 1\n", "just-a-word")
    assert [item.code for item in settings.findings] == ["P3O017"]


def test_verl_overrides_start_from_the_named_trainer() -> None:
    text = "python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer \\\n  algorithm.adv_estimator=grpo \\\n"
    settings = tree(text + "  actor_rollout_ref.rollout.n=$N\n", framework="verl", file="run.sh")
    assert settings.get("actor_rollout_ref.actor.strategy") == "megatron"
    assert settings.get("algorithm.adv_estimator") == "grpo"
    assert settings.get("actor_rollout_ref.rollout.n") is UNKNOWN
    place = settings.place("algorithm.adv_estimator")
    assert place is not None
    assert (place.line, place.column) == (2, 3 + len("algorithm.adv_estimator="))
    assert settings.place("actor_rollout_ref.actor.strategy") is None
    other = tree("algorithm.adv_estimator=grpo\n", framework="verl")
    assert other.get("actor_rollout_ref.actor.strategy") == "fsdp"


def test_verl_yaml_builds_on_the_packaged_trainer_unless_it_is_complete() -> None:
    part = tree("defaults:\n  - ppo_megatron_trainer\n  - _self_\ndata: {train_batch_size: 7}\n", framework="verl")
    assert part.get("data.train_batch_size") == 7
    assert part.get("actor_rollout_ref.actor.megatron.tensor_model_parallel_size") == 1
    whole = tree("actor_rollout_ref: {}\nalgorithm: {}\ndata: {}\ntrainer: {}\n", framework="verl")
    assert not whole.has("actor_rollout_ref.actor")


@pytest.mark.parametrize("text", ["- a\n- b\n", "just text", "a: [", "a: 1\na: 2\n"])
def test_files_that_hold_no_settings_are_findings(text: str) -> None:
    _, findings = load_tree(text, "nemo_rl", "f.yaml", ())
    assert findings
