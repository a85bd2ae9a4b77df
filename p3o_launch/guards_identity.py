"""7xx: identity of a run, and secrets. 701 and 703 are raised where the run directory is made and resumed."""

from __future__ import annotations

from collections.abc import Iterator

from p3o_launch.diagnostics import Finding, Severity
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
        "P3O703",
        "resume-does-nothing",
        Severity.ERROR,
        why="The stored checkpoint already stands at or past the number of optimizer steps the preset asks for: the "
        "resumed run would load everything, make no step and look like a success.",
        fix="Raise batch.num_rollout above the stored one, or start a new run.",
        source="design rule of p3o-launch: a run that makes zero steps is not a success",
        allows="A resume with at least one step left.",
    )
)


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
            f"{secret.path} holds {secret.kind}; presets are copied into run directories and scripts",
            secret.hint,
            key=secret.in_key,
        )
