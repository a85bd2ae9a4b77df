"""Token log-probs and entropies against log_softmax, whole and with the vocabulary split over two ranks."""

from typing import Any

import pytest
import torch

from p3o_launch.runtime.mcore.logprobs import local_targets, token_entropy, token_log_probs
from tests.mcore.ranks import RankEnv, run_ranks

SHAPE = (3, 5, 24)  # b, s, v


def _case(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    logits = 4.0 * torch.randn(SHAPE, generator=generator, dtype=torch.float64)
    logits[0, 0, 3] = 300.0  # far beyond what exp can hold
    targets = torch.randint(0, SHAPE[-1], SHAPE[:-1], generator=generator)
    weights = torch.randn(SHAPE[:-1], generator=generator, dtype=torch.float64)
    return logits.to(dtype), targets, weights.to(dtype)


def _reference(
    logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor, temperature: float
) -> dict[str, torch.Tensor]:
    """Everything in float64, by torch's own functions."""
    leaf = logits.detach().clone().double().requires_grad_()
    log_probs = torch.log_softmax(leaf / temperature, -1)
    chosen = log_probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    (chosen * weights.double()).sum().backward()
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    assert leaf.grad is not None
    return {"log_probs": chosen.detach(), "gradient": leaf.grad, "entropy": entropy.detach()}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 5e-5), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_whole_vocabulary_equals_log_softmax(dtype: torch.dtype, tolerance: float, temperature: float) -> None:
    logits, targets, weights = _case(dtype)
    wanted = _reference(logits, targets, weights, temperature)
    leaf = logits.clone().requires_grad_()
    found = token_log_probs(leaf, targets, None, temperature)
    working = torch.float64 if dtype is torch.float64 else torch.float32
    assert found.dtype is working
    (found * weights.to(working)).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.dtype is dtype
    # float16-sized logits are exact inputs: only their gradient is rounded.
    exact = tolerance if dtype is not torch.bfloat16 else 5e-5
    torch.testing.assert_close(found.double().detach(), wanted["log_probs"], rtol=exact, atol=exact)
    torch.testing.assert_close(leaf.grad.double(), wanted["gradient"], rtol=tolerance, atol=tolerance)
    entropy = token_entropy(logits, None, temperature)
    torch.testing.assert_close(entropy.double(), wanted["entropy"], rtol=exact, atol=exact)
    assert torch.equal(logits, _case(dtype)[0]), "the logits must not be overwritten"


def test_a_second_backward_and_unequal_shapes_are_refused() -> None:
    logits, targets, _ = _case(torch.float32)
    leaf = logits.requires_grad_()
    total = token_log_probs(leaf, targets, None).sum()
    total.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="only once"):
        total.backward()
    with pytest.raises(ValueError, match="do not agree"):
        token_log_probs(leaf, targets[:, :-1], None)


def test_entropy_of_impossible_words_is_finite() -> None:
    logits = torch.tensor([[[0.0, 0.0, -torch.inf, -torch.inf]]])
    assert token_entropy(logits, None).item() == pytest.approx(0.6931472)


def test_each_target_belongs_to_exactly_one_rank() -> None:
    targets = torch.tensor([0, 3, 4, 7])
    low, high = local_targets(targets, 0, 4), local_targets(targets, 4, 4)
    assert low[1].tolist() == [True, True, False, False]
    assert high[1].tolist() == [False, False, True, True]
    assert high[0].tolist() == [0, 0, 0, 3]


def _split_vocabulary(env: RankEnv, dtype: torch.dtype) -> dict[str, Any]:
    from p3o_launch.runtime.mcore.compat import cross_entropy
    from p3o_launch.runtime.mcore.groups import ParallelSizes, init_distributed

    groups = init_distributed(
        ParallelSizes(tp=2), rank=env.rank, world_size=2, init_method=env.new_init_method(), timeout_s=60
    )
    logits, targets, weights = _case(dtype)
    mine = logits.chunk(2, -1)[env.rank].contiguous()
    leaf = mine.clone().requires_grad_()
    found = token_log_probs(leaf, targets, groups.tp)
    (found * weights).sum().backward()

    # Megatron wants [s, b, v/tp] and works in float32.
    other = mine.float().transpose(0, 1).contiguous().requires_grad_()
    theirs = -cross_entropy(other.clone(), targets.T.contiguous(), groups.tp).T
    (theirs * weights.float()).sum().backward()
    result = {
        "log_probs": found.detach(),
        "gradient": leaf.grad,
        "entropy": token_entropy(mine, groups.tp),
        "megatron": theirs.detach(),
        "megatron_gradient": other.grad.transpose(0, 1),
    }
    groups.destroy()
    return result


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 5e-5)])
def test_a_split_vocabulary_equals_the_whole_and_megatrons_own(dtype: torch.dtype, tolerance: float) -> None:
    wanted = _reference(*_case(dtype), temperature=1.0)
    ranks = run_ranks(_split_vocabulary, 2, dtype)
    assert torch.equal(ranks[0]["log_probs"], ranks[1]["log_probs"])
    gradient = torch.cat([rank["gradient"] for rank in ranks], -1).double()
    torch.testing.assert_close(gradient, wanted["gradient"], rtol=tolerance, atol=tolerance)
    for rank in ranks:
        for name in ("log_probs", "entropy"):
            torch.testing.assert_close(rank[name].double(), wanted[name], rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(rank["log_probs"].float(), rank["megatron"], rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(rank["gradient"].float(), rank["megatron_gradient"], rtol=2e-6, atol=2e-6)
