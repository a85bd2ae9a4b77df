"""Prompts: a JSONL file or the built-in task -> tokenised problems, in an order that the seed and rollout id fix.

Read whole and checked before any actor starts: a run must not fail at its thousandth prompt. What may be left out
(``data.overlong_prompts: skip``, ``data.malformed_lines: skip``) is counted in ``PromptSet.skipped``.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from p3o_launch.errors import DataError, PreflightError
from p3o_launch.runtime.rollout.arithmetic import problems
from p3o_launch.runtime.rollout.prompt_survey import Unknown, prompt_warnings, rollout_warnings
from p3o_launch.runtime.types import Prompt
from p3o_launch.schema import Data, Preset

BUILTIN = "builtin:arithmetic"


class Encoder(Protocol):
    """What this module needs of a tokenizer."""

    def encode(self, text: str, *, chat: bool = False) -> list[int]: ...


@dataclass(frozen=True)
class PromptSet:
    """Problems of one split. ``skipped``: number of records left out, by reason. ``warnings``: what is odd about the
    rest, in sentences.

    ``batch`` is a function of (seed, rollout id) alone, so a resumed run continues where it stopped.
    """

    prompts: Sequence[Prompt]
    seed: int
    shuffle: bool
    skipped: dict[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    _orders: dict[int, list[int]] = field(default_factory=dict, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.prompts)

    def batch(self, rollout_id: int, count: int) -> list[Prompt]:
        """Prompts number ``rollout_id * count`` and following of an endless sequence of shuffled passes."""
        size = len(self.prompts)
        places = range(rollout_id * count, (rollout_id + 1) * count)
        return [self.prompts[self._order(place // size)[place % size]] for place in places]

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            order = list(range(len(self.prompts)))
            if self.shuffle:
                random.Random(f"{self.seed}/{epoch}").shuffle(order)
            while len(self._orders) >= 2:  # a batch may span two passes, never more of a set larger than it
                self._orders.pop(next(iter(self._orders)))
            self._orders[epoch] = order
        return self._orders[epoch]


def load_prompts(preset: Preset, tokenizer: Encoder, split: Literal["train", "eval"]) -> PromptSet:
    """Read, check and tokenise the prompts of ``split``.

    Raises DataError, with file and line, for a file or a record that cannot be used, and when none is left.
    """
    data = preset.data
    source = data.prompt_data if split == "train" else data.eval_prompt_data
    if source is None:
        raise PreflightError(
            "evaluation.interval is set, but data.eval_prompt_data names no prompts",
            hint="name an evaluation file, or remove evaluation.interval",
        )
    skipped: dict[str, int] = {}
    prompts: list[Prompt] = []
    unknown = Unknown(tokenizer)
    for record in _records(source, split, data, skipped):
        ids = tokenizer.encode(record.text, chat=data.apply_chat_template)
        reason = _left_out(preset, record, source, ids, unknown)
        if reason is None:
            prompts.append(Prompt(len(prompts), record.text, tuple(ids), record.label))
        else:
            skipped[reason] = skipped.get(reason, 0) + 1
    if not prompts:
        raise _nothing_left(source, split, data, skipped)
    warnings = prompt_warnings(source, prompts, unknown)
    if split == "train":
        warnings += rollout_warnings(preset, source, prompts)
    return PromptSet(prompts, preset.seed.seed, data.shuffle and split == "train", skipped, tuple(warnings))


def _nothing_left(source: str, split: Literal["train", "eval"], data: Data, skipped: dict[str, int]) -> DataError:
    """Where every line was malformed, what is wrong with the first is likely wrong with all: such as a key's name."""
    reasons = ", ".join(f"{count} skipped: {reason}" for reason, count in skipped.items()) or "the file is empty"
    message, hint = f"{source} holds no usable prompt ({reasons})", None
    if list(skipped) == ["malformed line"]:
        try:
            next(_records(source, split, data.model_copy(update={"malformed_lines": "error"}), {}), None)
        except DataError as error:
            message, hint = f"{message}; {error.message}", error.hint
    return DataError(message, path=source, hint=hint)


def _left_out(preset: Preset, record: _Record, source: str, ids: list[int], unknown: Unknown) -> str | None:
    """Why a record is left out; None when it can be used. Raises DataError where nothing may be left out."""
    data, limit, where = preset.data, preset.rollout.max_prompt_len, record.where(source)
    if not ids:
        raise DataError(f"{where}: the prompt has no tokens", path=source, line=record.line)
    if len(ids) > limit:
        if data.overlong_prompts == "error":
            raise DataError(
                f"{where}: the prompt has {len(ids)} tokens, rollout.max_prompt_len is {limit}",
                path=source,
                line=record.line,
                hint="raise rollout.max_prompt_len, or set data.overlong_prompts: skip",
            )
        return "overlong prompt"
    if unknown.makes_up(ids):
        if data.malformed_lines == "error":
            raise DataError(
                f"{where}: the checkpoint's tokenizer knows no character of the prompt",
                path=source,
                line=record.line,
                hint="use prompts the checkpoint was made for, or set data.malformed_lines: skip",
            )
        return "unknown to the tokenizer"
    return None


def sample_prompts(
    preset: Preset, tokenizer: Encoder, split: Literal["train", "eval"], limit: int
) -> tuple[list[Prompt], bool]:
    """The first ``limit`` usable prompts of ``split``, of any length, and whether these are all. Raises DataError."""
    source = preset.data.prompt_data if split == "train" else preset.data.eval_prompt_data
    if source is None:
        return [], True
    records = list(itertools.islice(_records(source, split, preset.data, {}), limit + 1))
    chat = preset.data.apply_chat_template
    prompts = [
        Prompt(index, record.text, tuple(tokenizer.encode(record.text, chat=chat)), record.label)
        for index, record in enumerate(records[:limit])
    ]
    return prompts, len(records) <= limit


@dataclass(frozen=True, slots=True)
class _Record:
    text: str
    label: str
    line: int | None = None

    def where(self, source: str) -> str:
        return source if self.line is None else f"{source}:{self.line}"


def _records(source: str, split: Literal["train", "eval"], data: Data, skipped: dict[str, int]) -> Iterator[_Record]:
    if source == BUILTIN:
        yield from (_Record(text, answer) for text, answer in problems(split))
    elif source.startswith("builtin:"):
        raise PreflightError(f"there is no built-in prompt set {source!r}", hint=f"the package ships {BUILTIN}")
    else:
        yield from _json_lines(source, data, skipped)


def _json_lines(source: str, data: Data, skipped: dict[str, int]) -> Iterator[_Record]:
    path = Path(source)
    if path.exists() and not path.is_file() and not path.is_dir():
        # Reading a device or a pipe may never end, and a resumed run could not read it again.
        raise DataError(f"{source} is not a regular file", path=source)
    try:
        # Bytes: one line that is not UTF-8 must not hide its number, nor end a run that may skip it.
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    yield _record(line, number, source, data)
                except DataError:
                    if data.malformed_lines == "error":
                        raise
                    skipped["malformed line"] = skipped.get("malformed line", 0) + 1
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise DataError(f"{source} cannot be read: {reason.lower()}", path=source) from error


def _record(line: bytes, number: int, source: str, data: Data) -> _Record:
    def fail(message: str, hint: str | None = None) -> DataError:
        return DataError(f"{source}:{number}: {message}", path=source, line=number, hint=hint)

    skip_hint = "mend the line, or set data.malformed_lines: skip"
    try:
        # utf-8-sig: a byte order mark is not part of the first key.
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        value: Any = json.loads(text, object_pairs_hook=_without_twins)
    except UnicodeDecodeError as error:
        raise fail(f"not UTF-8 text (byte {error.start + 1} of the line)", skip_hint) from None
    except json.JSONDecodeError as error:
        raise fail(f"not a JSON object ({error.msg}, column {error.colno})", skip_hint) from None
    except RecursionError:
        raise fail("not a JSON object (nested too deeply)", skip_hint) from None
    except ValueError as error:  # a key given twice, an integer of more digits than Python converts
        raise fail(f"not a usable JSON object ({error})", skip_hint) from None
    if not isinstance(value, dict):
        raise fail(f"a JSON {_kind(value)}, not an object", skip_hint)
    texts = []
    for field_name, key in (("data.input_key", data.input_key), ("data.label_key", data.label_key)):
        if key not in value:
            raise fail(f"no key {key!r} ({field_name})", f"the record has {', '.join(map(repr, value)) or 'no keys'}")
        text = value[key]
        if isinstance(text, (int, float)) and not isinstance(text, bool):
            text = str(text)
        if not isinstance(text, str):
            raise fail(f"{key!r} ({field_name}) is a {_kind(text)}, not text", skip_hint)
        if not text.strip():
            raise fail(f"{key!r} ({field_name}) is empty", skip_hint)
        if not _is_unicode(text):
            raise fail(f"{key!r} ({field_name}) holds half of a surrogate pair", skip_hint)
        texts.append(text)
    return _Record(texts[0], texts[1], number)


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record: dict[str, Any] = {}
    for key, value in pairs:
        if key in record:
            raise ValueError(f"the key {key!r} is given twice")
        record[key] = value
    return record


def _is_unicode(text: str) -> bool:
    r"""False for a lone surrogate: JSON can spell one (``"\ud800"``), no tokenizer or UTF-8 file can hold it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _kind(value: Any) -> str:
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "list", dict: "object"}
    return names.get(type(value), "null")
