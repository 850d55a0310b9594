"""Hatch build hook that adds the native index to wheels, and to the source tree of an editable installation."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from runpy import run_path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeCoreHook(BuildHookInterface[Any]):
    """Build of the native index. Without a compiler, the wheel has only the index in Python."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the module before the wheel is assembled."""
        try:
            module = run_path(str(Path(__file__).with_name("build.py")))["build"](Path(self.root))
        except Exception as error:  # compilers, and their absence, raise errors of many types
            self.app.display_warning(f"the native index was not built: {error}")
            return
        build_data["pure_python"] = False
        build_data["tag"] = "-".join([*_python_tags(), sysconfig.get_platform().replace("-", "_").replace(".", "_")])
        if version != "editable":
            build_data["force_include"][str(module)] = f"indexer/{module.name}"


def _python_tags() -> tuple[str, str]:
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return python, python
