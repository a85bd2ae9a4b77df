"""The commands, as Typer parses them: parse, call, exit code. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from p3o_launch import completion
from p3o_launch.console import known_format, report, unbroken, validate_files
from p3o_launch.errors import EXIT_FINDINGS, EXIT_OK, UsageError
from p3o_launch.presets import resolve_name
from p3o_launch.report import FORMATS

app = typer.Typer(
    name="p3o-launch",
    help="Validate and run P3O presets on Megatron.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
runs_app = typer.Typer(help="Records of runs.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(runs_app, name="runs")

Format = Annotated[
    str,
    typer.Option(
        "--format",
        metavar="|".join(FORMATS),
        help="How findings are printed.",
        autocompletion=completion.complete_format,
    ),
]
Sets = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="PATH=VALUE",
        help="Override one setting; may be repeated.",
        autocompletion=completion.complete_setting,
    ),
]
Profile = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Hardware profile, such as a100x4 or cpu.",
        autocompletion=completion.complete_profile,
    ),
]
Recipe = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Model, data and batch: formal_4b, formal_0p6b, smoke.",
        autocompletion=completion.complete_recipe,
    ),
]

_PRESET = typer.Option(
    "--preset",
    metavar="FILE_OR_NAME",
    help="Preset file, or a shipped one's name.",
    autocompletion=completion.complete_preset,
)
PresetName = Annotated[str, _PRESET]
OptionalPreset = Annotated[str | None, _PRESET]
Target = Annotated[str, typer.Option(metavar="builtin|relax", help="What trains: this package, or Relax as a Ray job.")]
RayAddress = Annotated[str | None, typer.Option(metavar="ADDRESS", help="Existing Ray cluster; local without.")]
JobsAddress = Annotated[
    str | None,
    typer.Option("--ray-address", metavar="URL", help="Jobs server, such as http://HOST:8265; RAY_ADDRESS without."),
]
Run = Annotated[str, typer.Argument(metavar="RUN", help="A run directory, or the id of a run.")]
Strict = Annotated[bool, typer.Option("--strict", help="A warning refuses the launch.")]
ClearProxies = Annotated[bool, typer.Option("--clear-proxies", help="Run without the shell's proxy variables.")]


def _version(show: bool) -> None:
    if show:
        from p3o_launch import __version__

        typer.echo(f"p3o-launch {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Validate and run P3O presets on Megatron."""


@app.command()
def validate(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE_OR_NAME...",
            help="Preset files, or names of shipped ones; - reads the standard input.",
            autocompletion=completion.complete_preset,
        ),
    ],
    format_: Format = "text",
    set_: Sets = [],  # noqa: B006 - typer reads the default and never changes it
    profile: Profile = None,
    recipe: Recipe = None,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings fail too.")] = False,
) -> None:
    """Report every finding of every file, in one pass."""
    raise typer.Exit(validate_files(files, format_, set_, profile, recipe, strict))


@app.command()
def lint(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Argument list or YAML; - reads the standard input.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[OVERRIDE...]", help="verl, NeMo-RL: a.b=c, +a.b=c, ~a.b.")
    ] = None,
    framework: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="relax|slime|megatron|verl|nemo_rl",
            help="Whose configuration it is.",
            autocompletion=completion.complete_framework,
        ),
    ] = "",
    target: Annotated[
        str | None, typer.Option("--as", metavar="p3o", help="Judge it as P3O with whole-step ESS.")
    ] = None,
    env: Annotated[list[str], typer.Option("--env", metavar="KEY=VALUE", help="Environment of the run.")] = [],  # noqa: B006
    gpus: Annotated[int | None, typer.Option(metavar="N", help="Trainer GPUs, where the file does not say.")] = None,
    gpu: Annotated[str | None, typer.Option(metavar="NAME", help="Their product name, such as A100-40GB.")] = None,
    facts: Annotated[bool, typer.Option("--facts", help="Print the facts as JSON instead of findings.")] = False,
    format_: Format = "text",
    strict: Annotated[bool, typer.Option("--strict", help="Warnings fail too.")] = False,
) -> None:
    """Judge another framework's configuration by the same rules."""
    from p3o_launch.importers import Request, facts_text, lint_file

    known_format(format_)
    result = lint_file(file, Request(framework, tuple(overrides or ()), tuple(env), gpus, gpu, target))
    if facts and result.facts is not None:
        sys.stdout.write(facts_text(result.facts))
        return
    code = report([result.check], format_)
    raise typer.Exit(code or (EXIT_FINDINGS if strict and result.warned else EXIT_OK))


@app.command()
def explain(
    code: Annotated[
        str | None, typer.Argument(help="Code or name of a rule.", autocompletion=completion.complete_rule)
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List every rule.")] = False,
) -> None:
    """What a rule says, why, how to mend it, and its source."""
    from p3o_launch.explain import find, listing, page
    from p3o_launch.guards import all_guards

    rules = all_guards()
    if list_ or code is None:
        if code is None and not list_:
            raise UsageError("which rule?", hint="`p3o-launch explain CODE`, or `p3o-launch explain --list`")
        sys.stdout.write(listing(rules.values()))
        return
    sys.stdout.write(page(find(rules, code)))


@app.command()
def schema() -> None:
    """Print the JSON Schema of a preset, for editors."""
    import json

    from p3o_launch.json_schema import preset_schema

    sys.stdout.write(json.dumps(preset_schema(), indent=2) + "\n")


@app.command()
def presets(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="A preset to show.", autocompletion=completion.complete_preset),
    ] = None,
    resolved: Annotated[bool, typer.Option("--resolved", help="With its inheritance resolved and origins.")] = False,
    set_: Sets = [],  # noqa: B006
    profile: Profile = None,
    recipe: Recipe = None,
) -> None:
    """List the shipped presets, or show one."""
    if name is None:
        from p3o_launch.catalogue import catalogue

        sys.stdout.write(catalogue())
        return
    from p3o_launch.check import check_file
    from p3o_launch.resolve import annotated

    path = resolve_name(name)
    if not (resolved or set_ or profile or recipe):
        from p3o_launch.loading import decode, read_limited

        sys.stdout.write(decode(read_limited(path)))
        return
    result = check_file(path, overrides=set_, profile=profile, recipe=recipe)
    unbroken(result)
    sys.stdout.write(annotated(result))


Arm = typer.Argument(
    metavar="FILE_OR_NAME", help="Preset file, or a shipped one's name.", autocompletion=completion.complete_preset
)


@app.command()
def diff(
    left: Annotated[str, Arm],
    right: Annotated[str, Arm],
    paired: Annotated[bool, typer.Option("--paired", help="Fail when more than the declared factor differs.")] = False,
    factor: Annotated[
        list[str],
        typer.Option(metavar="PATH", help="With --paired: what may differ (default: the algorithm); may be repeated."),
    ] = [],  # noqa: B006
    seeds: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="With --paired: the seeds both arms run with.")
    ] = None,
    format_: Format = "text",
    set_: Sets = [],  # noqa: B006
    profile: Profile = None,
    recipe: Recipe = None,
) -> None:
    """How two presets differ after resolution."""
    known_format(format_)
    if not paired and (factor or seeds is not None or format_ != "text"):
        raise UsageError("--factor, --seeds and --format need --paired", hint="add --paired")
    from p3o_launch.check import check_file
    from p3o_launch.paired import factors, judge_pair, seed_list
    from p3o_launch.resolve import difference_text, differences

    own, named = factors(factor), seed_list(seeds)
    sides = [check_file(resolve_name(name), overrides=set_, profile=profile, recipe=recipe) for name in (left, right)]
    dumps = [unbroken(side).model_dump() for side in sides]
    found = differences(*dumps)
    if format_ == "text":
        sys.stdout.write(difference_text(found))
    if paired:
        raise typer.Exit(report([judge_pair(sides[0], sides[1], own, named)], format_))
    typer.echo("no differences" if not found else f"{len(found)} differences", err=True)


def _with_address(overrides: list[str], recipe: str | None, ray_address: str | None) -> list[str]:
    """What the options that stand for settings say, as ``--set`` would."""
    import json

    named = [f"recipe={recipe}"] if recipe else []
    return [*overrides, *named, *([f"cluster.ray_address={json.dumps(ray_address)}"] if ray_address else [])]


@app.command()
def run(
    preset: OptionalPreset = None,
    profile: Profile = None,
    recipe: Recipe = None,
    set_: Sets = [],  # noqa: B006
    target: Target = "builtin",
    ray_address: RayAddress = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the script that would run, and stop.")] = False,
    output: Annotated[str | None, typer.Option(metavar="FILE", help="With --dry-run: write the script there.")] = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Carry on this run, as its record says where no --preset is given."),
    ] = None,
    clear_proxies: ClearProxies = False,
    strict: Strict = False,
) -> None:
    """Validate a preset, make a run directory, and train."""
    if preset is not None:
        resolve_name(preset)  # an unknown name is a usage error, before anything is loaded
    from p3o_launch.launch.run_command import run_preset

    overrides = _with_address(set_, recipe, ray_address)
    code = run_preset(
        preset, profile, overrides, dry_run, output, resume, target=target, clear_proxies=clear_proxies, strict=strict
    )
    raise typer.Exit(code)


@app.command()
def submit(
    preset: PresetName,
    profile: Profile = None,
    recipe: Recipe = None,
    set_: Sets = [],  # noqa: B006
    target: Target = "builtin",
    ray_address: JobsAddress = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Follow the job to its end.")] = True,
    clear_proxies: ClearProxies = False,
    strict: Strict = False,
) -> None:
    """Run a preset as a job of an existing Ray cluster."""
    resolve_name(preset)
    from p3o_launch.launch.run_command import submit_preset

    overrides = _with_address(set_, recipe, ray_address)
    raise typer.Exit(submit_preset(preset, profile, overrides, target, wait, clear_proxies, strict))


@app.command("run-resolved", hidden=True)
def run_resolved(directory: str, arguments: list[str]) -> None:
    """What a generated script, or a Ray job, launches in the run directory it has made."""
    from p3o_launch.launch.resolved_run import run_resolved as resolved

    raise typer.Exit(resolved(directory, arguments))


@app.command()
def verify(
    world: Annotated[int, typer.Option(min=1, metavar="N", help="Largest number of processes (GPUs with cuda).")] = 4,
    layouts: Annotated[
        list[str], typer.Option("--layouts", metavar="PATTERN", help="Layouts by name, as 'tp2*'; may be repeated.")
    ] = [],  # noqa: B006 - typer reads the default and never changes it
    format_: Annotated[str, typer.Option("--format", metavar="text|json", help="How figures are printed.")] = "text",
    device: Annotated[str, typer.Option(metavar="cpu|cuda", help="Where the processes compute.")] = "cpu",
) -> None:
    """Measure that no layout moves the cap, the loss or the gradient, on this machine's processes."""
    from p3o_launch.launch.verify_command import verify as measure

    raise typer.Exit(measure(world, layouts, format_, device))


@app.command()
def doctor(
    preset: Annotated[
        str | None,
        typer.Argument(
            metavar="[FILE_OR_NAME]", help="A preset to check too.", autocompletion=completion.complete_preset
        ),
    ] = None,
    profile: Profile = None,
    recipe: Recipe = None,
    set_: Sets = [],  # noqa: B006
    format_: Annotated[str, typer.Option("--format", metavar="text|json", help="How the report is printed.")] = "text",
) -> None:
    """What this machine can run: packages, GPUs, disk, network; with a preset, its files and data too."""
    from p3o_launch.launch.doctor import doctor as examine

    raise typer.Exit(examine(preset, set_, profile, recipe, format_))


@runs_app.command("list")
def runs_list(root: Annotated[str, typer.Argument(metavar="[ROOT]", help="Directory of runs.")] = "runs") -> None:
    """List the runs below a directory, with their status."""
    from p3o_launch.launch.runs_command import list_runs

    raise typer.Exit(list_runs(root))


@runs_app.command("show")
def runs_show(run: Run) -> None:
    """Show one run's record."""
    from p3o_launch.launch.runs_command import show_run

    raise typer.Exit(show_run(run))


@runs_app.command("stop")
def runs_stop(run: Run) -> None:
    """Stop a run that goes on, here or on a Ray cluster."""
    from p3o_launch.launch.runs_actions import stop_run

    raise typer.Exit(stop_run(run))


@runs_app.command("follow")
def runs_follow(run: Run) -> None:
    """Show a submitted run's output until it ends."""
    from p3o_launch.launch.runs_actions import follow_run

    raise typer.Exit(follow_run(run))


@runs_app.command("rerun")
def runs_rerun(run: Run) -> None:
    """Run a recorded configuration again."""
    from p3o_launch.launch.runs_actions import rerun

    raise typer.Exit(rerun(run))
