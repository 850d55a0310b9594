"""The form of the pages: one kind each, in the index, and short table cells."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from doc_pages import DOCS, pages, table_cells

KINDS = {"tutorial", "how-to", "reference", "explanation"}
MOST_WORDS = 15
WRITTEN = [page for page in pages() if page.parent.name != "reference"]  # the others are generated


def test_index_names_one_kind_for_each_page() -> None:
    rows = re.findall(r"^\| (.*?) \| (.*?) \|", (DOCS / "README.md").read_text(), re.MULTILINE)[1:]
    kinds = {link: kind for links, kind in rows for link in re.findall(r"\((\S+?\.md)\)", links)}
    assert set(kinds) == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} - {"README.md"}
    assert set(kinds.values()) == KINDS


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_table_cells_are_short(page: Path) -> None:
    for cell in table_cells(page):
        words = [word for word in cell.split() if re.search(r"\w", word)]
        assert len(words) <= MOST_WORDS, cell
