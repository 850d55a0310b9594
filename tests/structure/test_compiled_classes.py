"""What mypyc compiles, and what it makes of it without a word."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def compiled() -> set[Path]:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    return {path for pattern in build["hooks"]["mypyc"]["include"] for path in ROOT.glob(pattern.lstrip("/"))}


def test_no_final_tuple_of_floats_is_left_to_the_compiler() -> None:
    """mypyc takes such a constant for one that was not set, and reading it raises NameError: say tuple[float, ...]."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in compiled()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.AnnAssign)
        and ast.unparse(node.annotation) == "Final"
        and isinstance(node.value, ast.Tuple)
        and all(isinstance(each, ast.Constant) and isinstance(each.value, float) for each in node.value.elts)
    ]
    assert not found


def test_no_compiled_class_has_none_as_the_default_of_a_protocol() -> None:
    """mypyc leaves such an attribute unset, and reading it raises AttributeError: `__init__` has to set it."""
    classes = [
        (path, node)
        for path in compiled()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
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
