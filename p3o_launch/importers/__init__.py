"""Other frameworks' configurations, judged by the rules that judge presets.

``lint_file`` and ``lint_text`` read a launch argument list (Relax, slime, Megatron-LM, verl) or YAML (verl, NeMo-RL),
turn it into neutral facts, and return what the guards say about them. They never raise for what a file holds.
"""

from __future__ import annotations

from p3o_launch.importers.facts import Facts
from p3o_launch.importers.lint import FRAMEWORKS, LintResult, Request, lint_file, lint_text
from p3o_launch.importers.summary import facts_text, summary

__all__ = ["FRAMEWORKS", "Facts", "LintResult", "Request", "facts_text", "lint_file", "lint_text", "summary"]
