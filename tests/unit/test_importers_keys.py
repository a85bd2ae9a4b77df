"""Misspelt keys of YAML and overrides are named; what another version or the user may have added is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from importer_lists import CLEAN, NEMO, VERL, lint

from p3o_launch.diagnostics import LocatedFinding
from p3o_launch.importers import Request, lint_file
from p3o_launch.importers.yaml_keys import meant

YAML = sorted((Path(__file__).parents[1] / "data" / "corpus" / "yaml").rglob("*.yaml"))


def misspelt(framework: str, text: str, *overrides: str) -> list[LocatedFinding]:
    return [item for item in lint(framework, text, *overrides).check.findings if item.code == "P3O014"]


@pytest.mark.parametrize(
    ("text", "path", "hint"),
    [
        ("algorithm: {adv_estimater: grpo}", "algorithm.adv_estimater", "algorithm.adv_estimator"),
        (
            "actor_rollout_ref:\n  rollout:\n    temperatur: 0.9",
            "actor_rollout_ref.rollout.temperatur",
            "actor_rollout_ref.rollout.temperature",
        ),
        ("actor_rolout_ref: {rollout: {n: 4}}", "actor_rolout_ref", "actor_rollout_ref"),
        (
            "actor_rollout_ref: {actor: {megatron: {override_transformer_config: {atention_dropout: 0}}}}",
            "actor_rollout_ref.actor.megatron.override_transformer_config.atention_dropout",
            "actor_rollout_ref.actor.megatron.override_transformer_config.attention_dropout",
        ),
        ("training: {quantizaton: 4bit}", "training.quantizaton", "actor_rollout_ref.rollout.quantization"),
        ("async_training: {staleness_treshold: 0.5}", "async_training.staleness_treshold", "staleness_threshold"),
    ],
)
def test_a_misspelt_key_of_verls_yaml(text: str, path: str, hint: str) -> None:
    (found,) = misspelt("verl", "trainer: {nnodes: 1}\n" + text + "\n")
    assert found.message == f"{path} is no setting that is known here"
    assert (found.hint or "").startswith("did you mean ")
    assert hint in (found.hint or "")
    assert found.position.line == 2 + text.count("\n")


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("train_micro_batch_size", "train_micro_batchsize"),
        ("temperature", "temprature"),
        ("num_generations_per_prompt", "num_generation_per_prompt"),
        ("token_level_loss", "token_level_los"),
    ],
)
def test_a_misspelt_key_of_nemo_rls_yaml(right: str, wrong: str) -> None:
    (found,) = misspelt("nemo_rl", NEMO.replace(right, wrong))
    assert wrong in found.message
    assert right in (found.hint or "")


def test_a_misspelt_override() -> None:
    (known,) = misspelt("nemo_rl", NEMO, "policy.train_micro_batchsize=1")
    assert known.position.file == "<overrides>"
    (group,) = misspelt("nemo_rl", NEMO, "polcy.train_micro_batch_size=1")
    assert group.hint == "did you mean policy?"
    (hydra,) = misspelt("verl", VERL, "actor_rolout_ref.rollout.n=4")
    assert (hydra.message, hydra.hint) == (
        "there is no setting actor_rolout_ref.rollout.n: Hydra stops at it",
        "did you mean actor_rollout_ref.rollout.n?",
    )
    (stranger,) = misspelt("verl", VERL, "training.quantizaton=4bit")
    assert stranger.hint == "did you mean actor_rollout_ref.rollout.quantization?"


def test_a_misspelt_key_that_plus_lets_pass() -> None:
    (added,) = misspelt("verl", VERL, "+actor_rollout_ref.rollout.temprature=0.9")
    assert "is added as a setting of its own" in added.message
    assert added.hint == "did you mean actor_rollout_ref.rollout.temperature?"
    key = "+actor_rollout_ref.actor.megatron.override_transformer_config"
    for own in (f"{key}.attention_dropout=0", f"{key}.recompute_modules=[]", "+trainer.our_own_switch=1", "+ours.lr=1"):
        assert misspelt("verl", VERL, own) == [], own


@pytest.mark.parametrize("framework", ["verl", "nemo_rl"])
def test_what_may_be_somebodys_own_is_left_alone(framework: str) -> None:
    text = (
        "my_recipe: {lr: 1, width: 3, nested: {temperature: 2}}\n"
        "trainer: {nnodes: 1, our_own_switch: true}\n"
        "reward: {reward_manager: naive}\n"
        "data: {val_batch_size: 8, gen_batch_size: 8}\n"
    )
    assert misspelt(framework, text) == []


def test_two_names_in_one_file_are_no_misprint_of_each_other() -> None:
    assert misspelt("verl", "algorithm: {adv_estimator: grpo, adv_estimators: [grpo]}\n") == []
    (found,) = misspelt("verl", "algorithm: {adv_estimators: [grpo]}\n")
    assert found.hint == "did you mean algorithm.adv_estimator?"


def test_there_is_an_end_to_it() -> None:
    many = "".join(f"  temperatur{'e' * (index + 2)}: {index}\n" for index in range(40))
    assert 0 < len(misspelt("nemo_rl", f"policy:\n generation:\n{many}")) <= 12


@pytest.mark.parametrize("path", YAML, ids=lambda path: path.stem[-50:])
def test_no_published_configuration_has_a_misprint(path: Path) -> None:
    framework = path.parent.name
    found = lint_file(str(path), Request(framework)).check.findings
    assert [item.message for item in found if item.code == "P3O014"] == []


@pytest.mark.parametrize("framework", ["verl", "nemo_rl"])
def test_a_letter_lost_anywhere_is_named(framework: str) -> None:
    """Every key of a sound configuration without its middle letter, one at a time."""
    text = (
        CLEAN[framework] if framework == "nemo_rl" else "algorithm: {adv_estimator: grpo, norm_adv_by_std_in_grpo: 1}"
    )
    names = [name for group in yaml.safe_load(text).values() for name in group if len(name) > 7]
    assert names
    for name in names:
        broken = name[: len(name) // 2] + name[len(name) // 2 + 1 :]
        hints = [item.hint for item in misspelt(framework, text.replace(f"{name}:", f"{broken}:"))]
        assert len(hints) == 1, broken
        assert name in (hints[0] or "")


def test_what_is_close() -> None:
    known = {"temperature", "top_p", "top_k", "gen_batch_size", "seed"}
    assert meant("temprature", known) == "temperature"
    assert meant("sed", known) == "seed"
    assert meant("val_batch_size", known) is None
    assert meant("top_a", known) is None
