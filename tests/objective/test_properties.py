"""What must hold for any batch: bounds, additivity, clean padding, gradients, refusal of what cannot be computed."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from p3o_launch.errors import NonFiniteRatioError
from p3o_launch.runtime.objective import (
    StepContext,
    ess_moments,
    exact_kl,
    group_advantages,
    kl_proxy,
    p3o_token_terms,
    ppo_clip_loss,
    step_context,
)

PADDING = [math.nan, math.inf, -math.inf, 0.0, -1e30]
CONTEXT = StepContext(ess=0.7, cap=0.7, valid_tokens=1, ratio_mean=1.0, ratio_std=0.0)

fast = settings(max_examples=60, deadline=None, derandomize=True)


def random_batch(seed: int, rows: int, width: int, spread: float) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    behavior = -torch.empty(rows, width).exponential_(generator=generator)
    return {
        "log_probs": behavior + spread * torch.randn(rows, width, generator=generator),
        "behavior_log_probs": behavior,
        "advantages": torch.randn(rows, width, generator=generator),
        "mask": torch.rand(rows, width, generator=generator) < 0.7,
    }


batches = st.builds(
    random_batch,
    st.integers(0, 2**31),
    st.integers(1, 5),
    st.integers(1, 9),
    st.sampled_from([0.0, 1e-3, 0.3, 3.0, 20.0]),
)


def moments_of(batch: dict[str, Tensor]) -> Tensor:
    return ess_moments(batch["log_probs"], batch["behavior_log_probs"], batch["mask"])


@fast
@given(batches)
def test_ess_is_between_one_over_n_and_one(batch: dict[str, Tensor]) -> None:
    moments = moments_of(batch)
    context = step_context(moments)
    assert 0.0 <= context.ess <= 1.0
    assert context.cap == context.ess
    assert context.valid_tokens == int(batch["mask"].sum())
    if context.valid_tokens and moments[1] > 1e-4:  # far above the epsilon in the denominator
        assert context.ess >= (1 - 1e-3) / context.valid_tokens


@fast
@given(batches, st.randoms(use_true_random=False))
def test_moments_add_over_any_partition(batch: dict[str, Tensor], random: Any) -> None:
    flat = {name: values.reshape(1, -1) for name, values in batch.items()}
    width = flat["mask"].shape[1]
    cuts = sorted({0, width, *(random.randrange(width + 1) for _ in range(3))})
    parts = [
        moments_of({name: values[:, start:stop] for name, values in flat.items()}) for start, stop in pairwise(cuts)
    ]
    total, whole = torch.stack(parts).sum(0), moments_of(batch)
    assert total[2] == whole[2]
    torch.testing.assert_close(total, whole, rtol=1e-12, atol=0.0)


@fast
@given(batches, st.lists(st.sampled_from(PADDING), min_size=3, max_size=3), st.sampled_from(["proxy", "proxy_safe"]))
def test_padding_reaches_neither_values_nor_gradients(
    batch: dict[str, Tensor], padding: list[float], kl_mode: str
) -> None:
    names = ("log_probs", "behavior_log_probs", "advantages")
    dirty = batch | {
        name: torch.where(batch["mask"], batch[name], value) for name, value in zip(names, padding, strict=True)
    }
    results = []
    for one in (batch, dirty):
        log_probs = one["log_probs"].clone().requires_grad_()
        inputs = (log_probs, one["behavior_log_probs"], one["advantages"], one["mask"])
        terms = p3o_token_terms(*inputs, CONTEXT, kl_mode=kl_mode)
        grpo = ppo_clip_loss(*inputs, 0.4, 0.4)
        p3o_gradient = torch.autograd.grad(terms.token_loss.sum(), log_probs)[0]
        grpo_gradient = torch.autograd.grad(grpo.sum(), log_probs)[0]
        fields = (terms.ratio, terms.coefficient, terms.score_loss, terms.behavior_kl, terms.cap_hits, terms.clip_hits)
        results.append([moments_of(one), *fields, grpo, p3o_gradient, grpo_gradient])
    for clean_value, dirty_value in zip(*results, strict=True):
        assert torch.equal(clean_value, dirty_value)
    for value in results[1][1:]:
        assert not value[~batch["mask"]].any()


@fast
@given(batches)
def test_the_coefficient_is_the_ratio_under_the_cap_whatever_the_advantage(batch: dict[str, Tensor]) -> None:
    terms = p3o_token_terms(**batch, context=CONTEXT)
    flipped = p3o_token_terms(**(batch | {"advantages": -batch["advantages"]}), context=CONTEXT)
    assert terms.coefficient.max() <= torch.tensor(CONTEXT.cap)
    assert torch.equal(terms.coefficient, torch.minimum(terms.ratio, torch.tensor(CONTEXT.cap)))
    assert torch.equal(terms.coefficient, flipped.coefficient)
    assert torch.equal(terms.score_loss, -flipped.score_loss)
    assert not terms.coefficient.requires_grad


def test_no_term_waits_for_the_device() -> None:
    """Tensors without data: anything that reads a value, as a host sync would, raises on them."""
    batch = {name: value.to("meta") for name, value in random_batch(0, 3, 7, 0.3).items()}
    with pytest.raises(RuntimeError, match="meta"):
        batch["log_probs"].sum().item()
    assert moments_of(batch).shape == (4,)
    assert p3o_token_terms(**batch, context=CONTEXT).token_loss.shape == (3, 7)
    assert ppo_clip_loss(**batch, eps_low=0.4, eps_high=0.4).shape == (3, 7)


def test_float64_inputs_stay_float64() -> None:
    batch = random_batch(0, 3, 7, 0.3)
    double = {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}
    exact_ratio = (double["log_probs"] - double["behavior_log_probs"]).exp()[double["mask"]]
    assert moments_of(double)[0].item() == pytest.approx(exact_ratio.sum().item(), rel=1e-15)
    terms = p3o_token_terms(**double, context=CONTEXT)
    assert {terms.token_loss.dtype, terms.ratio.dtype, terms.coefficient.dtype} == {torch.float64}
    assert p3o_token_terms(**batch, context=CONTEXT).token_loss.dtype == torch.float32


def test_gradients_match_finite_differences() -> None:
    batch = random_batch(3, 3, 7, 1.0)
    behavior, advantages = batch["behavior_log_probs"].double(), batch["advantages"].double()
    mask, start = batch["mask"], batch["log_probs"].double()
    # The score term is not the derivative of its value: the coefficient is held fixed. Its advantage is set to zero.
    for kl_mode in ("proxy", "proxy_safe"):
        assert torch.autograd.gradcheck(
            lambda p, mode=kl_mode: (
                p3o_token_terms(p, behavior, torch.zeros_like(p), mask, CONTEXT, kl_mode=mode).token_loss
            ),
            start.clone().requires_grad_(),
        )
    assert torch.autograd.gradcheck(
        lambda p: ppo_clip_loss(p, behavior, advantages, mask, 0.2, 0.4), start.clone().requires_grad_()
    )
    logits = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    other, some = torch.zeros(2, 3, 5, dtype=torch.float64), torch.tensor([[1, 1, 0], [1, 0, 1]]).bool()
    assert torch.autograd.gradcheck(lambda x: exact_kl(x, other, some), logits)


def test_the_score_gradient_is_coefficient_times_advantage() -> None:
    batch = random_batch(5, 3, 7, 1.0)
    log_probs = batch.pop("log_probs").requires_grad_()
    terms = p3o_token_terms(log_probs=log_probs, **batch, context=CONTEXT)
    (gradient,) = torch.autograd.grad(terms.score_loss.sum(), log_probs)
    expected = torch.where(batch["mask"], -terms.coefficient * batch["advantages"], 0.0)
    torch.testing.assert_close(gradient, expected, rtol=0.0, atol=0.0)


def test_proxy_safe_pulls_back_tokens_that_the_plain_proxy_pushes_away() -> None:
    log_ratio = torch.tensor([-15.0, 15.0], dtype=torch.float64)
    slopes = {}
    for kl_mode in ("proxy", "proxy_safe"):
        point = log_ratio.clone().requires_grad_()
        (slopes[kl_mode],) = torch.autograd.grad(kl_proxy(point, kl_mode).sum(), point)
    assert torch.equal(kl_proxy(log_ratio, "proxy"), kl_proxy(log_ratio, "proxy_safe"))
    assert slopes["proxy"].tolist() == [1.0, 1.0]
    assert slopes["proxy_safe"][0].item() == pytest.approx(1 - math.exp(10))
    assert slopes["proxy_safe"][1].item() == pytest.approx(1 - math.exp(-10))


def test_the_sampled_proxy_averages_to_the_exact_kl() -> None:
    generator = torch.Generator().manual_seed(0)
    policy, behavior = (torch.randn(4, 3, 11, generator=generator, dtype=torch.float64) for _ in range(2))
    log_ratio = policy.log_softmax(-1) - behavior.log_softmax(-1)
    expected = (policy.softmax(-1) * kl_proxy(log_ratio)).sum(-1)
    torch.testing.assert_close(exact_kl(policy, behavior, torch.ones(4, 3, dtype=torch.bool)), expected)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 400.0, -400.0])
def test_a_bad_valid_token_stops_the_step_and_a_bad_masked_one_does_not(value: float) -> None:
    log_probs, behavior = torch.tensor([[value, -1.0, -1.0]]), torch.full((1, 3), -1.0)
    bad = ess_moments(log_probs, behavior, torch.tensor([[True, True, False]]))
    assert bad[3].item() == 1.0
    with pytest.raises(NonFiniteRatioError, match="1 token"):
        step_context(bad)
    with pytest.raises(NonFiniteRatioError):
        step_context(bad + ess_moments(behavior, behavior, torch.ones(1, 3, dtype=torch.bool)))
    good = ess_moments(log_probs, behavior, torch.tensor([[False, True, True]]))
    assert step_context(good).valid_tokens == 2


@pytest.mark.parametrize("sums", [[math.inf, 1.0, 1.0, 0.0], [1.0, math.nan, 1.0, 0.0], [1.0, 1.0, 1.0, math.nan]])
def test_a_sum_that_is_not_finite_stops_the_step(sums: list[float]) -> None:
    with pytest.raises(NonFiniteRatioError, match="not finite"):
        step_context(torch.tensor(sums, dtype=torch.float64))


def test_the_largest_squares_that_float64_holds_give_an_ess() -> None:
    """S1 * S1 alone would overflow here."""
    log_probs, behavior = torch.full((1, 4), 350.0), torch.zeros(1, 4)
    context = step_context(ess_moments(log_probs, behavior, torch.ones(1, 4, dtype=torch.bool)))
    assert context.ess == pytest.approx(1.0)
    assert math.isfinite(context.ratio_std)


def test_on_policy_tokens_are_not_capped() -> None:
    log_probs = random_batch(7, 4, 6, 0.0)["log_probs"]
    mask = torch.ones_like(log_probs, dtype=torch.bool)
    for dtype in (torch.float32, torch.float64):
        p = log_probs.to(dtype)
        context = step_context(ess_moments(p, p, mask))
        assert context.ess < 1.0
        assert p3o_token_terms(p, p, torch.ones_like(p), mask, context).cap_hits.sum() == 0


def test_an_empty_selection_is_neutral() -> None:
    batch = random_batch(9, 2, 3, 1.0) | {"mask": torch.zeros(2, 3, dtype=torch.bool)}
    assert moments_of(batch).tolist() == [0.0, 0.0, 0.0, 0.0]
    assert step_context(moments_of(batch)) == StepContext(1.0, 1.0, 0, 1.0, 0.0)
    for width in (0, 3):
        log_probs = torch.zeros(2, width, requires_grad=True)
        mask = torch.zeros(2, width, dtype=torch.bool)
        terms = p3o_token_terms(log_probs, log_probs.detach(), torch.zeros(2, width), mask, CONTEXT)
        assert terms.token_loss.sum().item() == 0.0


@pytest.mark.parametrize("name", ["log_probs", "behavior_log_probs", "advantages", "mask"])
def test_broadcasting_is_refused_with_the_shapes(name: str) -> None:
    batch = random_batch(11, 2, 3, 1.0)
    batch[name] = batch[name][:, :1]
    with pytest.raises(ValueError, match=rf"{name} \(2, 1\)"):
        p3o_token_terms(**batch, context=CONTEXT)
    with pytest.raises(ValueError, match=rf"{name} \(2, 1\)"):
        ppo_clip_loss(**batch, eps_low=0.2, eps_high=0.2)
    if name != "advantages":
        with pytest.raises(ValueError, match=rf"{name} \(2, 1\)"):
            moments_of(batch)


def test_other_misuse_is_refused() -> None:
    batch = random_batch(13, 2, 3, 1.0)
    with pytest.raises(ValueError, match="exact_kl"):
        p3o_token_terms(**batch, context=CONTEXT, kl_mode="exact")
    with pytest.raises(ValueError, match="'k3'"):
        p3o_token_terms(**batch, context=CONTEXT, kl_mode="k3")
    with pytest.raises(ValueError, match=r"mask \(2, 4\)"):
        exact_kl(torch.zeros(2, 3, 5), torch.zeros(2, 3, 5), torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"behavior_logits \(2, 3, 4\)"):
        exact_kl(torch.zeros(2, 3, 5), torch.zeros(2, 3, 4), torch.ones(2, 3))
    for moments in (torch.zeros(4), torch.zeros(3, dtype=torch.float64)):
        with pytest.raises(ValueError, match="float64 of shape"):
            step_context(moments)


def test_an_overflown_ratio_under_an_active_clip_has_a_clean_gradient() -> None:
    log_probs = torch.tensor([[0.0, 0.0, 0.0]], requires_grad=True)
    behavior, advantages = torch.tensor([[-200.0, -200.0, -0.1]]), torch.tensor([[1.0, 0.0, 1.0]])
    loss = ppo_clip_loss(log_probs, behavior, advantages, torch.ones(1, 3), 0.2, 0.2)
    (gradient,) = torch.autograd.grad(loss.sum(), log_probs)
    assert loss[0, :2].tolist() == pytest.approx([-1.2, 0.0])
    assert gradient[0, :2].tolist() == [0.0, 0.0]
    assert gradient[0, 2].item() == pytest.approx(-math.exp(0.1), rel=1e-6)


@pytest.mark.parametrize("reward", [0.1, 0.7, 1.0, 1e30, -3.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_exactly_zero(reward: float, dtype: torch.dtype) -> None:
    rewards = torch.tensor([reward] * 7 + [0.0, 1.0], dtype=dtype)
    advantages = group_advantages(rewards, torch.tensor([5] * 7 + [2, 2]))
    assert advantages[:7].tolist() == [0.0] * 7
    assert advantages[7:].tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)], abs=1e-5)
    assert advantages.dtype == dtype


@fast
@given(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=8, max_size=8), st.permutations(range(8)))
def test_advantages_follow_their_group_wherever_its_samples_stand(rewards: list[float], order: list[int]) -> None:
    ids = [0, 0, 0, 0, 7, 7, 7, 7]
    plain = group_advantages(rewards, ids)
    moved = group_advantages([rewards[i] for i in order], [ids[i] for i in order])
    torch.testing.assert_close(moved, plain[list(order)], rtol=1e-12, atol=1e-12)
    assert abs(plain[:4].sum().item()) < 1e-9


def test_rewards_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        group_advantages([0.0, math.nan], [0, 0])
    with pytest.raises(ValueError, match=r"rewards \(2,\), group_ids \(3,\)"):
        group_advantages([0.0, 1.0], [0, 0, 0])
    assert group_advantages([5.0], [0]).tolist() == [0.0]
    assert group_advantages([], []).tolist() == []
