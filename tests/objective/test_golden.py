"""Every case of the golden file, dispatched by kind, within the tolerances its README argues for.

Two references produced the figures. Where they differ, ours follows the design: float64 moments from a float32
log-ratio (Relax), an ESS clamped to [0, 1] (Relax), no fallback to ESS 1 on overflow (Relax), 1 - e formed in float64
(FeynRL), zero-variance groups at exactly 0 (FeynRL), clean gradients under non-finite masked advantages (neither:
the independent float64 evaluation), a group of one at 0 (Relax without the standard deviation).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from p3o_launch.errors import NonFiniteRatioError
from p3o_launch.runtime.objective import (
    StepContext,
    TokenTerms,
    ess_moments,
    exact_kl,
    expand_to_tokens,
    group_advantages,
    kl_proxy,
    p3o_token_terms,
    ppo_clip_terms,
    step_context,
)

Case = dict[str, Any]
CASES: list[Case] = json.loads((Path(__file__).parents[1] / "data" / "p3o_golden.json").read_text())["cases"]

SUM = {"rtol": 2e-7, "atol": 0.0}
ESS_RELAX = {"rtol": 0.0, "atol": 1e-7}
ESS_FEYNRL = {"rtol": 0.0, "atol": 1e-6}
KL = {"rtol": 1e-6, "atol": 2e-7}
SCORE = {"rtol": 1e-6, "atol": 1e-6}
LOSS_SUM = {"rtol": 1e-6, "atol": 2e-6}
STEP_LOSS = {"rtol": 0.0, "atol": 5e-7}
GRAD = {"rtol": 1e-6, "atol": 1e-6}
GRAD_BF16 = {"rtol": 8e-3, "atol": 2e-2}
EXACT_KL = {"rtol": 1e-6, "atol": 3e-7}
PPO = {"rtol": 5e-7, "atol": 5e-7}
ADVANTAGE = {"rtol": 2e-7, "atol": 2e-7}

OVERFLOW_FALLS_BACK_IN_FEYNRL = {
    "ess_log_ratio_46_f32_square_overflow",
    "ess_log_ratio_90_f32_ratio_overflow",
}


def tensor(block: Case) -> Tensor:
    def decode(value: Any) -> Any:
        return [decode(v) for v in value] if isinstance(value, list) else float(value)

    return torch.tensor(decode(block["data"]), dtype=torch.float64).to(getattr(torch, block["dtype"]))


def close(actual: Any, expected: Any, tolerance: dict[str, float]) -> None:
    expected = tensor(expected) if isinstance(expected, dict) else torch.tensor(expected, dtype=torch.float64)
    actual = actual if isinstance(actual, Tensor) else torch.tensor(actual, dtype=torch.float64)
    torch.testing.assert_close(
        actual.detach().double(), expected.double(), rtol=tolerance["rtol"], atol=tolerance["atol"]
    )


def batch(block: Case) -> tuple[Tensor, Tensor, Tensor]:
    return tensor(block["log_probs"]), tensor(block["behavior_log_probs"]), tensor(block["mask"])


def context_of(cap: float) -> StepContext:
    """The golden file fixes the cap and uses it as ESS, too."""
    return StepContext(ess=cap, cap=cap, valid_tokens=0, ratio_mean=1.0, ratio_std=0.0)


def token_sum(block: Case, context: StepContext, kl_mode: str) -> tuple[Tensor, Tensor, TokenTerms]:
    """Sum of the token losses, its gradient with respect to the log-probs, and the terms."""
    log_probs, behavior, mask = batch(block)
    log_probs.requires_grad_()
    terms = p3o_token_terms(log_probs, behavior, tensor(block["advantages"]), mask, context, kl_mode=kl_mode)
    total = terms.token_loss.sum()
    (gradient,) = torch.autograd.grad(total, log_probs)
    return total, gradient, terms


def check_moments(moments: Tensor, expected: Case) -> None:
    names = ("sum_ratio", "sum_ratio_sq")
    close(moments[:2], [float(expected[name]) for name in names], SUM)
    assert moments[2].item() == float(expected["valid_token_count"])


def check_ess(case: Case) -> None:
    moments = ess_moments(*batch(case["inputs"]))
    relax, feynrl = case["expected"]["relax"], case["expected"]["feynrl"]
    check_moments(moments, relax)
    assert moments[3].item() == relax["invalid_flag"]
    if relax["invalid_flag"]:
        with pytest.raises(NonFiniteRatioError):
            step_context(moments)
        return
    context = step_context(moments)
    close(context.ess, relax["normalized_ess"], ESS_RELAX)
    close(context.cap, relax["adaptive_cap"], ESS_RELAX)
    close(context.ratio_mean, relax["ratio_mean"], SUM)
    close(context.ratio_std, relax["ratio_std"], {"rtol": 2e-7, "atol": 1e-7})
    assert context.valid_tokens == relax["valid_token_count"]
    if case["name"] not in OVERFLOW_FALLS_BACK_IN_FEYNRL:
        bf16 = case["inputs"]["log_probs"]["dtype"] == "bfloat16"
        close(context.ess, feynrl["ess"], {"rtol": 0.0, "atol": 2e-4} if bf16 else ESS_FEYNRL)


def check_stats_multi(case: Case) -> None:
    per_batch = [ess_moments(*batch(block)) for block in case["inputs"]["micro_batches"]]
    relax, feynrl = case["expected"]["relax"], case["expected"]["feynrl"]
    for moments, expected, reference in zip(
        per_batch, relax["per_microbatch"], feynrl["per_microbatch_ess"], strict=True
    ):
        check_moments(moments, expected)
        close(step_context(moments).ess, expected["ess"], ESS_RELAX)
        close(step_context(moments).ess, reference, ESS_FEYNRL)
    total = torch.stack(per_batch).sum(0)
    check_moments(total, relax["total"])
    whole = step_context(total)
    close(whole.ess, relax["whole_step"]["normalized_ess"], ESS_RELAX)
    close(whole.ratio_mean, relax["whole_step"]["ratio_mean"], SUM)
    close(whole.ratio_std, relax["whole_step"]["ratio_std"], SUM)
    close(whole.ess, feynrl["whole_step_ess_by_concatenation"], ESS_FEYNRL)


def check_stats_ranks(case: Case) -> None:
    """The sums alone; ``test_collectives.py`` runs the same case in two processes."""
    per_rank = [[ess_moments(*batch(block)) for block in blocks] for blocks in case["inputs"]["ranks"]]
    relax, feynrl = case["expected"]["relax"], case["expected"]["feynrl"]
    pooled = [torch.stack(same_index).sum(0) for same_index in zip(*per_rank, strict=True)]
    for moments, expected, reference in zip(
        pooled, relax["per_microbatch_index_allreduced"], feynrl["ess_per_microbatch_index_allreduced"], strict=True
    ):
        check_moments(moments, expected)
        close(step_context(moments).ess, expected["ess"], ESS_RELAX)
        close(step_context(moments).ess, reference, ESS_FEYNRL)
    total = torch.stack(pooled).sum(0)
    check_moments(total, relax["whole_step"])
    close(step_context(total).ess, relax["whole_step"]["normalized_ess"], ESS_RELAX)


def check_token_terms(case: Case) -> None:
    inputs, expected = case["inputs"], case["expected"]
    log_probs, behavior, mask = batch(inputs)
    log_probs.requires_grad_()
    terms = p3o_token_terms(
        log_probs,
        behavior,
        tensor(inputs["advantages"]),
        mask,
        context_of(inputs["cap"]),
        kl_mode=inputs["kl_mode"],
        clip_low=inputs["clip_low"],
        clip_high=inputs["clip_high"],
    )
    total = terms.token_loss.sum()
    (gradient,) = torch.autograd.grad(total, log_probs)
    bf16 = log_probs.dtype == torch.bfloat16
    for source in ("relax", "feynrl"):
        tokens = expected[source]["per_token"]
        # FeynRL subtracts in bfloat16: its score is a rounded one there, its KL upcasts first.
        rounded = bf16 and source == "feynrl"
        close(terms.score_loss, tokens["score_loss"], {"rtol": 2e-3, "atol": 0.0} if rounded else SCORE)
        close(terms.behavior_kl, tokens["behavior_kl_proxy"], KL)
        close(terms.clip_hits, tokens["clip_hits"], {"rtol": 0.0, "atol": 0.0})
        close(gradient, expected[source]["grad_log_probs"], GRAD_BF16 if bf16 else GRAD)
    tokens = expected["relax"]["per_token"]
    close(terms.ratio, tokens["ratio"], SUM)
    close(terms.coefficient, tokens["coefficient"], SUM)
    close(terms.adaptive_kl_loss, tokens["adaptive_kl_loss"], SCORE)
    close(terms.cap_hits, tokens["cap_hits"], {"rtol": 0.0, "atol": 0.0})
    close(total, expected["relax"]["total_sum"], LOSS_SUM)
    close(total, expected["feynrl"]["loss_total_sum"], {"rtol": 0.0, "atol": 2e-3} if bf16 else LOSS_SUM)


def check_kl_proxy(case: Case) -> None:
    for kl_mode, expected in case["expected"]["relax"].items():
        log_probs, behavior, _ = batch(case["inputs"])
        log_probs.requires_grad_()
        kl = kl_proxy(log_probs - behavior, kl_mode)
        close(kl, expected["kl"], KL)
        close(torch.autograd.grad(kl.sum(), log_probs)[0], expected["grad_log_probs"], GRAD)


def check_grad(case: Case) -> None:
    relax = case["expected"]["relax"]
    own = case["inputs"]["cap"] == "own ESS of this batch"
    context = step_context(ess_moments(*batch(case["inputs"]))) if own else context_of(case["inputs"]["cap"])
    close(context.ess, relax["ess"], ESS_RELAX)
    for kl_mode in ("proxy", "proxy_safe"):
        total, gradient, _ = token_sum(case["inputs"], context, kl_mode)
        close(total, relax[kl_mode]["total_sum"], LOSS_SUM)
        close(gradient, relax[kl_mode]["grad_log_probs"], GRAD)
    _, gradient, _ = token_sum(case["inputs"], context, "proxy")
    close(gradient, case["expected"]["feynrl"]["grad_log_probs"], GRAD)


def check_padded_loss(case: Case) -> None:
    """FeynRL's value is nan in two of the three; Relax's gradient in one. The float64 evaluation is clean in all."""
    relax, clean = case["expected"]["relax"], case["expected"]["numpy_f64"]
    for kl_mode in ("proxy", "proxy_safe"):
        total, gradient, terms = token_sum(case["inputs"], context_of(case["inputs"]["cap"]), kl_mode)
        close(total, relax["total_sum"], LOSS_SUM)
        close(total, clean["total_sum"], LOSS_SUM)
        close(gradient, clean["grad_log_probs"], GRAD)
    for name in ("ratio", "coefficient", "score_loss", "adaptive_kl_loss", "cap_hits", "clip_hits"):
        close(getattr(terms, name), relax["per_token"][name], SCORE)
    close(step_context(ess_moments(*batch(case["inputs"]))).ess, relax["ess_of_batch"], ESS_RELAX)


def check_exact_kl(case: Case) -> None:
    logits = tensor(case["inputs"]["policy_logits"]).requires_grad_()
    kl = exact_kl(logits, tensor(case["inputs"]["behavior_logits"]), tensor(case["inputs"]["mask"]))
    (gradient,) = torch.autograd.grad(kl.sum(), logits)
    close(kl, case["expected"]["relax"]["exact_kl"], EXACT_KL)
    close(kl.sum(), case["expected"]["relax"]["sum"], LOSS_SUM)
    close(gradient, case["expected"]["relax"]["grad_policy_logits_of_sum"], GRAD)
    close(kl, case["expected"]["numpy_f64"]["exact_kl"], EXACT_KL)
    close(kl, case["expected"]["feynrl"]["expected_k3_under_policy"], EXACT_KL)


def check_step_loss(case: Case) -> None:
    blocks, relax, feynrl = case["inputs"]["micro_batches"], case["expected"]["relax"], case["expected"]["feynrl"]
    per_batch = [ess_moments(*batch(block)) for block in blocks]
    whole = step_context(torch.stack(per_batch).sum(0))
    scopes = [
        ("proxy", [whole] * len(blocks), relax["step_scope"], feynrl["step_scope_by_concatenation"]),
        ("proxy_safe", [whole] * len(blocks), relax["step_scope_proxy_safe"], feynrl["step_scope_by_concatenation"]),
        ("proxy", list(map(step_context, per_batch)), relax["per_microbatch_scope"], feynrl["per_microbatch_scope"]),
    ]
    for kl_mode, contexts, expected, reference in scopes:
        results = [token_sum(block, context, kl_mode) for block, context in zip(blocks, contexts, strict=True)]
        loss = torch.stack([total for total, _, _ in results]).sum() / whole.valid_tokens
        close(loss, expected["loss"], STEP_LOSS)
        close(loss, reference["loss"], STEP_LOSS)
        for i, (_, gradient, _) in enumerate(results):
            close(gradient / whole.valid_tokens, expected["grad_log_probs"][i], GRAD)
            close(gradient / whole.valid_tokens, reference["grad_log_probs"][i], GRAD)
        if "ess" not in expected:
            continue
        assert whole.valid_tokens == expected["valid_tokens"]
        close([context.ess for context in contexts], expected["ess"], ESS_RELAX)
        sums = [float(block["data"]) for block in expected["loss_sum_per_microbatch"]]
        close(torch.stack([total for total, _, _ in results]), sums, LOSS_SUM)
        fractions = {"cap_fraction": "cap_hits", "clip_fraction": "clip_hits"}
        for name, field in fractions.items():
            hits = sum(getattr(terms, field).sum().item() for _, _, terms in results)
            assert hits / whole.valid_tokens == expected[name]


def check_total_loss_aux(case: Case) -> None:
    """Entropy and reference KL are extras of the caller; ``kl_proxy`` serves the reference KL as it is."""
    inputs, expected = case["inputs"], case["expected"]
    context = step_context(ess_moments(*batch(inputs)))
    close(context.ess, expected["relax"]["ess"], ESS_RELAX)
    log_probs, behavior, mask = batch(inputs)
    log_probs.requires_grad_()
    terms = p3o_token_terms(log_probs, behavior, tensor(inputs["advantages"]), mask, context, kl_mode="proxy")
    entropy = torch.where(mask, tensor(inputs["entropies"]), 0.0).sum()
    reference = torch.where(mask, kl_proxy(log_probs - tensor(inputs["ref_log_probs"]), "proxy"), 0.0).sum()
    total = terms.token_loss.sum() - inputs["entropy_coef"] * entropy + inputs["kl_coef"] * reference
    (gradient,) = torch.autograd.grad(total, log_probs)
    for name in ("k3", "low_var_kl"):
        close(total, expected["relax"][name]["total_sum"], LOSS_SUM)
        close(reference, expected["relax"][name]["reference_kl_sum"], LOSS_SUM)
        close(gradient, expected["relax"][name]["grad_log_probs"], GRAD)
    close(total, expected["feynrl"]["total_sum"], LOSS_SUM)
    close(gradient, expected["feynrl"]["grad_log_probs"], GRAD)


def check_group_advantage(case: Case) -> None:
    groups, relax = case["inputs"]["rewards"], case["expected"]["relax"]
    rewards = torch.tensor([reward for group in groups for reward in group], dtype=torch.float32)
    ids = torch.tensor([g for g, group in enumerate(groups) for _ in group])
    shape = (len(groups), len(groups[0]))
    normalised = group_advantages(rewards, ids).reshape(shape)
    centred = group_advantages(rewards, ids, normalize=False).reshape(shape)
    if case["name"] in ("group_adv_zero_variance", "group_adv_zero_variance_float32_mean_rounding"):
        assert normalised.abs().max().item() == centred.abs().max().item() == 0.0
        close(normalised, case["expected"]["feynrl"]["advantage"], {"rtol": 0.0, "atol": 0.0})
        return
    close(centred, relax["advantage_mean_only"], ADVANTAGE)
    if case["name"] == "group_adv_group_of_one":
        assert normalised.abs().max().item() == 0.0
        return
    close(normalised, relax["advantage_mean_std"], ADVANTAGE)
    close(normalised, case["expected"]["numpy_f64"]["mean_std_eps1e_6"], ADVANTAGE)
    lengths = torch.tensor([n for group in case["inputs"]["response_lengths"] for n in group])
    mask = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
    tokens = expand_to_tokens(normalised.reshape(-1), mask)
    for row, length, expected in zip(tokens, lengths.tolist(), relax["token_advantages"], strict=False):
        close(row[:length], expected, ADVANTAGE)
        assert row[length:].abs().sum().item() == 0.0


def check_ppo_clip(case: Case) -> None:
    inputs, expected = case["inputs"], case["expected"]
    log_probs = tensor(inputs["log_probs"]).requires_grad_()
    terms = ppo_clip_terms(
        log_probs,
        tensor(inputs["old_log_probs"]),
        tensor(inputs["advantages"]),
        tensor(inputs["mask"]),
        inputs["eps_clip_low"],
        inputs["eps_clip_high"],
        inputs.get("dual_clip_c"),
    )
    (gradient,) = torch.autograd.grad(terms.loss.sum(), log_probs)
    references = [expected["relax"], *expected.get("feynrl", {}).values(), expected["numpy_f64"]]
    for reference in references:
        close(terms.loss, reference["pg_loss_per_token"], PPO)
        close(gradient, reference["grad_log_probs_of_sum"], GRAD)
        close(terms.loss.sum(), reference["loss_sum"], LOSS_SUM)
    # FeynRL counts every ratio outside the interval; ours is the sign-aware count.
    close(terms.clip_hits, expected["relax"]["clip_hits_sign_aware"], {"rtol": 0.0, "atol": 0.0})


CHECKS: dict[str, Callable[[Case], None]] = {
    "ess": check_ess,
    "stats_multi": check_stats_multi,
    "stats_ranks": check_stats_ranks,
    "token_terms": check_token_terms,
    "kl_proxy": check_kl_proxy,
    "grad": check_grad,
    "padded_loss": check_padded_loss,
    "exact_kl": check_exact_kl,
    "step_loss": check_step_loss,
    "total_loss_aux": check_total_loss_aux,
    "group_advantage": check_group_advantage,
    "ppo_clip": check_ppo_clip,
}


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_golden_case(case: Case) -> None:
    CHECKS[case["kind"]](case)


def test_all_forty_cases_are_here() -> None:
    assert len({case["name"] for case in CASES}) == 40
