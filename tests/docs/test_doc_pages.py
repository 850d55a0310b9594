"""The index of the pages: each has one kind."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from doc_pages import DOCS, ROOT, anchors, links, pages

KINDS = {"tutorial", "how-to", "reference", "explanation"}


def test_index_names_one_kind_for_each_page() -> None:
    rows = re.findall(r"^\| (.*?) \| (.*?) \|", (DOCS / "README.md").read_text(), re.MULTILINE)[1:]
    kinds = {link: kind for links, kind in rows for link in re.findall(r"\((\S+?\.md)\)", links)}
    assert set(kinds) == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} - {"README.md"}
    assert set(kinds.values()) == KINDS


def target(page: Path, link: str) -> tuple[Path, str]:
    """Return the file that a link names, and its anchor."""
    parts = urlsplit(link)
    return (page.parent / unquote(parts.path)).resolve() if parts.path else page, parts.fragment


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_existing_files_and_anchors(page: Path) -> None:
    for link in links(page):
        if urlsplit(link).scheme:
            assert link.startswith("https://"), link
            continue
        file, anchor = target(page, link)
        assert file.is_relative_to(ROOT), link
        assert file.exists(), link
        if anchor:
            assert anchor in anchors(file), link


def test_readme_links_to_the_index() -> None:
    front = ROOT / "README.md"
    assert DOCS / "README.md" in {target(front, link)[0] for link in links(front)}


def test_pages_name_existing_tests() -> None:
    there = {file.name for file in (ROOT / "tests").rglob("test_*.py")}
    for page in pages():
        named = set(re.findall(r"test_\w+\.py", page.read_text()))
        assert named <= there, page
        for folder in re.findall(r"`(tests/[\w/.]+)`", page.read_text()):
            assert (ROOT / folder).exists(), (page, folder)
