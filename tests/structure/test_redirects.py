"""Requests of ours follow no redirect, because a redirect would send prompts and tokens to another server."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


def sessions() -> Iterator[tuple[str, bool]]:
    """Yield the place of every session, and whether it refuses redirects."""
    for package in ("indexer", "router", "kvrouter"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "aiohttp.ClientSession":
                    refuses = any(
                        keyword.arg == "middlewares" and "refuse_redirects" in ast.unparse(keyword.value)
                        for keyword in node.keywords
                    )
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", refuses


def test_every_session_refuses_redirects() -> None:
    found = dict(sessions())
    assert len(found) > 5
    assert [place for place, refuses in found.items() if not refuses] == []
