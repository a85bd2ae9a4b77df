"""The script of a run: one bash file, complete in itself, that does what ``p3o-launch run`` does.

The text is in ``script.sh`` and one file per target. Values enter by ``word`` or in a quoted here-document: bash
expands none of them. ``ray job submit`` quotes the words it is given for the job's shell (Ray 2.60; a test checks it).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import p3o_launch
from p3o_launch.launch.arguments import resolved_yaml
from p3o_launch.launch.bundle import recorder_source
from p3o_launch.launch.job import PROXIES, Job
from p3o_launch.launch.quoting import word
from p3o_launch.launch.redact import redact, redact_text
from p3o_launch.launch.relax import RUN_DIR
from p3o_launch.schema import Preset

_NO_ADDRESS = "RAY_ADDRESS is not set: the Jobs server of the Ray cluster, such as http://127.0.0.1:8265"


def run_script(job: Job) -> str:
    """The script of ``job``."""
    preset_text = redact_text(resolved_yaml(job.preset))
    facts = json.dumps(redact(dict(job.facts)), indent=2, ensure_ascii=False)
    template = _template("script").replace("@TARGET_PART@\n", _template(f"script_{job.target}") + "\n")
    values = {
        "TITLE": job.preset.name,
        "TARGET": job.target,
        "VERSION": p3o_launch.__version__,
        "NAME": word(job.preset.name),
        "SEED": str(job.preset.seed.seed),
        "OUTPUT_ROOT": word(str(Path(job.preset.logging.output_root))),
        "ARGUMENTS": "\n".join(f"    {line}" for line in argument_lines(job)),
        "ENVIRONMENT": _environment(job),
        "MARK": _mark("P3O_PRESET", preset_text),
        "PRESET": preset_text,
        "FACTS_MARK": _mark("P3O_FACTS", facts),
        "FACTS": facts,
        "CHECKS": "".join(f"  {line}\n" for line in _checks(job.preset)),
        "PROXIES": f"  unset {' '.join(PROXIES)}\n" if job.clear_proxies else "",
        "BEGIN_EXTRA": "",
        "RECORDER": recorder_source(),
    }
    if job.target == "relax":
        values |= _relax_values(job)
    return re.sub(r"@([A-Z_]+)@", lambda match: values[match[1]], template)


@cache
def _template(name: str) -> str:
    return Path(__file__).with_name(f"{name}.sh").read_text(encoding="utf-8")


def argument_lines(job: Job) -> Iterator[str]:
    """The arguments as bash words; a flag and its values share a line."""
    line: list[str] = []
    for argument in job.arguments:
        if line and (job.target == "builtin" or argument.startswith("--")):
            yield " ".join(line)
            line = []
        line.append(_word(argument))
    yield " ".join(line)


def _word(argument: str) -> str:
    before, marker, after = argument.partition(RUN_DIR)
    if not marker:
        return word(argument)
    assert not before, "the run's directory comes first"
    return f'"$run_dir"{word(after)}'


def _environment(job: Job) -> str:
    """The environment block. Relax's is part of the job's runtime environment."""
    if job.target == "relax":
        return ""
    pairs = "\n".join(f"  {word(f'{name}={value}')}" for name, value in job.environment.items())
    return f"environment=(\n{pairs}\n)\n\n"


def _relax_values(job: Job) -> dict[str, str]:
    logging = job.preset.logging
    before = after = ""
    if logging.pre_command is not None:
        before = f"  P3O_RUN_DIR=$run_dir P3O_STATUS=created bash -c {word(logging.pre_command)} || conclude 1\n"
    if logging.post_command is not None:
        after = (
            "  local status=failed\n"
            '  [ "$1" != 0 ] || status=succeeded\n'
            '  [ "$1" != 130 ] || status=interrupted\n'
            f"  P3O_RUN_DIR=$run_dir P3O_STATUS=$status bash -c {word(logging.post_command)} ||\n"
            "    printf 'warning: logging.post_command ended with exit code %s\\n' \"$?\" >&2\n"
        )
    address = f'  [ -n "${{RAY_ADDRESS:-}}" ] || die {word(_NO_ADDRESS)}\n  ray_address=$RAY_ADDRESS\n'
    return {
        "ADDRESS": address if job.address is None else f"  ray_address={word(job.address)}\n",
        "HOOK_BEFORE": before,
        "HOOK_AFTER": after or "  :\n",
        "RUNTIME_ENV": word(json.dumps(redact(job.runtime_env), ensure_ascii=False)),
        "BEGIN_EXTRA": ' "ray_address=$ray_address" "submission_id=p3o-$run_id"',
    }


def _checks(preset: Preset) -> Iterator[str]:
    """One line per path the preset needs, in shell's words."""
    wanted = [("need_checkpoint", "model.hf_checkpoint", preset.model.hf_checkpoint)]
    wanted += [("need_file", "data.prompt_data", preset.data.prompt_data)]
    wanted += [("need_file", "data.eval_prompt_data", preset.data.eval_prompt_data or "builtin:")]
    for test, field, path in wanted:
        if not path.startswith("builtin:"):
            yield f"{test} {field} {word(path)}"


def _mark(mark: str, text: str) -> str:
    """A here-document delimiter that is no line of ``text``."""
    lines = set(text.split("\n"))
    while mark in lines:
        mark += "_"
    return mark
