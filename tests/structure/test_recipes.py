"""All recipes of CONTRIBUTING.md are followed in a copy of the project, and their own tests pass there.

A block of code is the text of a new file, or is inserted after a line, as the words before the block say.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
COPIED = ("kvevents", "indexer", "router", "worker", "kvrouter", "config.yaml", "pyproject.toml", "docs/metrics.md")

_FILE = re.compile(r"`((?:[\w.-]+/)*[\w-]+\.(?:py|yaml|md))`")
_AFTER = re.compile(r"after the line\s+(?:`` (.+?) ``|`([^`]+)`):\Z", re.DOTALL)


@dataclass(frozen=True)
class Step:
    """A change of a file: its whole text, or lines to insert after an existing line."""

    file: str
    after: str | None
    text: str


def recipes() -> dict[str, list[Step]]:
    found: dict[str, list[Step]] = {}
    steps: list[Step] | None = None
    file, before, level = "", "", ""
    for token in MarkdownIt("commonmark").parse((ROOT / "CONTRIBUTING.md").read_text()):
        if token.type == "heading_open":
            level = token.tag
        elif token.type == "inline" and level:
            steps = found.setdefault(token.content, []) if level == "h3" else None
            level = ""
        elif token.type == "inline":
            before = token.content
            if named := _FILE.findall(before):
                file = named[-1]
        elif token.type == "fence" and steps is not None:
            after = _AFTER.search(before)
            steps.append(Step(file, after[1] or after[2] if after else None, token.content))
    return found


def follow(step: Step, project: Path) -> None:
    path = project / step.file
    if step.after is None:
        assert not path.exists(), f"{step.file} is there already"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(step.text)
        return
    lines = path.read_text().splitlines(keepends=True)
    places = [number for number, line in enumerate(lines, 1) if line.rstrip("\n").startswith(step.after)]
    assert len(places) == 1, f"{step.file} has {len(places)} lines {step.after!r}"
    path.write_text("".join([*lines[: places[0]], step.text, *lines[places[0] :]]))


def test_contributing_has_recipes() -> None:
    assert len(recipes()) >= 4


def test_recipes_can_be_followed(tmp_path: Path) -> None:
    for copied in COPIED:
        source, copy = ROOT / copied, tmp_path / copied
        copy.parent.mkdir(exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(source, copy)
    files: list[str] = []
    for name, steps in recipes().items():
        for step in steps:
            follow(step, tmp_path)
        files += [step.file for step in steps]
        assert any(step.file.startswith("tests/") for step in steps), f"{name}: a recipe ends with its test"
    tests = [file for file in files if file.startswith("tests/")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", *tests]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    changed = [file for file in files if file.endswith(".py")]
    lint = [sys.executable, "-m", "ruff", "check", "--quiet", "--ignore", "I001", *changed]
    linted = subprocess.run(lint, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert linted.returncode == 0, linted.stdout
