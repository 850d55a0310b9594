"""Puts the native core into wheels, and beside the code of an editable installation, where it can be built."""

from __future__ import annotations

import sys
import sysconfig
from importlib import import_module
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).parent))


class NativeCoreHook(BuildHookInterface[Any]):
    """Without a compiler a wheel has Python alone, and the index its core in Python."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the module before the wheel is put together."""
        try:
            module = import_module("build").build(Path(self.root))
        except Exception as error:  # whatever a compiler, or the lack of one, comes up with
            self.app.display_warning(f"the index's native core was not built: {error}")
            return
        build_data["pure_python"] = False
        build_data["tag"] = "-".join([*_python_tags(), sysconfig.get_platform().replace("-", "_").replace(".", "_")])
        if version != "editable":
            build_data["force_include"][str(module)] = f"indexer/{module.name}"


def _python_tags() -> tuple[str, str]:
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return python, python
