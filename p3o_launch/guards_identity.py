"""7xx: identity of a run, and secrets. 701 and 703 are raised where the run directory is made and resumed."""

from __future__ import annotations

import re
from collections.abc import Iterator

from p3o_launch.diagnostics import Finding, Severity
from p3o_launch.guard_tools import actor_env, named, printable
from p3o_launch.guards import GuardContext, Rule, guard, register
from p3o_launch.secret_shapes import secrets_of

register(
    Rule(
        "P3O701",
        "output-holds-another-run",
        Severity.ERROR,
        why="Two runs that write to one directory overwrite each other's checkpoints and mix their records.",
        fix="Choose another logging.output_root, or resume the run with `--resume`.",
        source="https://github.com/PrimeIntellect-ai/prime-rl/pull/1872",
        allows="A directory that exists and is empty, or holds logs only.",
    )
)
register(
    Rule(
        "P3O702",
        "resume-finds-nothing",
        Severity.ERROR,
        why="The run's checkpoints were removed or damaged, or it saves none: there is nothing to go on from, and "
        "starting over under the same name would hide that.",
        fix="Start a new run with `p3o-launch runs rerun`; checkpoint.save_interval makes it one that can be resumed.",
        source="design rule of p3o-launch: a resume that loads nothing is not a resume",
        allows="Any complete checkpoint, also an older one beside an interrupted save; a run that ended before its "
        "first checkpoint was due, which begins again with its first step.",
    )
)
register(
    Rule(
        "P3O706",
        "objective-changed-on-resume",
        Severity.ERROR,
        why="The second half of the run would optimise something else than the first, under one name and one curve.",
        fix="Resume with the run's own resolved.yaml, or start a new run with the new settings.",
        source="design rule of p3o-launch: settings are compared with those recorded in the run's directory",
        allows="Other parallel sizes (the checkpoint is resharded); cluster, evaluation, checkpoint, logging.",
    )
)
register(
    Rule(
        "P3O703",
        "resume-does-nothing",
        Severity.ERROR,
        why="The stored checkpoint already stands at or past the number of optimizer steps the preset asks for: the "
        "resumed run would load everything, make no step and look like a success.",
        fix="The run is complete: repeat it with `p3o-launch runs rerun`, or, at a constant learning rate, ask for "
        "more rollouts with `--set batch.num_rollout=N`.",
        source="design rule of p3o-launch: a run that makes zero steps is not a success",
        allows="A resume with at least one step left.",
    )
)
register(
    Rule(
        "P3O704",
        "dirty-tree",
        Severity.WARNING,
        why="The code that runs is not the commit the record names. The difference is saved with the run (git.patch, "
        "untracked files by their hash), but nobody else can check it out.",
        fix="Commit first. With `--strict` the launch is refused.",
        source="design rule of p3o-launch: a record names the code that ran",
        allows="validate and run --dry-run; a directory that is in no git repository; ignored files.",
        ignorable=True,
    )
)


# Below this many rollouts a run is quickly repeated.
LONG_RUN = 100
# Each rank has its own; one value for all of them breaks the layout.
_OF_THE_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR")
_PROTECTED = (*_OF_THE_RANK, "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "RAY_ADDRESS", "RAY_JOB_ID")


@guard(
    "P3O707",
    "nothing-to-resume",
    Severity.WARNING,
    why="A run that saves nothing before its end starts from zero after any interruption; one that saves nothing at "
    "its end either leaves no weights at all.",
    fix="Set checkpoint.save_interval, or leave checkpoint.save_final on.",
    source="design rule of p3o-launch; --save-interval of Megatron",
    allows=f"Runs below {LONG_RUN} rollouts that save at their end, and any save_interval below the number of "
    "rollouts.",
    ignorable=True,
)
def nothing_to_resume(context: GuardContext) -> Iterator[Finding]:
    preset = context.preset
    rollouts, interval = preset.batch.num_rollout, preset.checkpoint.save_interval
    final = "checkpoint.save_final"
    if rollouts >= LONG_RUN and (interval is None or interval >= rollouts):
        yield Finding(
            "batch.num_rollout" if interval is None else "checkpoint.save_interval",
            f"{named(preset, 'batch.num_rollout')} with {named(preset, 'checkpoint.save_interval')}: no checkpoint is "
            "written before the end",
            f"set checkpoint.save_interval: {rollouts // 10}",
            related=("checkpoint.save_interval", "batch.num_rollout"),
        )
    elif not preset.checkpoint.save_final and (interval is None or interval > rollouts):
        yield Finding(
            final,
            f"{named(preset, final)} with {named(preset, 'checkpoint.save_interval')}: no checkpoint is ever written",
            f"set {final}: true",
            related=("checkpoint.save_interval", "batch.num_rollout"),
        )


@guard(
    "P3O708",
    "protected-env-overridden",
    why="The launcher gives each rank its place: rank, world size, address and GPU. One value for all ranks sends them "
    "to the same GPU or the same place in the group, and they wait for each other without end.",
    fix="Remove the variable. To choose GPUs, export CUDA_VISIBLE_DEVICES in the shell that launches the run; for an "
    "existing cluster set cluster.ray_address.",
    source="environment of torch.distributed's ranks and of Ray's workers",
    allows="Any other variable; these in the launching shell.",
)
def protected_env_overridden(context: GuardContext) -> Iterator[Finding]:
    for name, entry in actor_env(context.preset).items():
        if name in _PROTECTED:
            hint = {
                "CUDA_VISIBLE_DEVICES": "remove it, and export it in the shell that launches the run",
                "RAY_ADDRESS": "remove it, and set cluster.ray_address",
            }.get(name, "remove it")
            yield Finding(entry.path, f"{entry.path} overrides what the launcher gives each rank", hint)


@guard(
    "P3O709",
    "kill-by-name",
    why="A hook that ends processes by name ends those of everybody on the node, this run's own included.",
    fix="Record the process id at the start and end that one, or its process group.",
    source="https://github.com/AI45Lab/SAfactory/pull/80",
    allows="kill with a process id, a group or a variable; pkill -P with a parent's id, -F with a pid file.",
    ignorable=True,
)
def kill_by_name(context: GuardContext) -> Iterator[Finding]:
    for field in ("pre_command", "post_command"):
        command = getattr(context.preset.logging, field)
        found = name_kill(command) if command else None
        if found:
            path = f"logging.{field}"
            yield Finding(
                path, f"{path} ends processes by name ({found}), whoever they belong to", "end them by process id"
            )


# Where a shell starts a command: the words before it do not end processes, quoted text elsewhere is no command.
_START = (
    r"(?:^|[;&|(`\n]|\b(?:then|do|else)\s|-c\s+[\"']|\bssh\s+\S+\s+[\"']?|\bsrun\s+(?:-\S+\s+)*)\s*"
    r"(?:(?:sudo|exec|nohup|timeout\s+\S+|\w+=\S*)\s+)*"
)
_BY_NAME = (
    r"(killall\b[^;&|\n]*"
    r"|pkill\b(?![^;&|\n]*\s-(?:P|F|g|s|-parent|-pidfile|-pgroup|-session)\b)[^;&|\n]*"
    r"|ray\s+stop\b[^;&|\n]*"
    r"|kill\b[^;&|\n]*(?:\$\(|`)\s*(?:pgrep|pidof|ps)\b[^;\n]*"
    r"|(?:pgrep|pidof)\b[^;&\n]*\|\s*xargs\s+(?:-\S+\s+)*kill\b[^;&|\n]*"
    r"|ps\b[^;&\n]*grep[^;&\n]*xargs\s+(?:-\S+\s+)*kill\b[^;&|\n]*)"
)


def name_kill(command: str) -> str | None:
    """The part of a shell command that ends processes by name, or None."""
    match = re.search(_START + _BY_NAME, command)
    return printable(match[1].strip()[:60]) if match else None


@guard(
    "P3O705",
    "secret-in-preset",
    why="A preset is copied into every run directory, into scripts and into version control, and process lists show "
    "environment values. A key written in it is published with them.",
    fix="Take it out, revoke it, and pass it by the environment of the launching shell, such as "
    "WANDB_API_KEY, which the ranks inherit.",
    source="https://github.com/modal-projects/training-gym/pull/516",
    allows="References such as ${HF_TOKEN}, empty values, placeholders; names that only contain a word such as token "
    "(tokenizer, max_tokens_per_gpu, eos_token); commit hashes.",
)
def secret_in_preset(context: GuardContext) -> Iterator[Finding]:
    for secret in secrets_of(context.preset):
        yield Finding(
            secret.path,
            f"{printable(secret.path)} holds {secret.kind}; presets are copied into run directories and scripts",
            secret.hint,
            key=secret.in_key,
        )
