"""Build of the native index: `python indexer/native/build.py` writes the module into the source tree.

It needs a C++20 compiler, nanobind and setuptools.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import nanobind
from setuptools import Distribution, Extension

HERE = Path(__file__).parent
MODULE = "indexer._native"


def build(root: Path) -> Path:
    """Compile `indexer/_native…` below `root`, and return its path. Without a compiler, setuptools raises."""
    parts = Path(nanobind.__file__).parent
    extension = Extension(
        MODULE,
        sources=[str(HERE / "module.cpp"), str(parts / "src" / "nb_combined.cpp")],
        include_dirs=[nanobind.include_dir(), str(parts / "ext" / "robin_map" / "include")],
        define_macros=[("NDEBUG", None), ("NB_COMPACT_ASSERTIONS", None)],
        extra_compile_args=[
            "-std=c++20",
            "-O3",
            "-fvisibility=hidden",
            "-fno-strict-aliasing",
            "-ffp-contract=off",
            "-g0",
        ],
        language="c++",
    )
    with tempfile.TemporaryDirectory() as objects:
        command = Distribution({"ext_modules": [extension]}).get_command_obj("build_ext")
        command.build_lib, command.build_temp = str(root), objects
        command.force = True  # setuptools does not see changed headers
        command.ensure_finalized()
        command.run()
        return root / str(command.get_ext_filename(MODULE))


if __name__ == "__main__":
    print(build(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE.parents[1]))
