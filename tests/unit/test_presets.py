"""Every shipped preset is sound, reproduces its recipe, and differs from its twin by the algorithm alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from p3o_launch.check import check_file
from p3o_launch.errors import UsageError
from p3o_launch.presets import names, nearest, resolve_name, shipped
from p3o_launch.resolve import differences, undeclared
from p3o_launch.schema import Preset
from p3o_launch.topology import topology

ROOT = Path(__file__).parents[2]
SCENARIOS = ("on_policy", "temp_0p6", "temp_1p2", "periodic_sync_3", "quantized_rollout")
PROFILES = ("a100x4", "cpu")
RECIPES = ("formal_4b", "formal_0p6b", "smoke")


def preset(name: str, **options: Any) -> Preset:
    result = check_file(resolve_name(name), **options)
    assert result.findings == ()
    assert result.preset is not None
    return result.preset


def test_each_scenario_ships_for_both_objectives() -> None:
    assert names() == sorted([*SCENARIOS, *(f"grpo_{name}" for name in SCENARIOS)])
    assert names("profiles") == sorted(PROFILES)
    assert names("recipes") == sorted(RECIPES)


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_shipped_preset_has_no_findings_on_any_profile_and_recipe(name: str, profile: str, recipe: str) -> None:
    assert preset(name, profile=profile, recipe=recipe).name == name


@pytest.mark.parametrize("path", sorted((ROOT / "presets").rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_file_below_presets_is_sound(path: Path) -> None:
    assert check_file(str(path)).findings == ()


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("profile", PROFILES)
def test_twins_differ_by_the_algorithm_alone(scenario: str, profile: str) -> None:
    p3o, grpo = (preset(name, profile=profile) for name in (scenario, f"grpo_{scenario}"))
    found = differences(p3o.model_dump(), grpo.model_dump())
    assert undeclared(found) == []
    changed = {".".join(item.path) for item in found}
    assert changed == {
        "name",
        "description",
        "algorithm.advantage_estimator",
        "algorithm.eps_clip",
        "algorithm.eps_clip_high",
    }
    assert (grpo.algorithm.eps_clip, grpo.algorithm.eps_clip_high) == (0.4, 0.4)


@pytest.mark.parametrize("profile", PROFILES)
def test_a_scenario_changes_one_thing_each(profile: str) -> None:
    base = preset("on_policy", profile=profile).model_dump()
    changed = {
        name: {
            ".".join(item.path): json.loads(str(item.right))
            for item in differences(base, preset(name, profile=profile).model_dump())
            if item.path[0] not in ("name", "description")
        }
        for name in SCENARIOS[1:]
    }
    assert changed == {
        "temp_0p6": {"rollout.temperature": 0.6},
        "temp_1p2": {"rollout.temperature": 1.2},
        "periodic_sync_3": {"rollout.update_weights_interval": 3},
        "quantized_rollout": {"rollout.weight_quantization": "int8"},
    }


FIGURES = {
    # rollouts, prompts, samples, global batch, response cap, layers, hidden, RoPE base, prompt key
    "formal_4b": (30, 4, 16, 64, 4096, 36, 2560, 5_000_000, "problem"),
    "formal_0p6b": (11, 12, 4, 48, 4096, 28, 1024, 1_000_000, "question"),
    "smoke": (1, 4, 4, 16, 128, 28, 1024, 1_000_000, "question"),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_reproduces_its_figures(recipe: str) -> None:
    p = preset("on_policy", recipe=recipe)
    b, m, r, o = p.batch, p.model, p.rollout, p.optimizer
    assert (
        b.num_rollout,
        b.rollout_batch_size,
        b.n_samples_per_prompt,
        b.global_batch_size,
        r.max_response_len,
        m.num_layers,
        m.hidden_size,
        m.rotary_base,
        p.data.input_key,
    ) == FIGURES[recipe]
    assert (b.micro_batch_size, r.max_prompt_len, p.seed.seed, p.precision.bf16) == (1, 512, 42, True)
    assert (o.lr, o.min_lr, o.lr_decay_style, o.lr_warmup_fraction) == (1e-5, 0.0, "cosine", 0.1)
    assert (o.adam_beta1, o.adam_beta2, o.weight_decay, o.clip_grad) == (0.9, 0.95, 0.01, 1.0)
    assert (m.attention_dropout, m.hidden_dropout) == (0.0, 0.0)
    assert (r.temperature, r.top_p, r.top_k, r.logprobs) == (1.0, 1.0, -1, 0)
    assert (p.algorithm.ess_scope, p.algorithm.kl_mode) == ("step", "proxy_safe")
    sizes = topology(p)
    assert (sizes.world_size, sizes.tp, sizes.pp, sizes.cp, sizes.dp, sizes.steps_per_rollout) == (4, 1, 1, 1, 4, 1)


@pytest.mark.parametrize(("recipe", "evaluates"), [("formal_4b", True), ("formal_0p6b", True), ("smoke", False)])
def test_evaluation_follows_the_recipe(recipe: str, evaluates: bool) -> None:
    p = preset("on_policy", recipe=recipe)
    assert (p.evaluation.interval is not None, p.data.eval_prompt_data is not None) == (evaluates, evaluates)
    e = p.evaluation
    assert (e.n_samples_per_prompt, e.temperature, e.top_p, e.max_response_len) == (16, 1.0, 0.95, 4096)


def test_formal_4b_is_the_default_recipe_and_a100x4_the_default_profile() -> None:
    for name in names():
        assert preset(name) == preset(name, recipe="formal_4b", profile="a100x4")


def test_the_cpu_profile_fits_the_checkpoint_that_ships() -> None:
    p = preset("temp_1p2", profile="cpu")
    config = json.loads((ROOT / "p3o_launch/assets/arithmetic/config.json").read_text())
    assert p.model.hf_checkpoint == "builtin:arithmetic"
    m = p.model
    rope = config.get("rope_parameters") or {}
    assert (
        m.num_layers,
        m.hidden_size,
        m.ffn_hidden_size,
        m.num_attention_heads,
        m.num_query_groups,
        m.kv_channels,
        m.vocab_size,
        m.max_position_embeddings,
        m.rotary_base,
        m.norm_epsilon,
        not m.untie_embeddings_and_output_weights,
    ) == (
        config["num_hidden_layers"],
        config["hidden_size"],
        config["intermediate_size"],
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["head_dim"],
        config["vocab_size"],
        config["max_position_embeddings"],
        config.get("rope_theta", rope.get("rope_theta")),
        config["rms_norm_eps"],
        config["tie_word_embeddings"],
    )
    assert p.rollout.max_prompt_len + p.rollout.max_response_len <= m.max_position_embeddings


def test_the_cpu_profile_runs_two_data_parallel_ranks_and_four_on_request() -> None:
    sizes = topology(preset("temp_1p2", profile="cpu"))
    assert (sizes.world_size, sizes.dp) == (2, 2)
    sizes = topology(preset("temp_1p2", profile="cpu", overrides=["cluster.gpus_per_node=4"]))
    assert (sizes.world_size, sizes.dp) == (4, 4)


# names


def test_a_name_is_a_shipped_preset_and_a_path_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_name("on_policy") == str(ROOT / "presets/on_policy.yaml")
    assert resolve_name("on_policy.yaml") == "on_policy.yaml"
    assert resolve_name("./on_policy") == "./on_policy"
    (tmp_path / "on_policy").mkdir()
    assert resolve_name("on_policy") == str(ROOT / "presets/on_policy.yaml")
    (tmp_path / "mine").write_text("x: 1\n")
    assert resolve_name("mine") == "mine"


@pytest.mark.parametrize("name", ["", "..", "../README", "base/common/../..", "on_policy\0", "x" * 10_000])
def test_a_name_does_not_lead_out_of_the_shipped_presets(name: str) -> None:
    assert shipped(name) is None


def test_an_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(UsageError) as near:
        resolve_name("temp_12")
    assert near.value.hint == "did you mean temp_1p2?"
    with pytest.raises(UsageError) as far:
        resolve_name("zzz")
    assert "periodic_sync_3" in str(far.value.hint)


def test_nearest_ignores_case_and_gives_up_when_nothing_is_close() -> None:
    assert nearest("Temp_1P2", names()) == "temp_1p2"
    assert nearest("zebra", names()) is None
    assert nearest("x" * 100, names()) is None


def test_presets_work_by_name_from_an_installed_package(tmp_path: Path) -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert build["force-include"] == {"presets": "p3o_launch/_presets"}
    skip = shutil.ignore_patterns("__pycache__", "runtime", "assets")
    shutil.copytree(ROOT / "p3o_launch", tmp_path / "site/p3o_launch", ignore=skip)
    shutil.copytree(ROOT / "presets", tmp_path / "site/p3o_launch/_presets")
    done = subprocess.run(
        [sys.executable, "-m", "p3o_launch", "validate", "temp_1p2", "grpo_on_policy", "--profile", "cpu"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "2 files: no findings\n")
