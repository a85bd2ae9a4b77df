"""``run --resume``: the same run goes on, nothing is written twice, and what cannot be carried on is refused."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import yaml
from run_support import TEXTS, TINY, Prompts, Ranks, tiny_preset

from p3o_launch.check import check_file
from p3o_launch.errors import NonFiniteRatioError, PreflightError, UsageError
from p3o_launch.launch.arguments import data_of, resolved_arguments, resolved_data, resolved_yaml
from p3o_launch.launch.preset_run import PresetRun
from p3o_launch.launch.record import RunRecord, process_facts
from p3o_launch.launch.resume import changed_settings, find_resumption
from p3o_launch.launch.run_command import run_preset
from p3o_launch.launch.runs_command import show_lines
from p3o_launch.runtime.driver import Inputs
from p3o_launch.runtime.metrics import read_jsonl


class Cluster:
    job_id = "job-1"

    def close(self):
        pass

    def kill(self):
        pass


@pytest.fixture
def job(tmp_path):
    """Makes a run of the tiny preset with fake ranks; ``resume`` names the run to go on with."""

    def make(ranks, resume=None, **groups):
        groups.setdefault("checkpoint", {"save_interval": 1})
        groups.setdefault("evaluation", {"interval": 1})
        data = tiny_preset(**groups).model_dump(exclude_none=True) | {
            "logging": {"output_root": str(tmp_path / "runs")}
        }
        path = tmp_path / "mine.yaml"
        path.write_text(yaml.safe_dump(data))
        result = check_file(str(path))
        return PresetRun(
            result,
            result.preset,
            resumption=find_resumption(result.preset, resume) if resume else None,
            load=lambda preset: Inputs(Prompts(), TEXTS, Prompts(2)),
            start_cluster=lambda plan: Cluster(),
            start_ranks=lambda plan, cluster, stop: ranks,
        )

    return make


@pytest.fixture
def broken(job, tmp_path):
    """A run that failed in its third step, after two checkpoints; the directory."""
    with pytest.raises(NonFiniteRatioError):
        job(Ranks(bad_step=3)).execute()
    (record,) = tmp_path.glob("runs/*/*/*/run.json")
    return record.parent


def test_a_resumed_run_goes_on_in_its_directory_and_ends_complete(job, broken):
    ranks = Ranks()
    assert job(ranks, resume=broken.name).execute() == 0
    assert ranks.events[0] == "load rollout_000002"
    assert not [event for event in ranks.events if event == "sync 0"]
    record = RunRecord.load(broken).data
    assert (record["status"], record["exit_code"], record["failure"], record["steps_done"]) == ("succeeded", 0, None, 4)
    assert record["resumed_from"] == "checkpoints/rollout_000002"
    assert [past["status"] for past in record["earlier"]] == ["failed"]
    assert show_lines(RunRecord.load(broken))[2].endswith("succeeded, exit code 0; resumed once")
    assert [row["step"] for row in read_jsonl(broken / "metrics.jsonl")] == [1, 2, 3, 4]
    assert [row["rollout"] for row in read_jsonl(broken / "evaluations.jsonl")] == [0, 1, 2, 3, 4]
    assert sorted(path.name for path in (broken / "rollouts").iterdir()) == [
        f"rollout_00000{i}.jsonl" for i in range(4)
    ]
    assert sorted(path.name for path in (broken / "checkpoints").iterdir()) == ["rollout_000003", "rollout_000004"]


def test_steps_after_the_checkpoint_are_written_once(job, tmp_path):
    with pytest.raises(NonFiniteRatioError):
        job(Ranks(bad_step=4), checkpoint={"save_interval": 2}).execute()
    (record,) = tmp_path.glob("runs/*/*/*/run.json")
    directory = record.parent
    assert [row["step"] for row in read_jsonl(directory / "metrics.jsonl")] == [1, 2, 3]
    job(Ranks(), resume=directory.name, checkpoint={"save_interval": 2}).execute()
    assert [row["step"] for row in read_jsonl(directory / "metrics.jsonl")] == [1, 2, 3, 4]
    assert [row["rollout"] for row in read_jsonl(directory / "evaluations.jsonl")] == [0, 1, 2, 3, 4]


def test_tensorboard_readers_see_each_step_once(job, broken):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    job(Ranks(), resume=broken.name).execute()
    events = accumulator.EventAccumulator(str(broken / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4]


def test_a_finished_run_has_nothing_to_resume(job, tmp_path, capsys):
    job(Ranks()).execute()
    (record,) = tmp_path.glob("runs/*/*/*/run.json")
    before = record.read_text()
    assert run_preset(str(tmp_path / "mine.yaml"), resume=record.parent.name) == 1
    out = capsys.readouterr().out
    assert "P3O703" in out
    assert out.count(" error ") == 1
    line = next(i for i, t in enumerate((tmp_path / "mine.yaml").read_text().splitlines(), 1) if "num_rollout" in t)
    assert f"mine.yaml:{line}:" in out
    assert record.read_text() == before


def test_a_changed_objective_is_refused_and_named(job, broken):
    with pytest.raises(PreflightError, match=r"P3O706 .*algorithm\.clip_high, optimizer\.lr differ"):
        job(Ranks(), resume=broken.name, optimizer={"lr": 0.5}, algorithm={"clip_high": 0.3})
    assert RunRecord.load(broken).status == "failed"


def test_settings_that_move_nothing_may_change():
    recorded = {"cluster": {"timeout_s": 1}, "logging": {"a": 1}, "batch": {"num_rollout": 4}}
    assert changed_settings(recorded, {"cluster": {"timeout_s": 2}, "logging": {}, "batch": {"num_rollout": 4}}) == []
    assert changed_settings(recorded, {**recorded, "batch": {"num_rollout": 5}}) == ["batch.num_rollout"]
    assert changed_settings(recorded, {**recorded, "name": "x"}) == ["name"]


def test_a_run_whose_checkpoints_are_damaged_is_refused(job, broken):
    for checkpoint in (broken / "checkpoints").iterdir():
        (checkpoint / "checkpoint.json").unlink()
    with pytest.raises(
        PreflightError, match=r"P3O702 .* no complete checkpoint .*rollout_000002, which is gone or dam"
    ):
        job(Ranks(), resume=broken.name)
    RunRecord.load(broken).update(last_checkpoint=None)
    with pytest.raises(PreflightError, match=r"P3O702 .* rollout_000002 is damaged"):
        job(Ranks(), resume=broken.name)


def test_a_run_whose_checkpoints_are_gone_is_refused(job, broken):
    shutil.rmtree(broken / "checkpoints")
    with pytest.raises(PreflightError, match=r"P3O702 .* which is gone or damaged") as caught:
        job(Ranks(), resume=broken.name)
    assert caught.value.hint.endswith(f"p3o-launch runs rerun {broken}")


def test_a_run_that_saves_nothing_is_refused(job, tmp_path):
    with pytest.raises(NonFiniteRatioError):
        job(Ranks(bad_step=2), checkpoint={"save_interval": None}).execute()
    (record,) = tmp_path.glob("runs/*/*/*/run.json")
    with pytest.raises(PreflightError, match=r"P3O702 .*checkpoint\.save_interval is not set"):
        job(Ranks(), resume=record.parent.name, checkpoint={"save_interval": None})


def test_a_run_that_ended_before_its_first_checkpoint_begins_again(job, tmp_path, capsys):
    settings = {"checkpoint": {"save_interval": 3}, "evaluation": {"interval": 1, "before_train": True}}
    with pytest.raises(NonFiniteRatioError):
        job(Ranks(bad_step=3), **settings).execute()
    (record,) = tmp_path.glob("runs/*/*/*/run.json")
    directory = record.parent
    (directory / "checkpoints").mkdir(exist_ok=True)
    (directory / "checkpoints" / ".rollout_000003.incomplete").mkdir()  # killed in the save
    assert [row["rollout"] for row in read_jsonl(directory / "evaluations.jsonl")] == [0, 1, 2]
    capsys.readouterr()
    ranks = Ranks()
    assert job(ranks, resume=directory.name, **settings).execute() == 0
    assert ranks.events[0] == "sync 0"
    assert "begins again with step 1" in capsys.readouterr().err
    assert [row["step"] for row in read_jsonl(directory / "metrics.jsonl")] == [1, 2, 3, 4]
    assert [row["rollout"] for row in read_jsonl(directory / "evaluations.jsonl")] == [0, 1, 2, 3, 4]
    data = RunRecord.load(directory).data
    assert (data["status"], data["resumed_from"], data["steps_done"]) == ("succeeded", None, 4)
    assert [past["steps_done"] for past in data["earlier"]] == [2]


def test_resume_alone_goes_on_as_the_record_says(broken, monkeypatch, capsys):
    begun = []
    monkeypatch.setattr(PresetRun, "execute", lambda run: begun.append(run) or 0)
    assert run_preset(None, resume=str(broken)) == 0
    (run,) = begun
    assert run.result.source == f"{broken}/resolved.yaml"
    assert (run.resumption.directory, run.resumption.checkpoint.name) == (broken, "rollout_000002")


def test_a_resume_in_other_code_or_packages_says_so_and_records_both(job, broken, monkeypatch, capsys):
    record = RunRecord.load(broken)
    record.update(versions=record.data["versions"] | {"torch": "1.0"}, git=None)
    monkeypatch.setattr(PresetRun, "execute", lambda run: 0)
    run_preset(None, resume=str(broken))
    assert "warning: torch was 1.0, is " in capsys.readouterr().err
    monkeypatch.undo()
    job(Ranks(), resume=broken.name).execute()
    data = RunRecord.load(broken).data
    assert data["earlier"][0]["versions"]["torch"] == "1.0"
    assert data["versions"]["torch"] != "1.0"


def test_resume_alone_finds_a_run_by_its_id_below_runs(broken, monkeypatch):
    monkeypatch.chdir(broken.parents[3])
    begun = []
    monkeypatch.setattr(PresetRun, "execute", lambda run: begun.append(run) or 0)
    assert run_preset(None, resume=broken.name) == 0
    assert begun[0].resumption.directory == broken


def test_neither_preset_nor_run_is_a_usage_error():
    with pytest.raises(UsageError, match="--preset is missing"):
        run_preset(None)


def test_a_resume_has_no_script(broken):
    with pytest.raises(UsageError, match="--dry-run has no script for --resume"):
        run_preset(None, dry_run=True, resume=str(broken))


def test_more_rollouts_are_the_same_run_for_longer(job, broken):
    ranks = Ranks()
    constant = {"lr_decay_style": "constant"}
    data = yaml.safe_load((broken / "resolved.yaml").read_text())
    data["optimizer"] |= constant
    (broken / "resolved.yaml").write_text(yaml.safe_dump(data))
    assert job(ranks, resume=broken.name, batch={"num_rollout": 6}, optimizer=constant).execute() == 0
    assert [row["step"] for row in read_jsonl(broken / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    # The directory says what runs now, and what ran before.
    assert yaml.safe_load((broken / "resolved.yaml").read_text())["batch"]["num_rollout"] == 6
    assert yaml.safe_load((broken / "earlier" / "1" / "resolved.yaml").read_text())["batch"]["num_rollout"] == 4
    record = RunRecord.load(broken).data
    assert "batch.num_rollout=6" in record["arguments"]
    assert "batch.num_rollout=4" in record["earlier"][0]["arguments"]
    assert "batch.num_rollout=6" in (broken / "resolved_args.txt").read_text()


def test_a_rate_that_is_spread_over_the_run_fixes_its_length():
    def changed(**optimizer):
        recorded = {"batch": {"num_rollout": 4}, "optimizer": optimizer}
        return changed_settings(recorded, recorded | {"batch": {"num_rollout": 5}})

    assert changed(lr_decay_style="constant", lr_warmup_fraction=0.0) == []
    assert changed(lr_decay_style="constant", lr_warmup_fraction=0.1) == ["batch.num_rollout"]
    assert changed(lr_decay_style="cosine", lr_warmup_fraction=0.0) == ["batch.num_rollout"]


def test_a_run_that_still_runs_is_refused(job, broken):
    record = RunRecord.load(broken)
    data = json.loads((broken / "run.json").read_text())
    assert data["process"] == record.data["process"]
    record.update(status="running")
    with pytest.raises(UsageError, match="still runs, as process"):
        job(Ranks(), resume=broken.name)


def test_of_two_that_resume_at_once_one_gets_the_run(job, broken):
    first, second = job(Ranks(), resume=broken.name), job(Ranks(), resume=broken.name)
    assert first.execute() == 0
    before = (broken / "run.json").read_text()
    with pytest.raises(UsageError, match="was resumed in the meantime"):
        second.execute()
    assert (broken / "run.json").read_text() == before
    assert [row["step"] for row in read_jsonl(broken / "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_run_that_another_process_took_just_now_is_named_with_it(job, broken):
    mine = job(Ranks(), resume=broken.name)
    RunRecord.load(broken).update(status="running", **process_facts())
    with pytest.raises(UsageError, match=f"still runs, as process {os.getpid()}"):
        mine.execute()


def test_a_longer_run_at_a_rate_that_decays_is_refused_with_the_reason(job, broken):
    with pytest.raises(PreflightError, match="P3O706") as caught:
        job(Ranks(), resume=broken.name, batch={"num_rollout": 6})
    assert "spread over batch.num_rollout" in caught.value.hint


def test_a_resumed_run_warns_of_nothing_the_first_one_did_not(tmp_path, monkeypatch, capsys):
    """``resolved.yaml`` holds every default, and keeps what the author wrote as off."""
    text = (TINY.read_text()).replace("evaluation: {", "evaluation: {interval: null, ")
    text = text.replace("interval: null, interval: null, ", "interval: null, ")
    (tmp_path / "mine.yaml").write_text(text)
    first = check_file(str(tmp_path / "mine.yaml"))
    assert first.findings == ()
    (tmp_path / "resolved.yaml").write_text(resolved_yaml(first.preset))
    assert check_file(str(tmp_path / "resolved.yaml")).findings == ()
    again = check_file(str(tmp_path / "resolved.yaml")).preset
    assert resolved_data(again) == resolved_data(first.preset)
    assert data_of(resolved_arguments(first.preset)) == resolved_data(first.preset)
