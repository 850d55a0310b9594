"""Which version runs, and with which core: for `kvrouter --version`, `/health`, the page and the metrics."""

from __future__ import annotations

import platform
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Info, ProcessCollector

from indexer.cores import core_name


def build_info() -> dict[str, str]:
    """The version, the index's core (`native` or `python`) and the version of Python."""
    return {"version": version("kvrouter"), "core": core_name(), "python": platform.python_version()}


def add_process_metrics(registry: CollectorRegistry) -> None:
    """What runs, and what the process takes: CPU seconds, memory, open files, and when it started."""
    Info("kvrouter_build", "What runs: its version, the index's core, Python", registry=registry).info(build_info())
    ProcessCollector(registry=registry)
