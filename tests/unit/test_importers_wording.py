"""A hint about another framework's configuration is in that framework's words, and works when it is applied."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from importer_lists import CLEAN, NEMO, SLIME, codes, finding, lint, without
from test_importers_siblings import ROWS, SIBLINGS

from p3o_launch.check import check_file
from p3o_launch.guards import GuardContext, all_guards
from p3o_launch.importers.wording import Wording
from p3o_launch.schema import Preset

ERR = sorted((Path(__file__).parents[1] / "data" / "err").glob("P3O[1-7]*.yaml"))
GROUPS = "|".join(Preset.model_fields)
LINE_OF_YAML = re.compile(rf"\b(?:set|write|use|and|or) \+?(?:{GROUPS})\.[a-z_.]+: ?\S")
ACTOR = "actor_rollout_ref.actor"
STREAM = ("async_training.trigger_parameter_sync_step=1", "rollout.nnodes=1", "rollout.n_gpus_per_node=8")


def sound_presets() -> list[Preset]:
    """The golden faults whose shape is sound: what a rule can say."""
    presets = [check_file(str(path)).preset for path in ERR if "# args:" not in path.read_text("utf-8")]
    return [preset for preset in presets if preset is not None]


@pytest.fixture(scope="module")
def hints() -> list[tuple[str, str]]:
    """(code, hint) of every golden fault."""
    found = []
    for preset in sound_presets():
        for code, rule in all_guards().items():
            if rule.body is not None and code != "P3O119":
                found += [(code, item.hint) for item in rule.body(GuardContext(preset)) if item.hint]
    return sorted(set(found))


@pytest.mark.parametrize("framework", ["slime", "relax", "megatron", "verl"])
def test_no_hint_about_flags_or_overrides_asks_for_a_line_of_yaml(framework: str, hints: list[tuple[str, str]]) -> None:
    facts = lint(framework, CLEAN[framework]).facts
    assert facts is not None
    assert len(hints) > 100
    for code, hint in hints:
        said = Wording(facts).hint(code, hint)
        assert not LINE_OF_YAML.search(said), (code, hint, said)
        assert "cluster.env" not in said
        assert "ignore P3O" not in said


def test_a_setting_that_a_framework_has_no_name_for_is_named_in_words() -> None:
    facts = lint("slime", SLIME).facts
    assert facts is not None
    bare = Wording(replace(facts, names={}, remedies={}))
    assert bare.setting("rollout.max_staleness", "1") == "make max staleness 1"
    assert bare.setting("rollout.per_sample_seed", "true") == "turn per sample seed on"
    assert bare.setting("rollout.speculative_decoding", "false") == "turn speculative decoding off"
    assert bare.setting("evaluation.interval", "null") == "leave out interval"


def test_the_environment_of_flags_is_a_line_for_the_shell() -> None:
    missing = finding(lint("slime", SLIME, "--deterministic-mode"), "P3O503")
    assert missing.message.endswith(
        "the environment does not set NCCL_ALGO, NVTE_ALLOW_NONDETERMINISTIC_ALGO and CUBLAS_WORKSPACE_CONFIG"
    )
    assert missing.hint is not None
    words = shlex.split(missing.hint.removeprefix("where the ranks start: export "))
    assert codes(lint("slime", SLIME, "--deterministic-mode", env=tuple(words))) == []


@pytest.mark.parametrize(
    ("framework", "extra", "code", "hint", "mend"),
    [
        ("slime", ("--kl-coef 0.01",), "P3O110", "pass --kl-coef 0, or pass --use-kl-loss", ("--kl-coef 0",)),
        ("slime", ("--kl-loss-coef 0.01",), "P3O110", "--use-kl-loss with --kl-loss-coef", ("--use-kl-loss",)),
        ("relax", ("--critic-load /ckpt",), "P3O104", "remove --critic-load", None),
        ("relax", ("--cuda-graph-impl full_iteration",), "P3O209", "pass --cuda-graph-impl local", None),
        (
            "megatron",
            ("--rl-partial-rollouts --rl-inference-logprobs-is-correction",),
            "P3O410",
            "pass --rl-generation-lag 1",
            None,
        ),
        (
            "verl",
            (
                "algorithm.use_kl_in_reward=true",
                "algorithm.kl_ctrl.kl_coef=0.01",
                f"{ACTOR}.use_kl_loss=true",
                f"{ACTOR}.kl_loss_coef=0.01",
            ),
            "P3O111",
            "set algorithm.use_kl_in_reward=false",
            None,
        ),
        ("verl", ("algorithm.adv_estimator=gae",), "P3O104", "set algorithm.adv_estimator=grpo", None),
    ],
)
def test_a_hint_names_what_the_framework_has(
    framework: str, extra: tuple[str, ...], code: str, hint: str, mend: tuple[str, ...] | None
) -> None:
    target = None if code in ("P3O110", "P3O111", "P3O410") else "p3o"
    result = lint(framework, CLEAN[framework], *extra, target=target)
    named = [item for item in result.check.findings if item.code == code]
    assert named, [(item.code, item.hint) for item in result.check.findings]
    assert hint in (named[0].hint or "")
    if mend:
        assert code not in codes(lint(framework, CLEAN[framework], *extra, *mend))


def test_an_override_that_the_tree_does_not_hold_is_added() -> None:
    key = f"{ACTOR}.megatron.override_transformer_config"
    bypass = ("algorithm.rollout_correction.bypass_mode=true", "actor_rollout_ref.rollout.calculate_log_probs=true")
    result = lint("verl", CLEAN["verl"], *bypass, f"+{key}.fp8=hybrid", target="p3o")
    hint = finding(result, "P3O202").hint or ""
    assert hint.startswith(f"set +{key}.fp8_recipe=tensorwise")
    mended = lint("verl", CLEAN["verl"], *bypass, f"+{key}.fp8=hybrid", f"+{key}.fp8_recipe=tensorwise", target="p3o")
    assert not {"P3O202", "P3O014"} & set(codes(mended))


def test_the_yaml_of_verl_is_told_lines_of_yaml() -> None:
    text = "algorithm: {adv_estimator: grpo}\nactor_rollout_ref: {rollout: {n: 4}}\n"
    result = lint("verl", text, target="p3o")
    assert finding(result, "P3O101").hint == "set algorithm.rollout_correction.bypass_mode: true"


def test_the_neutral_generation_config_has_its_engines_name() -> None:
    silent = without(NEMO, ", top_p: 1.0")
    hint = finding(lint("nemo_rl", silent), "P3O413").hint
    assert hint == "set policy.generation.vllm_kwargs.generation_config: vllm"
    key = "+policy.generation.vllm_kwargs.generation_config"
    assert codes(lint("nemo_rl", silent, f"{key}=vllm")) == []
    assert codes(lint("nemo_rl", silent, f"{key}=auto")) == ["P3O413"]


def test_a_stream_with_a_threshold_has_a_bound() -> None:
    base = CLEAN["verl"]
    add = (*(f"+{item}" for item in STREAM), "algorithm.rollout_correction.rollout_is=token")
    assert "P3O410" in codes(lint("verl", base, *add))
    assert "P3O410" not in codes(lint("verl", base, *add, "+async_training.staleness_threshold=0.5"))


_PASS = re.compile(r"pass (--[a-z][^;,]*?)(?:, which [^;]*|, or .*|;.*)?$")
_OVERRIDE = re.compile(r"set (\+?[\w.]+=[^\s;,]+)(?:[;,].*)?$")


def mend(hint: str) -> str | None:
    """The words that a hint asks to add; None when it is prose or takes something away."""
    if match := _PASS.fullmatch(hint):
        return match[1].replace(" and pass ", " ").replace(" and ", " ")
    match = _OVERRIDE.fullmatch(hint)
    return match[1] if match else None


MENDED = [
    *((framework, CLEAN[framework], extra, {"target": target or None}) for framework, target, extra, _ in ROWS),
    *((framework, text, extra, machine) for _, framework, text, extra, machine, _ in SIBLINGS),
]


@pytest.mark.parametrize(("framework", "text", "extra", "request_"), MENDED)
def test_what_a_hint_asks_to_add_takes_the_finding_away(
    framework: str, text: str, extra: tuple[str, ...], request_: dict[str, Any]
) -> None:
    if framework == "nemo_rl":  # its hints are lines of YAML
        return
    before = lint(framework, text, *extra, **request_).check.findings
    for found in before:
        words = mend(found.hint or "")
        if words is None:
            continue
        after = lint(framework, text, *extra, words, **request_).check.findings
        assert (found.code, found.path) not in {(item.code, item.path) for item in after}, (found.hint, words)
        # The first of two flags has no effect; a note for the record is no fault.
        known = {item.code for item in before} | {"P3O011", "P3O025"}
        assert {item.code for item in after} <= known, (found.hint, [item.message for item in after])
