"""YAML or overrides -> a draft of facts, for verl and NeMo-RL."""

from __future__ import annotations

from collections.abc import Sequence

from p3o_launch.diagnostics import LocatedFinding, Position
from p3o_launch.importers.configured import Tree
from p3o_launch.importers.facts import Draft
from p3o_launch.importers.nemo_rl import nemo_facts
from p3o_launch.importers.settings import load_tree
from p3o_launch.importers.verl import verl_facts


def draft_from_yaml(
    text: str, framework: str, file: str, overrides: Sequence[str]
) -> tuple[Draft | None, list[LocatedFinding]]:
    """The draft; None when the file holds no settings, in which case the findings say why."""
    settings, findings = load_tree(text, framework, file, overrides)
    if settings is None:
        return None, findings
    draft = Draft(framework, file, "override" if settings.listed else "yaml", Position(file, 1, 1), findings=findings)
    tree = Tree(settings, draft)
    if framework == "verl":
        verl_facts(tree)
    else:
        nemo_facts(tree)
    draft.additions = {name for name in draft.names.values() if not settings.has(name)}
    return draft, findings
