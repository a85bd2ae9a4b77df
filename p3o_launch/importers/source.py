"""Bytes of a configuration -> text, or a finding. Also the standard input."""

from __future__ import annotations

from p3o_launch.diagnostics import LocatedFinding, Position
from p3o_launch.loading import STDIN, STDIN_NAME, NotText, Oversized, decode, read_limited, standard_input
from p3o_launch.nodes import MAX_BYTES
from p3o_launch.rules_file import file_finding


def read_source(path: str) -> tuple[str | None, str, list[LocatedFinding]]:
    """The text (None when it cannot be used), the name reports show, and what is wrong."""
    name = STDIN_NAME if path == STDIN else path
    here = Position(name, 1, 1)
    try:
        raw = standard_input() if path == STDIN else read_limited(path)
        text = decode(raw)
    except FileNotFoundError:
        return None, name, [file_finding("P3O001", here, "the file does not exist")]
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        reason = getattr(error, "strerror", None) or str(error)
        return None, name, [file_finding("P3O001", here, f"the file cannot be read: {reason}")]
    except Oversized:
        return None, name, [file_finding("P3O004", here, f"the file is larger than {MAX_BYTES:,} bytes")]
    except NotText as error:
        return None, name, [file_finding("P3O001", Position(name, error.line, 1), str(error), "save it as UTF-8 text")]
    return text, name, []
