"""Whole optimizer steps from recorded log-probs, against the golden figures, in both ESS scopes and on real ranks.

The model is a table: one parameter per token, which is that token's log-prob. So a gradient of the step is the loss's
gradient with respect to the log-probs, which the golden file has.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from p3o_launch.schema import Optimizer
from tests.mcore.ranks import RankEnv, run_ranks
from tests.mcore.tiny import FLOAT32, parallel, tiny_model

Case = dict[str, Any]
GOLDEN = Path(__file__).parents[1] / "data" / "p3o_golden.json"
# Argued for in the golden figures' own notes, as in tests/objective/test_golden.py.
ESS, LOSS, GRADIENT = 1e-7, 5e-7, 1e-6


def golden(name: str) -> Case:
    return next(case for case in json.loads(GOLDEN.read_text())["cases"] if case["name"] == name)


def _table(blocks: list[Case]) -> Any:
    """A Megatron module whose logits over two words give word 0 the log-probs of block ``input_ids[0, 0]``."""
    from megatron.core.enums import ModelType
    from megatron.core.transformer.module import MegatronModule

    from p3o_launch.runtime.mcore.config import transformer_config

    class LogProbTable(MegatronModule):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model_type = ModelType.encoder_or_decoder
            tables = (torch.tensor(block["log_probs"]["data"], dtype=torch.float32) for block in blocks)
            self.tables = torch.nn.ParameterList(tables)

        def forward(self, input_ids: Any, position_ids: Any, attention_mask: Any) -> Any:
            del position_ids, attention_mask
            log_probs = self.tables[int(input_ids[0, 0])]
            return torch.stack([log_probs, torch.log(-torch.expm1(log_probs))], dim=-1)

        def set_input_tensor(self, _: Any) -> None:
            """Only pipeline stages after the first have one."""

    return LogProbTable(transformer_config(tiny_model(), parallel(), FLOAT32, "cpu"))


def _micro_batch(block: Case, index: int) -> Any:
    from p3o_launch.runtime.mcore.batch import MicroBatch

    mask = torch.tensor(block["mask"]["data"]).bool()
    advantages = block.get("advantages")
    return MicroBatch(
        tokens=torch.full(mask.shape, index),
        position_ids=torch.arange(mask.shape[1]).expand(mask.shape),
        targets=torch.zeros(mask.shape, dtype=torch.int64),
        mask=mask,
        behavior_log_probs=torch.tensor(block["behavior_log_probs"]["data"], dtype=torch.float32),
        advantages=torch.tensor(advantages["data"]) if advantages else torch.ones(mask.shape),
    )


def _step(env: RankEnv, per_rank: list[list[Case]], scope: str, kl_mode: str) -> tuple[dict[str, float], list[Any]]:
    """Means of the step and the gradient of every block, ranks one after the other."""
    from p3o_launch.runtime.mcore.cpu_backend import device_backend
    from p3o_launch.runtime.mcore.groups import ParallelSizes, init_distributed
    from p3o_launch.runtime.mcore.model import wrap_ddp
    from p3o_launch.runtime.mcore.optimizer import build_optimizer
    from p3o_launch.runtime.mcore.step import Objective, PolicyStep

    method = env.new_init_method()
    groups = init_distributed(
        ParallelSizes(), rank=env.rank, world_size=env.world_size, init_method=method, timeout_s=60
    )
    try:
        blocks = [block for rank in per_rank for block in rank]
        chunks = wrap_ddp([_table(blocks)], parallel(), FLOAT32, groups)
        with device_backend("cpu"):
            optimizer = build_optimizer(chunks, Optimizer(lr=0.0, clip_grad=0.0), FLOAT32, parallel(), "cpu")
        first = sum(map(len, per_rank[: env.rank]))
        micro_batches = [_micro_batch(block, first + i) for i, block in enumerate(per_rank[env.rank])]
        objective = Objective("p3o", ess_scope=scope, kl_mode=kl_mode)  # type: ignore[arg-type]
        outcome = PolicyStep(chunks, optimizer, groups, objective).run(micro_batches, step=1)
        return outcome.means, [parameter.main_grad.clone() for parameter in chunks[0].parameters()]
    finally:
        groups.destroy()


def _close(ours: torch.Tensor, block: Case) -> None:
    expected = torch.tensor(block["data"], dtype=torch.float32)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=GRADIENT)


@pytest.mark.parametrize("kl_mode", ["proxy", "proxy_safe"])
def test_step_scope_gives_the_golden_step_on_one_rank_and_on_three(kl_mode: str) -> None:
    case = golden("step_loss_three_microbatches")
    blocks = case["inputs"]["micro_batches"]
    expected = case["expected"]["relax"]["step_scope"]
    for per_rank in ([blocks], [[block] for block in blocks]):
        for means, gradients in run_ranks(_step, len(per_rank), per_rank, "step", kl_mode):
            assert means["tokens"] == expected["valid_tokens"] == 24
            assert means["replay_error"] == 0.0
            assert means["loss"] == pytest.approx(expected["loss"]["data"], abs=LOSS)
            for gradient, block in zip(gradients, expected["grad_log_probs"], strict=True):
                _close(gradient, block)


def test_micro_batch_scope_gives_the_golden_step() -> None:
    case = golden("step_loss_three_microbatches")
    blocks, expected = case["inputs"]["micro_batches"], case["expected"]["relax"]["per_microbatch_scope"]
    means, gradients = run_ranks(_step, 1, [blocks], "micro_batch", "proxy")[0]
    assert means["loss"] == pytest.approx(expected["loss"]["data"], abs=LOSS)
    weights = [sum(map(sum, block["mask"]["data"])) for block in blocks]
    ess = sum(e * n for e, n in zip(expected["ess"], weights, strict=True)) / sum(weights)
    assert means["ess"] == pytest.approx(ess, abs=ESS)
    for gradient, block in zip(gradients, expected["grad_log_probs"], strict=True):
        _close(gradient, block)


def _caps(blocks: list[Case], gradients: list[torch.Tensor], tokens: float, smallest: float) -> list[float]:
    """The cap each block's gradient was made with, from its capped tokens (A = 1, ratio r above ``smallest``).

    N g = -c + (1 - c) (1 - 1/r), solved for c.
    """
    caps = []
    for block, gradient in zip(blocks, gradients, strict=True):
        p, b = (torch.tensor(block[name]["data"], dtype=torch.float64) for name in ("log_probs", "behavior_log_probs"))
        capped = torch.tensor(block["mask"]["data"]).bool() & ((p - b).exp() > smallest)
        slope = 1.0 - (b - p).exp()[capped]
        solved = (slope - tokens * gradient.double()[capped]) / (1.0 + slope)
        assert len(solved) > 0
        assert float(solved.max() - solved.min()) < 1e-5
        caps.append(float(solved.mean()))
    return caps


def _per_index(case: Case) -> list[float]:
    pooled = [entry["ess"] for entry in case["expected"]["relax"]["per_microbatch_index_allreduced"]]
    return [*pooled, *pooled]  # blocks come rank by rank, two micro-batches each


def _whole(case: Case) -> list[float]:
    return [case["expected"]["relax"]["whole_step"]["normalized_ess"]] * 4


@pytest.mark.parametrize(("scope", "expected"), [("micro_batch", _per_index), ("step", _whole)])
def test_each_micro_batch_gets_the_golden_cap_of_its_scope(scope: str, expected: Callable[[Case], list[float]]) -> None:
    """``micro_batch``: pooled over the two DP ranks at the same micro-batch index, and not over the step."""
    case = golden("stats_two_ranks_two_microbatches")
    per_rank = case["inputs"]["ranks"]
    blocks = [block for rank in per_rank for block in rank]
    valid = [sum(map(sum, block["mask"]["data"])) for block in blocks]
    caps = expected(case)
    for means, gradients in run_ranks(_step, 2, per_rank, scope, "proxy_safe"):
        assert means["tokens"] == sum(valid) == 23
        assert means["ess"] == pytest.approx(sum(c * n for c, n in zip(caps, valid, strict=True)) / 23, abs=ESS)
        # A cap read off float32 gradients is good to their rounding, not to that of the ESS itself.
        assert _caps(blocks, gradients, 23.0, max(caps)) == pytest.approx(caps, abs=2e-6)
