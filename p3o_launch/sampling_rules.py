"""Which sampling settings leave the softmax as it is, and which cut, reweight or force it. Data for the 4xx guards.

The ratio divides the trainer's probability over the whole vocabulary by the engine's. A setting is *neutral* when the
engine's distribution is the softmax of logits / temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple


def _number(value: object) -> float | None:
    """The value as a number, also from text such as ``"0.9"``; None when it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def _is(*neutral: float) -> Callable[[object], bool]:
    return lambda value: value is None or _number(value) in neutral


def _is_empty(value: object) -> bool:
    return value is None or value is False or (isinstance(value, str | list | tuple | Mapping) and len(value) == 0)


def _is_zero_bias(value: object) -> bool:
    return _is_empty(value) or (isinstance(value, Mapping) and all(_number(bias) == 0 for bias in value.values()))


def _is_off(value: object) -> bool:
    return _is_empty(value) or _number(value) == 0


class Knob(NamedTuple):
    """One sampling setting: what it does to the distribution, when it does nothing, and the value to write."""

    effect: str
    is_neutral: Callable[[object], bool]
    off: str


_CUT = "cuts tokens off the distribution"
_SHIFT = "reweights tokens by what was generated before"
_FORCE = "allows only some tokens"
_SEARCH = "is a search, not a sample of the distribution"

# The schema's own fields; the same names are looked for inside ``rollout.extra``.
FIELDS: dict[str, Knob] = {
    "top_p": Knob(_CUT, _is(1), "1.0"),
    "top_k": Knob(_CUT, _is(-1, 0), "-1"),
    "min_p": Knob(_CUT, _is(0), "0"),
    "top_a": Knob(_CUT, _is(0), "0"),
    "typical_p": Knob(_CUT, _is(1), "1.0"),
    "epsilon_cutoff": Knob(_CUT, _is(0), "0"),
    "eta_cutoff": Knob(_CUT, _is(0), "0"),
    "repetition_penalty": Knob(_SHIFT, _is(1), "1.0"),
    "presence_penalty": Knob(_SHIFT, _is(0), "0"),
    "frequency_penalty": Knob(_SHIFT, _is(0), "0"),
    "logit_bias": Knob("shifts logits", _is_zero_bias, "{}"),
}
# What the schema has no field for and engines take through free-form parameters.
_EXTRA: dict[str, Knob] = {
    "tfs": Knob(_CUT, _is(1), "1.0"),
    "tfs_z": Knob(_CUT, _is(1), "1.0"),
    "top_n_sigma": Knob(_CUT, _is(-1, 0), "-1"),
    "top_h": Knob(_CUT, _is_off, "0"),
    "smoothing_factor": Knob("bends the logits", _is(0), "0"),
    "mirostat": Knob(_CUT, _is(0), "0"),
    "mirostat_mode": Knob(_CUT, _is(0), "0"),
    "xtc_probability": Knob(_CUT, _is(0), "0"),
    "dry_multiplier": Knob(_SHIFT, _is(0), "0"),
    "encoder_repetition_penalty": Knob(_SHIFT, _is(1), "1.0"),
    "no_repeat_ngram_size": Knob(_CUT, _is(0), "0"),
    "encoder_no_repeat_ngram_size": Knob(_CUT, _is(0), "0"),
    "penalty_alpha": Knob(_SEARCH, _is(0), "0"),
    "num_beams": Knob(_SEARCH, _is(1), "1"),
    "use_beam_search": Knob(_SEARCH, _is_off, "false"),
    "best_of": Knob(_SEARCH, _is(1), "1"),
    "min_tokens": Knob("forbids the end of sequence at first", _is(0), "0"),
    "min_new_tokens": Knob("forbids the end of sequence at first", _is(0), "0"),
    "min_length": Knob("forbids the end of sequence at first", _is(0), "0"),
    "bad_words": Knob(_FORCE, _is_empty, "[]"),
    "bad_words_ids": Knob(_FORCE, _is_empty, "[]"),
    "suppress_tokens": Knob(_FORCE, _is_empty, "[]"),
    "begin_suppress_tokens": Knob(_FORCE, _is_empty, "[]"),
    "allowed_token_ids": Knob(_FORCE, _is_empty, "null"),
    "forced_bos_token_id": Knob(_FORCE, _is_empty, "null"),
    "forced_eos_token_id": Knob(_FORCE, _is_empty, "null"),
    "force_words_ids": Knob(_FORCE, _is_empty, "null"),
    "sequence_bias": Knob("shifts logits", _is_empty, "null"),
    "exponential_decay_length_penalty": Knob("shifts logits", _is_empty, "null"),
    "guidance_scale": Knob("mixes two distributions", _is(1), "1.0"),
    "logits_processors": Knob("changes logits", _is_empty, "[]"),
    "logits_processor": Knob("changes logits", _is_empty, "null"),
    "custom_logit_processor": Knob("changes logits", _is_empty, "null"),
    "guided_decoding": Knob(_FORCE, _is_empty, "null"),
    "structured_outputs": Knob(_FORCE, _is_empty, "null"),
    "guided_json": Knob(_FORCE, _is_empty, "null"),
    "guided_regex": Knob(_FORCE, _is_empty, "null"),
    "guided_choice": Knob(_FORCE, _is_empty, "null"),
    "guided_grammar": Knob(_FORCE, _is_empty, "null"),
    "response_format": Knob(_FORCE, _is_empty, "null"),
    "json_schema": Knob(_FORCE, _is_empty, "null"),
    "regex": Knob(_FORCE, _is_empty, "null"),
    "ebnf": Knob(_FORCE, _is_empty, "null"),
    "structural_tag": Knob(_FORCE, _is_empty, "null"),
}


def _plain(name: str) -> str:
    """``topP``, ``top-p`` and ``TOP_P`` are one name."""
    return name.lower().replace("-", "").replace("_", "")


_BY_PLAIN_NAME: dict[str, Knob] = {}
_RENAMED = {"repeatpenalty": "repetition_penalty", "typical": "typical_p"}


def knob_of(name: str) -> Knob | None:
    """The knob a free-form parameter turns, however it is spelt; None for parameters that leave sampling alone."""
    if not _BY_PLAIN_NAME:
        _BY_PLAIN_NAME.update({_plain(known): knob for known, knob in (FIELDS | _EXTRA).items()})
    plain = _plain(name)
    alias = _RENAMED.get(plain)
    return FIELDS[alias] if alias else _BY_PLAIN_NAME.get(plain)


def same_name(name: str, known: str) -> bool:
    """Is ``name`` a spelling of ``known``?"""
    return _plain(name) == _plain(known)
