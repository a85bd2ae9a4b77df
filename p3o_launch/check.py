"""Load -> schema errors -> guards -> every finding, sorted. The one function the commands and the tests call.

A fault is reported once: what depends on a field that is broken, missing or misspelt is held back until it is mended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from p3o_launch.diagnostics import Finding, LocatedFinding, Position, Severity
from p3o_launch.guards import GuardContext, Rule, all_guards
from p3o_launch.loading import STDIN, STDIN_NAME, ChainFile, Flat, Loaded, flatten, load, merge, parse_overrides
from p3o_launch.nodes import Entry, Node, Path, parse, shown_key
from p3o_launch.presets import nearest
from p3o_launch.rules_file import file_finding
from p3o_launch.verdict import Unreadable, Verdict, place

if TYPE_CHECKING:
    from p3o_launch.schema import Preset

__all__ = ["CheckResult", "Suppressed", "check_file", "check_text"]


# Origins of what the author of a preset, or of a command line, wrote.
_OWN = ("", "--set")


@dataclass(frozen=True, slots=True)
class Suppressed:
    """A finding the preset asks to ignore, with its reason."""

    finding: LocatedFinding
    reason: str


class CheckResult:
    """What is known about one preset.

    ``findings``: sorted by place. ``resolved``: plain data after inheritance, without defaults. ``values``, ``keys``:
    place of each value and key by path. ``chain``: the files that took part. ``choices``: the profile and recipe in
    effect. ``crashes``: tracebacks of guards that raised (P3O901).
    """

    def __init__(
        self,
        source: str,
        preset: Preset | None,
        findings: tuple[LocatedFinding, ...],
        suppressed: tuple[Suppressed, ...] = (),
        *,
        flat: Flat | None = None,
        loaded: Loaded | None = None,
        overrides: Sequence[str] = (),
        crashes: Sequence[str] = (),
        sound: bool = False,
    ) -> None:
        self.source, self.findings, self.suppressed = source, findings, suppressed
        self.resolved: dict[str, Any] = flat.data if flat else {}
        self.values: dict[Path, Position] = flat.values if flat else {}
        self.keys: dict[Path, Position] = flat.keys if flat else {}
        self.chain: tuple[ChainFile, ...] = tuple(loaded.chain) if loaded else ()
        self.choices: dict[str, str] = loaded.choices if loaded else {}
        self.partial = loaded.partial if loaded else False
        self.overrides, self.crashes = tuple(overrides), tuple(crashes)
        self._preset, self._sound = preset, sound

    @property
    def preset(self) -> Preset | None:
        """The preset; None when its shape is broken or the file is a ``partial`` one.

        It may still have errors from guards, so ask ``has_errors`` before a launch. Built when first asked for: only
        then is pydantic imported.
        """
        if self._preset is None and self._sound:
            from p3o_launch.schema import Preset

            self._preset = Preset.model_validate(self.resolved)
        return self._preset

    def count(self, severity: Severity) -> int:
        """Findings of one severity."""
        return sum(finding.severity is severity for finding in self.findings)

    @property
    def has_errors(self) -> bool:
        """True when the launch must be refused."""
        return self.count(Severity.ERROR) > 0

    @property
    def crashed(self) -> bool:
        """True when a guard raised."""
        return bool(self.crashes)


def check_file(
    path: str, *, overrides: Sequence[str] = (), profile: str | None = None, recipe: str | None = None
) -> CheckResult:
    """Every finding of the preset file ``path``; ``-`` is the standard input.

    Raises UsageError only for a ``--set`` without ``=``.
    """
    path = STDIN_NAME if path == STDIN else path
    return _check(path, load(path, overrides=overrides, profile=profile, recipe=recipe), overrides)


def check_text(
    text: str,
    *,
    file: str = "preset.yaml",
    overrides: Sequence[str] = (),
    profile: str | None = None,
    recipe: str | None = None,
) -> CheckResult:
    """Like ``check_file`` for a text that is shown as ``file``; ``extends`` is relative to that name."""
    return _check(file, load(file, text=text, overrides=overrides, profile=profile, recipe=recipe), overrides)


def _check(source: str, loaded: Loaded, overrides: Sequence[str]) -> CheckResult:
    findings = loaded.findings
    if loaded.root is None:
        return CheckResult(source, None, _sorted(findings), loaded=loaded, overrides=overrides)
    flat = flatten(_override(loaded.root, overrides, findings))
    shape = Verdict(flat, loaded.partial)
    findings += shape.findings
    rules = all_guards()
    crashes: list[str] = []
    if shape.readable is not None and not loaded.partial:
        located, crashes = _run_guards(rules, shape.readable, flat, shape.failed)
        findings += located
    kept, suppressed = _suppress(rules, findings, flat, shape.failed)
    return CheckResult(
        source,
        None,
        _sorted(kept),
        tuple(suppressed),
        flat=flat,
        loaded=loaded,
        overrides=overrides,
        crashes=crashes,
        sound=shape.sound,
    )


def _sorted(findings: list[LocatedFinding]) -> tuple[LocatedFinding, ...]:
    return tuple(sorted(dict.fromkeys(findings), key=lambda finding: finding.sort_key))


def _override(root: Node, overrides: Sequence[str], findings: list[LocatedFinding]) -> Node:
    """Lay ``--set`` values on the tree; a path that does not exist is a finding and changes nothing."""
    if not overrides:
        return root
    from p3o_launch.shape import is_text, known_path, suggest
    from p3o_launch.synonyms import note

    for dotted, text, where in parse_overrides(overrides):
        if dotted in ("profile", "recipe"):
            continue
        path = known_path(dotted)
        if path is None:
            close = suggest(tuple(dotted.split(".")))
            hint = f"did you mean {'.'.join(close)}{note(dotted.rpartition('.')[2])}?" if close else None
            start = Position(where.file, where.line, 1, where.origin)
            findings.append(file_finding("P3O009", start, f"there is no setting {shown_key(dotted)}", hint))
            continue
        tree, problems = parse(text, where.file, where.origin, where.line, where.column)
        findings += problems
        if tree is None and problems:
            continue
        node = tree or Node(where, None)
        if is_text(path):
            node = _as_text(node, text, path)
        for key in reversed(path):
            node = Node(where, {key: Entry(where, node)})
        root = merge(root, node)
    return root


def _as_text(node: Node, text: str, path: Path) -> Node:
    """The value of a text setting: shells take quotes away, so that no ``--set`` could say that ``1`` is a text."""
    number = node.raw is not None and isinstance(node.value, (bool, int, float))
    if number or (len(path) > 2 and not text.strip()):
        return Node(node.position, text.strip())
    return node


def _run_guards(
    rules: dict[str, Rule], preset: Any, flat: Flat, failed: set[Path]
) -> tuple[list[LocatedFinding], list[str]]:
    context = GuardContext(preset)
    located: list[LocatedFinding] = []
    crashes: list[str] = []
    for rule in rules.values():
        if rule.body is None:
            continue
        try:
            found = list(rule.body(context))
        except Unreadable:
            continue
        except Exception:  # any bug in a rule must show, and must not hide the other rules
            import traceback

            crashes.append(traceback.format_exc())
            message = f"the rule {rule.code} failed: {crashes[-1].strip().splitlines()[-1]}"
            located.append(file_finding("P3O901", place(flat, ()), message, "this is a bug of p3o-launch"))
            continue
        if rule.own:
            found = [finding for finding in found if _is_own(finding, flat)]
        located += [_located(rule, finding, flat) for finding in found if not _touches(finding, failed)]
    return located, crashes


def _touches(finding: Finding, failed: set[Path]) -> bool:
    paths = [tuple(path.split(".")) for path in (finding.path, *finding.related)]
    return any(path[: len(bad)] == bad for path in paths for bad in failed)


def _is_own(finding: Finding, flat: Flat) -> bool:
    """See ``Rule.own``."""
    from p3o_launch.shape import known_path

    *members, decides = [flat.values.get(known_path(dotted) or ()) for dotted in (finding.path, *finding.related)]
    own = [place.origin for place in members if place is not None and place.origin in _OWN]
    if decides is None or decides.origin in ("", "extends"):
        return bool(own)
    return decides.origin in own


def _located(rule: Rule, finding: Finding, flat: Flat) -> LocatedFinding:
    from p3o_launch.shape import known_path

    path = known_path(finding.path) or tuple(finding.path.split(".")) if finding.path else ()
    position = place(flat, path, finding.key)
    if position.origin not in _OWN:
        # A relation between values that came along and one the user wrote: the user's is the one to look at.
        others = [flat.values.get(known_path(dotted) or ()) for dotted in finding.related]
        own = [other for other in others if other is not None and other.origin in _OWN]
        position = own[0] if own else position
    return LocatedFinding(position, rule.severity, rule.code, rule.name, finding.message, finding.hint, finding.path)


def _suppress(
    rules: dict[str, Rule], findings: list[LocatedFinding], flat: Flat, failed: set[Path]
) -> tuple[list[LocatedFinding], list[Suppressed]]:
    """Apply ``ignore``; an entry that may not be, or that names no rule, is a finding itself."""
    wishes = flat.data.get("ignore")
    if not isinstance(wishes, dict) or ("ignore",) in failed:
        return findings, []
    reasons = {code: reason for code, reason in wishes.items() if ("ignore", code) not in failed}
    extra: list[LocatedFinding] = []
    for code in list(reasons):
        rule = rules.get(code)
        if rule is not None and (rule.ignorable or rule.severity is not Severity.ERROR):
            continue
        del reasons[code]
        position = flat.keys[("ignore", code)]
        if rule is None:
            named = nearest(code, [known.name for known in rules.values()])
            meant = next((known.code for known in rules.values() if known.name == named), None)
            hint = f"did you mean {meant}?" if meant else "`p3o-launch explain --list` shows every code"
            message = f"there is no rule {shown_key(code)}"
        else:
            message, hint = f"{code} ({rule.name}) cannot be ignored", rule.fix
        extra.append(file_finding("P3O013", position, message, hint, f"ignore.{shown_key(code)}"))
    kept = [finding for finding in findings if finding.code not in reasons]
    silenced = [Suppressed(finding, str(reasons[finding.code])) for finding in findings if finding.code in reasons]
    return kept + extra, silenced
