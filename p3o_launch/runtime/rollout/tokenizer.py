"""A checkpoint's tokenizer, from local files only. transformers does the work; this pins down what is asked of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from p3o_launch.errors import MissingExtraError, PreflightError


class Tokenizer:
    """Text to ids and back. Special tokens are never added behind the caller's back, and never shown in a text."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

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
        """Text of ``ids`` without special tokens."""
        return str(self._backend.decode(list(ids), skip_special_tokens=True))


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
    return Tokenizer(backend)
