"""Recording a run: what ``p3o-launch run`` calls, and what a generated script runs as a program of its own.

A script carries this module with the ones it names (``bundle.py``), so it needs python3 and nothing else::

    begin RUN_DIR PID FACTS_FILE COMMAND [KEY=VALUE...] -- ARGUMENT...   the record of a run about to start
    start RUN_DIR                                                        it runs
    finish RUN_DIR CODE [INTERRUPTED]                                    how it ended, unless that is written
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from p3o_launch.launch.environment import Tree, machine, versions, working_tree
from p3o_launch.launch.quoting import word
from p3o_launch.launch.record_file import (
    FAILED,
    INTERRUPTED,
    RECORD,
    RUNNING,
    SUCCEEDED,
    UNFINISHED,
    first_record,
    utc_now,
    write_atomic,
    write_record,
)
from p3o_launch.launch.redact import redact_text

FOLDERS = ("rollouts", "checkpoints", "logs")
CODE_INTERRUPTED = 130


def begin(
    directory: Path, facts: Mapping[str, Any], arguments: Sequence[str], pid: int | None = None
) -> dict[str, Any]:
    """Write the first record of a run, its argument list, and the state of the code; the record's data.

    ``facts``: what was known when the run was resolved; ``pid``: the process that the run lives and dies with.
    """
    tree = working_tree()
    data = first_record(directory, {**facts, **present(tree, arguments)}, pid)
    write_record(directory, data)
    for folder in FOLDERS:
        (directory / folder).mkdir(exist_ok=True)
    write_inputs(directory, tree, arguments)
    return data


def present(tree: Tree | None, arguments: Sequence[str]) -> dict[str, Any]:
    """What the record says of a launch that happens now: its arguments, the code, the packages, the machine."""
    return {
        "arguments": list(arguments),
        "git": tree.record() if tree is not None else None,
        "versions": versions(),
        "machine": machine(),
    }


def write_inputs(directory: Path, tree: Tree | None, arguments: Sequence[str]) -> None:
    """The argument list and the uncommitted changes as files of the run."""
    write_atomic(directory / "resolved_args.txt", "".join(f"{redact_text(word(item))}\n" for item in arguments))
    if tree is not None and tree.patch:
        write_atomic(directory / "git.patch", tree.patch)


def change(directory: Path, **changes: Any) -> None:
    """Change fields of the record of ``directory``."""
    data = json.loads((directory / RECORD).read_text(encoding="utf-8"))
    write_record(directory, data | changes)


def finish(directory: Path, code: int, interrupted: bool = False) -> None:
    """Write how the job ended. An end that the job has written itself stays."""
    data = json.loads((directory / RECORD).read_text(encoding="utf-8"))
    if data.get("status") not in UNFINISHED:
        return
    outcome, failure = SUCCEEDED, None
    if code != 0:
        outcome = INTERRUPTED if interrupted or code == CODE_INTERRUPTED else FAILED
        failure = {"class": "JobFailed", "message": f"the job ended with exit code {code}", "rank": None}
    write_record(directory, data | {"status": outcome, "exit_code": code, "failure": failure, "ended": utc_now()})


def main(words: list[str]) -> None:
    """The program in a script."""
    action, directory = words[0], Path(words[1])
    if action == "begin":
        split = words.index("--")
        facts = json.loads(Path(words[3]).read_text(encoding="utf-8"))
        facts["command_line"] = [words[4]]
        facts.update(pair.split("=", 1) for pair in words[5:split])
        begin(directory, facts, words[split + 1 :], int(words[2]))
    elif action == "start":
        change(directory, status=RUNNING, started=utc_now())
    else:
        finish(directory, int(words[2]), words[3:] == ["1"])


if __name__ == "__main__":
    main(sys.argv[1:])
