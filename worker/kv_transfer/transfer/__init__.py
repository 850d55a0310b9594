"""Transfer engines, which move KV pages from a prefill worker's memory into that of a decode worker.

engine    the interface of every engine
runs      conversion of pages to runs and byte ranges
engines   an engine by its name
memory    registered memory: bytes by address
grants    ranges that peers may write, and writes that are landing

tcp       plain sockets, the default
shm       processes of one host; copying
libraries Mooncake and NIXL, which write by themselves; one_sided is their common base

endpoint, writing, sessions, channel: sessions over sockets, from the session down to the frame
"""

from worker.kv_transfer.transfer.engine import (
    DeadlineError,
    GrantKey,
    PeerLostError,
    Quiescence,
    RefusedError,
    Region,
    Session,
    TransferEngine,
    TransferError,
)
from worker.kv_transfer.transfer.engines import ENGINES, open_engine
from worker.kv_transfer.transfer.runs import (
    PageRuns,
    Ranges,
    Writes,
    group_runs,
    join_ranges,
    join_writes,
    page_ranges,
    page_writes,
)
from worker.kv_transfer.transfer.writing import IDLE_SECONDS

__all__ = [
    "ENGINES",
    "IDLE_SECONDS",
    "DeadlineError",
    "GrantKey",
    "PageRuns",
    "PeerLostError",
    "Quiescence",
    "Ranges",
    "RefusedError",
    "Region",
    "Session",
    "TransferEngine",
    "TransferError",
    "Writes",
    "group_runs",
    "join_ranges",
    "join_writes",
    "open_engine",
    "page_ranges",
    "page_writes",
]
