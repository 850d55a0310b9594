"""The native index in C++, its Python side, and the choice between the native and the reference implementation."""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

# Environment variable that selects an implementation, for benchmarks and tests.
CORE_VARIABLE = "KVROUTER_INDEX_CORE"
# Available implementations. The last one is the default.
CORES = ("python", "native") if find_spec("indexer._native") else ("python",)


def core_name() -> str:
    """Return the name of the implementation in use: `native` or `python`."""
    return os.environ.get(CORE_VARIABLE) or CORES[-1]


def native_core() -> ModuleType | None:
    """Return the compiled module; None if the implementation in use is `python`."""
    return import_module("indexer._native") if core_name() == "native" else None
