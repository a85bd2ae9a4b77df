"""What the shell completes: names of presets, profiles and recipes, codes and names of rules, formats.

Each function takes what is typed so far and gives (text, help) pairs. Files are left to the shell.
"""

from __future__ import annotations

from collections.abc import Iterable

Choices = list[tuple[str, str]]


def complete_preset(incomplete: str) -> Choices:
    """Shipped presets with their descriptions."""
    return _shipped("", incomplete)


def complete_profile(incomplete: str) -> Choices:
    """Shipped hardware profiles."""
    return _shipped("profiles", incomplete)


def complete_recipe(incomplete: str) -> Choices:
    """Shipped recipes."""
    return _shipped("recipes", incomplete)


def _shipped(folder: str, incomplete: str) -> Choices:
    from p3o_launch.catalogue import described

    return [(name, text) for name, text in described(folder) if name.startswith(incomplete)]


def complete_rule(incomplete: str) -> Choices:
    """Codes of rules with their names; a name when letters other than a code's are typed."""
    from p3o_launch.guards import all_guards

    rules = list(all_guards().values())
    codes = [(rule.code, rule.name) for rule in rules if rule.code.startswith(incomplete.upper())]
    return codes or [(rule.name, rule.code) for rule in rules if rule.name.startswith(incomplete.lower())]


def complete_format(incomplete: str) -> list[str]:
    """Output formats of findings."""
    from p3o_launch.report import FORMATS

    return _starting(FORMATS, incomplete)


def complete_framework(incomplete: str) -> list[str]:
    """Frameworks that ``lint`` reads."""
    from p3o_launch.importers import FRAMEWORKS

    return _starting(FRAMEWORKS, incomplete)


def complete_setting(incomplete: str) -> list[str]:
    """Dotted paths of settings, as ``--set`` takes them."""
    from p3o_launch.fields import FIELDS

    paths = [f"{group}.{name}" for group, fields in FIELDS.items() for name in fields]
    return [f"{path}=" for path in _starting([*paths, "profile", "recipe"], incomplete)]


def _starting(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
