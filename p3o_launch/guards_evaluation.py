"""4xx: evaluation, and samples longer than the model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from p3o_launch.diagnostics import Finding, Severity
from p3o_launch.guard_tools import named, up_to
from p3o_launch.guards import GuardContext, guard

if TYPE_CHECKING:
    from p3o_launch.schema import Preset


@guard(
    "P3O411",
    "bad-evaluation-sampling",
    why="Evaluation runs minutes into a run; sampling parameters that no engine accepts stop it there.",
    fix="evaluation.temperature 0 or above, top_p above 0 and at most 1, top_k -1 (off) or above 0.",
    source="argument checks of vLLM's and SGLang's sampling parameters",
    allows="Greedy evaluation (temperature 0) and any truncation; a group that no evaluation uses.",
    ignorable=False,
)
def bad_evaluation_sampling(context: GuardContext) -> Iterator[Finding]:
    preset, evaluation = context.preset, context.preset.evaluation
    if evaluation.interval is None:
        return
    if not math.isfinite(evaluation.temperature) or evaluation.temperature < 0:
        path = "evaluation.temperature"
        yield Finding(path, f"{named(preset, path)} is not a finite number of 0 or above", "use 1.0, or 0 for greedy")
    if not 0 < evaluation.top_p <= 1:
        path = "evaluation.top_p"
        yield Finding(path, f"{named(preset, path)} is not above 0 and at most 1", "use 1.0 for no truncation")
    if evaluation.top_k < -1:
        path = "evaluation.top_k"
        yield Finding(path, f"{named(preset, path)} is neither -1 (off) nor a number of tokens", "use -1")


@guard(
    "P3O414",
    "evaluation-without-prompts",
    why="An interval asks for evaluations, and there is nothing to evaluate on: the run stops before it starts.",
    fix="Set data.eval_prompt_data, or evaluation.interval: null.",
    source="design rule of p3o-launch: what a preset asks for is done or refused",
    allows="No interval; evaluation prompts that no interval uses.",
)
def evaluation_without_prompts(context: GuardContext) -> Iterator[Finding]:
    preset = context.preset
    if preset.evaluation.interval is not None and preset.data.eval_prompt_data is None:
        yield Finding(
            "evaluation.interval",
            f"{named(preset, 'evaluation.interval')} asks for evaluations, but data.eval_prompt_data is absent",
            "set data.eval_prompt_data, or evaluation.interval: null",
            related=("data.eval_prompt_data",),
        )


@guard(
    "P3O415",
    "evaluation-never-due",
    Severity.WARNING,
    why="The run ends before the first evaluation is due. Its record holds none, and nothing says so.",
    fix="Use an interval of at most batch.num_rollout, or evaluate before training.",
    source="design rule of p3o-launch: what a preset asks for is done or refused",
    allows="An evaluation before training; an interval equal to the number of rollouts.",
    ignorable=True,
)
def evaluation_never_due(context: GuardContext) -> Iterator[Finding]:
    preset, interval = context.preset, context.preset.evaluation.interval
    if interval is None or preset.data.eval_prompt_data is None or preset.evaluation.before_train:
        return
    if interval > preset.batch.num_rollout:
        yield Finding(
            "evaluation.interval",
            f"{named(preset, 'evaluation.interval')} is above {named(preset, 'batch.num_rollout')}: the run ends "
            "before the first evaluation",
            f"use {up_to(preset.batch.num_rollout)}, or set evaluation.before_train: true",
            related=("batch.num_rollout", "evaluation.before_train"),
        )


@guard(
    "P3O412",
    "sample-longer-than-model",
    why="A prompt and its response share the model's positions. Past the last one the rotary angles were never "
    "trained, and engines stop at the first prompt that leaves too little room.",
    fix="Lower rollout.max_prompt_len or max_response_len, of rollout or evaluation, or correct "
    "model.max_position_embeddings.",
    source="max_position_embeddings of the checkpoint's config.json; max_model_len of vLLM",
    allows="Lengths that fill the positions exactly.",
    ignorable=True,
)
def sample_longer_than_model(context: GuardContext) -> Iterator[Finding]:
    preset, rollout = context.preset, context.preset.rollout
    positions = preset.model.max_position_embeddings
    if context.topology.max_tokens_per_sample <= positions:
        yield from _evaluation_too_long(preset)
        return
    room = positions - rollout.max_response_len
    yield Finding(
        "rollout.max_prompt_len" if room > 0 else "rollout.max_response_len",
        f"{named(preset, 'rollout.max_prompt_len')} + {named(preset, 'rollout.max_response_len')} = "
        f"{context.topology.max_tokens_per_sample} tokens exceed {named(preset, 'model.max_position_embeddings')}",
        _shorter(positions, rollout.max_prompt_len, rollout.max_response_len),
        related=("rollout.max_prompt_len", "rollout.max_response_len", "model.max_position_embeddings"),
    )


def _evaluation_too_long(preset: Preset) -> Iterator[Finding]:
    """Absent, evaluation's length is the rollout's, which fits."""
    response, prompt = preset.evaluation.max_response_len, preset.rollout.max_prompt_len
    positions = preset.model.max_position_embeddings
    if preset.evaluation.interval is None or response is None or prompt + response <= positions:
        return
    yield Finding(
        "evaluation.max_response_len",
        f"{named(preset, 'rollout.max_prompt_len')} + {named(preset, 'evaluation.max_response_len')} = "
        f"{prompt + response} tokens exceed {named(preset, 'model.max_position_embeddings')}",
        f"use evaluation.max_response_len {up_to(positions - prompt)}",
        related=("rollout.max_prompt_len", "evaluation.max_response_len", "model.max_position_embeddings"),
    )


def length_is_refused(context: GuardContext) -> bool:
    """Samples are too long for the model already: what else that length would ask for is moot."""
    return "P3O412" not in context.preset.ignore and any(sample_longer_than_model(context))


def _shorter(positions: int, prompt: int, response: int) -> str:
    """Lengths that fit together: one is kept when it leaves room for the other."""
    if response < positions:
        return f"use rollout.max_prompt_len {up_to(positions - response)}"
    if prompt < positions:
        return f"use rollout.max_response_len {up_to(positions - prompt)}"
    half = positions // 2
    if not half:
        return "correct model.max_position_embeddings"
    return f"set rollout.max_prompt_len: {half} and rollout.max_response_len: {positions - half}"
