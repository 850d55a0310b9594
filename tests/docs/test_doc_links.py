"""Every link leads somewhere, and every page is found from the index."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from doc_pages import DOCS, ROOT, anchors, links, pages


def target(page: Path, link: str) -> tuple[Path, str]:
    """The file that a link names, and its anchor."""
    parts = urlsplit(link)
    return (page.parent / unquote(parts.path)).resolve() if parts.path else page, parts.fragment


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in links(page):
        if urlsplit(link).scheme:
            assert link.startswith("https://"), link
            continue
        file, anchor = target(page, link)
        assert file.is_relative_to(ROOT), link
        assert file.exists(), link
        if anchor:
            assert anchor in anchors(file), link


def test_every_page_is_found_from_the_index() -> None:
    index = DOCS / "README.md"
    listed = {target(index, link)[0] for link in links(index) if not urlsplit(link).scheme}
    assert {page for page in DOCS.rglob("*.md") if page != index} - listed == set()


def test_the_front_door_leads_to_the_index() -> None:
    front = ROOT / "README.md"
    assert DOCS / "README.md" in {target(front, link)[0] for link in links(front)}


def test_every_test_that_a_page_names_is_there() -> None:
    """docs/security.md names the test that holds each promise."""
    there = {file.name for file in (ROOT / "tests").rglob("test_*.py")}
    for page in pages():
        named = set(re.findall(r"test_\w+\.py", page.read_text()))
        assert named <= there, page
        for folder in re.findall(r"`(tests/[\w/.]+)`", page.read_text()):
            assert (ROOT / folder).exists(), (page, folder)
