"""The script of a run: one bash file, complete in itself, that does what ``p3o-launch run`` did."""

from __future__ import annotations

import shlex

import p3o_launch
from p3o_launch.launch.arguments import resolved_yaml
from p3o_launch.schema import Preset

_TEMPLATE = """\
#!/usr/bin/env bash
# Runs the preset {title}, resolved by p3o-launch {version}. Complete in itself: nothing else is read.
# shellcheck disable=SC2016  # quoted text is meant as it stands
set -euo pipefail

die() {{
  printf '%s\\n' "error: $1" >&2
  exit 2
}}

launcher=${{P3O_LAUNCH:-p3o-launch}}
command -v "$launcher" >/dev/null ||
  die "$launcher is not on PATH: pip install 'p3o-launch[runtime]', or set P3O_LAUNCH"
{checks}
preset=$(mktemp "${{TMPDIR:-/tmp}}/p3o-preset.XXXXXX") || die "no temporary file can be made"
cat >"$preset" <<'{mark}'
{preset}{mark}

# The launcher reads the open file; its name is gone before the run starts, so no run leaves it behind.
exec 3<"$preset"
rm -f -- "$preset"
exec "$launcher" run --preset /dev/fd/3 "$@"
"""


def run_script(preset: Preset) -> str:
    """The script. Values stand in a quoted here-document or behind ``shlex.quote``: bash expands none of them."""
    text = resolved_yaml(preset)
    return _TEMPLATE.format(
        title=preset.name,
        version=p3o_launch.__version__,
        checks=_checks(preset),
        mark=_mark(text),
        preset=text,
    )


def _checks(preset: Preset) -> str:
    """One line per path the preset needs, in shell's words."""
    wanted = [("-d", "model.hf_checkpoint", preset.model.hf_checkpoint)]
    wanted += [("-f", "data.prompt_data", preset.data.prompt_data)]
    wanted += [("-f", "data.eval_prompt_data", preset.data.eval_prompt_data or "builtin:")]
    lines = []
    for test, field, path in wanted:
        if not path.startswith("builtin:"):
            quoted = shlex.quote(path)
            lines.append(f"[ {test} {quoted} ] || die {shlex.quote(f'{field} does not exist: {path}')}\n")
    return "".join(lines)


def _mark(text: str) -> str:
    """A here-document delimiter that is no line of ``text``."""
    lines = set(text.splitlines())
    mark = "P3O_PRESET"
    while mark in lines:
        mark += "_"
    return mark
