"""Shell words -> the words of the one command that trains.

A command line is often followed by ``2>&1 | tee log`` or preceded by ``cd x &&``, and a launch script gathers its
arguments in arrays (``PERF_ARGS=(...)``) and passes them on as ``${PERF_ARGS[@]}``. What is set in the text is put in;
what is set elsewhere (a sourced file, the environment) is unknown, and then so is every flag that is not written.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from p3o_launch.diagnostics import LocatedFinding, Position
from p3o_launch.importers.words import Word, Words, shorten
from p3o_launch.rules_import import import_finding

_SEPARATORS = frozenset((";", "|", "||", "&&", "&", "then", "do", "{", "}"))
_REDIRECTION = re.compile(r"(?:\d*|&)(?:>>?|<)(&?\d+|&-|\S*)")
_ARRAY = re.compile(r"([A-Za-z_]\w*)\+?=\(")
_SCALAR = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_WHOLE_ARRAY = re.compile(r"\$\{([A-Za-z_]\w*)\[[@*]\]\}")
_NAME = re.compile(r"\$\{([A-Za-z_]\w*)(?::?-([^${}]*))?\}|\$([A-Za-z_]\w*)")
_LAUNCHER_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_LAUNCHER_SWITCHES = ("--", "--standalone", "--no-wait")
_MAX_WORDS = 20_000


@dataclass(slots=True)
class Command:
    """The words of the command that trains. ``partial``: what comes from elsewhere, ``"model"`` (a list of model
    arguments by its name), ``"all"`` or nothing."""

    words: list[Word]
    findings: list[LocatedFinding]
    partial: str = ""


@dataclass(slots=True)
class _Script:
    file: str
    arrays: dict[str, list[Word]] = field(default_factory=dict)
    scalars: dict[str, str] = field(default_factory=dict)
    commands: list[list[Word]] = field(default_factory=lambda: [[]])
    findings: list[LocatedFinding] = field(default_factory=list)
    partial: str = ""


def training_command(found: Words, file: str) -> Command:
    """The training command among shell words; a bare list of arguments is its own command."""
    if not found.shell:
        return Command(found.words, found.findings)
    script = _Script(file)
    is_script = found.script or any(_ARRAY.fullmatch(word.text) and not word.quoted for word in found.words)
    _collect(script, found.words, is_script)
    programs = [words for words in script.commands if entry_of(words) is not None]
    if not is_script:
        words = max(programs, key=len) if programs else [word for words in script.commands for word in words]
        return Command(words, found.findings)
    chosen = max(programs or script.commands, key=lambda words: len(_expand(script, words, set(), quiet=True)))
    expanded = _expand(script, chosen, set())
    return Command(expanded[:_MAX_WORDS], [*found.findings, *script.findings], script.partial)


def entry_of(words: list[Word]) -> int | None:
    """Index of the training program: ``train.py`` behind a launcher, or the module behind ``-m``."""
    for index, word in enumerate(words):
        before = words[index - 1].text if index else ""
        if before == "-m":
            if word.text not in _LAUNCHER_MODULES:
                return index
        elif word.text.endswith(".py"):
            takes_value = before.startswith("--") and "=" not in before and before not in _LAUNCHER_SWITCHES
            if not takes_value:
                return index
    return None


def _collect(script: _Script, words: list[Word], is_script: bool) -> None:
    """Sort the words into arrays, variables and commands."""
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if word.starts and is_script and script.commands[-1]:
            script.commands.append([])
        if not word.quoted and word.text in _SEPARATORS:
            script.commands.append([])
        elif not word.quoted and (match := _REDIRECTION.fullmatch(word.text)):
            index += 0 if match[1] else 1
        elif is_script and not word.quoted and (array := _ARRAY.fullmatch(word.text)):
            index = _array(script, array[1], word, words, index)
        elif is_script and word.text in ("export", "local", "readonly", "declare") and word.starts:
            script.commands.append([])
        elif is_script and not script.commands[-1] and (scalar := _SCALAR.fullmatch(word.text)):
            value = _substitute(script, scalar[2], word.variable)
            if value is not None:
                script.scalars[scalar[1]] = value
            script.commands[-1].append(word)
        else:
            script.commands[-1].append(word)


def _array(script: _Script, name: str, word: Word, words: list[Word], index: int) -> int:
    """Collect the words of an array; returns the index behind it."""
    items = script.arrays.setdefault(name, []) if word.text.endswith("+=(") else []
    script.arrays[name] = items
    for item in words[index:]:
        index += 1
        if item.text == ")" and not item.quoted:
            break
        items.append(item)
    return index


def _expand(script: _Script, words: list[Word], inside: set[str], quiet: bool = False) -> list[Word]:
    """Put arrays and variables in; what is not known stays, and makes the command partial (unless ``quiet``)."""
    expanded: list[Word] = []
    for word in words:
        if len(expanded) > _MAX_WORDS:
            break
        whole = _WHOLE_ARRAY.fullmatch(word.text)
        bare = _NAME.fullmatch(word.text) if not word.quoted else None
        name = whole[1] if whole else (bare[1] or bare[3]) if bare else ""
        if name in script.arrays and name not in inside:
            expanded += _expand(script, script.arrays[name], inside | {name}, quiet)
        elif whole:
            if not quiet:
                _unknown(script, word)
        elif bare and " " in script.scalars.get(name, ""):
            parts = script.scalars[name].split()
            expanded += [word._replace(text=part, variable="$" in part) for part in parts]
        elif word.variable:
            value = _substitute(script, word.text, True)
            expanded.append(word if value is None else word._replace(text=value, variable=False))
        else:
            expanded.append(word)
    return expanded


def _unknown(script: _Script, word: Word) -> None:
    model_only = "MODEL" in word.text.upper() and script.partial != "all"
    script.partial = "model" if model_only else "all"
    script.findings.append(
        import_finding(
            "P3O029",
            Position(script.file, word.line, word.column),
            f"{shorten(word.text)} is set elsewhere: what it holds was not read",
            "lint the argument list the script ends up with",
        )
    )


def _substitute(script: _Script, text: str, variable: bool) -> str | None:
    """The text with every variable put in; None when one is not known."""
    if not variable:
        return text
    missing = False

    def value(match: re.Match[str]) -> str:
        nonlocal missing
        known = script.scalars.get(match[1] or match[3], match[2])
        missing = missing or known is None
        return known or ""

    result = _NAME.sub(value, text)
    return None if missing or "$" in result or "`" in result or len(result) > 10_000 else result
