"""The decode loop against the trainer's own forward, alone against together, and layout against layout."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from p3o_launch.errors import RunError
from p3o_launch.runtime.mcore.generation import batches
from p3o_launch.runtime.mcore.rng import rng_state
from p3o_launch.runtime.types import Completion, GenerationRequest, SamplingParams
from tests.mcore.ranks import RankEnv, run_ranks
from tests.mcore.rollout_setup import (
    LAYOUTS,
    engine_rank,
    make_preset,
    requests,
    sampling,
    teacher_log_probs,
    teacher_logits,
)
from tests.mcore.tiny import write_hf_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf_checkpoint("qwen3", tmp_path_factory.mktemp("tiny"))


def _generate(
    env: RankEnv, checkpoint: Path, parallel: dict[str, int], work: list[GenerationRequest], how: SamplingParams
) -> list[Completion]:
    with engine_rank(env, checkpoint, make_preset(parallel)) as rank:
        return rank.engine.generate(work, how)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> list[Completion]:
    """What one rank samples for ``requests()``."""
    completions: list[Completion] = run_ranks(_generate, 1, checkpoint, {}, requests(), sampling())[0]
    return completions


def assert_same(found: list[Completion], expected: list[Completion]) -> None:
    assert [c.response_ids for c in found] == [c.response_ids for c in expected]
    for one, other in zip(found, expected, strict=True):
        assert (one.request_id, one.truncated) == (other.request_id, other.truncated)
        assert one.log_probs == pytest.approx(other.log_probs, abs=2e-5)


# --- against the trainer ---------------------------------------------------------------------------------------------


def _errors_by_temperature(env: RankEnv, checkpoint: Path, dtype: str) -> dict[float, tuple[float, float]]:
    """Temperature -> (largest difference to the trainer at that temperature, and at temperature 1)."""
    found = {}
    with engine_rank(env, checkpoint, make_preset(params_dtype=dtype)) as rank:
        for temperature in (0.7, 1.0, 1.2):
            work = requests()
            pairs = list(zip(work, rank.engine.generate(work, sampling(temperature)), strict=True))
            errors = []
            for at in (temperature, 1.0):
                gaps = [
                    teacher_log_probs(rank, r, c, at) - torch.tensor(c.log_probs, dtype=torch.float64) for r, c in pairs
                ]
                errors.append(float(torch.cat(gaps).abs().max()))
            found[temperature] = (errors[0], errors[1])
    return found


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 2e-5), ("float64", 1e-12)])
def test_log_probs_are_the_trainers_at_the_temperature_that_was_sampled(
    checkpoint: Path, dtype: str, limit: float
) -> None:
    for temperature, (same, unscaled) in run_ranks(_errors_by_temperature, 1, checkpoint, dtype)[0].items():
        assert same < limit
        assert temperature == 1.0 or unscaled > 0.1  # the check can tell temperatures apart


def _greedy_and_recomputed(env: RankEnv, checkpoint: Path) -> list[tuple[tuple[int, ...], list[int]]]:
    pairs = []
    with engine_rank(env, checkpoint, make_preset(), eos_ids=()) as rank:
        work = requests()
        for request, completion in zip(work, rank.engine.generate(work, sampling(0.0)), strict=True):
            tokens: list[int] = []
            for _ in range(8):
                logits = teacher_logits(rank.chunks, request.prompt_ids, [*tokens, 0])
                tokens.append(int(logits[-1].argmax()))
            pairs.append((completion.response_ids, tokens))
    return pairs


def test_cached_decoding_takes_the_tokens_that_recomputing_the_prefix_takes(checkpoint: Path) -> None:
    for cached, recomputed in run_ranks(_greedy_and_recomputed, 1, checkpoint)[0]:
        assert list(cached) == recomputed


def _truncated(env: RankEnv, checkpoint: Path) -> list[tuple[float, float]]:
    """Every token of a truncated evaluation rollout: (log-prob, log of its share of the kept mass)."""
    pairs = []
    with engine_rank(env, checkpoint, make_preset()) as rank:
        work = requests()
        how = sampling(0.9, top_p=0.6)
        for request, completion in zip(work, rank.engine.generate(work, how), strict=True):
            logits = teacher_logits(rank.chunks, request.prompt_ids, completion.response_ids)
            for row, token, value in zip(logits, completion.response_ids, completion.log_probs, strict=True):
                p = torch.softmax(row.double() / 0.9, -1)
                ordered = p.sort(descending=True).values.tolist()
                kept, mass = 0, 0.0
                while mass < 0.6:
                    mass += ordered[kept]
                    kept += 1
                assert p[token] >= ordered[kept - 1], "a token outside the nucleus was sampled"
                pairs.append((value, math.log(p[token] / mass)))
    return pairs


def test_truncated_evaluation_reports_the_renormalised_distribution(checkpoint: Path) -> None:
    pairs = run_ranks(_truncated, 1, checkpoint)[0]
    assert len(pairs) > 20
    for value, expected in pairs:
        assert value == pytest.approx(expected, abs=2e-5)


# --- a request does not depend on its company ------------------------------------------------------------------------


def _one_by_one(env: RankEnv, checkpoint: Path) -> tuple[list[Completion], list[Completion]]:
    with engine_rank(env, checkpoint, make_preset()) as rank:
        alone = [rank.engine.generate([r], sampling())[0] for r in requests()]
        rank.engine._cache_tokens = 40  # rows of up to 17 tokens: two or three to a batch
        return alone, rank.engine.generate(requests()[::-1], sampling())[::-1]


def test_a_request_samples_alone_what_it_samples_in_company(checkpoint: Path, reference: list[Completion]) -> None:
    alone, small_batches = run_ranks(_one_by_one, 1, checkpoint)[0]
    assert_same(alone, reference)
    assert_same(small_batches, reference)


def test_two_seeds_of_one_prompt_give_two_responses(checkpoint: Path) -> None:
    same = [GenerationRequest(i, (3, 1, 4), seed=i % 2) for i in range(4)]
    first, second, third, fourth = run_ranks(_generate, 1, checkpoint, {}, same, sampling())[0]
    assert first.response_ids == third.response_ids != second.response_ids == fourth.response_ids


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one rank"])
def test_every_rank_of_every_layout_returns_what_one_rank_samples(
    checkpoint: Path, reference: list[Completion], layout: str
) -> None:
    ranks, parallel = LAYOUTS[layout]
    results = run_ranks(_generate, ranks, checkpoint, parallel, requests(), sampling())
    for found in results:
        assert_same(found, reference)
    assert all(found == results[0] for found in results)


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
        {"tensor_model_parallel_size": 2, "context_parallel_size": 2},
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"pipeline_model_parallel_size": 4},
    ],
)
def test_layouts_of_four_ranks_agree_too(
    checkpoint: Path, reference: list[Completion], parallel: dict[str, Any]
) -> None:
    for found in run_ranks(_generate, 4, checkpoint, parallel, requests(), sampling()):
        assert_same(found, reference)


# --- where a response ends -------------------------------------------------------------------------------------------


def _with_many_stops(env: RankEnv, checkpoint: Path, stops: list[int]) -> tuple[list[Completion], list[Completion]]:
    """Responses with ``stops`` as the ends of sequence, and with none."""
    work = requests(24)
    with engine_rank(env, checkpoint, make_preset(), eos_ids=stops) as rank:
        stopped = rank.engine.generate(work, sampling())
    with engine_rank(env, checkpoint, make_preset(), eos_ids=()) as rank:
        return stopped, rank.engine.generate(work, sampling())


def test_a_response_ends_with_its_first_stop_token_or_at_the_cap(checkpoint: Path) -> None:
    stops = list(range(20, 32))
    stopped, endless = run_ranks(_with_many_stops, 1, checkpoint, stops)[0]
    for short, full in zip(stopped, endless, strict=True):
        first = next((i for i, token in enumerate(full.response_ids) if token in stops), None)
        expected = full.response_ids if first is None else full.response_ids[: first + 1]
        assert short.response_ids == expected
        assert short.truncated == (first is None)
        assert len(short.log_probs) == len(short.response_ids)
        assert short.log_probs == pytest.approx(full.log_probs[: len(expected)], abs=2e-5)
        assert full.truncated
        assert len(full.response_ids) == 8
    # Rows leave the batch at different times, and some never do: the cache has shrunk on the way.
    assert {len(c.response_ids) for c in stopped} >= {1, 2, 3, 8}


# --- the edges -------------------------------------------------------------------------------------------------------


def _edges(env: RankEnv, checkpoint: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with engine_rank(env, checkpoint, make_preset()) as rank:
        found["none"] = rank.engine.generate([], sampling())
        found["one"] = rank.engine.generate(requests(1), sampling())
        for name, length, new in (("long", 121, 8), ("empty", 0, 8), ("huge", 129, 1)):
            try:
                rank.engine.generate(
                    [*requests(3), GenerationRequest(77, (1,) * length, 0)], sampling(max_new_tokens=new)
                )
            except RunError as error:
                found[name] = error.message
        found["fits"] = rank.engine.generate([GenerationRequest(1, (1,) * 120, 0)], sampling())
    return found


def test_no_request_fewer_requests_than_ranks_and_prompts_without_room(
    checkpoint: Path, reference: list[Completion]
) -> None:
    for found in run_ranks(_edges, 2, checkpoint):
        assert found["none"] == []
        assert_same(found["one"], reference[:1])
        assert "request 77: a prompt of 121 tokens" in found["long"]
        assert "128 positions" in found["long"]
        assert "request 77: a prompt of 129 tokens" in found["huge"]
        assert "request 77 has an empty prompt" in found["empty"]
        assert len(found["fits"]) == 1


def _random_states(env: RankEnv, checkpoint: Path) -> bool:
    with engine_rank(env, checkpoint, make_preset()) as rank:
        before = rng_state()
        rank.engine.generate(requests(), sampling())
        after = rng_state()
        same = [torch.equal(before["cpu"], after["cpu"])]
        same += [torch.equal(before["tracker"][k], after["tracker"][k]) for k in before["tracker"]]
        return all(same) and len(same) > 1


def test_generation_leaves_the_trainers_random_states_alone(checkpoint: Path) -> None:
    assert run_ranks(_random_states, 1, checkpoint) == [True]


def _broken_weights(env: RankEnv, checkpoint: Path) -> str:
    with engine_rank(env, checkpoint, make_preset()) as rank:
        if env.rank == 1:  # one replica only: the other must raise too, or it would wait for the next collective
            for chunk in rank.chunks:
                for parameter in chunk.parameters():
                    torch.nn.init.constant_(parameter, float("nan"))
        rank.engine.update_weights(1)
        try:
            rank.engine.generate(requests(), sampling())
        except RunError as error:
            return error.message
        return "no error"


def test_a_log_prob_that_is_not_finite_raises_on_every_rank(checkpoint: Path) -> None:
    for message in run_ranks(_broken_weights, 2, checkpoint):
        assert message == "request 901: the rollout policy gave a log-prob that is not finite"


def test_batches_keep_to_the_room_of_the_cache_and_lose_no_request() -> None:
    work = requests(30)
    for room in (1, 40, 100, 10_000):
        cut = list(batches(work, max_new_tokens=8, max_tokens=room))
        assert sorted(i for batch in cut for i in batch) == list(range(30))
        for batch in cut:
            width = max(len(work[i].prompt_ids) for i in batch) + 8
            assert len(batch) == 1 or len(batch) * width <= room
    assert len(list(batches(work, 8, 10_000))) == 1
    assert list(batches([], 8, 100)) == []
