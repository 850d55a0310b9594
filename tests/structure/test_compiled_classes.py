"""Constructs that mypyc compiles wrongly without an error."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def compiled() -> set[Path]:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    return {path for pattern in build["hooks"]["mypyc"]["include"] for path in ROOT.glob(pattern.lstrip("/"))}


Sources = dict[Path, list[ast.AST]]


@pytest.fixture(scope="module")
def sources() -> Sources:
    """The nodes of each module of ours, parsed once for all tests."""
    packages = ("kvevents", "indexer", "router", "worker", "kvrouter")
    wanted = (ast.AnnAssign, ast.ClassDef, ast.ExceptHandler, ast.Try)
    return {
        path: [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, wanted)]
        for package in packages
        for path in (ROOT / package).rglob("*.py")
    }


def test_compiled_tuples_of_floats_are_annotated(sources: Sources) -> None:
    """Reading a compiled Final tuple of floats raises NameError: annotate it as tuple[float, ...]."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in compiled()
        for node in sources[path]
        if isinstance(node, ast.AnnAssign)
        and ast.unparse(node.annotation) == "Final"
        and isinstance(node.value, ast.Tuple)
        and all(isinstance(each, ast.Constant) and isinstance(each.value, float) for each in node.value.elts)
    ]
    assert not found


def test_compiled_protocol_attributes_have_no_default_of_none(sources: Sources) -> None:
    """mypyc leaves the attribute unset, and reading it raises AttributeError: set it in `__init__`."""
    classes = [(path, node) for path in compiled() for node in sources[path] if isinstance(node, ast.ClassDef)]
    protocols = {
        node.name for _, node in classes if any(ast.unparse(base).startswith("Protocol") for base in node.bases)
    }
    assert protocols
    found = [
        f"{path.relative_to(ROOT)}: {node.name}.{ast.unparse(line.target)}"
        for path, node in classes
        for line in node.body
        if isinstance(line, ast.AnnAssign)
        and isinstance(line.value, ast.Constant)
        and line.value.value is None
        and protocols & {*re.findall(r"\w+", ast.unparse(line.annotation))}
    ]
    assert not found


def test_compiled_classes_allow_their_interpreted_subclasses(sources: Sources) -> None:
    """Otherwise the creation of an interpreted class's objects raises TypeError."""
    compiled_paths = compiled()
    ours, interpreted = [], []
    for path, nodes in sources.items():
        classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
        if path in compiled_paths:
            ours += classes
        else:
            own = {node.name for node in classes}
            interpreted += [(path, node, {ast.unparse(base) for base in node.bases} - own) for node in classes]
    closed = {
        node.name
        for node in ours
        if not any("allow_interpreted_subclasses" in ast.unparse(each) for each in node.decorator_list)
    }
    assert not [f"{path.relative_to(ROOT)}: {node.name}" for path, node, bases in interpreted if bases & closed]


def in_function(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield these nodes and all below them, without functions inside."""
    for node in nodes:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield node
            yield from in_function(ast.iter_child_nodes(node))


def test_compiled_coroutines_do_not_wait_while_they_handle_an_error(sources: Sources) -> None:
    """mypyc leaves the error as the one that is handled while the coroutine waits.

    Errors of other coroutines then refer to it, and those to each other: memory and the time of each error grow.
    """
    waits = (ast.Await, ast.Yield, ast.YieldFrom, ast.AsyncFor, ast.AsyncWith)
    handlers = [
        (path, node.body if isinstance(node, ast.ExceptHandler) else node.finalbody)
        for path in compiled()
        for node in sources[path]
        if isinstance(node, ast.ExceptHandler | ast.Try)
    ]
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path, body in handlers
        for node in in_function(body)
        if isinstance(node, waits)
    ]
    assert not found, "wait after the handler, or after the finally"


def test_structs_are_not_compiled(sources: Sources) -> None:
    """mypyc compiles a class that derives from a struct of another module without the fields of that struct."""
    bases = {
        (path, node.name): {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        for path, nodes in sources.items()
        for node in nodes
        if isinstance(node, ast.ClassDef)
    }
    structs: set[tuple[Path, str]] = set()

    def is_struct(path: Path, name: str) -> bool:
        of_others = not name.startswith("_") and any(name == other for _, other in structs)
        return name == "Struct" or (path, name) in structs or of_others

    while more := {each for each, its in bases.items() if any(is_struct(each[0], base) for base in its)} - structs:
        structs |= more
    assert len(structs) > 10
    assert not [f"{path.relative_to(ROOT)}: {name}" for path, name in structs if path in compiled()]
