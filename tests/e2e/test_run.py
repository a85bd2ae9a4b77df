"""``p3o-launch run`` as a user types it, on this machine's CPU: real checkpoint, Megatron ranks, Ray, files."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

if any(find_spec(module) is None for module in ("torch", "megatron", "ray", "transformers")):
    pytest.skip("needs the runtime extra", allow_module_level=True)

from p3o_launch.launch.record import RunRecord
from p3o_launch.runtime.metrics import read_jsonl

LAUNCHER = shutil.which("p3o-launch", path=str(Path(sys.executable).parent)) or "p3o-launch"
SMALL = ("rollout_batch_size=4", "n_samples_per_prompt=4", "global_batch_size=8", "micro_batch_size=2")
TIMES = ("time", "perf/")


def launch(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"P3O_LAUNCH": LAUNCHER}
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_MODE"):
        environment.pop(name, None)
    return subprocess.run(
        arguments, cwd=directory, env=environment, capture_output=True, text=True, timeout=280, check=False
    )


def command(directory: Path, preset: str, *settings: str) -> list[str]:
    """The words that train a few small steps."""
    words = [f"batch.{setting}" for setting in SMALL]
    words += ["evaluation.max_prompts=4", f"logging.output_root={directory / 'runs'}", *settings]
    sets = [word for setting in words for word in ("--set", setting)]
    return [LAUNCHER, "run", "--preset", preset, "--profile", "cpu", *sets]


def run(directory: Path, preset: str, *settings: str) -> Path:
    """Train; the run directory."""
    done = launch(directory, *command(directory, preset, *settings))
    assert done.returncode == 0, done.stderr
    # Whoever works on the code has uncommitted changes.
    assert [line for line in done.stdout.splitlines() if " P3O" in line and " P3O704 " not in line] == []
    assert "Traceback" not in done.stderr
    return newest(directory)


def newest(directory: Path) -> Path:
    records = sorted(directory.glob("runs/*/seed_*/*/run.json"), key=lambda path: path.stat().st_mtime)
    return records[-1].parent


def figures(directory: Path) -> list[dict]:
    """Metrics lines without what a clock moves."""
    rows = read_jsonl(directory / "metrics.jsonl")
    return [{name: value for name, value in row.items() if not name.startswith(TIMES)} for row in rows]


@pytest.fixture(scope="module")
def on_policy(tmp_path_factory):
    return run(tmp_path_factory.mktemp("on_policy"), "on_policy", "batch.num_rollout=3")


def test_a_run_trains_and_its_directory_is_complete(on_policy):
    record = RunRecord.load(on_policy).data
    assert (record["status"], record["exit_code"], record["steps_done"]) == ("succeeded", 0, 6)
    assert record["last_checkpoint"] == "checkpoints/rollout_000003"
    assert (on_policy / record["last_checkpoint"]).is_dir()
    assert {"resolved.yaml", "resolved_args.txt", "command.sh", "evaluations.jsonl"} <= {
        path.name for path in on_policy.iterdir()
    }
    assert [path.name for path in sorted((on_policy / "logs").iterdir())] == ["rank_0.log", "rank_1.log"]
    samples = read_jsonl(on_policy / "rollouts" / "rollout_000000.jsonl")
    assert len(samples) == 16
    assert all(sample["behavior_log_prob_sum"] < 0 for sample in samples)
    assert {sample["reward"] for sample in samples} <= {0.0, 1.0}


def test_every_metric_of_the_design_is_on_a_line_and_in_tensorboard(on_policy):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    p3o = (
        "ess cap cap_fraction clip_fraction behavior_kl_proxy adaptive_kl_loss score_loss ratio_mean ratio_std "
        "valid_tokens rollout_policy_age_rollouts"
    )
    train = "actor_optimizer_step rollout_policy_snapshot_step loss grad_norm lr entropy"
    rollout = "reward_mean reward_std response_length_mean truncated_fraction zero_variance_groups"
    perf = "rollout_s stats_pass_s train_pass_s optimizer_s weight_sync_s tokens_per_s peak_memory_bytes"
    groups = {"train/p3o": p3o, "train": train, "rollout": rollout, "perf": perf}
    names = {f"{group}/{name}" for group, words in groups.items() for name in words.split()}
    first = read_jsonl(on_policy / "metrics.jsonl")[0]
    assert names <= set(first)
    events = EventAccumulator(str(on_policy / "tensorboard"))
    events.Reload()
    assert names <= set(events.Tags()["scalars"])
    losses = [event.value for event in events.Scalars("train/loss")]
    assert losses == pytest.approx([row["train/loss"] for row in figures(on_policy)])


def test_on_policy_the_ess_of_the_first_step_is_one_and_the_age_is_zero(on_policy):
    rows = figures(on_policy)
    assert rows[0]["train/p3o/ess"] == pytest.approx(1.0, abs=1e-6)
    assert {row["train/p3o/rollout_policy_age_rollouts"] for row in rows} == {0}
    assert [row["train/rollout_policy_snapshot_step"] for row in rows] == [0, 0, 2, 2, 4, 4]
    # The second step of a rollout trains on samples of weights one step older.
    assert all(row["train/p3o/ess"] < 1 - 1e-7 for row in rows[1::2])
    assert all(row["train/grad_norm"] > 0 for row in rows)


def test_no_process_of_the_run_is_left(on_policy):
    def holds(process):
        try:
            return any(file.path.startswith(str(on_policy)) for file in process.open_files())
        except psutil.Error:
            return False

    assert [process for process in psutil.process_iter() if holds(process)] == []


def test_the_recorded_script_repeats_the_run_bit_for_bit(on_policy):
    root = on_policy.parents[3]
    done = launch(root, "bash", str(on_policy / "command.sh"))
    assert done.returncode == 0, done.stderr
    again = newest(root)
    assert again != on_policy
    assert figures(again) == figures(on_policy)
    for name in ("resolved.yaml", "resolved_args.txt", "command.sh"):
        assert (again / name).read_text() == (on_policy / name).read_text()
    left, right = (read_jsonl(path / "rollouts" / "rollout_000002.jsonl") for path in (on_policy, again))
    assert left == right


def test_an_interrupted_run_resumes_to_the_same_figures_bit_for_bit(on_policy, tmp_path):
    words = command(tmp_path, "on_policy", "batch.num_rollout=3", "checkpoint.save_interval=1")
    with (tmp_path / "stderr").open("wb") as log:
        process = subprocess.Popen(words, stderr=log, stdout=subprocess.DEVNULL, cwd=tmp_path)
        wait_for(tmp_path / "stderr", "checkpoint rollout_000001", process)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
    directory = newest(tmp_path)
    assert RunRecord.load(directory).status == "interrupted"
    done = launch(tmp_path, *words, "--resume", directory.name)
    assert done.returncode == 0, done.stderr
    assert newest(tmp_path) == directory
    assert RunRecord.load(directory).status == "succeeded"
    assert figures(directory) == figures(on_policy)
    for name in sorted(path.name for path in (on_policy / "rollouts").iterdir()):
        assert read_jsonl(directory / "rollouts" / name) == read_jsonl(on_policy / "rollouts" / name)


def wait_for(log: Path, text: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 200
    while text not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


def test_the_grpo_twin_with_periodic_sync_trains_on_a_policy_that_ages(tmp_path):
    directory = run(tmp_path, "grpo_periodic_sync_3", "batch.num_rollout=4", "batch.global_batch_size=16")
    rows = figures(directory)
    assert [row["train/p3o/rollout_policy_age_rollouts"] for row in rows] == [0, 1, 2, 0]
    assert [row["train/rollout_policy_snapshot_step"] for row in rows] == [0, 0, 0, 3]
    assert all("train/p3o/ess" not in row for row in rows)
    assert json.loads((directory / "run.json").read_text())["algorithm"] == "grpo"


def test_a_checkpoint_whose_shape_differs_stops_the_run_with_one_clear_error(tmp_path):
    done = launch(tmp_path, LAUNCHER, "run", "--preset", "on_policy", "--profile", "cpu", "--set", "model.num_layers=2")
    assert done.returncode == 1
    shown = done.stdout + done.stderr
    assert "num_layers" in shown
    assert "Traceback" not in shown
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["periodic_sync_3", "quantized_rollout"])
def test_a_resumed_run_keeps_a_rollout_policy_that_is_not_the_trainers(preset, tmp_path):
    """The checkpoint lies between two refreshes, or the rollout weights are rounded: the snapshot must come back."""
    settings = ("batch.num_rollout=4", "checkpoint.save_interval=2")
    directory = run(tmp_path, preset, *settings)
    expected = figures(directory)
    shutil.rmtree(directory / "checkpoints" / "rollout_000004")
    record = RunRecord.load(directory)
    record.update(status="failed")
    done = launch(tmp_path, *command(tmp_path, preset, *settings), "--resume", directory.name)
    assert done.returncode == 0, done.stderr
    assert "resumed after step 4" in done.stderr
    assert figures(directory) == expected


@pytest.mark.slow
def test_a_run_resumes_on_another_layout_whose_checkpoint_is_resharded(tmp_path):
    """Saved by two data-parallel ranks between two refreshes, carried on by two tensor-parallel ones."""
    # Short on purpose: nothing is refreshed.
    settings = ("batch.num_rollout=3", "checkpoint.save_interval=2", "ignore.P3O416=a short run")
    directory = run(tmp_path, "periodic_sync_3", *settings)
    before = figures(directory)
    shutil.rmtree(directory / "checkpoints" / "rollout_000003")
    RunRecord.load(directory).update(status="failed")
    words = command(tmp_path, "periodic_sync_3", *settings, "parallel.tensor_model_parallel_size=2")
    done = launch(tmp_path, *words, "--resume", directory.name)
    assert done.returncode == 0, done.stderr
    after = figures(directory)
    assert after[:4] == before[:4]
    assert [row["step"] for row in after] == [1, 2, 3, 4, 5, 6]
    # The same weights and the same snapshot, summed in another order: the sampled figures of the next step agree.
    for name in ("train/grad_norm", "train/loss", "rollout/reward_mean", "train/lr"):
        if name in before[4]:
            assert after[4][name] == pytest.approx(before[4][name], rel=1e-3, abs=1e-5), name


@pytest.mark.slow
def test_two_runs_at_the_same_time_do_not_meet(tmp_path):
    words = command(tmp_path, "on_policy", "batch.num_rollout=1")
    both = [subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait(timeout=280) for process in both] == [0, 0]
    first, second = (path.parent for path in tmp_path.glob("runs/*/seed_*/*/run.json"))
    assert figures(first) == figures(second)
