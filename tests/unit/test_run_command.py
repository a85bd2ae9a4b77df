"""``run`` up to the point where processes would start, summaries, and the ``runs`` commands."""

from __future__ import annotations

import io
import json
import signal
import sys
from pathlib import Path

import pytest
import yaml
from run_support import TEXTS, TINY, Prompts, Ranks, tiny_preset

from p3o_launch.check import check_file
from p3o_launch.errors import DataError, MissingExtraError, NonFiniteRatioError, RunInterrupted, UsageError
from p3o_launch.launch import preflight
from p3o_launch.launch.environment import Gpu, working_tree
from p3o_launch.launch.preflight import Request, machine_findings, require_packages
from p3o_launch.launch.preset_run import PresetRun
from p3o_launch.launch.progress import LiveProgress, PlainProgress, step_text
from p3o_launch.launch.run_command import run_preset
from p3o_launch.launch.runs_command import list_runs, show_run
from p3o_launch.launch.summary import summarize
from p3o_launch.runtime.driver import Inputs
from p3o_launch.runtime.metrics import JsonlSink, RolloutSink, read_jsonl
from p3o_launch.runtime.signals import StopRequest


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(preflight, "gpus", list)


@pytest.fixture
def preset_file(tmp_path):
    def write(**groups):
        data = tiny_preset(**groups).model_dump(exclude_none=True)
        path = tmp_path / "mine.yaml"
        path.write_text(yaml.safe_dump(data))
        return str(path)

    return write


def test_a_scenario_without_gpus_names_the_command_that_runs_it_on_the_cpu(no_gpu, capsys):
    assert run_preset("temp_1p2", overrides=["seed.seed=7"]) == 1
    out = capsys.readouterr().out
    assert out.count(" error ") == 1
    assert "P3O609 temp_1p2 needs 4 GPUs" in out
    assert "this machine has no GPU" in out
    assert "p3o-launch run --preset temp_1p2 --profile cpu --set seed.seed=7" in out


def test_enough_gpus_are_no_finding_and_too_few_are_counted(monkeypatch, preset_file):
    path = preset_file(cluster={"device": "cuda", "gpus_per_node": 2})
    result = check_file(path)
    preset = tiny_preset(cluster={"device": "cuda", "gpus_per_node": 2})
    for present, codes in ((2, []), (1, ["P3O609"])):
        monkeypatch.setattr(preflight, "gpus", lambda n=present: [Gpu("A100", "40 GiB", "1")] * n)
        assert [f.code for f in machine_findings(result, preset, Request(path))] == codes


def test_missing_files_are_findings_where_the_preset_names_them(preset_file, capsys):
    path = preset_file(model={"hf_checkpoint": "/no/checkpoint"}, data={"prompt_data": "/no/prompts.jsonl"})
    assert run_preset(path) == 1
    out = capsys.readouterr().out
    assert out.count("P3O610") == 2
    line = next(i for i, text in enumerate(Path(path).read_text().splitlines(), 1) if "/no/prompts" in text)
    assert f"mine.yaml:{line}:" in out


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setattr(preflight, "find_spec", lambda module: None if module == "ray" else object())
    with pytest.raises(MissingExtraError, match="'ray'") as caught:
        require_packages()
    assert "p3o-launch[runtime]" in caught.value.hint


def test_findings_refuse_the_run_before_anything_is_written(preset_file, tmp_path, capsys):
    path = preset_file(algorithm={"use_critic": True}, logging={"output_root": str(tmp_path / "runs")})
    assert run_preset(path) == 1
    assert "P3O104" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_prints_the_script_and_writes_it_on_request(preset_file, tmp_path, capsys):
    path = preset_file()
    assert run_preset(path, dry_run=True) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("#!/usr/bin/env bash\n")
    assert run_preset(path, dry_run=True, output=tmp_path / "x.sh") == 0
    assert (tmp_path / "x.sh").read_text() == printed
    assert (tmp_path / "x.sh").stat().st_mode & 0o111
    with pytest.raises(UsageError):
        run_preset(path, output=tmp_path / "y.sh")


class Cluster:
    job_id = "job-1"

    def close(self):
        pass

    def kill(self):
        pass


@pytest.fixture
def start(tmp_path, monkeypatch, preset_file):
    """Runs a preset with fake ranks in a real run directory; gives the exit code."""
    monkeypatch.chdir(tmp_path)

    def run(ranks=None, load=lambda preset: Inputs(Prompts(), TEXTS, Prompts(2)), strict=False, **groups):
        groups.setdefault("logging", {"output_root": str(tmp_path / "runs")})
        result = check_file(preset_file(**groups))
        return PresetRun(
            result,
            result.preset,
            strict=strict,
            load=load,
            start_cluster=lambda plan: Cluster(),
            start_ranks=lambda plan, cluster, stop: ranks or Ranks(),
        ).execute()

    return run


def only_run(root: Path) -> Path:
    (record,) = root.glob("runs/*/seed_*/*/run.json")
    return record.parent


def test_a_run_leaves_a_complete_directory(start, tmp_path, capsys):
    assert start(evaluation={"interval": 2}, checkpoint={"save_interval": 2}) == 0
    run = only_run(tmp_path)
    assert {path.name for path in run.iterdir()} - {"git.patch"} == {
        "run.json",
        "resolved.yaml",
        "resolved_args.txt",
        "command.sh",
        "metrics.jsonl",
        "evaluations.jsonl",
        "tensorboard",
        "rollouts",
        "checkpoints",
        "logs",
    }
    record = json.loads((run / "run.json").read_text())
    assert record["status"] == "succeeded"
    assert (record["exit_code"], record["failure"], record["steps_done"]) == (0, None, 4)
    assert (record["last_checkpoint"], record["ray_job_id"]) == ("checkpoints/rollout_000004", "job-1")
    assert record["preset_chain"][0]["sha256"]
    assert [row["step"] for row in read_jsonl(run / "metrics.jsonl")] == [1, 2, 3, 4]
    assert len(read_jsonl(run / "rollouts" / "rollout_000003.jsonl")) == 4
    assert list((run / "tensorboard").iterdir())
    assert check_file(str(run / "resolved.yaml")).findings == ()
    err = capsys.readouterr().err
    assert f"results {run}" in err
    assert "step 4/4  reward 0.500  ess 0.5000" in err


def test_prompts_that_are_left_out_are_counted_and_recorded(start, tmp_path, capsys, monkeypatch):
    lines = ['{"q": "1+1=", "a": "2"}', "not json", '{"q": "' + "1" * 40 + '", "a": "1"}', '{"q": "2+2=", "a": 4}']
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    data = {"prompt_data": "p.jsonl", "input_key": "q", "label_key": "a"}
    with pytest.raises(DataError, match=r"p\.jsonl:2: not a JSON object"):
        start(load=preflight.load_inputs, data=data)
    assert not (tmp_path / "runs").exists()
    data |= {"malformed_lines": "skip", "overlong_prompts": "skip"}
    assert start(load=preflight.load_inputs, data=data) == 0
    record = json.loads((only_run(tmp_path) / "run.json").read_text())
    assert record["prompts"] == 2
    assert record["skipped"] == {"p.jsonl": {"malformed line": 1, "overlong prompt": 1}}
    assert "warning: 1 prompts of p.jsonl are left out: overlong prompt" in capsys.readouterr().err


def test_odd_prompts_are_warned_of_and_recorded_and_refuse_a_strict_launch(start, tmp_path, capsys):
    (tmp_path / "p.jsonl").write_text('{"q": "1+1=", "a": "2"}\n')
    data = {"prompt_data": "p.jsonl", "input_key": "q", "label_key": "a"}
    words = "p.jsonl holds 1 different prompt, a rollout takes 2 (batch.rollout_batch_size)"
    assert start(load=preflight.load_inputs, strict=True, data=data) == 1
    assert f"warning: {words}" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    assert start(load=preflight.load_inputs, data=data) == 0
    assert f"warning: {words}" in capsys.readouterr().err
    (recorded,) = json.loads((only_run(tmp_path) / "run.json").read_text())["data_warnings"]
    assert recorded.startswith(words)


def test_a_failed_run_says_so_and_keeps_its_steps(start, tmp_path):
    with pytest.raises(NonFiniteRatioError):
        start(Ranks(bad_step=3))
    record = json.loads((only_run(tmp_path) / "run.json").read_text())
    assert (record["status"], record["exit_code"], record["steps_done"]) == ("failed", 1, 2)
    assert record["failure"]["class"] == "NonFiniteRatioError"
    assert len(read_jsonl(only_run(tmp_path) / "metrics.jsonl")) == 2


def test_a_signal_interrupts_the_run_and_handlers_are_put_back(start, tmp_path):
    class Signalled(Ranks):
        def train_step(self, samples):
            signal.raise_signal(signal.SIGTERM)
            return super().train_step(samples)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RunInterrupted, match="stopped by SIGTERM after 1 steps"):
        start(Signalled())
    assert signal.getsignal(signal.SIGTERM) is before
    record = json.loads((only_run(tmp_path) / "run.json").read_text())
    assert (record["status"], record["exit_code"]) == ("interrupted", 130)


def test_a_signal_that_rays_own_handler_takes_while_ray_starts_is_an_interrupt(start, tmp_path):
    class Starting(Ranks):
        def update_rollout_weights(self, snapshot_id):
            sys.exit(signal.SIGTERM)

    with pytest.raises(RunInterrupted, match="stopped by SIGTERM after 0 steps"):
        start(Starting())
    record = json.loads((only_run(tmp_path) / "run.json").read_text())
    assert (record["status"], record["exit_code"]) == ("interrupted", 130)


def test_an_interrupted_run_says_how_it_goes_on(start, tmp_path, capsys):
    with pytest.raises(NonFiniteRatioError):
        start(Ranks(bad_step=3))
    run = only_run(tmp_path)
    capsys.readouterr()
    show_run(run.name, tmp_path / "runs")
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 10
    assert shown[-1].endswith(f"p3o-launch runs rerun {run}; go on: p3o-launch run --resume {run}")


def test_the_users_commands_run_around_the_run_with_its_outcome(start, tmp_path):
    hooks = {
        "output_root": str(tmp_path / "runs"),
        "pre_command": f'echo "$P3O_STATUS" > {tmp_path}/pre',
        "post_command": f'echo "$P3O_STATUS" > {tmp_path}/post; exit 3',
    }
    assert start(logging=hooks) == 0
    assert (tmp_path / "pre").read_text() == "created\n"
    assert (tmp_path / "post").read_text() == "succeeded\n"


def test_runs_list_and_show_say_what_ran_and_how_to_run_it_again(start, tmp_path, capsys):
    start()
    capsys.readouterr()
    assert list_runs(tmp_path / "runs") == 0
    listing = capsys.readouterr().out.splitlines()
    assert listing[0].split() == ["run", "preset", "seed", "status", "steps", "reward", "started"]
    assert "succeeded" in listing[1]
    run = only_run(tmp_path)
    assert show_run(run.name, tmp_path / "runs") == 0
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 10
    assert shown[-1].endswith(f"p3o-launch runs rerun {run}")
    assert "reward 0.500 -> 0.500" in "\n".join(shown)
    with pytest.raises(UsageError, match="no runs below"):
        list_runs(tmp_path / "nothing")
    start()
    (run / "run.json").write_text("{")
    assert list_runs(tmp_path / "runs") == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert sorted(row[3] for row in rows) == ["succeeded", "unreadable"]


def test_the_second_signal_forces_the_end():
    events = []
    with StopRequest(exit_now=events.append) as stop:
        stop.on_force(lambda: events.append("forced"))
        signal.raise_signal(signal.SIGINT)
        assert stop()
        assert (stop.name, events) == ("SIGINT", [])
        signal.raise_signal(signal.SIGINT)
    assert events == ["forced", 130]


def test_an_ignored_hangup_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_metrics_lines_are_readable_while_the_run_goes_on(tmp_path):
    sink = JsonlSink(tmp_path, now=lambda: 5.0)
    sink.on_step(1, 0, {"b": 2.0, "a": float("nan")})
    line = (tmp_path / "metrics.jsonl").read_text()
    assert line == '{"step": 1, "rollout": 0, "time": 5.0, "a": "nan", "b": 2.0}\n'
    sink.close()
    sink.close()


def test_a_line_cut_short_by_a_kill_is_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "a')
    assert read_jsonl(tmp_path / "metrics.jsonl") == [{"step": 1}]
    assert read_jsonl(tmp_path / "absent.jsonl") == []


def test_a_rollout_file_is_complete_or_absent(tmp_path):
    RolloutSink(tmp_path / "rollouts").on_rollout(7, [{"text": "é\n"}, {"text": ""}])
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["rollout_000007.jsonl"]
    assert read_jsonl(tmp_path / "rollouts" / "rollout_000007.jsonl") == [{"text": "é\n"}, {"text": ""}]


def test_a_summary_compares_equal_windows_at_both_ends(tmp_path):
    rows = [{"rollout/reward_mean": i / 10, "train/p3o/ess": 1 - i / 100} for i in range(10)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = summarize(tmp_path, 12.0)
    assert (summary.steps, summary.window) == (10, 5)
    assert (summary.reward_first, summary.reward_last) == pytest.approx((0.2, 0.7))
    assert (summary.ess_min, summary.ess_max) == pytest.approx((0.91, 1.0))
    assert summary.lines()[1] == "reward 0.200 -> 0.700 (+0.500; mean of 5 rollouts at each end)"
    assert summarize(tmp_path / "none", 0.0).lines() == ["0 optimizer steps in 0 s"]


def test_plain_progress_shows_the_figures_a_step_has(capsys):
    PlainProgress(3).on_step(1, 0, {"train/loss": 0.5, "train/grad_norm": 1.0})
    assert capsys.readouterr().err == "step 1/3  loss +0.5000  grad_norm 1.000\n"
    assert step_text({}) == ""


def test_a_step_without_a_reward_of_its_own_shows_its_rollouts(capsys):
    progress = PlainProgress(2)
    progress.on_step(1, 0, {"rollout/reward_mean": 0.25})
    progress.on_step(2, 0, {"train/loss": 1.0})
    assert capsys.readouterr().err.splitlines() == ["step 1/2  reward 0.250", "step 2/2  reward 0.250  loss +1.0000"]


def test_the_live_display_fits_a_narrow_terminal_and_closes_twice():
    from rich.console import Console

    console = Console(file=io.StringIO(), force_terminal=True, width=80, highlight=False)
    progress = LiveProgress(3, console)
    progress.say("starting [bold]")
    progress.on_step(1, 0, {"rollout/reward_mean": 0.25, "train/loss": 1.0, "perf/tokens_per_s": 4310.0})
    progress.on_evaluation(1, 1, {"eval/reward_mean": 0.5})
    progress.close()
    progress.close()
    shown = console.file.getvalue()
    for text in ("starting [bold]", "1/3", "reward 0.250  loss +1.0000  tok/s 4,310", "evaluation after step 1"):
        assert text in shown


def test_the_working_tree_is_recorded_with_its_changes(tmp_path):
    import subprocess

    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.example", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    git("init", "-q", "-b", "trunk")
    (tmp_path / "a").write_text("one\n")
    git("add", "a")
    git("commit", "-qm", "first")
    clean = working_tree(tmp_path)
    assert (clean.branch, clean.dirty, clean.patch, clean.untracked) == ("trunk", False, "", {})
    (tmp_path / "a").write_text("two hf_" + "x" * 30 + "\n")
    (tmp_path / "b").write_text("new\n")
    dirty = working_tree(tmp_path)
    assert dirty.dirty
    assert "+two <redacted>" in dirty.patch
    assert list(dirty.untracked) == ["b"]
    assert len(dirty.untracked["b"]) == 64


def test_the_tiny_preset_of_these_tests_validates():
    assert check_file(str(TINY)).findings == ()
