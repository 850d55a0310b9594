"""The size of the project in lines and files: `python -m benchmarks.house [REVISION …]`. Default: the work tree.

Lines of Python include blank lines, comments and docstrings. With several revisions, each has a column.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import yaml

PRODUCT = ("router", "indexer", "kvevents", "http_api", "worker", "kvrouter", "simulator")
_ROOT = Path(__file__).parents[1]
# Settings whose keys are names of users: of a worker, pool, model, class or tenant.
_NAMED = {"workers", "pools", "models", "service_levels", "tenants.named"}


def sizes(revision: str | None) -> dict[str, int]:
    """Return the size of a revision by what is counted. None: the work tree."""
    counted: Counter[str] = Counter()
    for name in _files(revision):
        folder, suffix = name.split("/")[0], Path(name).suffix
        place = "product" if folder in PRODUCT else folder
        if suffix == ".py" and place in ("product", "tests", "benchmarks", "deploy"):
            lines = _text(revision, name).count("\n")
            counted[f"Python of {place}, files"] += 1
            counted[f"Python of {place}, lines"] += lines
            if place == "product":
                counted[f"  {folder}, lines"] += lines
        elif suffix in (".cpp", ".hpp") and place == "product":
            counted["C++ of product, lines"] += _text(revision, name).count("\n")
        elif suffix == ".md" and re.fullmatch(r"(docs/)?[^/]+", name):
            counted["pages, lines"] += _text(revision, name).count("\n")
    counted["settings"] = sum(_settings(yaml.safe_load(_text(revision, "config.yaml"))))
    return counted


def _settings(section: dict[str, object], prefix: str = "") -> Iterable[int]:
    for name, value in section.items():
        if prefix + name in _NAMED:
            continue
        if isinstance(value, dict) and value:
            yield from _settings(value, f"{prefix}{name}.")
        else:
            yield 1


def _files(revision: str | None) -> list[str]:
    return _git("ls-files" if revision is None else f"ls-tree -r --name-only {revision}").splitlines()


def _text(revision: str | None, name: str) -> str:
    return (_ROOT / name).read_text() if revision is None else _git(f"show {revision}:{name}")


def _git(command: str) -> str:
    return subprocess.run(["git", *command.split()], cwd=_ROOT, capture_output=True, text=True, check=True).stdout


def main(revisions: list[str]) -> None:
    """Print a row for each size, with a column for each revision."""
    columns = [sizes(revision) for revision in revisions or [None]]  # type: ignore[list-item]
    print(f"{'':30}", *(f"{(revision or 'work tree')[:10]:>10}" for revision in revisions or ["work tree"]))
    for row in sorted(set().union(*columns), key=lambda row: (not row.startswith("Python of product"), row)):
        print(f"{row:30}", *(f"{column.get(row, 0):10,}" for column in columns))


if __name__ == "__main__":
    main(sys.argv[1:])
