"""``--as p3o``: what a switch to P3O with whole-step ESS would meet beyond the guards."""

from __future__ import annotations

from collections.abc import Iterator

from p3o_launch.diagnostics import LocatedFinding
from p3o_launch.importers.facts import Facts
from p3o_launch.rules_import import import_finding

_STATELESS = ("tensorwise", "blockwise", "mxfp8")


def notes(facts: Facts) -> Iterator[LocatedFinding]:
    """Findings of the importer. The first says that there is nothing to switch, and is the only one then."""
    kind = facts.extra.get("kind", "rl")
    if kind != "rl":
        yield import_finding(
            "P3O020", facts.start, f"this is {_KINDS.get(kind, kind)}: there are no rollouts to switch P3O on for"
        )
        return
    yield from _undecided(facts)
    yield from _elsewhere(facts)
    yield from _for_the_record(facts)


_KINDS = {"sft": "supervised fine-tuning", "pretrain": "pre-training"}


def _undecided(facts: Facts) -> Iterator[LocatedFinding]:
    names = ("model.attention_dropout", "model.hidden_dropout")
    hidden = [path for path in names if path in facts.unknown]
    if hidden:
        source = facts.extra.get("dropout_source", "the model configuration")
        kinds = " and ".join(path.removeprefix("model.").removesuffix("_dropout") for path in hidden)
        verb = "comes" if len(hidden) == 1 else "come"
        yield import_finding(
            "P3O021",
            facts.place(*hidden),
            f"{kinds} dropout {verb} from {source}, which was not read: P3O's two passes need it at 0",
            "look it up, or set it to 0 where it is decided",
            hidden[0],
        )
    forced = facts.extra.get("ratio_forced")
    if forced:
        cause, place = forced
        yield import_finding(
            "P3O023",
            place or facts.start,
            f"{cause} takes the trainer's own log-probs as the rollout policy's: every ratio is 1 and the ESS reads 1",
            "turn it off for P3O",
        )
    if facts.extra.get("micro_batch_mean"):
        yield import_finding(
            "P3O024",
            facts.place("algorithm.calculate_per_token_loss"),
            "token-mean is taken per micro-batch by the legacy workers, over the whole batch only by engine workers",
            "use the engine workers",
            "algorithm.calculate_per_token_loss",
        )


def _elsewhere(facts: Facts) -> Iterator[LocatedFinding]:
    hook = facts.extra.get("sampling_hook")
    if hook:
        flag, name, place = hook
        env = facts.preset.cluster.env.get("P3O_BEHAVIOR_TEMPERATURE")
        sets = f"; P3O_BEHAVIOR_TEMPERATURE ({env}) sets its temperature" if env else ""
        yield import_finding(
            "P3O022",
            place,
            f"{flag} {name} may sample at another temperature, or truncate{sets}",
            "read it, and record what it samples with",
        )


def _for_the_record(facts: Facts) -> Iterator[LocatedFinding]:
    preset = facts.preset
    rollout, precision = preset.rollout, preset.precision
    extra = facts.extra
    entries = (
        (
            rollout.temperature != 1 and "rollout.temperature" not in facts.unknown,
            "rollout.temperature",
            f"rollouts sample at temperature {rollout.temperature:g}: the denominator must be of that distribution",
        ),
        (
            rollout.update_weights_interval > 1,
            "rollout.update_weights_interval",
            f"the rollout policy is up to {rollout.update_weights_interval} rollouts old; its log-probs stay valid",
        ),
        (
            rollout.speculative_decoding,
            "rollout.speculative_decoding",
            "speculative decoding: check that the returned log-probs are the target model's",
        ),
        (
            precision.fp8 is not None and precision.fp8_recipe in _STATELESS,
            "precision.fp8_recipe",
            f"FP8 with {precision.fp8_recipe} scaling keeps no history; Relax's own step scope refuses any FP8",
        ),
        (
            bool(extra.get("whitened")),
            "algorithm.normalize_advantages",
            "advantages are whitened over the batch as well",
        ),
        (bool(extra.get("lag_note")), "rollout.max_staleness", str(extra.get("lag_note"))),
    )
    for holds, path, message in entries:
        if holds:
            yield import_finding("P3O025", facts.place(path), message, None, path)
