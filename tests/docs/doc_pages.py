"""The pages for users: their code blocks, links and anchors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@dataclass(frozen=True)
class Block:
    """A code block. `language` is that of its fence, or empty for an indented block. `line` is its first line."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """Return README.md and all pages of docs/, with the generated ones."""
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


@cache
def _tokens(page: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(page.read_text())


def blocks() -> Iterator[Block]:
    for page in pages():
        for token in _tokens(page):
            if token.type in ("fence", "code_block"):
                assert token.map is not None
                line = token.map[0] + (2 if token.type == "fence" else 1)
                language = token.info.strip() or "not said" if token.type == "fence" else ""
                yield Block(page, line, language, token.content)


def inline_code() -> Iterator[str]:
    """Yield the code spans in the text of all pages."""
    for page in pages():
        for token in _tokens(page):
            yield from (child.content for child in token.children or [] if child.type == "code_inline")


def links(page: Path) -> Iterator[str]:
    """Yield the targets of links and images."""
    for token in _tokens(page):
        for child in token.children or []:
            for name in ("href", "src"):
                if isinstance(target := child.attrs.get(name), str):
                    yield target
        if token.type == "html_block":
            yield from re.findall(r'(?:href|src|srcset)="([^"]+)"', token.content)


@cache
def anchors(page: Path) -> frozenset[str]:
    """Return the anchors that GitHub gives to the headings."""
    found: list[str] = []
    tokens = _tokens(page)
    for opening, inline in pairwise(tokens):
        if opening.type == "heading_open":
            text = "".join(child.content for child in inline.children or [])
            name = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            seen = sum(each == name or re.fullmatch(rf"{re.escape(name)}-\d+", each) is not None for each in found)
            found.append(f"{name}-{seen}" if seen else name)
    return frozenset(found)
