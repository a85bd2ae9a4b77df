"""A resumed run is the run that was never stopped: bit for bit in the same layout, to rounding in another."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from p3o_launch.errors import CheckpointError
from p3o_launch.runtime.mcore.checkpoint_dirs import complete, latest, prune, read_manifest, temporary
from p3o_launch.schema import Optimizer
from tests.mcore.layouts import Layout, forward_backward
from tests.mcore.ranks import RankEnv, run_ranks
from tests.mcore.tiny import FLOAT64, parallel, tiny_model, write_hf_checkpoint

# Dropout on: the resumed run must continue the random stream as well.
MODEL = tiny_model(hidden_dropout=0.1, attention_dropout=0.1)
SETTINGS = Optimizer(lr=1e-2, lr_warmup_fraction=0.2, weight_decay=0.1)


@dataclass
class Trainer:
    """What a rank trains with, in one layout."""

    groups: Any
    chunks: list[Any]
    optimizer: Any
    scheduler: Any
    layout: Layout

    def steps(self, count: int) -> list[float]:
        from p3o_launch.runtime.mcore.cpu_backend import device_backend
        from p3o_launch.runtime.mcore.optimizer import zero_gradients

        losses = []
        for _ in range(count):
            with device_backend("cpu"):
                zero_gradients(self.chunks, self.optimizer)
                losses.append(forward_backward(self.chunks, self.groups, self.layout)[0])
                self.optimizer.step()
                self.scheduler.step(1)
        return losses

    def adam_steps(self) -> set[float]:
        state = self.optimizer.chained_optimizers[0].optimizer.state
        return {float(values["step"]) for values in state.values()}

    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for chunk in self.chunks for parameter in chunk.parameters()]


def start(env: RankEnv, layout: Layout, model: Any, hf_dir: Path, seed: int = 3) -> Trainer:
    from p3o_launch.runtime.mcore.cpu_backend import device_backend
    from p3o_launch.runtime.mcore.groups import ParallelSizes, init_distributed
    from p3o_launch.runtime.mcore.model import build_model, wrap_ddp
    from p3o_launch.runtime.mcore.optimizer import build_optimizer, build_scheduler
    from p3o_launch.runtime.mcore.rng import seed_rank
    from p3o_launch.runtime.mcore.weights_hf import load_hf

    sizes = ParallelSizes(tp=layout.tp, pp=layout.pp, vpp=layout.vpp)
    method = env.new_init_method()
    groups = init_distributed(sizes, rank=env.rank, world_size=env.world_size, init_method=method, timeout_s=60)
    seed_rank(seed, groups)
    vpp_layers = None if layout.vpp is None else model.num_layers // (layout.pp * layout.vpp)
    split = parallel(tp=layout.tp, pp=layout.pp, sp=layout.sp, vpp_layers=vpp_layers)
    bare = build_model(model, split, FLOAT64, groups)
    load_hf(bare, hf_dir, groups)
    chunks = wrap_ddp(bare, split, FLOAT64, groups)
    with device_backend("cpu"):
        optimizer = build_optimizer(chunks, SETTINGS, FLOAT64, split, "cpu")
    return Trainer(groups, chunks, optimizer, build_scheduler(optimizer, SETTINGS, 10), layout)


def _resume(env: RankEnv, layout: Layout, hf_dir: Path, target: Path) -> dict[str, Any]:
    """Three steps, a save, three more; then a fresh start that loads and does the last three."""
    from p3o_launch.runtime.mcore import checkpoint

    trainer = start(env, layout, MODEL, hf_dir)
    trainer.steps(3)
    checkpoint.save(target, trainer.chunks, trainer.optimizer, trainer.scheduler, trainer.groups, {"note": [1, "two"]})
    wanted = trainer.steps(3)
    weights, adam = trainer.weights(), trainer.adam_steps()
    trainer.groups.destroy()

    resumed = start(env, layout, MODEL, hf_dir, seed=99)
    resumed.steps(1)  # loading must replace whatever the fresh start has done
    extra, _ = checkpoint.load(target, resumed.chunks, resumed.optimizer, resumed.scheduler, resumed.groups)
    loaded_steps = resumed.adam_steps(), resumed.scheduler.num_steps
    found = resumed.steps(3)
    same = all(torch.equal(ours, theirs) for ours, theirs in zip(resumed.weights(), weights, strict=True))
    result = {
        "losses": (found, wanted),
        "same_weights": same,
        "extra": extra,
        "loaded_steps": loaded_steps,
        "adam": (resumed.adam_steps(), adam),
        "lr": (resumed.optimizer.param_groups[0]["lr"], trainer.optimizer.param_groups[0]["lr"]),
    }
    resumed.groups.destroy()
    return result


def _resumes(env: RankEnv, layouts: list[Layout], hf_dir: Path, root: Path) -> list[dict[str, Any]]:
    return [_resume(env, layout, hf_dir, root / f"{layout}") for layout in layouts]


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf_checkpoint("qwen3", tmp_path_factory.mktemp("hf"))


def test_training_continues_bit_identically(hf_dir: Path, tmp_path: Path) -> None:
    layouts = [Layout(), Layout(tp=2, sp=True), Layout(pp=2, vpp=2)]
    for rank in run_ranks(_resumes, 2, layouts, hf_dir, tmp_path):
        for layout, result in zip(layouts, rank, strict=True):
            found, wanted = result["losses"]
            assert found == wanted, layout
            assert len(set(wanted)) == 3
            assert result["same_weights"], layout
            assert result["extra"] == {"note": [1, "two"]}
            assert result["loaded_steps"] == ({3.0}, 3)
            assert result["adam"] == ({6.0}, {6.0})
            assert result["lr"][0] == result["lr"][1] > 0.0


def _save_then_train(env: RankEnv, layout: Layout, hf_dir: Path, target: Path) -> list[float]:
    from p3o_launch.runtime.mcore import checkpoint

    trainer = start(env, layout, tiny_model(), hf_dir)
    trainer.steps(2)
    checkpoint.save(target, trainer.chunks, trainer.optimizer, trainer.scheduler, trainer.groups, {})
    losses = trainer.steps(2)
    trainer.groups.destroy()
    return losses


def _load_then_train(env: RankEnv, layouts: list[Layout], hf_dir: Path, target: Path) -> list[list[float]]:
    from p3o_launch.runtime.mcore import checkpoint

    losses = []
    for layout in layouts:
        trainer = start(env, layout, tiny_model(), hf_dir, seed=5)
        checkpoint.load(target, trainer.chunks, trainer.optimizer, trainer.scheduler, trainer.groups)
        assert trainer.adam_steps() == {2.0}
        losses.append(trainer.steps(2))
        trainer.groups.destroy()
    return losses


def test_another_layout_loads_the_checkpoint(hf_dir: Path, tmp_path: Path) -> None:
    target = tmp_path / "rollout_000002"
    wanted = run_ranks(_save_then_train, 2, Layout(tp=2), hf_dir, target)[0]
    alone = run_ranks(_load_then_train, 1, [Layout()], hf_dir, target)[0]
    pairs = run_ranks(_load_then_train, 2, [Layout(), Layout(pp=2), Layout(pp=2, vpp=2)], hf_dir, target)[0]
    for losses in (*alone, *pairs):
        assert losses == pytest.approx(wanted, rel=1e-9)


def _engine_state_travels(trainer: Trainer, target: Path, parts: tuple[Any, ...]) -> None:
    """A second set of weights under names of its own, and plain data beside it, come back as they were."""
    from p3o_launch.runtime.mcore import checkpoint, snapshot

    state = {"snapshot_id": 4, **snapshot.sharded_state(trainer.chunks, trainer.groups)}
    weight = trainer.chunks[0].module.embedding.word_embeddings.weight
    kept = weight.detach().clone()
    checkpoint.save(target, *parts, {}, engine_state=state)
    trainer.steps(1)
    assert not torch.equal(weight, kept)
    template = {"snapshot_id": -1, **snapshot.sharded_state(trainer.chunks, trainer.groups)}
    _, found = checkpoint.load(target, *parts, engine_state=template)
    assert found["snapshot_id"] == 4
    assert torch.equal(found["chunk_0"][f"{snapshot.STATE_PREFIX}embedding.word_embeddings.weight"], kept)
    with pytest.raises(CheckpointError, match="no rollout snapshot"):
        checkpoint.load(target.with_name("first"), *parts, engine_state=template)


def _edge_cases(env: RankEnv, hf_dir: Path, root: Path) -> dict[str, str]:
    from p3o_launch.runtime.mcore import checkpoint

    trainer = start(env, Layout(), tiny_model(), hf_dir)
    parts = (trainer.chunks, trainer.optimizer, trainer.scheduler, trainer.groups)
    messages = {}
    # Before any step there are no moments; a load must leave the optimizer able to make its first step.
    checkpoint.save(root / "first", *parts, {"step": 0})
    checkpoint.load(root / "first", *parts)
    trainer.steps(1)
    assert trainer.adam_steps() == {1.0}
    checkpoint.save(root / "first", *parts, {"step": 1})
    assert checkpoint.load(root / "first", *parts)[0] == {"step": 1}
    assert not list(root.glob(".*"))
    _engine_state_travels(trainer, root / "snapshot", parts)
    (root / "blocked").write_text("a file where a directory should be")
    for name, action in {
        "blocked": lambda: checkpoint.save(root / "blocked" / "x", *parts, {}),
        "absent": lambda: checkpoint.load(root / "nothing", *parts),
    }.items():
        with pytest.raises(CheckpointError) as error:
            action()
        messages[name] = error.value.message
    trainer.groups.destroy()

    other = _random_start(env, tiny_model(ffn_hidden_size=128))
    with pytest.raises(CheckpointError) as error:
        checkpoint.load(root / "first", other.chunks, other.optimizer, other.scheduler, other.groups)
    messages["other model"] = error.value.message
    other.groups.destroy()
    return messages


def _random_start(env: RankEnv, model: Any) -> Trainer:
    from p3o_launch.runtime.mcore.cpu_backend import device_backend
    from p3o_launch.runtime.mcore.groups import ParallelSizes, init_distributed
    from p3o_launch.runtime.mcore.model import build_model, wrap_ddp
    from p3o_launch.runtime.mcore.optimizer import build_optimizer, build_scheduler
    from p3o_launch.runtime.mcore.rng import seed_rank

    groups = init_distributed(
        ParallelSizes(), rank=env.rank, world_size=env.world_size, init_method=env.new_init_method(), timeout_s=60
    )
    seed_rank(1, groups)
    chunks = wrap_ddp(build_model(model, parallel(), FLOAT64, groups), parallel(), FLOAT64, groups)
    with device_backend("cpu"):
        optimizer = build_optimizer(chunks, SETTINGS, FLOAT64, parallel(), "cpu")
    return Trainer(groups, chunks, optimizer, build_scheduler(optimizer, SETTINGS, 10), Layout())


def test_first_checkpoint_overwriting_and_clear_errors(hf_dir: Path, tmp_path: Path) -> None:
    for messages in run_ranks(_edge_cases, 2, hf_dir, tmp_path):
        assert "cannot make" in messages["blocked"]
        assert "there is no checkpoint at" in messages["absent"]
        assert "cannot load checkpoint" in messages["other model"]
        assert "linear_fc1" in messages["other model"]


def _fake_checkpoint(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "checkpoint.json").write_text('{"format": 1}')
    return directory


def test_latest_and_prune_see_only_whole_checkpoints(tmp_path: Path) -> None:
    assert latest(tmp_path / "none") is None
    old, middle, new = (_fake_checkpoint(tmp_path / f"rollout_{number:06d}") for number in (2, 9, 11))
    (tmp_path / "rollout_000012").mkdir()
    remnant = temporary(tmp_path / "rollout_000013")
    _fake_checkpoint(remnant)
    assert latest(tmp_path) == new
    with pytest.raises(CheckpointError, match="not a whole checkpoint"):
        read_manifest(tmp_path / "rollout_000012")
    assert set(prune(tmp_path, keep=2)) == {old, remnant}
    assert complete(tmp_path) == [middle, new]
    assert not remnant.exists()
    shutil.rmtree(tmp_path / "rollout_000012")
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["rollout_000009", "rollout_000011"]
