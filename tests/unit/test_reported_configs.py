"""Every configuration that somebody got wrong in public, and those that must pass: the stated verdict, its reason.

``tests/data/reported_configs.json`` holds the reports. One case here per report: how its configuration is written for
the framework it is about (judged by ``lint``) or as a preset (by ``validate``), and the rule that must say so. Reports
about what only a machine can tell (disks, directories, git) name the part of P3O Launch that answers instead.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from importer_lists import MEGATRON, NEMO, RELAX, SLIME, codes, lint, without

from p3o_launch.check import check_text
from p3o_launch.diagnostics import LocatedFinding, Severity
from p3o_launch.errors import PreflightError
from p3o_launch.launch import launch_warnings as launch_warnings_module
from p3o_launch.launch.arguments import resolved_data
from p3o_launch.launch.environment import Tree
from p3o_launch.launch.launch_warnings import Disk, launch_warnings
from p3o_launch.launch.record import INTERRUPTED, RunRecord
from p3o_launch.launch.resume import find_resumption
from p3o_launch.launch.rundir import claim_run_dir, create_run_dir
from p3o_launch.launch.submit import package_findings
from p3o_launch.paired import factors, judge_pair

DATA = Path(__file__).parent.parent / "data"
REPORTS = {case["id"]: case for case in json.loads((DATA / "reported_configs.json").read_text("utf-8"))["cases"]}
BASE = (DATA / "base.yaml").read_text("utf-8")
GRPO_PRESET = ("algorithm.advantage_estimator=grpo", "algorithm.use_rollout_logprobs=true")
DETERMINISM = ("NCCL_ALGO=Ring", "NVTE_ALLOW_NONDETERMINISTIC_ALGO=0", "CUBLAS_WORKSPACE_CONFIG=:4096:8")
A100 = "A100-80GB"

Findings = tuple[LocatedFinding, ...]


@dataclass(frozen=True)
class Case:
    """``judge``: the findings. ``code`` and ``word``: the rule that must be among them, and a word of its message."""

    judge: Callable[[], Findings]
    code: str = ""
    word: str = ""


def linted(framework: str, text: str, *extra: str, **request: Any) -> Callable[[], Findings]:
    return lambda: lint(framework, text, *extra, **request).check.findings


def preset(*changes: str, text: str = BASE) -> Callable[[], Findings]:
    return lambda: check_text(text, overrides=changes).findings


def nemo(*overrides: str) -> Callable[[], Findings]:
    return linted("nemo_rl", NEMO, *overrides)


def verl(*overrides: str, **request: Any) -> Callable[[], Findings]:
    base = "algorithm.adv_estimator=grpo\nactor_rollout_ref.rollout.n=4\nactor_rollout_ref.rollout.name=vllm\n"
    return linted("verl", "--config-name=ppo_megatron_trainer\n" + base, *overrides, **request)


def changed(text: str, old: str, new: str) -> str:
    assert old in text, old
    return text.replace(old, new)


NO_DROPOUT = ("--attention-dropout 0.0 ", "--hidden-dropout 0.0 ")
ASYNC_VERL = ("+async_training.use_rollout_log_probs=true", "+async_training.trigger_parameter_sync_step=4")
STEPS_80 = without(MEGATRON, "--num-layers 36 ", "--global-batch-size 64 ")
PRE_TRAIN = without(MEGATRON, "--perform-rl-step ", "--lr-decay-style constant ") + (
    "--lr-decay-style cosine --train-samples 102400000 --lr-warmup-samples 5120000 "
)
LORA = "actor_rollout_ref.model.lora.rank=32"

CASES = {
    1: Case(linted("relax", without(RELAX, *NO_DROPOUT)), "P3O201", "default 0.1"),
    3: Case(linted("slime", SLIME, "--use-rollout-logprobs --use-tis"), "P3O102", "second time"),
    4: Case(linted("slime", SLIME, "--use-tis --rollout-top-p 0.95"), "P3O401", "--rollout-top-p (0.95)"),
    6: Case(linted("nemo_rl", changed(NEMO, " top_p: 1.0, top_k: null", "")), "P3O413", "top_p"),
    7: Case(linted("slime", SLIME, "--kl-coef 0.01"), "P3O110", "--kl-coef (0.01) is never applied"),
    8: Case(
        verl("algorithm.use_kl_in_reward=true", "actor_rollout_ref.actor.use_kl_loss=true"),
        "P3O111",
        "algorithm.kl_ctrl.kl_coef (0.001)",
    ),
    10: Case(
        linted(
            "slime", changed(SLIME, "--n-samples-per-prompt 4", "--n-samples-per-prompt 1"), "--global-batch-size 16"
        ),
        "P3O112",
        "groups of one",
    ),
    11: Case(linted("slime", SLIME, "--train-backend fsdp"), "P3O026", "--train-backend fsdp"),
    13: Case(
        linted(
            "slime",
            without(SLIME, " --calculate-per-token-loss"),
            "--use-dynamic-batch-size --max-tokens-per-gpu 8192",
        ),
        "P3O118",
        "token budget",
    ),
    14: Case(linted("megatron", PRE_TRAIN, "--lr-decay-samples 97280000"), "P3O027", "floor"),
    15: Case(
        linted(
            "megatron",
            STEPS_80,
            "--num-layers 80 --global-batch-size 64 --pipeline-model-parallel-size 16",
            "--num-layers-per-virtual-pipeline-stage 2",
            gpus=16,
        ),
        "P3O304",
        "--num-layers (80)",
    ),
    17: Case(verl(LORA, *ASYNC_VERL), "P3O406", "never see the adapter"),
    19: Case(
        linted(
            "relax",
            without(RELAX, " --calculate-per-token-loss", "--use-rollout-logprobs ", "--rollout-top-p 1.0 "),
            "--rollout-top-p 0.95",
        ),
        "P3O101",
        "--use-rollout-logprobs",
    ),
    20: Case(linted("relax", RELAX, "--fp8-format hybrid --fp8-recipe delayed"), "P3O202", "history"),
    21: Case(nemo("+policy.generation.vllm_cfg.precision=fp8"), "P3O407", "policy.generation.vllm_cfg.precision"),
    25: Case(
        linted(
            "megatron",
            STEPS_80,
            "--num-layers 24 --global-batch-size 3 --pipeline-model-parallel-size 6",
            "--num-virtual-stages-per-pipeline-rank 2",
            gpus=6,
        ),
        "P3O310",
        "3 micro-batches",
    ),
    28: Case(linted("slime", SLIME, "--fp8-format hybrid --fp8-recipe blockwise", gpu=A100), "P3O501", A100),
    30: Case(linted("slime", SLIME, env=("http_proxy=http://proxy:3128", "no_proxy=10.0.0.0/8")), "P3O605", "no_proxy"),
    32: Case(
        linted(
            "verl",
            "--config-name=ppo_trainer\nalgorithm.adv_estimator=grpo\nactor_rollout_ref.rollout.n=4\n",
            "actor_rollout_ref.actor.use_dynamic_bsz=true",
        ),
        "P3O028",
        "fsdp",
    ),
    34: Case(
        preset("batch.rollout_batch_size=6", "batch.n_samples_per_prompt=8", "parallel.tensor_model_parallel_size=1"),
        "P3O313",
        "data-parallel size (4)",
    ),
    36: Case(
        linted(
            "slime",
            without(SLIME, "--vocab-size 151936 "),
            "--vocab-size 248320 --use-dynamic-batch-size --max-tokens-per-gpu 65536",
            gpu=A100,
        ),
        "P3O602",
        "--vocab-size (248320)",
    ),
    37: Case(
        linted("slime", SLIME, env=("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",)),
        "P3O601",
        "expandable_segments",
    ),
    45: Case(linted("slime", SLIME, "--train-env-vars '{NCCL_DEBUG: INFO}'"), "P3O018", "quotes were lost"),
    49: Case(preset('logging.pre_command="pkill -9 -f python; ray stop --force"'), "P3O709", "by name"),
    50: Case(linted("slime", SLIME, "--wandb-key 0123456789abcdef0123456789abcdef01234567"), "P3O705", "--wandb-key"),
    53: Case(
        linted("nemo_rl", NEMO + "data:\n  max_input_seq_length: 1024\n  max_input_seq_length: 262144\n"),
        "P3O003",
        "max_input_seq_length",
    ),
    54: Case(
        preset(text=BASE + "\ntraining:\n  quantizaton: 4bit\n  gradient_checkpoint: true\n"), "P3O006", "training"
    ),
    56: Case(linted("slime", SLIME, "--use-kl-loss False"), "P3O017", "False"),
    59: Case(nemo("+policy.generation.val_temperature=0.6", "+policy.generation.val_top_p=0.95")),
    60: Case(nemo("policy.generation.top_p=0.95", "policy.generation.top_k=20")),
    62: Case(linted("relax", RELAX, "--fp8-format hybrid --fp8-recipe tensorwise", gpu="H100")),
    63: Case(linted("relax", RELAX, "--lora-rank 0 --lora-dropout 0.1")),
    64: Case(verl("actor_rollout_ref.actor.use_kl_loss=true", "algorithm.kl_ctrl.kl_coef=0.01")),
    66: Case(nemo("grpo.async_grpo.enabled=true", "+distillation.topk_logits_k=64")),
    67: Case(
        linted(
            "megatron",
            MEGATRON,
            "--num-experts 128 --moe-aux-loss-coeff 0.001 --moe-z-loss-coeff 0.001 --expert-model-parallel-size 4",
            "--moe-router-load-balancing-type aux_loss",
        )
    ),
    68: Case(
        linted(
            "relax",
            without(RELAX, "--rollout-batch-size 16 ", "--global-batch-size 64 "),
            "--rollout-batch-size 8 --global-batch-size 24 --disable-rollout-trim-samples",
            "--use-dynamic-batch-size --max-tokens-per-gpu 8192",
        )
    ),
    70: Case(
        linted("slime", without(SLIME, "--num-query-groups 8 "), "--num-query-groups 2 --tensor-model-parallel-size 4")
    ),
    71: Case(linted("megatron", MEGATRON, "--deterministic-mode --attention-backend flash", env=DETERMINISM)),
    73: Case(linted("slime", SLIME, "--fp8-format hybrid --fp8-recipe tensorwise", gpu="L40S")),
    74: Case(verl(env=("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",))),
}
# Judged where the machine is: by preflight, by the run directory, by the record of a run.
ELSEWHERE = {
    22: "the checkpoint's config.json, below",
    29: "disk space: a launch warning, below",
    39: "a checkpoint to resume from, below",
    41: "a directory that holds another run, below",
    42: "a dirty tree: a launch warning, below, and the record of a run",
    43: "the attention backend of a comparison, below, and hook files: the record of a run",
    47: "the size of a working directory: before a job is sent, below",
    52: "an untyped YAML file over the arguments, below",
}


def test_every_report_has_a_case() -> None:
    assert CASES.keys() | ELSEWHERE.keys() == REPORTS.keys()
    assert not CASES.keys() & ELSEWHERE.keys()


@pytest.mark.parametrize("number", sorted(CASES))
def test_the_verdict_is_the_stated_one_for_the_stated_reason(number: int) -> None:
    case, verdict = CASES[number], REPORTS[number]["verdict"]
    found = case.judge()
    errors = [item for item in found if item.severity is Severity.ERROR]
    if verdict == "accept":
        assert [item.message for item in errors] == []
        return
    named = [item for item in found if item.code == case.code]
    assert named, [f"{item.code} {item.message}" for item in found]
    assert any(case.word in item.message for item in named), [item.message for item in named]
    assert named[0].severity.value == verdict
    if verdict == "warning":
        assert [item.message for item in errors] == []


def test_each_condition_of_the_p3o_contract_is_an_error_alone() -> None:
    alone = {
        "P3O101": (without(RELAX, "--use-rollout-logprobs "), ""),
        "P3O103": (without(RELAX, " --calculate-per-token-loss"), ""),
        "P3O109": (RELAX, "--use-opd"),
        "P3O102": (RELAX, "--use-tis"),
        "P3O401": (RELAX, "--rollout-top-k 20"),
    }
    for code, (text, extra) in alone.items():
        assert codes(lint("relax", text, extra), Severity.ERROR) == [code]


def test_dropout_beside_rollout_log_probs_is_an_error_whatever_the_estimator() -> None:
    """Report 1 names no estimator; a denominator that the trainer recomputes has the dropout too."""
    bare = without(SLIME, *NO_DROPOUT)
    assert codes(lint("slime", bare, "--use-rollout-logprobs"), Severity.ERROR) == ["P3O124"]
    assert codes(lint("slime", bare)) == []
    grpo = changed(without(RELAX, *NO_DROPOUT), "--advantage-estimator p3o", "--advantage-estimator grpo")
    assert codes(lint("relax", grpo), Severity.ERROR) == ["P3O124"]
    unset = ("model.attention_dropout=null", "model.hidden_dropout=null")
    for changes, code in ((GRPO_PRESET, "P3O124"), ((), "P3O201")):
        errors = [item.code for item in preset(*changes, *unset)() if item.severity is Severity.ERROR]
        assert errors == [code]


def test_other_temperatures_intervals_scopes_and_kl_modes_are_no_errors_under_p3o() -> None:
    for extra in (
        "--rollout-temperature 0.6",
        "--rollout-temperature 1.2",
        "--update-weights-interval 3",
        "--p3o-kl-mode proxy",
        "--p3o-ess-scope micro-batch",
    ):
        assert codes(lint("relax", RELAX, extra), Severity.ERROR) == [], extra


def test_a_rotary_base_that_differs_from_the_checkpoint_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"rope_theta": 1000000, "num_hidden_layers": 36}), "utf-8")
    text = changed(SLIME, "--rotary-base 1000000", "--rotary-base 10000")
    text = changed(text, "/models/Qwen3-4B", str(tmp_path))
    result = lint("slime", text)
    assert codes(result, Severity.ERROR) == ["P3O505"]
    assert "--rotary-base (10000)" in result.check.findings[0].message
    assert codes(lint("slime", changed(text, "--rotary-base 10000", "--rotary-base 1000000"))) == []


def test_text_that_looks_like_a_number_reaches_slime_untyped_and_presets_typed(tmp_path: Path) -> None:
    (tmp_path / "custom.yaml").write_text("lr: 2e-5\n", "utf-8")
    result = lint("slime", SLIME, "--custom-config-path custom.yaml", file=str(tmp_path / "launch.args"))
    (found,) = [item for item in result.check.findings if item.severity is Severity.ERROR]
    assert (found.code, found.position.line, found.position.column) == ("P3O007", 1, 5)
    assert found.position.file.endswith("custom.yaml")
    assert "2e-5 is text" in found.message
    assert "2.0e-05" in (found.hint or "")
    (tmp_path / "custom.yaml").write_text("lr: 2.0e-5\n", "utf-8")
    result = lint("slime", SLIME, "--custom-config-path custom.yaml", file=str(tmp_path / "launch.args"))
    assert codes(result) == []
    assert check_text(BASE, overrides=("optimizer.lr=2e-5",)).findings == ()


def test_a_partial_last_step_is_accepted_in_the_flags_of_the_fork_that_reported_it() -> None:
    """Report 68 is about miles, whose flags slime's table lacks: a warning says so, and nothing is an error."""
    trimmed = without(SLIME, "--rollout-batch-size 16 ", "--global-batch-size 64 ")
    partial = "--allow-partial-train-step --disable-rollout-trim-samples"
    sizes = "--rollout-batch-size 8 --global-batch-size 24 --use-dynamic-batch-size --max-tokens-per-gpu 8192"
    result = lint("slime", trimmed, sizes, partial)
    assert codes(result) == ["P3O014", "P3O014"]
    assert (result.check.findings[0].hint or "").startswith("miles has it")
    assert codes(lint("slime", trimmed, sizes), Severity.ERROR) == ["P3O303"]


def test_siblings_of_the_accepted_reports_are_errors() -> None:
    """The same configuration with the one setting that made it acceptable taken away."""
    assert "P3O114" in codes(lint("nemo_rl", NEMO, "grpo.async_grpo.enabled=true"), Severity.ERROR)
    delayed = lint("relax", RELAX, "--fp8-format hybrid", gpu="H100")
    assert codes(delayed, Severity.ERROR) == ["P3O202"]
    adapter = lint("relax", RELAX, "--lora-rank 8 --lora-dropout 0.1")
    assert codes(adapter, Severity.ERROR) == ["P3O203"]
    bare = lint("megatron", MEGATRON, "--deterministic-mode")
    assert codes(bare, Severity.ERROR) == ["P3O503"]
    trimmed = without(RELAX, "--rollout-batch-size 16 ", "--global-batch-size 64 ")
    uneven = lint("relax", trimmed, "--rollout-batch-size 8 --global-batch-size 24")
    assert codes(uneven, Severity.ERROR) == ["P3O303"]
    cut = lint("slime", without(SLIME, "--num-query-groups 8 "), "--num-query-groups 3 --tensor-model-parallel-size 4")
    assert "P3O307" in codes(cut, Severity.ERROR)


def test_siblings_of_the_rejected_reports_are_accepted() -> None:
    """The nearest valid configuration of a report."""
    hook = lint("slime", SLIME, "--use-rollout-logprobs --use-tis --custom-tis-function-path my.hook")
    assert codes(hook, Severity.ERROR) == []
    for estimator in ("ppo", "reinforce_plus_plus"):
        text = changed(SLIME, "--advantage-estimator grpo", f"--advantage-estimator {estimator}")
        alone = lint(
            "slime",
            changed(text, "--n-samples-per-prompt 4", "--n-samples-per-prompt 1"),
            "--kl-coef 0.01",
            "--global-batch-size 16",
        )
        assert codes(alone, Severity.ERROR) == []
    merged = lint(
        "verl",
        "algorithm.adv_estimator=grpo\nactor_rollout_ref.rollout.n=4\n",
        LORA,
        *ASYNC_VERL,
        "actor_rollout_ref.model.lora.merge=true",
    )
    assert codes(merged, Severity.ERROR) == []
    constant = lint("megatron", PRE_TRAIN, "--lr-decay-samples 102400000")
    assert codes(constant) == []
    uneven = lint(
        "megatron",
        STEPS_80,
        "--num-layers 80 --global-batch-size 64 --pipeline-model-parallel-size 16",
        "--decoder-first-pipeline-num-layers 20",
        gpus=16,
    )
    assert codes(uneven, Severity.ERROR) == []


def test_a_run_without_a_checkpoint_is_not_resumed_from_the_beginning(tmp_path: Path) -> None:
    """Report 39: the intent to resume is explicit, and without a checkpoint to go on from it stops."""
    result = check_text(BASE, overrides=(f"logging.output_root={tmp_path}",))
    assert result.preset is not None
    directory = create_run_dir(tmp_path, result.preset.name, result.preset.seed.seed)
    record = RunRecord.create(directory, {})
    record.update(status=INTERRUPTED)
    (directory / "resolved.yaml").write_text(yaml.safe_dump(resolved_data(result.preset)), "utf-8")
    with pytest.raises(PreflightError, match="no complete checkpoint to resume from"):
        find_resumption(result.preset, directory.name)


def test_a_file_system_that_is_nearly_full_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report 29: 459 GB were free, and the checkpoints needed less; the file system was 90 % full."""
    result = check_text(BASE)
    assert result.preset is not None
    monkeypatch.setattr(launch_warnings_module, "working_tree", lambda: None)
    for free, total, expected in ((459, 4590, ["P3O604"]), (459, 900, [])):
        disk = Disk(Path("/fsx"), free * 10**9, total * 10**9)
        monkeypatch.setattr(launch_warnings_module, "disk_of", lambda _, disk=disk: disk)
        found = launch_warnings(result, result.preset)
        assert [(item.code, item.severity) for item in found] == [(code, Severity.WARNING) for code in expected]


def test_a_dirty_tree_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report 42."""
    result = check_text(BASE)
    assert result.preset is not None
    plenty = Disk(Path("/"), 10**15, 2 * 10**15)
    monkeypatch.setattr(launch_warnings_module, "disk_of", lambda _: plenty)
    for tree, expected in (
        (Tree("0" * 40, "main", True, "diff --git a/a b/a", {}), ["P3O704"]),
        (Tree("0" * 40, "main", True, "", {"hook.py": "0" * 64}), ["P3O704"]),
        (Tree("0" * 40, "main", False, "", {}), []),
    ):
        monkeypatch.setattr(launch_warnings_module, "working_tree", lambda tree=tree: tree)
        assert [item.code for item in launch_warnings(result, result.preset)] == expected


def test_an_attention_backend_left_to_choose_is_a_warning_in_a_comparison() -> None:
    """Report 43."""
    arms = [check_text(BASE, file=name, overrides=("model.attention_backend=auto",)) for name in ("a.yaml", "b.yaml")]
    found = judge_pair(*arms, factors(()), (42, 43)).findings
    assert [(item.code, item.severity) for item in found if item.code == "P3O506"] == [("P3O506", Severity.WARNING)]
    fixed = [check_text(BASE, file=name, overrides=("model.attention_backend=flash",)) for name in ("a.yaml", "b.yaml")]
    assert "P3O506" not in [item.code for item in judge_pair(*fixed, factors(()), (42, 43)).findings]


def test_a_working_directory_above_the_limit_is_an_error(tmp_path: Path) -> None:
    """Report 47."""
    with (tmp_path / "weights.bin").open("wb") as file:
        file.truncate(101 * 2**20)  # sparse: no disk is used
    result = check_text(BASE, overrides=(f"cluster.runtime_env.working_dir={tmp_path}",))
    assert result.preset is not None
    (found,) = package_findings(result, result.preset.cluster.runtime_env, "runs", as_job=True)
    assert (found.code, found.severity) == ("P3O608", Severity.ERROR)
    excluding = {"working_dir": str(tmp_path), "excludes": ["*.bin"]}
    assert package_findings(result, excluding, "runs", as_job=True) == []


def test_a_directory_that_holds_another_run_is_refused_and_one_with_logs_is_not(tmp_path: Path) -> None:
    """Report 41."""
    (tmp_path / "taken" / "checkpoints").mkdir(parents=True)
    (tmp_path / "logs_only" / "logs").mkdir(parents=True)
    with pytest.raises(PreflightError, match="P3O701"):
        claim_run_dir(tmp_path / "taken")
    claim_run_dir(tmp_path / "logs_only")
    with pytest.raises(PreflightError, match="P3O701"):
        claim_run_dir(tmp_path / "logs_only")
