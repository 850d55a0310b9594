"""Imports between the project's packages, and between the rooms of `router`, go one way only.

CONTRIBUTING.md names the rooms of `router` from the lowest to the highest: a room imports from those before it alone.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from prose import statements

ROOT = Path(__file__).parents[2]

# Which of our packages each may import from.
PACKAGES = {
    "http_api": set[str](),
    "kvevents": set[str](),
    "worker": {"kvevents"},
    "indexer": {"http_api", "kvevents"},
    "router": {"http_api", "indexer", "kvevents"},
    "simulator": {"http_api", "router", "indexer", "worker", "kvevents"},
    "kvrouter": {"simulator", "http_api", "router", "indexer", "worker", "kvevents"},
}


def rooms() -> list[str]:
    """The rooms of `router` as CONTRIBUTING.md lists them, the lowest first."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    return re.findall(r"^\| `router/([a-z_]+)(?:/|\.py)` \|", text, re.MULTILINE)


@cache
def modules() -> dict[str, Path]:
    """Every module of ours by its dotted name."""
    found: dict[str, Path] = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imported(module: str) -> frozenset[str]:
    """Our modules that a module imports, wherever in it."""
    found: set[str] = set()
    for node in statements(ast.parse(modules()[module].read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {
                name if (name := f"{node.module}.{alias.name}") in modules() else node.module for alias in node.names
            }
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return frozenset(name for name in found if name in modules() and name != module)


def arrows() -> Iterator[tuple[str, str]]:
    for module in modules():
        yield from ((module, other) for other in imported(module))


def room_of(module: str) -> str:
    return module.split(".")[1]


def test_packages_import_only_allowed_packages() -> None:
    wrong = []
    for module, other in arrows():
        package, imports = module.split(".")[0], other.split(".")[0]
        if package != imports and imports not in PACKAGES[package]:
            wrong.append(f"{module} imports {other}")
    assert wrong == []


def test_contributing_lists_every_room_of_the_router() -> None:
    actual = {room_of(module) for module in modules() if module.startswith("router.")}
    assert set(rooms()) == actual
    assert len(rooms()) == len(actual)


def test_router_rooms_import_only_lower_rooms() -> None:
    place = {room: number for number, room in enumerate(rooms())}
    wrong = [
        f"{module} imports {other}"
        for module, other in arrows()
        if module.startswith("router.")
        and other.startswith("router.")
        and place[room_of(module)] < place[room_of(other)]
    ]
    assert wrong == []


def test_imports_have_no_cycle() -> None:
    others = {
        module: {other for other in imported(module) if not other.startswith(f"{module}.")} for module in modules()
    }
    try:
        TopologicalSorter(others).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_long_files_give_a_reason() -> None:
    """The reason is a sentence of the docstring that begins with "One file"."""
    silent = [
        f"{path.relative_to(ROOT)}: {lines} lines"
        for path in modules().values()
        if (lines := path.read_text().count("\n")) > 420
        and "One file" not in (ast.get_docstring(ast.parse(path.read_text())) or "")
    ]
    assert silent == []
