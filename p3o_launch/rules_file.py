"""Metadata of the rules about files and YAML (0xx) and of the internal one (901); other modules emit them."""

from __future__ import annotations

from p3o_launch.diagnostics import LocatedFinding, Position, Severity
from p3o_launch.guards import Rule, register

_YAML11 = "https://yaml.org/spec/1.1/"


def _rule(code: str, name: str, why: str, fix: str, source: str, allows: str = "") -> Rule:
    return register(Rule(code, name, Severity.ERROR, why, fix, source, allows))


FILE_RULES: dict[str, Rule] = {
    rule.code: rule
    for rule in (
        _rule(
            "P3O001",
            "unreadable-file",
            "A preset is a UTF-8 text file that holds one YAML mapping. Anything else cannot be checked, and a file"
            " that was not checked is never called ok.",
            "Name an existing file, save it as UTF-8, and write the settings as `key: value` lines.",
            "design rule of p3o-launch",
            "a UTF-8 byte order mark; comments before the first key",
        ),
        _rule(
            "P3O002",
            "yaml-syntax",
            "The YAML parser stops at the first syntax error, so nothing after it could be checked.",
            "Mend the line: look for a tab, a missing space after a colon, an unclosed quote or bracket.",
            _YAML11,
        ),
        _rule(
            "P3O003",
            "duplicate-key",
            "YAML readers keep the last of two equal keys without a word, so one of the two values has no effect.",
            "Delete one of the two lines.",
            _YAML11 + "#id861060",
            "a key that overrides one merged with `<<`",
        ),
        _rule(
            "P3O004",
            "oversized-yaml",
            "Nested aliases, deep nesting or a huge file can make a few lines expand to gigabytes. No preset needs more"
            " than a megabyte, 10,000 values or 32 levels.",
            "Write the settings out, or split the file with `extends`.",
            "the entity expansion attack known as billion laughs",
            "anchors and aliases that stay below the limits",
        ),
        _rule(
            "P3O005",
            "unsafe-tag",
            "A YAML tag such as `!!python/object` asks the reader to build an object and may run code. Presets hold"
            " plain text, numbers, booleans, lists and mappings.",
            "Remove the tag and write the plain value.",
            "PyYAML documentation, `yaml.load`",
            "the core tags `!!str`, `!!int`, `!!float`, `!!bool`, `!!null`, `!!map`, `!!seq`",
        ),
        _rule(
            "P3O006",
            "unknown-key",
            "A misspelt key, or a key at the wrong level, would leave the setting at its default without a word.",
            "Use the name the finding offers; `p3o-launch schema` lists all of them.",
            "design rule of p3o-launch",
            "free-form mappings: `rollout.extra`, `cluster.env`, `cluster.runtime_env`",
        ),
        _rule(
            "P3O007",
            "wrong-value",
            "The value has another type than its field, or lies outside the field's own range. YAML 1.1 has traps here:"
            " `off`, `on`, `yes` and `no` are booleans, `010` is 8, `1:30` is 90, `1E400` is infinite.",
            "Write a value of the type the finding names; put text that looks like a number or a boolean in quotes.",
            _YAML11 + ", types bool, int and float",
            "`1e-5` in numeric fields, although YAML 1.1 reads it as text; `on` and `off` in boolean fields",
        ),
        _rule(
            "P3O008",
            "broken-inheritance",
            "A parent, profile or recipe that does not exist, or leads back to itself, leaves the settings undefined.",
            "Name an existing file (relative to the file that extends it, with its suffix) or a preset that ships with"
            " p3o-launch.",
            "design rule of p3o-launch",
            "two parents that share a grandparent",
        ),
        _rule(
            "P3O009",
            "unknown-set-path",
            "A `--set` whose path does not exist would change nothing, and the run would look as if it did.",
            "Use the dotted path the finding offers; `p3o-launch presets NAME --resolved` shows all of them.",
            "design rule of p3o-launch",
            "any key below a free-form mapping, such as `cluster.env.NAME`",
        ),
        _rule(
            "P3O010",
            "wrong-schema-version",
            "`schema_version` says which meaning the names have. Read under another version, the run may change.",
            "Write `schema_version: 1`.",
            "design rule of p3o-launch",
        ),
        _rule(
            "P3O012",
            "missing-key",
            "A setting without a default that any experiment could rely on must be written.",
            "Add the key, or extend a preset that has it.",
            "design rule of p3o-launch",
            "a key that comes through `extends`, a recipe, a profile or `--set`",
        ),
        _rule(
            "P3O013",
            "refused-ignore",
            "`ignore` names a code that does not exist, or a rule whose violation changes the objective, breaks the"
            " replay or stops the run; silencing it would only hide a wrong run.",
            "Remove the entry and mend the setting the rule is about.",
            "design rule of p3o-launch",
            "warnings, and errors whose rule says so, each with a reason",
        ),
        _rule(
            "P3O901",
            "guard-crashed",
            "A rule failed with an exception. That is a bug of p3o-launch, and it must not pass as a clean report.",
            "Report it with the traceback in the log file.",
            "design rule of p3o-launch",
        ),
    )
}


def file_finding(
    code: str, position: Position, message: str, hint: str | None = None, path: str = ""
) -> LocatedFinding:
    """A located finding of one of the rules above."""
    rule = FILE_RULES[code]
    return LocatedFinding(position, rule.severity, rule.code, rule.name, message, hint, path)
