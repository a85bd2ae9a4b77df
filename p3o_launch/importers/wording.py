"""Sentences and hints about a preset -> the same in the words of another framework's configuration.

A hint that reads ``set PATH: VALUE`` becomes the flag, the override or the YAML line that does it there.
"""

from __future__ import annotations

import re
import shlex
from functools import cache

from p3o_launch.importers.facts import Facts
from p3o_launch.schema import Group, Preset

_SET = re.compile(r"\b(?:set|write|use|add) ([a-z_]+\.[a-z_0-9.]+): ?([^\s,;()]+)")
_AND_SET = re.compile(r"\b(and|or) ([a-z_]+\.[a-z_0-9.]+): ?([^\s,;()]+)")
_REMOVE = re.compile(r"\bremove ([a-z_]+\.[a-z_0-9.]+)")
_PATH = re.compile(r"\b(?:" + "|".join(Preset.model_fields) + r")\.[a-z_0-9]+(?:\.[\w]+)*")
_FIELD = re.compile(r"(?<![\w.-])[a-z]+(?:_[a-z0-9]+)+(?![\w.=-])")
_VARIABLES = re.compile(r"add to cluster\.env: (.*)", re.DOTALL)
_VARIABLE = re.compile(r'([A-Z][A-Z0-9_]*): "([^"]*)"')
_NO_ENVIRONMENT = re.compile(r"\bcluster\.env does not set\b")
# Only a preset can ignore a rule.
_IGNORE = re.compile(r",? (?:or|then) ignore P3O\d+[^;]*")
# Two settings of a preset that are one in the framework.
_TWICE = re.compile(r"(\S{3,}) and \1(?!\S)")
# What other frameworks offer and the builtin runtime does not, so that the rules do not: code -> switch and weight.
_ALSO = {"P3O110": ("algorithm.use_kl_loss", "algorithm.kl_loss_coef", "for a KL in the loss")}


# What mends a fault elsewhere, where the rule's own hint offers only what the builtin runtime carries out.
_INSTEAD = {"P3O111": "set algorithm.use_kl_in_reward: false", "P3O410": "write rollout.max_staleness: 1"}


@cache
def _fields() -> dict[str, str]:
    """Names of settings that one group alone has -> their path: rules name a neighbour without its group."""
    paths: dict[str, list[str]] = {}
    for group, info in Preset.model_fields.items():
        kind = info.annotation
        for name in kind.model_fields if isinstance(kind, type) and issubclass(kind, Group) else ():
            paths.setdefault(name, []).append(f"{group}.{name}")
    return {name: found[0] for name, found in paths.items() if len(found) == 1}


class Wording:
    """Preset paths -> the names by which the user sets them."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts

    def name(self, path: str) -> str:
        """The user's name of a path; the path itself where the framework has no such setting."""
        known = self.facts.names.get(path)
        variable = path.removeprefix("cluster.env.")  # its own name says enough
        return known or (variable if variable != path else path)

    def sentence(self, text: str) -> str:
        """Every path in a text, renamed."""
        if "cluster.env" not in self.facts.names:
            text = _NO_ENVIRONMENT.sub("the environment does not set", text)
        text = _PATH.sub(lambda match: self.name(match[0]), text)
        return _FIELD.sub(lambda match: self.name(_fields().get(match[0], match[0])), text)

    def hint(self, code: str, text: str) -> str:
        """What to do about a finding of ``code``, where its own hint is ``text``."""
        if code in self.facts.remedies:
            return self.facts.remedies[code]
        text = _IGNORE.sub("", _INSTEAD.get(code, text))
        return self.remedy(text) + self._also(code)

    def remedy(self, text: str) -> str:
        """A hint, with ``set PATH: VALUE`` in the way the user writes a setting."""
        if "cluster.env" not in self.facts.names and (match := _VARIABLES.fullmatch(text)):
            pairs = " ".join(f"{name}={shlex.quote(value)}" for name, value in _VARIABLE.findall(match[1]))
            return f"where the ranks start: export {pairs}"
        text = _SET.sub(lambda match: self.setting(match[1], match[2]), text)
        text = _AND_SET.sub(lambda match: f"{match[1]} {_without_verb(self.setting(match[2], match[3]))}", text)
        text = _REMOVE.sub(lambda match: self._styled(self.facts.remedies.get(match[1], match[0])), text)
        return _TWICE.sub(r"\1", self.sentence(text))

    def setting(self, path: str, value: str) -> str:
        """``pass --flag value``, or ``set key=value``."""
        if path in self.facts.remedies:
            return self._styled(self.facts.remedies[path])
        name = self.facts.names.get(path)
        if name is None:
            return _in_words(path, value)
        if name.startswith("--"):
            if value == "true":
                return f"pass {name}"
            return f"leave out {name}" if value in ("false", "null") else f"pass {name} {value}"
        if self.facts.style == "yaml":
            return f"set {name}: {value}"
        return f"set {'+' if name in self.facts.additions else ''}{name}={value}"

    def _styled(self, remedy: str) -> str:
        """A remedy written as an override, as a line of YAML where the source is YAML."""
        return re.sub(r"\b(set [\w.]+)=", r"\1: ", remedy) if self.facts.style == "yaml" else remedy

    def _also(self, code: str) -> str:
        if code not in _ALSO:
            return ""
        switch, weight, purpose = _ALSO[code]
        if switch not in self.facts.names or weight not in self.facts.names:
            return ""
        return f", or {self.setting(switch, 'true')} with {self.name(weight)} {purpose}"


def _without_verb(text: str) -> str:
    """The second of two settings: ``pass --a 1 and --b 2``."""
    return text.removeprefix("pass ").removeprefix("set ")


def _in_words(path: str, value: str) -> str:
    """A setting for which the framework has no name that is known here."""
    words = path.rpartition(".")[2].replace("_", " ")
    if value in ("true", "false"):
        return f"turn {words} {'on' if value == 'true' else 'off'}"
    return f"leave out {words}" if value == "null" else f"make {words} {value}"
