"""Safetensors files of a Hugging Face directory: one file or several with an index, read tensor by tensor."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from p3o_launch.errors import PreflightError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_CARRIED = (
    "added_tokens.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)


class TensorSource:
    """The tensors of one checkpoint by name. A context manager; files are opened when first needed.

    Raises PreflightError for a directory without weights, an index without its file, or an unreadable file.
    """

    def __init__(self, hf_dir: Path) -> None:
        self._dir = hf_dir
        self._open: dict[str, Any] = {}
        self._file_of = self._locate()

    def __enter__(self) -> TensorSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.clear()

    def names(self) -> set[str]:
        """Every tensor of the checkpoint."""
        return set(self._file_of)

    def read(self, name: str) -> torch.Tensor:
        """One tensor, on the CPU, in the type it is stored in."""
        tensor: torch.Tensor = self._file(self._file_of[name]).get_tensor(name)
        return tensor

    def _locate(self) -> dict[str, str]:
        index = self._dir / INDEX
        if index.is_file():
            try:
                return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise PreflightError(f"cannot read {index}: {error!r}") from None
        if not (self._dir / SINGLE).is_file():
            raise PreflightError(
                f"{self._dir} has no weights: neither {SINGLE} nor {INDEX}",
                hint="only safetensors are read; convert a .bin checkpoint with transformers' save_pretrained",
            )
        return dict.fromkeys(self._file(SINGLE).keys(), SINGLE)

    def _file(self, name: str) -> Any:
        if name not in self._open:
            try:
                self._open[name] = safe_open(self._dir / name, framework="pt")
            except (OSError, SafetensorError) as error:
                raise PreflightError(f"cannot read {self._dir / name}: {error}") from None
        return self._open[name]


def write_index(out_dir: Path, stages: list[dict[str, tuple[str, int]]]) -> None:
    """``model.safetensors.index.json`` from what each rank wrote: name -> (file, bytes)."""
    written = {name: place for stage in stages for name, place in stage.items()}
    index = {
        "metadata": {"total_size": sum(size for _, size in written.values())},
        "weight_map": {name: file for name, (file, _) in sorted(written.items())},
    }
    (out_dir / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def carry_files(source_dir: Path, out_dir: Path) -> None:
    """Copy the configuration and tokenizer files that are there."""
    for name in _CARRIED:
        if (source_dir / name).is_file():
            shutil.copyfile(source_dir / name, out_dir / name)
