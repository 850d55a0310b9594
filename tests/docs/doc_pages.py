"""The pages for users: their blocks of code, their links and their anchors."""

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
    """A block of code. `language`: what its fence says; empty for an indented block. `line`: of its first line."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """README.md and all of docs/, the generated pages too."""
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
    """What stands in backticks in the text of all pages."""
    for page in pages():
        for token in _tokens(page):
            yield from (child.content for child in token.children or [] if child.type == "code_inline")


def table_cells(page: Path) -> Iterator[str]:
    """The text of each table cell, in which a code span counts as one word."""
    for opening, inline in pairwise(_tokens(page)):
        if opening.type in ("th_open", "td_open"):
            children = inline.children or []
            yield "".join("code" if child.type == "code_inline" else child.content for child in children)


def links(page: Path) -> Iterator[str]:
    """The targets of links and images."""
    for token in _tokens(page):
        for child in token.children or []:
            for name in ("href", "src"):
                if isinstance(target := child.attrs.get(name), str):
                    yield target
        if token.type == "html_block":
            yield from re.findall(r'(?:href|src|srcset)="([^"]+)"', token.content)


@cache
def anchors(page: Path) -> frozenset[str]:
    """What GitHub names the headings."""
    found: list[str] = []
    tokens = _tokens(page)
    for opening, inline in pairwise(tokens):
        if opening.type == "heading_open":
            text = "".join(child.content for child in inline.children or [])
            name = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            seen = sum(each == name or re.fullmatch(rf"{re.escape(name)}-\d+", each) is not None for each in found)
            found.append(f"{name}-{seen}" if seen else name)
    return frozenset(found)
