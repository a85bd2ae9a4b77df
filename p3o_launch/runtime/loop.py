"""The training loop: generate -> score -> advantages -> optimizer steps -> sync -> evaluate -> checkpoint.

Against protocols only: no torch, ray or megatron, so that order, ages and cadences can be tested with small fakes.

A snapshot is named after the first rollout it serves. With a refresh every k rollouts, rollout r is sampled by snapshot
``k * (r // k)``, so its age is ``r % k``: a refresh at the boundary after rollout r counts from rollout r + 1 on.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from p3o_launch.errors import NonFiniteRatioError, RunInterrupted
from p3o_launch.runtime.plan import RunPlan
from p3o_launch.runtime.types import Completion, GenerationRequest, Prompt, Sample, SamplingParams

Row = dict[str, float]


class Ranks(Protocol):
    """All ranks of the run behind one face; every call is made on each of them and returns rank 0's answer."""

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> list[Completion]:
        """Sample from the rollout policy, the snapshot named last."""
        ...

    def update_rollout_weights(self, snapshot_id: int) -> None:
        """Make the trainer's present weights the rollout policy."""
        ...

    def group_advantages(self, rewards: Sequence[float], group_ids: Sequence[int]) -> list[float]:
        """Group-relative advantages, one per reward. On a rank because the formula is a tensor function."""
        ...

    def train_step(self, samples: Sequence[Sample]) -> Row:
        """One optimizer step over the whole list."""
        ...

    def save_checkpoint(self, directory: Path, extra: Mapping[str, Any]) -> None:
        """Write a checkpoint that is complete or absent, with ``extra`` in it."""
        ...


class PromptSource(Protocol):
    """Prompts in an order that depends on the seed and the rollout id alone."""

    def batch(self, rollout_id: int, count: int) -> Sequence[Prompt]: ...

    def __len__(self) -> int: ...


class Sink:
    """Receives what the loop produces. The default of every event is to ignore it."""

    def on_resume(self, state: LoopState) -> None:
        """The run goes on from ``state``: what was written about later steps did not happen."""

    def on_rollout(self, rollout_id: int, records: Sequence[Mapping[str, Any]]) -> None:
        """``records``: one per sample, plain JSON values."""

    def on_step(self, step: int, rollout_id: int, row: Row) -> None:
        """After optimizer step ``step``, counted from 1."""

    def on_evaluation(self, step: int, rollout_id: int, row: Row) -> None:
        """``rollout_id``: rollouts done when the evaluation ran."""

    def on_checkpoint(self, directory: Path, state: LoopState) -> None:
        """A complete checkpoint lies in ``directory``."""

    def close(self) -> None:
        """Release files. May be called twice."""


@dataclass(frozen=True, slots=True)
class LoopState:
    """Where the loop stands between two rollouts; goes into every checkpoint.

    ``next_rollout``: rollouts done. ``optimizer_step``: steps done. ``snapshot_id``: rollout at which the present
    rollout policy was taken; ``snapshot_step``: optimizer steps it had seen.
    """

    next_rollout: int = 0
    optimizer_step: int = 0
    snapshot_id: int = 0
    snapshot_step: int = 0


@dataclass(frozen=True, slots=True)
class Texts:
    """What turns tokens into rewards. ``decode``: response ids -> text. ``score``: (text, label) -> reward."""

    decode: Callable[[Sequence[int]], str]
    score: Callable[[str, str], float]


@dataclass(frozen=True, slots=True)
class Scored:
    """Completions of one batch of prompts with their rewards; ``group_ids[i]`` is the prompt's place in the batch."""

    prompts: list[Prompt]
    completions: list[Completion]
    responses: list[str]
    rewards: list[float]
    group_ids: list[int]
    seconds: float

    @property
    def tokens(self) -> int:
        """Response tokens."""
        return sum(len(c.response_ids) for c in self.completions)


@dataclass
class Loop:
    """One run of the loop. ``should_stop`` is asked between any two calls on the ranks; True raises RunInterrupted.

    Evaluation samples from the rollout policy, so under periodic sync or rounded weights it judges the policy that
    would be served; ``eval/policy_snapshot_step`` says which one that was.
    """

    plan: RunPlan
    ranks: Ranks
    prompts: PromptSource
    texts: Texts
    sinks: Sequence[Sink] = ()
    eval_prompts: PromptSource | None = None
    should_stop: Callable[[], bool] = lambda: False
    clock: Callable[[], float] = time.monotonic
    state: LoopState = LoopState()

    def run(self) -> LoopState:
        """Train until ``batch.num_rollout`` rollouts are done; the state then. Errors of the ranks pass through."""
        preset = self.plan.preset
        sync_s = 0.0
        if self.state == LoopState():  # a resumed engine has its snapshot from the checkpoint
            sync_s = self._timed(lambda: self.ranks.update_rollout_weights(0))
            if preset.evaluation.before_train:
                self._evaluate()
        while self.state.next_rollout < preset.batch.num_rollout:
            self._rollout_and_steps(sync_s)
            done = self.state.next_rollout
            sync_s = 0.0
            if done % preset.rollout.update_weights_interval == 0:
                sync_s = self._sync()
            if preset.evaluation.interval and done % preset.evaluation.interval == 0:
                self._evaluate()
            if self._checkpoint_due(done):
                self._save()
        return self.state

    def _rollout_and_steps(self, sync_s: float) -> None:
        started = self.clock()
        rollout_id = self.state.next_rollout
        scored = self._generate_and_score(self.prompts, self.plan.preset.batch.rollout_batch_size, "train")
        self._check_stop()
        advantages = self.ranks.group_advantages(scored.rewards, scored.group_ids)
        samples = self._samples(scored, advantages)
        for sink in self.sinks:
            sink.on_rollout(rollout_id, rollout_records(rollout_id, scored, samples))
        # A rollout's own figures stand on the line of its first step: sums over lines then count nothing twice.
        extra = rollout_metrics(scored) | {"perf/rollout_s": scored.seconds, "perf/weight_sync_s": sync_s}
        size = self.plan.preset.batch.global_batch_size
        for start in range(0, len(samples), size):
            self._step(rollout_id, samples[start : start + size], extra, started)
            extra, started = {}, self.clock()
        self.state = replace(self.state, next_rollout=rollout_id + 1)

    def _generate_and_score(self, source: PromptSource, count: int, stream: str) -> Scored:
        started = self.clock()
        self._check_stop()
        preset = self.plan.preset
        rollout_id = self.state.next_rollout
        training = stream == "train"
        per_prompt = preset.batch.n_samples_per_prompt if training else preset.evaluation.n_samples_per_prompt
        prompts = list(source.batch(rollout_id if training else 0, count))
        repeated = [(group, prompt) for group, prompt in enumerate(prompts) for _ in range(per_prompt)]
        requests = []
        for index, (group, prompt) in enumerate(repeated):
            own = index if preset.rollout.per_sample_seed else group
            seed = request_seed(self.plan.rollout_seed, stream, rollout_id, own)
            requests.append(GenerationRequest(request_id=index, prompt_ids=prompt.token_ids, seed=seed))
        sampling = training_sampling(self.plan) if training else evaluation_sampling(self.plan)
        completions = self.ranks.generate(requests, sampling)
        responses = [self.texts.decode(c.response_ids) for c in completions]
        rewards = [self.texts.score(text, prompt.label) for text, (_, prompt) in zip(responses, repeated, strict=True)]
        group_ids = [group for group, _ in repeated]
        return Scored(
            [prompt for _, prompt in repeated], completions, responses, rewards, group_ids, self.clock() - started
        )

    def _samples(self, scored: Scored, advantages: Sequence[float]) -> list[Sample]:
        first_id = self.state.next_rollout * len(scored.completions)
        return [
            Sample(
                sample_id=first_id + index,
                group_id=scored.group_ids[index],
                prompt_ids=scored.prompts[index].token_ids,
                response_ids=completion.response_ids,
                behavior_log_probs=completion.log_probs,
                reward=scored.rewards[index],
                advantage=advantage,
                truncated=completion.truncated,
                snapshot_id=self.state.snapshot_id,
            )
            for index, (completion, advantage) in enumerate(zip(scored.completions, advantages, strict=True))
        ]

    def _step(self, rollout_id: int, samples: list[Sample], extra: Row, started: float) -> None:
        self._check_stop()
        step = self.state.optimizer_step + 1
        try:
            metrics = self.ranks.train_step(samples)
        except NonFiniteRatioError as error:
            error.step = step if error.step is None else error.step
            raise
        elapsed = self.clock() - started
        tokens = sum(len(s.response_ids) for s in samples)
        row: Row = dict(metrics) | extra
        row |= {
            "train/actor_optimizer_step": step,
            "train/rollout_policy_snapshot_step": self.state.snapshot_step,
            "train/p3o/rollout_policy_age_rollouts": rollout_id - samples[0].snapshot_id,
            "perf/tokens_per_s": tokens / elapsed if elapsed > 0 else 0.0,
        }
        self.state = replace(self.state, optimizer_step=step)
        for sink in self.sinks:
            sink.on_step(step, rollout_id, row)

    def _sync(self) -> float:
        self._check_stop()
        snapshot_id = self.state.next_rollout
        seconds = self._timed(lambda: self.ranks.update_rollout_weights(snapshot_id))
        self.state = replace(self.state, snapshot_id=snapshot_id, snapshot_step=self.state.optimizer_step)
        return seconds

    def _evaluate(self) -> None:
        evaluation = self.plan.preset.evaluation
        if self.eval_prompts is None or evaluation.interval is None:
            return
        count = min(len(self.eval_prompts), evaluation.max_prompts or len(self.eval_prompts))
        scored = self._generate_and_score(self.eval_prompts, count, "eval")
        row = {f"eval/{name.removeprefix('rollout/')}": value for name, value in rollout_metrics(scored).items()}
        row |= {"eval/seconds": scored.seconds, "eval/policy_snapshot_step": self.state.snapshot_step}
        for sink in self.sinks:
            sink.on_evaluation(self.state.optimizer_step, self.state.next_rollout, row)

    def _checkpoint_due(self, done: int) -> bool:
        checkpoint = self.plan.preset.checkpoint
        if done == self.plan.preset.batch.num_rollout and checkpoint.save_final:
            return True
        return checkpoint.save_interval is not None and done % checkpoint.save_interval == 0

    def _save(self) -> None:
        self._check_stop()
        directory = checkpoint_dir(self.plan, self.state.next_rollout)
        self.ranks.save_checkpoint(directory, asdict(self.state))
        for sink in self.sinks:
            sink.on_checkpoint(directory, self.state)

    def _timed(self, call: Callable[[], None]) -> float:
        started = self.clock()
        call()
        return self.clock() - started

    def _check_stop(self) -> None:
        if self.should_stop():
            raise RunInterrupted("the run was asked to stop")


def checkpoint_dir(plan: RunPlan, rollouts_done: int) -> Path:
    """Directory of the checkpoint taken after ``rollouts_done`` rollouts; sorts by name as by age."""
    return plan.checkpoints_dir / f"rollout_{rollouts_done:06d}"


def training_sampling(plan: RunPlan) -> SamplingParams:
    """Training rollouts sample the untruncated distribution, so that its log-probs are the ones recorded."""
    rollout = plan.preset.rollout
    return SamplingParams(
        temperature=rollout.temperature,
        top_p=1.0 if rollout.top_p is None else rollout.top_p,
        top_k=rollout.top_k or -1,  # absent and 0 mean off, as -1 does
        max_new_tokens=rollout.max_response_len,
    )


def evaluation_sampling(plan: RunPlan) -> SamplingParams:
    """Evaluation may truncate."""
    evaluation = plan.preset.evaluation
    return SamplingParams(
        temperature=evaluation.temperature,
        top_p=evaluation.top_p,
        top_k=evaluation.top_k or -1,
        max_new_tokens=evaluation.max_response_len or plan.preset.rollout.max_response_len,
    )


def request_seed(rollout_seed: int, stream: str, rollout_id: int, index: int) -> int:
    """Seed of one request in [0, 2^63): a hash, so that neighbouring rollouts and runs share no stream."""
    text = f"{rollout_seed}/{stream}/{rollout_id}/{index}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def rollout_metrics(scored: Scored) -> Row:
    """Rewards, lengths [tokens] and groups whose rewards are all equal (their advantages are 0)."""
    groups: dict[int, set[float]] = {}
    for group, reward in zip(scored.group_ids, scored.rewards, strict=True):
        groups.setdefault(group, set()).add(reward)
    count = len(scored.completions)
    return {
        "rollout/reward_mean": statistics.fmean(scored.rewards),
        "rollout/reward_std": statistics.pstdev(scored.rewards),
        "rollout/response_length_mean": scored.tokens / count,
        "rollout/truncated_fraction": sum(c.truncated for c in scored.completions) / count,
        "rollout/zero_variance_groups": sum(len(rewards) == 1 for rewards in groups.values()),
    }


def rollout_records(rollout_id: int, scored: Scored, samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """One JSON object per sample, for the rollout log."""
    return [
        {
            "rollout_id": rollout_id,
            "sample_id": sample.sample_id,
            "group_id": sample.group_id,
            "prompt_index": prompt.index,
            "prompt": prompt.text,
            "label": prompt.label,
            "response": response,
            "response_length": len(sample.response_ids),
            "truncated": sample.truncated,
            "reward": sample.reward,
            "advantage": sample.advantage,
            "behavior_log_prob_sum": sum(sample.behavior_log_probs),
            "snapshot_id": sample.snapshot_id,
        }
        for sample, prompt, response in zip(samples, scored.prompts, scored.responses, strict=True)
    ]
