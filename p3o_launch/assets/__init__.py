"""Files that ship with the package, found from an installed wheel and from a checkout alike."""

from __future__ import annotations

from pathlib import Path

from p3o_launch.errors import PreflightError

_ROOT = Path(__file__).parent
BUILTIN_CHECKPOINTS = {"builtin:arithmetic": _ROOT / "arithmetic"}


def resolve_checkpoint(name: str) -> Path:
    """Directory of a Hugging Face checkpoint: a name of ``BUILTIN_CHECKPOINTS``, or a directory.

    Raises PreflightError when there is none, or when it holds no ``config.json``.
    """
    path = BUILTIN_CHECKPOINTS.get(name, Path(name))
    if name.startswith("builtin:") and name not in BUILTIN_CHECKPOINTS:
        known = ", ".join(BUILTIN_CHECKPOINTS)
        raise PreflightError(f"there is no built-in checkpoint {name!r}", hint=f"the package ships {known}")
    if not (path / "config.json").is_file():
        raise PreflightError(
            f"model.hf_checkpoint {name!r} is not a Hugging Face checkpoint: no config.json there",
            hint="give the directory that holds config.json, the safetensors files and tokenizer.json",
        )
    return path
