"""Generated pages are what the generator writes today, and the pages agree with `explain`."""

from __future__ import annotations

import importlib.util
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from p3o_launch.explain import page, sections
from p3o_launch.guards import all_guards

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pages() -> dict[Path, str]:
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "scripts/generate_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.pages()


def test_the_pages_are_what_the_generator_writes(pages: dict[Path, str]) -> None:
    stale = [
        path for path, text in pages.items() if not (ROOT / path).is_file() or (ROOT / path).read_text("utf-8") != text
    ]
    assert stale == [], "run `make docs`"
    written = {path.relative_to(ROOT) for path in (ROOT / "docs/guards").glob("*")}
    assert written == {path for path in pages if path.parent.name == "guards"}


@pytest.mark.parametrize("code", all_guards())
def test_a_page_says_what_explain_prints(code: str, pages: dict[Path, str]) -> None:
    rule = all_guards()[code]
    printed = textwrap.dedent(page(rule, width=10_000))
    text = pages[Path(f"docs/guards/{code}.md")].replace("&lt;", "<")
    for _, body in sections(rule):
        assert body in printed
        assert body in text


def test_every_link_in_the_docs_leads_somewhere() -> None:
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/guards/*.md")]:
        for link in re.findall(r"\]\(([^)#\s]+)", path.read_text("utf-8")):
            if "://" not in link:
                assert (path.parent / link).exists(), f"{path.name} links to {link}"


def test_the_pre_commit_hook_calls_a_command_that_exists() -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    assert hook["entry"] == "p3o-launch validate"
    assert re.search(hook["files"], "presets/temp_1p2.yaml")
    assert not re.search(hook["files"], "docs/presets.md")
