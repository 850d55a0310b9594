"""Transfer by NIXL, for sites with RDMA: the extra `nixl`.

NIXL lets whoever holds an engine's description write to its registered memory: grants bind honest senders only. The
description goes over our session alone, to those that know the secret.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Sequence

import numpy as np

from worker.disaggregation.transfer.engine import PeerLostError, Region
from worker.disaggregation.transfer.one_sided import OneSidedEndpoint
from worker.disaggregation.transfer.runs import Addresses, Writes

_LONGEST_NAP = 0.001  # seconds between two looks at a transfer


class NixlEngine(OneSidedEndpoint):
    """See TransferEngine. `backend` is NIXL's: UCX, LIBFABRIC…"""

    name = "nixl"

    def __init__(self, host: str = "127.0.0.1", secret: bytes | None = None, backend: str = "UCX") -> None:
        """Raises ValueError for a host or backend that can't be used, ImportError without NIXL."""
        super().__init__(host, secret, _Nixl(backend))


class _Nixl:
    def __init__(self, backend: str) -> None:
        try:
            from nixl import nixl_agent, nixl_agent_config, nixl_thread_sync_t
        except ImportError as error:
            raise ImportError(f"the nixl engine needs the extra kvrouter[nixl]: {error}") from error
        config = nixl_agent_config(backends=[backend], sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT)
        self._agent = nixl_agent(f"kvrouter-{secrets.token_hex(8)}", config)
        if backend not in self._agent.backends:
            raise ValueError(f"NIXL has no backend {backend}; it has {', '.join(self._agent.get_plugin_list())}")
        self._lock = threading.Lock()
        self._peers: dict[str, bytes] = {}
        self._registered: list[object] = []

    def register(self, regions: Sequence[Region]) -> None:
        try:
            self._registered.append(
                self._agent.register_memory([(region.pointer, region.length, 0, "") for region in regions], "DRAM")
            )
        except Exception as error:  # the binding's errors have no common base
            raise ValueError(f"NIXL can't register {list(regions)}: {error}") from None

    def describe(self) -> bytes:
        return bytes(self._agent.get_agent_metadata())

    def open(self, description: bytes) -> str:
        try:
            with self._lock:
                name = self._agent.add_remote_agent(description)
        except Exception as error:
            raise PeerLostError(f"NIXL can't read the peer's description: {error}") from None
        return name.decode() if isinstance(name, bytes) else str(name)

    def write(self, peer: str, writes: Writes) -> None:
        try:
            handle = self._agent.initialize_xfer(
                "WRITE",
                self._descriptors(writes.sources, writes.lengths),
                self._descriptors(writes.destinations, writes.lengths),
                peer,
            )
            state = self._agent.transfer(handle)
            nap = 0.0
            while state == "PROC":
                time.sleep(nap)
                nap = min(nap + 1e-5, _LONGEST_NAP)
                state = self._agent.check_xfer_state(handle)
            self._agent.release_xfer_handle(handle)
        except Exception as error:
            raise PeerLostError(f"NIXL failed to write to {peer}: {error}") from None
        if state != "DONE":
            raise PeerLostError(f"NIXL failed to write to {peer}: state {state}")

    def close(self) -> None:
        while self._registered:
            self._agent.deregister_memory(self._registered.pop())

    def _descriptors(self, pointers: Addresses, lengths: Addresses) -> object:
        device = np.zeros(len(pointers), np.uint64)
        return self._agent.get_xfer_descs(np.stack((pointers, lengths, device), axis=1), "DRAM")
