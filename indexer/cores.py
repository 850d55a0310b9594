"""Which core the index has: the native one where it was built, else its twin in Python."""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

# Chooses a core, for benchmarks and tests.
CORE_VARIABLE = "KVROUTER_INDEX_CORE"
# Those that are there, the twin first.
CORES = ("python", "native") if find_spec("indexer._native") else ("python",)


def core_name() -> str:
    """`native` or `python`."""
    return os.environ.get(CORE_VARIABLE) or CORES[-1]


def native_core() -> ModuleType | None:
    """The native core's module, where that core is the one in use."""
    return import_module("indexer._native") if core_name() == "native" else None
