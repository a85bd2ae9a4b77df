"""What is odd about prompts that can all be used: said before a run starts, because training shows none of it.

Unknown characters, prompts that come again, labels that no response can match. Each warning is one sentence with
counts; what makes every prompt useless raises DataError.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from p3o_launch.errors import DataError
from p3o_launch.runtime.types import Prompt
from p3o_launch.schema import Preset

MAX_SENTENCES = 50
"""Labels that are given to math-verify, which takes up to a tenth of a second for one."""
_WORD = re.compile(r"[^\W\d_]{2,}")
_NUMBER = re.compile(r"-?\d+(?:[.,]\d+)*")
_MARKED_UP = re.compile(r"\\[A-Za-z]+(?:\{[^{}]*\})?")
_SENTENCE_WORDS = 3
_WORDS = "words that the checkpoint's tokenizer does not know"


class Vocabulary(Protocol):
    """What this module needs of a tokenizer; beside it an ``unknown_id``, if a token stands for what is not known."""

    def encode(self, text: str, *, chat: bool = False) -> list[int]: ...


class Unknown:
    """Which characters a tokenizer does not know, or leaves out; every character is asked for once."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._id: int | None = getattr(vocabulary, "unknown_id", None)
        self._lost: dict[str, bool] = {}

    def in_text(self, text: str) -> str:
        """The characters of ``text`` that are lost, each once, in the order of their first use."""
        return "".join(char for char in dict.fromkeys(text) if self._is_lost(char))

    def _is_lost(self, char: str) -> bool:
        if char not in self._lost:
            self._lost[char] = self._ask(char)
        return self._lost[char]

    def _ask(self, char: str) -> bool:
        ids = self._vocabulary.encode(char)
        if self._id is not None and self._id in ids:
            return True
        # Normalisers drop format characters and fold marks and spaces on purpose.
        return not ids and unicodedata.category(char)[0] in "LNPS"

    def is_in(self, token_ids: Sequence[int]) -> bool:
        """Is one of the tokens the unknown one?"""
        return self._id is not None and self._id in token_ids

    def makes_up(self, token_ids: Sequence[int]) -> bool:
        """Is every token the unknown one?"""
        return self._id is not None and set(token_ids) == {self._id}


def prompt_warnings(source: str, prompts: Sequence[Prompt], unknown: Unknown) -> list[str]:
    """Sentences about the prompts of one file. Raises DataError when not one of them says what it is to say."""
    return [*_unknown_characters(source, prompts, unknown), *_repeats(source, prompts)]


def rollout_warnings(preset: Preset, source: str, prompts: Sequence[Prompt]) -> list[str]:
    """Fewer different prompts than one rollout takes."""
    different, wanted = len({prompt.token_ids for prompt in prompts}), preset.batch.rollout_batch_size
    if different >= wanted:
        return []
    return [
        f"{source} holds {_count(different, 'different prompt')}, a rollout takes {wanted} "
        "(batch.rollout_batch_size): every rollout shows the same ones, some more than once"
    ]


def shared_warnings(train: Sequence[Prompt], evaluation: Sequence[Prompt], source: str) -> list[str]:
    """Evaluation prompts that are trained on."""
    seen = {prompt.token_ids for prompt in train}
    shared = sum(prompt.token_ids in seen for prompt in evaluation)
    if not shared:
        return []
    return [f"{shared} of {_count(len(evaluation), 'evaluation prompt')} of {source} are training prompts too"]


def _unknown_characters(source: str, prompts: Sequence[Prompt], unknown: Unknown) -> Iterator[str]:
    found = [
        (prompt, lost)
        for prompt in prompts
        if (lost := unknown.in_text(prompt.text)) or unknown.is_in(prompt.token_ids)
    ]
    if not found:
        return
    characters = _shown("".join(lost for _, lost in found))
    if all(lost for _, lost in found) and len(found) == len(prompts):
        raise DataError(
            f"every prompt of {source} holds characters that the checkpoint's tokenizer does not know: {characters}",
            path=source,
            hint="write the prompts as the checkpoint knows them, or use a checkpoint that knows the characters",
        )
    what = f"characters that the checkpoint's tokenizer does not know ({characters})" if characters else _WORDS
    yield (
        f"{len(found)} of {_count(len(prompts), 'prompt')} of {source} hold {what}, such as "
        f"{_quoted(found[0][0].text)}: the model does not see them"
    )


def _shown(characters: str) -> str:
    """Up to eight characters, each once."""
    each = list(dict.fromkeys(characters))
    return " ".join(_quoted(char) for char in each[:8]) + (f" and {len(each) - 8} more" if len(each) > 8 else "")


def _quoted(text: str) -> str:
    return ascii(text) if not text.isprintable() else repr(text if len(text) <= 40 else text[:37] + "...")


def _repeats(source: str, prompts: Sequence[Prompt]) -> Iterator[str]:
    labels: dict[tuple[int, ...], set[str]] = {}
    for prompt in prompts:
        labels.setdefault(prompt.token_ids, set()).add(prompt.label.strip())
    repeated = len(prompts) - len(labels)
    if repeated:
        yield f"{repeated} of {_count(len(prompts), 'prompt')} of {source} repeat an earlier one"
    torn = sum(len(found) > 1 for found in labels.values())
    if torn:
        yield f"{_count(torn, 'prompt')} of {source} {'occurs' if torn == 1 else 'occur'} with different labels"


def label_warnings(
    preset: Preset,
    source: str,
    prompts: Sequence[Prompt],
    vocabulary: Vocabulary,
    unknown: Unknown,
    score: Callable[[str, str], float],
) -> list[str]:
    """Labels that no response can match. Raises DataError when the reward can never be other than 0."""
    if preset.reward.type == "exact":
        return _unsayable_labels(preset, source, prompts, vocabulary, unknown)
    return _sentences(source, prompts, score)


def _unsayable_labels(
    preset: Preset, source: str, prompts: Sequence[Prompt], vocabulary: Vocabulary, unknown: Unknown
) -> list[str]:
    limit = preset.rollout.max_response_len
    distinct = {prompt.label.strip() for prompt in prompts}
    strange = {label for label in distinct if unknown.in_text(label)}
    long = {label for label in distinct - strange if len(vocabulary.encode(label)) > limit}
    count = sum(prompt.label.strip() in strange | long for prompt in prompts)
    if not count:
        return []
    causes = []
    if long:
        causes.append(f"longer than rollout.max_response_len ({limit})")
    if strange:
        characters = _shown("".join(map(unknown.in_text, sorted(strange))))
        causes.append(f"of characters that the tokenizer does not know ({characters})")
    cause = " or ".join(causes)
    if count == len(prompts):
        raise DataError(
            f"no response can be any label of {source}, so every reward is 0 (reward.type exact): they are {cause}",
            path=source,
            hint="set reward.type: math for boxed answers, or mend data.label_key or rollout.max_response_len",
        )
    return [
        f"{count} of {_count(len(prompts), 'label')} of {source} can be no response (reward.type exact): "
        f"{'it is' if count == 1 else 'they are'} {cause}"
    ]


def _sentences(source: str, prompts: Sequence[Prompt], score: Callable[[str, str], float]) -> list[str]:
    """Labels in words, whose number alone the verifier does not take for the answer."""
    worded = [label for label in dict.fromkeys(prompt.label for prompt in prompts) if _is_sentence(label)]
    unread = [label for label in worded[:MAX_SENTENCES] if not _reads_number(label, score)]
    if not unread:
        return []
    looked = "" if len(worded) <= MAX_SENTENCES else f" (of the first {MAX_SENTENCES} in words)"
    return [
        f"{_count(len(unread), 'label')} of {source}{looked} {'is' if len(unread) == 1 else 'are'} in words, such as "
        f"{_quoted(unread[0])}: only a box with the same words is rewarded"
    ]


def _is_sentence(label: str) -> bool:
    return len(_WORD.findall(_MARKED_UP.sub(" ", label))) >= _SENTENCE_WORDS


def _reads_number(label: str, score: Callable[[str, str], float]) -> bool:
    numbers = _NUMBER.findall(label)
    return bool(numbers) and score(f"\\boxed{{{numbers[-1]}}}", label) > 0


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
