"""The rollout policy is a snapshot: it lags behind the trainer until a refresh, and rounding stays on its side."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from p3o_launch.errors import PreflightError, RunError
from p3o_launch.runtime.mcore.checkpoint import load, save
from p3o_launch.runtime.mcore.cpu_backend import device_backend
from p3o_launch.runtime.mcore.engine import MegatronEngine
from p3o_launch.runtime.mcore.model import unwrap, wrap_ddp
from p3o_launch.runtime.mcore.optimizer import build_optimizer, build_scheduler
from p3o_launch.runtime.mcore.rng import rng_state
from p3o_launch.runtime.mcore.snapshot import is_rounded, refresh
from p3o_launch.runtime.mcore.weights_hf import gathered
from p3o_launch.runtime.objective import ess_moments, step_context
from p3o_launch.runtime.rollout.engines import FACTORIES, EngineParts, create_engine
from p3o_launch.runtime.rollout.quantize import Scheme, rounded
from p3o_launch.runtime.types import Completion
from tests.mcore.ranks import RankEnv, run_ranks
from tests.mcore.rollout_setup import EOS, Rank, engine_rank, make_preset, requests, sampling, teacher_log_probs
from tests.mcore.tiny import write_hf_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf_checkpoint("qwen3", tmp_path_factory.mktemp("tiny"))


def _weights(chunks: list[torch.nn.Module]) -> dict[str, Tensor]:
    return {name: p.detach().clone() for chunk in chunks for name, p in unwrap(chunk).named_parameters()}


def _same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@torch.no_grad()
def _train(chunks: list[torch.nn.Module], step: int) -> None:
    """Stands for an optimizer step: moves every weight a little."""
    stream = torch.Generator().manual_seed(step)
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.add_(0.005 * torch.randn(parameter.shape, generator=stream))


def _ess(rank: Rank, completions: list[Completion]) -> float:
    """ESS of one step over these completions: the trainer's log-probs at temperature 1 against the recorded ones."""
    pairs = list(zip(requests(), completions, strict=True))
    policy = torch.cat([teacher_log_probs(rank, r, c, 1.0) for r, c in pairs])
    behavior = torch.tensor([value for c in completions for value in c.log_probs])
    return step_context(ess_moments(policy, behavior, torch.ones_like(behavior, dtype=torch.bool))).ess


# --- a snapshot lags -------------------------------------------------------------------------------------------------


def _periodic_sync(env: RankEnv, checkpoint: Path) -> list[dict[str, Any]]:
    """Six rollouts with a step after each and a refresh every third, as the scenario periodic_sync_3 runs them."""
    rows = []
    with engine_rank(env, checkpoint, make_preset(update_weights_interval=3)) as rank:
        for rollout in range(6):
            completions = rank.engine.generate(requests(), sampling())
            rows.append(
                {
                    "age": rollout - rank.engine.snapshot_id,
                    "ess": _ess(rank, completions),
                    "responses": [c.response_ids for c in completions],
                }
            )
            _train(rank.chunks, rollout)
            if (rollout + 1) % 3 == 0:
                rank.engine.update_weights(rollout + 1)
    return rows


def test_the_rollout_policy_lags_until_its_refresh(checkpoint: Path) -> None:
    rows = run_ranks(_periodic_sync, 1, checkpoint)[0]
    assert [row["age"] for row in rows] == [0, 1, 2, 0, 1, 2]
    # The same seeds give the same responses for as long as the snapshot is the same, however far the trainer moves.
    responses = [row["responses"] for row in rows]
    assert responses[0] == responses[1] == responses[2]
    assert responses[3] == responses[4] == responses[5]
    assert responses[2] != responses[3]
    for first in (0, 3):
        fresh, stale, staler = (row["ess"] for row in rows[first : first + 3])
        assert fresh == pytest.approx(1.0, abs=1e-5)
        assert fresh > stale > staler


def _building_moves_nothing(env: RankEnv, checkpoint: Path) -> tuple[bool, str]:
    with engine_rank(env, checkpoint, make_preset()) as rank:
        weights, states = _weights(rank.chunks), rng_state()
        engine = MegatronEngine(rank.chunks, rank.groups, rank.preset, EOS)
        after = rng_state()
        untouched = torch.equal(states["cpu"], after["cpu"]) and _same(states["tracker"], after["tracker"])
        try:
            engine.generate(requests(), sampling())
        except RunError as error:
            return untouched and _same(weights, _weights(rank.chunks)), error.message
        return untouched, "no error"


def test_building_an_engine_moves_no_weight_and_no_random_state(checkpoint: Path) -> None:
    untouched, message = run_ranks(_building_moves_nothing, 1, checkpoint)[0]
    assert untouched
    assert message == "the rollout engine has no weights yet"


class _OverlappingChunk(torch.nn.Linear):
    """A wrapped chunk as the distributed optimizer leaves it: its weights arrive when they are asked for."""

    ddp_config = SimpleNamespace(use_distributed_optimizer=True, overlap_param_gather=True)

    def start_param_sync(self, force_sync: bool = False) -> None:
        torch.nn.init.constant_(self.weight, 5.0 if force_sync else 0.0)


def test_a_refresh_waits_for_weights_that_are_still_being_gathered() -> None:
    rollout = torch.nn.Linear(2, 2)
    refresh([rollout], [_OverlappingChunk(2, 2)], "none", None)  # type: ignore[arg-type]
    assert torch.equal(rollout.weight, torch.full((2, 2), 5.0))


def _training_mode(env: RankEnv, checkpoint: Path) -> tuple[bool, bool, bool]:
    with engine_rank(env, checkpoint, make_preset()) as rank:
        for chunk in rank.chunks:
            chunk.train()
        rank.engine.generate(requests(), sampling())
        model = unwrap(rank.chunks[0])
        tokens = torch.tensor([[3, 1, 4, 1, 5]])
        model(tokens, torch.arange(5)[None], None).sum().backward()
        gradients = [p.grad is not None and not p.grad.is_inference() for p in model.parameters()]
        return model.training, torch.is_grad_enabled(), all(gradients)


def test_the_trainer_can_go_on_training_after_a_rollout(checkpoint: Path) -> None:
    assert run_ranks(_training_mode, 1, checkpoint) == [(True, True, True)]


# --- rounded weights -------------------------------------------------------------------------------------------------


def _quantized(env: RankEnv, checkpoint: Path, scheme: Scheme) -> dict[str, Any]:
    with engine_rank(env, checkpoint, make_preset(weight_quantization=scheme)) as rank:
        before = _weights(rank.chunks)
        rank.engine.update_weights(1)
        rollout = _weights(rank.engine._rollout)
        expected = {n: rounded(w, scheme) if is_rounded(n) else w for n, w in before.items()}
        ess = _ess(rank, rank.engine.generate(requests(), sampling()))
        return {
            "trainer untouched": _same(before, _weights(rank.chunks)),
            "rollout as expected": _same(rollout, expected),
            "changed": sorted({n.split(".", 3)[-1] for n in rollout if not torch.equal(rollout[n], before[n])}),
            "ess": ess,
        }


def test_rounding_changes_the_rollout_policys_matrices_and_nothing_else(checkpoint: Path) -> None:
    found = {s: run_ranks(_quantized, 1, checkpoint, s)[0] for s in ("none", "int8", "int4", "fp8_e4m3")}
    for scheme, result in found.items():
        assert result["trainer untouched"], scheme
        assert result["rollout as expected"], scheme
    assert found["none"]["changed"] == []
    for scheme in ("int8", "int4", "fp8_e4m3"):
        assert found[scheme]["changed"] == [
            "mlp.linear_fc1.weight",
            "mlp.linear_fc2.weight",
            "self_attention.linear_proj.weight",
            "self_attention.linear_qkv.weight",
        ]
    assert found["none"]["ess"] == pytest.approx(1.0, abs=1e-5)
    assert found["none"]["ess"] > found["int8"]["ess"] > found["int4"]["ess"]
    assert found["int4"]["ess"] < 0.99


def _whole_weights(env: RankEnv, checkpoint: Path, parallel: dict[str, int]) -> dict[str, Tensor]:
    with engine_rank(env, checkpoint, make_preset(parallel, weight_quantization="int4")) as rank:
        return {name: value.clone() for name, value in gathered(rank.engine._rollout, rank.groups)}


def test_a_matrix_rounds_alike_whole_and_split_over_ranks(checkpoint: Path) -> None:
    whole = run_ranks(_whole_weights, 1, checkpoint, {})[0]
    for split in run_ranks(_whole_weights, 2, checkpoint, {"tensor_model_parallel_size": 2}):
        assert _same(split, whole)


# --- across processes ------------------------------------------------------------------------------------------------


def _save_and_load(env: RankEnv, checkpoint: Path, parallel: dict[str, int], directory: Path, saves: bool) -> list[Any]:
    """[snapshot id, responses] after saving a snapshot the trainer has left behind, or after loading it."""
    with engine_rank(env, checkpoint, make_preset(parallel, weight_quantization="int4")) as rank:
        preset, groups = rank.preset, rank.groups
        chunks = wrap_ddp(rank.chunks, preset.parallel, preset.precision, groups)
        with device_backend(groups.device):
            optimizer = build_optimizer(chunks, preset.optimizer, preset.precision, preset.parallel, groups.device)
        parts = (chunks, optimizer, build_scheduler(optimizer, preset.optimizer, 10), groups)
        if saves:
            rank.engine.update_weights(7)
            _train(rank.chunks, 1)
            save(directory, *parts, {}, engine_state=rank.engine.state())
        else:
            _, engine_state = load(directory, *parts, engine_state=rank.engine.state())
            rank.engine.load_state(engine_state)
        return [rank.engine.snapshot_id, [c.response_ids for c in rank.engine.generate(requests(), sampling())]]


@pytest.fixture(scope="module")
def saved(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A checkpoint of two data-parallel ranks, and what they sampled after saving it."""
    directory = tmp_path_factory.mktemp("run") / "checkpoint"
    first, second = run_ranks(_save_and_load, 2, checkpoint, {}, directory, True)
    assert first == second
    return directory, first


@pytest.mark.parametrize(
    "parallel", [{}, {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}], ids=["dp2", "tp2", "pp2"]
)
def test_a_saved_snapshot_is_sampled_from_after_a_restart_in_any_layout(
    saved: tuple[Path, list[Any]], tmp_path: Path, parallel: dict[str, int]
) -> None:
    directory, sampled = saved
    assert sampled[0] == 7
    other = write_hf_checkpoint("qwen3", tmp_path, seed=1)  # what the second run starts with, before it loads
    assert run_ranks(_save_and_load, 2, other, parallel, directory, False) == [sampled, sampled]


# --- the registry ----------------------------------------------------------------------------------------------------


def _stop_tokens_of_the_checkpoint(env: RankEnv, checkpoint: Path) -> list[Completion]:
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": [20, 21, 22, 23, 24, 25, 26, 27]}')
    preset = make_preset()
    preset = preset.model_copy(update={"model": preset.model.model_copy(update={"hf_checkpoint": str(checkpoint)})})
    with engine_rank(env, checkpoint, preset) as rank:
        engine = MegatronEngine(rank.chunks, rank.groups, preset)
        engine.update_weights(0)
        return engine.generate(requests(), sampling())


def test_the_checkpoint_says_which_tokens_end_a_response(tmp_path: Path) -> None:
    completions = run_ranks(_stop_tokens_of_the_checkpoint, 1, write_hf_checkpoint("qwen3", tmp_path))[0]
    ended = [c for c in completions if not c.truncated]
    assert ended
    assert all(20 <= c.response_ids[-1] <= 27 for c in ended)
    assert not any(20 <= token <= 27 for c in completions for token in c.response_ids[:-1])


def _by_name(env: RankEnv, checkpoint: Path) -> bool:
    with engine_rank(env, checkpoint, make_preset()) as rank:
        engine = create_engine(EngineParts(rank.preset, rank.chunks, rank.groups, EOS))
        engine.update_weights(3)
        same = engine.generate(requests(), sampling()) == rank.engine.generate(requests(), sampling())
        return same and engine.snapshot_id == 3


def test_the_registry_builds_the_engine_a_preset_names(checkpoint: Path) -> None:
    assert run_ranks(_by_name, 1, checkpoint) == [True]


def test_an_engine_there_is_not_is_refused_with_the_names_of_those_there_are() -> None:
    with pytest.raises(PreflightError, match="'sglang' is not available") as caught:
        create_engine(EngineParts(make_preset(engine="sglang"), [], None, EOS))
    assert caught.value.hint == f"set rollout.engine to one of: {', '.join(sorted(FACTORIES))}"
