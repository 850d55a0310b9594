"""A check that mypyc translates every module that a build compiles, without the C compiler.

Code that mypy accepts may still be refused by mypyc, and then neither image nor wheel can be built.
"""

from __future__ import annotations

import tempfile
import tomllib
from pathlib import Path

from mypyc.build import mypycify

ROOT = Path(__file__).parents[2]


def main() -> None:
    """End with mypyc's error, if there is one."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    options = build["hooks"]["mypyc"]
    found = {path for pattern in options["include"] for path in ROOT.glob(pattern.lstrip("/"))}
    modules = sorted(str(path.relative_to(ROOT)) for path in found if path.name not in options["exclude"])
    with tempfile.TemporaryDirectory() as folder:
        cache = ["--cache-dir", str(ROOT / ".mypy_cache" / "mypyc")]  # mypy itself runs beside, with its own
        mypycify([*cache, *options["mypy-args"], *modules], target_dir=folder)


if __name__ == "__main__":
    main()
