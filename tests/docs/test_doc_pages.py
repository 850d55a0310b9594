"""The index of the pages: each has one kind."""

from __future__ import annotations

import re

from doc_pages import DOCS

KINDS = {"tutorial", "how-to", "reference", "explanation"}


def test_index_names_one_kind_for_each_page() -> None:
    rows = re.findall(r"^\| (.*?) \| (.*?) \|", (DOCS / "README.md").read_text(), re.MULTILINE)[1:]
    kinds = {link: kind for links, kind in rows for link in re.findall(r"\((\S+?\.md)\)", links)}
    assert set(kinds) == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} - {"README.md"}
    assert set(kinds.values()) == KINDS
