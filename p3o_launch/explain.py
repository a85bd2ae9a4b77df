"""Rule metadata -> the page that ``p3o-launch explain`` prints, and the list of all rules."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping

from p3o_launch.errors import UsageError
from p3o_launch.guards import Rule
from p3o_launch.nodes import shown_key
from p3o_launch.presets import nearest


def sections(rule: Rule) -> list[tuple[str, str]]:
    """(title, text) of everything a rule says about itself; the printed page and the one in ``docs/guards`` agree."""
    ignored = rule.ignorable or rule.severity.value != "error"
    silence = f'`ignore: {{{rule.code}: "reason"}}` in the preset' if ignored else "cannot be ignored"
    named = [
        ("why", rule.why),
        ("fix", rule.fix),
        ("allows", rule.allows),
        ("source", rule.source),
        ("ignore", silence),
    ]
    return [(title, text) for title, text in named if text]


def page(rule: Rule, width: int = 88) -> str:
    """What a rule says, why, how to mend it, what it allows, and where it comes from."""
    lines = [f"{rule.code} {rule.name} ({rule.severity.value})"]
    for title, body in sections(rule):
        indent = " " * 10
        lines += ["", textwrap.fill(body, width, initial_indent=f"  {title + ':':<8}", subsequent_indent=indent)]
    return "\n".join(lines) + "\n"


def listing(rules: Iterable[Rule]) -> str:
    """One line per rule: code, severity, name."""
    return "".join(f"{rule.code}  {rule.severity.value:<7}  {rule.name}\n" for rule in rules)


def find(rules: Mapping[str, Rule], wanted: str) -> Rule:
    """The rule with this code (``P3O301``, ``p3o301``, ``301``) or name; UsageError with the nearest one otherwise."""
    code = wanted.upper() if not wanted.isdigit() else f"P3O{wanted}"
    by_name = {rule.name: rule for rule in rules.values()}
    if code in rules:
        return rules[code]
    if wanted.lower() in by_name:
        return by_name[wanted.lower()]
    close = nearest(wanted, list(by_name))
    hint = f"did you mean {by_name[close].code} ({close})?" if close else "`p3o-launch explain --list` shows every code"
    raise UsageError(f"there is no rule {shown_key(wanted)}", hint=hint)
