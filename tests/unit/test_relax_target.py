"""The target ``relax``: its published P3O recipes come out of our presets, and every difference has a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from p3o_launch.check import check_file
from p3o_launch.errors import PreflightError
from p3o_launch.fields import FIELDS
from p3o_launch.importers import Request, lint_file
from p3o_launch.importers.flags import table
from p3o_launch.launch import relax
from p3o_launch.launch.job import make_job
from p3o_launch.launch.relax import RUN_DIR, relax_arguments, relax_environment
from p3o_launch.launch.script import run_script
from p3o_launch.presets import names, shipped
from p3o_launch.schema import Preset

RECIPES = Path(__file__).parents[1] / "data" / "corpus" / "launch" / "relax"

# What our argument list has and a published recipe has not, and the other way round. Each with its reason.
WHOLE_STEP = ("--p3o-ess-scope", "micro-batch", "step")  # the recipe's knob; the objective's ESS is that of the step
SAVES = {  # the recipes keep no weights; a preset keeps its last ones (checkpoint.save_final)
    "--save": f"{RUN_DIR}/checkpoints",
    "--max-actor-ckpt-to-keep": "2",
}
OWN_NAMES = ("--tb-project-name", "--tb-experiment-name")  # labels of a plot: ours say estimator, preset and seed
OWN_PLACE = ("--rollout-result-dir",)  # /out in the recipe; the run's directory here
SMOKE = {  # the recipe reads DeepScaleR's file with GSM8K's key; ours reads GSM8K, whose verifier is the boxed one
    "--prompt-data": ("/data/deepscaler/train.jsonl", "/data/gsm8k/train.jsonl"),
    "--rm-type": ("mopd", "deepscaler"),
}

CASES = {
    "run_p3o_on_policy_a100x4": ("on_policy", []),
    "run_p3o_periodic_sync_interval_3_a100x4": ("periodic_sync_3", []),
    "run_p3o_temperature_0p6_a100x4": ("temp_0p6", []),
    "run_p3o_temperature_1p2_a100x4": ("temp_1p2", []),
    "run_grpo_on_policy_a100x4": ("grpo_on_policy", []),
    "run_p3o_smoke": ("on_policy", ["recipe=smoke"]),
    "run_p3o_on_policy_a100x4_step_scope_pp2": (
        "on_policy",
        [  # the recipe's own knobs, in our words
            "parallel.pipeline_model_parallel_size=2",
            "parallel.recompute_granularity=full",
            "parallel.recompute_method=uniform",
            "parallel.recompute_num_layers=1",
            "rollout.deterministic_inference=true",
        ],
    ),
}


def preset(name: str, *overrides: str) -> Preset:
    result = check_file(shipped(name), overrides=overrides)
    assert not result.has_errors, result.findings
    return result.preset


def recipe(name: str) -> list[str]:
    return (RECIPES / f"{name}.args").read_text().splitlines()


def lines(arguments: list[str]) -> dict[str, list[str]]:
    """Flag -> its values. A flag that comes twice is a fault."""
    found: dict[str, list[str]] = {}
    for word in arguments:
        if word.startswith("--"):
            assert word not in found
            found[word] = []
        else:
            found[list(found)[-1]].append(word)
    return found


def same(flag: str, left: list[str] | None, right: list[str] | None) -> bool:
    """Equal as the flag's own type reads them: 1e-5 and 1e-05 are one number."""
    if left is None or right is None:
        return False
    kind = table("relax").find(flag).type
    if (kind == "float" or flag == "--sglang-mem-fraction-static") and left and right:
        return [float(value) for value in left] == [float(value) for value in right]
    return left == right


@pytest.mark.parametrize("name", CASES)
def test_a_published_recipe_comes_out_of_a_preset_argument_by_argument(name):
    base, overrides = CASES[name]
    theirs, ours = lines(recipe(name)), lines(relax_arguments(preset(base, *overrides)))
    differing = {
        flag: (theirs.get(flag), ours.get(flag))
        for flag in {*theirs, *ours}
        if not same(flag, theirs.get(flag), ours.get(flag))
    }
    expected = {flag: (None, [value]) for flag, value in SAVES.items()}
    expected["--save-interval"] = (None, theirs["--num-rollout"])
    expected |= {flag: (theirs[flag], ours[flag]) for flag in OWN_NAMES if theirs[flag] != ours[flag]}
    expected["--rollout-result-dir"] = (["/out/rollout_results"], [f"{RUN_DIR}/rollouts"])
    if "p3o" in name and "step_scope" not in name:
        expected[WHOLE_STEP[0]] = ([WHOLE_STEP[1]], [WHOLE_STEP[2]])
    if name == "run_p3o_smoke":
        expected |= {flag: ([theirs_], [ours_]) for flag, (theirs_, ours_) in SMOKE.items()}
    assert differing == expected
    # What both have stands in the same order.
    assert [flag for flag in theirs if flag in ours] == [flag for flag in ours if flag in theirs]


def test_with_the_recipes_ess_scope_only_names_and_places_are_left():
    theirs = lines(recipe("run_p3o_on_policy_a100x4"))
    ours = lines(relax_arguments(preset("on_policy", "algorithm.ess_scope=micro_batch", "checkpoint.save_final=false")))
    differing = [flag for flag in {*theirs, *ours} if not same(flag, theirs.get(flag), ours.get(flag))]
    assert sorted(differing) == sorted([*OWN_NAMES, *OWN_PLACE])


def test_the_behaviour_temperature_goes_to_relaxs_hook_as_in_its_recipes():
    assert relax_environment(preset("temp_0p6"))[relax.BEHAVIOUR_VARIABLE] == "0.6"
    assert relax_environment(preset("grpo_temp_1p2"))[relax.BEHAVIOUR_VARIABLE] == "1.2"
    assert relax.BEHAVIOUR_VARIABLE not in relax_environment(preset("on_policy"))


@pytest.mark.parametrize("name", [name for name in names() if "quantized" not in name])
def test_every_flag_exists_and_every_value_has_its_type(name):
    for flag, values in lines(relax_arguments(preset(name))).items():
        known = table("relax").find(flag)
        assert known is not None, flag
        if known.is_switch:
            assert values == [], flag
        elif known.nargs == "+":
            assert len(values) >= 1
        else:
            assert len(values) == 1, flag
        convert = {"int": int, "float": float}.get(known.type, str)
        assert len([convert(value) for value in values]) == len(values)
        assert not {"True", "False", "true", "false", "None"} & set(values), flag


@pytest.mark.parametrize("name", [name for name in names() if "quantized" not in name])
def test_the_linter_reads_the_preset_back_from_the_arguments(name, tmp_path):
    source = preset(name)
    (tmp_path / "relax.args").write_text("\n".join(relax_arguments(source)).replace("\0", "/"))
    environment = tuple(f"{key}={value}" for key, value in relax_environment(source).items())
    read = lint_file(str(tmp_path / "relax.args"), Request("relax", (), environment, None, "A100-80GB", None))
    assert [finding for finding in read.check.findings if finding.severity.value == "error"] == []
    assert read.facts is not None
    again = read.facts.preset
    assert (again.batch, again.optimizer, again.seed) == (source.batch, source.optimizer, source.seed)
    p3o_only = {"algorithm.ess_scope", "algorithm.kl_mode"} if source.algorithm.advantage_estimator == "grpo" else set()
    for group in ("algorithm", "model", "precision", "parallel", "evaluation"):
        told = {field for field in FIELDS[group] if f"{group}.{field}" not in {*relax.UNSAID, *OTHERWISE, *p3o_only}}
        left, right = getattr(again, group).model_dump(include=told), getattr(source, group).model_dump(include=told)
        assert left == right


# The importer reads no --skip-eval-before-train, and Relax's --normalize-advantages is another thing than ours.
# Expert parallelism's own size is written out, as the recipes do.
OTHERWISE = {
    "algorithm.normalize_advantages",
    "algorithm.eps_clip",
    "algorithm.eps_clip_high",
    "evaluation.before_train",
    "parallel.expert_tensor_parallel_size",
}


def test_a_switch_that_is_off_is_said_by_its_negation_or_not_at_all():
    source = preset("on_policy", "logging.tensorboard=false", "algorithm.normalize_advantages=false")
    arguments = relax_arguments(source)
    assert "--no-use-tensorboard" in arguments
    assert "--use-tensorboard" not in arguments
    assert "--disable-grpo-std-normalization" in arguments
    assert "--tb-project-name" not in arguments


def test_what_relax_cannot_do_is_refused_by_name_all_at_once():
    with pytest.raises(PreflightError) as caught:
        relax_arguments(preset("quantized_rollout"))
    assert 'rollout.weight_quantization ("int8"): Relax cannot round the rollout weights alone' in caught.value.message
    result = check_file(shipped("temp_1p2"), profile="cpu")
    with pytest.raises(PreflightError) as caught:
        relax_arguments(result.preset)
    for part in ("cluster.device", "precision.bf16", "builtin:arithmetic", "reward.type (exact)", "max_prompts"):
        assert part in caught.value.message
    with pytest.raises(PreflightError, match="--attention-backend has no choice"):
        raise_for_choice()


def raise_for_choice():
    source = preset("on_policy")
    odd = source.model_copy(update={"model": source.model.model_copy(update={"attention_backend": "nonsense"})})
    relax_arguments(odd)


def test_a_value_that_looks_like_a_flag_is_tied_to_its_own():
    source = preset("on_policy", "data.input_key=--lr", "data.eval_prompt_data=-x.jsonl")
    arguments = relax_arguments(source)
    assert "--input-key=--lr" in arguments
    place = arguments.index("--eval-prompt-data")
    assert arguments[place + 1 : place + 3] == ["eval", "./-x.jsonl"]


class Reads:
    """A preset, or a group of one, that remembers which settings were looked at."""

    def __init__(self, inner, prefix, seen):
        self._inner, self._prefix, self._seen = inner, prefix, seen

    def __getattr__(self, name):
        value = getattr(self._inner, name)
        if not self._prefix and name in FIELDS:
            return Reads(value, name, self._seen)
        self._seen.add(f"{self._prefix}.{name}")
        return value


def test_every_setting_is_said_refused_or_left_unsaid_with_a_reason():
    seen: set[str] = set()
    branches = [
        ("on_policy", "batch.use_dynamic_batch_size=true", "batch.max_tokens_per_gpu=8192"),
        ("grpo_on_policy", "model.lora_rank=8", "algorithm.use_kl_loss=true", "algorithm.kl_loss_coef=0.1"),
        ("grpo_on_policy", "parallel.recompute_granularity=selective", "precision.fp8=hybrid"),
    ]
    for name, *overrides in branches:
        relax_arguments(Reads(check_file(shipped(name), overrides=overrides).preset, "", seen))
    for group, fields in FIELDS.items():
        for field in fields:
            path = f"{group}.{field}"
            assert (path in seen) != (path in relax.UNSAID), path
    assert {*relax.UNSAID, *relax._ONLY} <= {f"{group}.{field}" for group, fields in FIELDS.items() for field in fields}


@pytest.mark.parametrize("name", [name for name in names() if f"grpo_{name}" in names() and "quantized" not in name])
def test_the_two_arms_of_a_pair_differ_in_the_objectives_flags_alone(name):
    p3o, grpo = lines(relax_arguments(preset(name))), lines(relax_arguments(preset(f"grpo_{name}")))
    assert {flag for flag in {*p3o, *grpo} if p3o.get(flag) != grpo.get(flag)} == {
        "--advantage-estimator",
        "--p3o-ess-scope",
        "--p3o-kl-mode",
        "--clip-low",
        "--clip-high",
        "--eps-clip",
        "--eps-clip-high",
        *OWN_NAMES,
    }
    assert relax_environment(preset(name)) == relax_environment(preset(f"grpo_{name}"))


@pytest.mark.parametrize("name", ["on_policy", "grpo_temp_0p6"])
def test_the_linter_reads_the_generated_script_too(name, tmp_path):
    made = make_job(check_file(shipped(name)), preset(name), target="relax")
    (tmp_path / "launch.sh").write_text(run_script(made))
    read = lint_file(str(tmp_path / "launch.sh"), Request("relax", (), (), None, "A100-80GB", None))
    assert read.check.findings == ()
    assert read.facts is not None
    assert read.facts.preset.batch == preset(name).batch
