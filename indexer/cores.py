"""Which core the index has: the native one where it was built, else its twin in Python."""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from indexer.inbox import Inbox, PythonInbox
from indexer.index import MOST_BLOCKS, ORPHAN_BLOCKS, Index

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


def make_index(secret: str = "", orphan_blocks: int = ORPHAN_BLOCKS, most_blocks: int = MOST_BLOCKS) -> Index:
    """An empty index. `secret`: see `Index`; `orphan_blocks` of a target may wait for their parent, and it may hold
    `most_blocks`."""
    if core_name() == "native":
        from indexer.native_index import NativeIndex

        return NativeIndex(secret, orphan_blocks, most_blocks)
    from indexer.python_index import PythonIndex

    return PythonIndex(secret, orphan_blocks, most_blocks)


def make_inbox(index: Index) -> Inbox:
    """What receives live batches for an index."""
    if "native" in CORES:
        from indexer.native_inbox import NativeInbox, zmq_functions
        from indexer.native_index import NativeIndex

        if isinstance(index, NativeIndex) and (functions := zmq_functions()) is not None:
            return NativeInbox(index, functions)
    return PythonInbox(index)
