"""An index and the inbox of its streams, of the core in use."""

from __future__ import annotations

from indexer.cores import CORES, core_name
from indexer.inbox import Inbox, PythonInbox
from indexer.index import MOST_BLOCKS, ORPHAN_BLOCKS, Index


def make_index(secret: str = "", orphan_blocks: int = ORPHAN_BLOCKS, most_blocks: int = MOST_BLOCKS) -> Index:
    """An empty index. `secret`: see `Index`; `orphan_blocks` of a target may wait for their parent, and it may hold
    `most_blocks`."""
    if core_name() == "native":
        from indexer.native_index import NativeIndex

        return NativeIndex(secret, orphan_blocks, most_blocks)
    from indexer.python_index import PythonIndex

    return PythonIndex(secret, orphan_blocks, most_blocks)


def make_inbox(index: Index, others: int) -> Inbox:
    """What receives live batches for an index. `others`: a file descriptor of whatever else its reader waits for."""
    if "native" in CORES:
        from indexer.native_inbox import NativeInbox, zmq_functions
        from indexer.native_index import NativeIndex

        if isinstance(index, NativeIndex) and (functions := zmq_functions()) is not None:
            return NativeInbox(index, functions, others)
    return PythonInbox(index, others)
