"""A checkpoint's tokenizer, from local files only. transformers does the work; this pins down what is asked of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from p3o_launch.errors import MissingExtraError, PreflightError
from p3o_launch.runtime.rollout.stop_tokens import stop_token_ids


class Tokenizer:
    """Text to ids and back. ``stop_ids``: the tokens that end a response. Nothing is added behind the caller's back."""

    def __init__(self, backend: Any, stop_ids: Sequence[int] = ()) -> None:
        self._backend = backend
        self._stop_ids = frozenset(stop_ids)

    @property
    def unknown_id(self) -> int | None:
        """The token that stands for what the tokenizer does not know; None when it has none of its own."""
        backend = self._backend
        # Byte-level tokenizers know every text; some name their end-of-sequence token here, to name one at all.
        others = {backend.eos_token_id, backend.bos_token_id, backend.pad_token_id, *self._stop_ids}
        return None if backend.unk_token_id in others else backend.unk_token_id

    def encode(self, text: str, *, chat: bool = False) -> list[int]:
        """Token ids of ``text``; with ``chat``, of a conversation in which the user said it and the model is to answer.

        Raises PreflightError when the checkpoint has no chat template.
        """
        if not chat:
            return list(self._backend.encode(text, add_special_tokens=False))
        if not self._backend.chat_template:
            raise PreflightError(
                "data.apply_chat_template is true, but the checkpoint's tokenizer has no chat template",
                hint="set data.apply_chat_template: false, or use a checkpoint with a chat template",
            )
        conversation = [{"role": "user", "content": text}]
        # Rendered to text first: the form in which ids come back differs between transformers versions.
        rendered = self._backend.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        return list(self._backend.encode(rendered, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of a response, without the token that ended it.

        Any other special token stays visible: dropping it would let a verifier reward what the policy did not say.
        """
        text_ids = list(ids)
        if text_ids and text_ids[-1] in self._stop_ids:
            text_ids.pop()
        return str(self._backend.decode(text_ids, skip_special_tokens=False))


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer in ``directory``. Raises PreflightError when there is none that can be read."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise MissingExtraError("transformers", "runtime") from None
    try:
        backend = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise PreflightError(
            f"the tokenizer in {directory} cannot be read: {first_line}",
            hint="the checkpoint directory must hold tokenizer.json and tokenizer_config.json",
        ) from error
    return Tokenizer(backend, stop_token_ids(directory))
