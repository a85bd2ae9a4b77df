"""Files that ship with the package. Importing this loads nothing but the standard library."""

from __future__ import annotations

from pathlib import Path

from p3o_launch.errors import PreflightError

BUILTIN_PREFIX = "builtin:"
REQUIRED_FILES = ("config.json", "tokenizer.json")


def resolve_checkpoint(name: str) -> Path:
    """Directory of a Hugging Face checkpoint: ``builtin:arithmetic``, or a path on this machine.

    Raises ``PreflightError`` when it does not exist or lacks the configuration, the tokenizer or the weights. Nothing
    is downloaded.
    """
    if name.startswith(BUILTIN_PREFIX):
        directory = Path(__file__).parent / name.removeprefix(BUILTIN_PREFIX)
        known = sorted(path.parent.name for path in Path(__file__).parent.glob("*/config.json"))
        if directory.name not in known:
            names = ", ".join(f"{BUILTIN_PREFIX}{one}" for one in known)
            raise PreflightError(f"there is no built-in checkpoint {name!r}", hint=f"model.hf_checkpoint can be {names}")
        return directory
    directory = Path(name).expanduser()
    if not directory.is_dir():
        problem = "is a file" if directory.exists() else "does not exist"
        raise PreflightError(
            f"the checkpoint directory {name!r} {problem}",
            hint="set model.hf_checkpoint to a directory in Hugging Face format on this machine; nothing is downloaded",
        )
    missing = [file for file in REQUIRED_FILES if not (directory / file).is_file()]
    if not any(directory.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise PreflightError(
            f"the checkpoint directory {name!r} lacks {', '.join(missing)}",
            hint="save the model and its fast tokenizer with save_pretrained",
        )
    return directory
