"""Telling people something, whether or not they still listen."""

from __future__ import annotations

import os
from typing import IO


def tell(stream: IO[str], text: str) -> None:
    """Write ``text``; a reader that has gone away (``| head``, a closed terminal) is no error.

    After the first failure the stream leads nowhere, so that the interpreter's last flush does not fail either.
    """
    try:
        stream.write(text)
        stream.flush()
    except OSError:
        _lead_nowhere(stream)


def _lead_nowhere(stream: IO[str]) -> None:
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
    except OSError:  # no descriptor behind it: nothing will be flushed
        return
