"""The distribution that is reported is the one that is drawn from, and random streams belong to requests."""

from __future__ import annotations

import math

import pytest
import torch

from p3o_launch.runtime.rollout.sampling import draw, mix64, sampled_log_probs, uniforms
from p3o_launch.runtime.types import SamplingParams


def params(temperature: float = 1.0, top_p: float = 1.0, top_k: int = -1, max_new_tokens: int = 8) -> SamplingParams:
    return SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, max_new_tokens=max_new_tokens)


def test_mixing_reproduces_the_published_splitmix64_sequence() -> None:
    gamma = 0x9E3779B97F4A7C15
    states = [(1234567 + (i + 1) * gamma) % 2**64 for i in range(5)]
    signed = torch.tensor([s - 2**64 if s >= 2**63 else s for s in states])
    outputs = [value % 2**64 for value in mix64(signed).tolist()]
    assert outputs == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_a_stream_depends_on_its_seed_and_step_alone() -> None:
    seeds, steps = torch.tensor([5, 6, 5, -1]), torch.tensor([0, 0, 3, 9])
    together = uniforms(seeds, steps)
    for row in range(4):
        assert uniforms(seeds[row : row + 1], steps[row : row + 1]).item() == together[row].item()
    assert len(set(together.tolist())) == 4


def test_streams_of_neighbouring_seeds_are_uniform_and_uncorrelated() -> None:
    steps = torch.arange(20_000)
    first = uniforms(torch.full_like(steps, 42), steps)
    second = uniforms(torch.full_like(steps, 43), steps)
    for stream in (first, second):
        assert stream.min() >= 0
        assert stream.max() < 1
        counts = torch.histc(stream.float(), bins=20, min=0, max=1)
        chi2 = ((counts - 1000) ** 2 / 1000).sum().item()
        assert chi2 < 45  # 19 degrees of freedom: p = 0.0007
    correlation = torch.corrcoef(torch.stack([first, second]))[0, 1].item()
    assert abs(correlation) < 4 / math.sqrt(20_000)


def test_sampling_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    numbers = uniforms(torch.tensor([1, 2, 3]), torch.tensor([0, 0, 5]))
    draw(sampled_log_probs(torch.eye(3), params(0.7, top_p=0.9, top_k=2)), numbers)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.2])
def test_log_probs_are_of_the_tempered_distribution(temperature: float) -> None:
    logits = torch.randn(4, 11, generator=torch.Generator().manual_seed(1))
    expected = torch.log_softmax(logits.double() / temperature, -1).float()
    torch.testing.assert_close(sampled_log_probs(logits, params(temperature)), expected)


def test_draws_have_the_reported_frequencies() -> None:
    logits = torch.tensor([[0.3, -1.0, 2.0, 0.0, -30.0]])
    log_probs = sampled_log_probs(logits, params(0.8)).expand(40_000, -1)
    steps = torch.arange(40_000)
    tokens, chosen = draw(log_probs, uniforms(torch.full_like(steps, 7), steps))
    expected = log_probs[0].exp()
    observed = torch.bincount(tokens, minlength=5) / len(tokens)
    assert torch.allclose(observed, expected, atol=4 * 0.5 / math.sqrt(40_000))
    torch.testing.assert_close(chosen, log_probs[0][tokens])


def test_an_entry_without_mass_is_never_drawn() -> None:
    log_probs = torch.log(torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]])).expand(4, -1)
    numbers = torch.tensor([0.0, 0.2501, 1 - 2.0**-53, 0.2499], dtype=torch.float64)
    tokens, _ = draw(log_probs, numbers)
    assert tokens.tolist() == [1, 3, 3, 1]


def test_top_k_keeps_k_entries_and_renormalises() -> None:
    log_probs = sampled_log_probs(torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0]]), params(top_k=2))
    finite = torch.isfinite(log_probs)
    assert finite.sum() == 2
    torch.testing.assert_close(log_probs[finite], torch.full((2,), math.log(0.5)))


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(1.0, [0, 1, 2, 3]), (0.95, [0, 1, 2]), (0.79, [0, 1]), (0.5, [0]), (1e-9, [0])],
)
def test_top_p_keeps_the_smallest_set_that_reaches_the_mass(top_p: float, kept: list[int]) -> None:
    probabilities = torch.tensor([[0.5, 0.3, 0.19, 0.01]])
    log_probs = sampled_log_probs(probabilities.log(), params(top_p=top_p))
    assert torch.isfinite(log_probs)[0].nonzero().flatten().tolist() == kept
    expected = probabilities[0, kept] / probabilities[0, kept].sum()
    torch.testing.assert_close(log_probs[0, kept].exp(), expected)


def test_top_p_counts_the_mass_that_top_k_left() -> None:
    probabilities = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    # Of the two that top-k leaves, the first has 4/7 of the mass: it alone reaches 0.5, though 0.4 would not.
    log_probs = sampled_log_probs(probabilities.log(), params(top_p=0.5, top_k=2))
    assert torch.isfinite(log_probs)[0].tolist() == [True, False, False, False]


def test_temperature_zero_takes_the_likeliest() -> None:
    logits = torch.tensor([[0.1, 2.0, 2.0], [5.0, 1.0, 0.0]])
    tokens, log_probs = draw(sampled_log_probs(logits, params(0.0)), torch.tensor([0.9, 0.0], dtype=torch.float64))
    assert tokens.tolist() == [1, 0]
    assert log_probs.tolist() == [0.0, 0.0]


def test_half_precision_logits_give_float32_log_probs_and_float64_stays() -> None:
    assert sampled_log_probs(torch.zeros(1, 4, dtype=torch.bfloat16), params()).dtype == torch.float32
    assert sampled_log_probs(torch.zeros(1, 4, dtype=torch.float64), params()).dtype == torch.float64


@pytest.mark.parametrize(
    "bad",
    [
        params(-1.0),
        params(float("inf")),
        params(float("nan")),
        params(top_p=0.0),
        params(top_p=1.5),
        params(top_k=0),
        params(max_new_tokens=0),
    ],
)
def test_parameters_out_of_range_are_refused(bad: SamplingParams) -> None:
    with pytest.raises(ValueError, match="must be"):
        sampled_log_probs(torch.zeros(1, 4), bad)
