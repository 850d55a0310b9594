"""Transfers by libraries for sites with RDMA: by NIXL (extra `nixl`), and by Mooncake (`mooncake`, libibverbs1).

Mooncake writes to any address that a peer names, and its own port needs no secret. With an engine's description, NIXL
allows writes to all its registered memory. Therefore grants only bind honest senders. Restrict access to Mooncake's
port. NIXL's description is sent over our session alone, to peers that know the secret.

At the exit of a process, long after everything is closed, NIXL 1.5.1 may crash in its bundled libnl (for InfiniBand).
`UCX_MODULES=^ib` excludes that library.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from worker.kv_transfer.transfer.engine import PeerLostError, Region
from worker.kv_transfer.transfer.one_sided import OneSidedEndpoint
from worker.kv_transfer.transfer.runs import Addresses, Writes


class MooncakeEngine(OneSidedEndpoint):
    """A TransferEngine by Mooncake. `protocol` is Mooncake's: tcp, or rdma with the names of its `devices`."""

    name = "mooncake"

    def __init__(
        self, host: str = "127.0.0.1", secret: bytes | None = None, protocol: str = "tcp", devices: str = ""
    ) -> None:
        """Start Mooncake. Raises ValueError for an invalid host or protocol, and ImportError without Mooncake."""
        super().__init__(host, secret, _Mooncake(host, protocol, devices))


class _Mooncake:
    def __init__(self, host: str, protocol: str, devices: str) -> None:
        try:
            from mooncake.engine import TransferEngine as Mooncake
        except ImportError as error:
            raise ImportError(
                f"the mooncake engine needs the extra kvrouter[mooncake] and the library libibverbs1: {error}"
            ) from error
        self._engine = Mooncake()
        if self._engine.initialize(host, "P2PHANDSHAKE", protocol, devices):
            raise ValueError(f"Mooncake can't start on {host} with protocol {protocol}, devices {devices or 'any'}")
        self._host = f"[{host}]" if ":" in host else host
        self._registered: list[int] = []

    def register(self, regions: Sequence[Region]) -> None:
        for region in regions:
            if self._engine.register_memory(region.pointer, region.length):
                raise ValueError(f"Mooncake can't register {region.length} bytes at {region.pointer:#x}")
            self._registered.append(region.pointer)

    def describe(self) -> bytes:
        return f"{self._host}:{self._engine.get_rpc_port()}".encode()

    def open(self, description: bytes) -> str:
        return description.decode()

    def forget(self, peer: str) -> None:
        pass

    def write(self, peer: str, writes: Writes) -> None:
        status = self._engine.batch_transfer_sync_write(
            peer, writes.sources.tolist(), writes.destinations.tolist(), writes.lengths.tolist()
        )
        if status:
            raise PeerLostError(f"Mooncake failed to write to {peer}: status {status}")

    def close(self) -> None:
        while self._registered:
            self._engine.unregister_memory(self._registered.pop())


_LONGEST_NAP = 0.001  # seconds between two checks of a transfer


class NixlEngine(OneSidedEndpoint):
    """A TransferEngine by NIXL. `backend` is NIXL's, for example UCX or LIBFABRIC."""

    name = "nixl"

    def __init__(self, host: str = "127.0.0.1", secret: bytes | None = None, backend: str = "UCX") -> None:
        """Start NIXL. Raises ValueError for an invalid host or backend, and ImportError without NIXL."""
        super().__init__(host, secret, _Nixl(backend))


class _Nixl:
    def __init__(self, backend: str) -> None:
        try:
            from nixl import nixl_agent, nixl_agent_config, nixl_thread_sync_t
        except ImportError as error:
            raise ImportError(f"the nixl engine needs the extra kvrouter[nixl]: {error}") from error
        config = nixl_agent_config(backends=[backend], sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT)
        self._agent: Any = nixl_agent(f"kvrouter-{secrets.token_hex(8)}", config)
        if backend not in self._agent.backends:
            raise ValueError(f"NIXL has no backend {backend}; it has {', '.join(self._agent.get_plugin_list())}")
        self._lock = threading.Lock()
        self._sessions: Counter[str] = Counter()
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
        with self._lock:
            try:
                name = self._agent.add_remote_agent(description)
            except Exception as error:
                raise PeerLostError(f"NIXL can't read the peer's description: {error}") from None
            peer = name.decode() if isinstance(name, bytes) else str(name)
            self._sessions[peer] += 1
        return peer

    def forget(self, peer: str) -> None:
        with self._lock:
            self._sessions[peer] -= 1
            if not self._sessions[peer] and self._agent is not None:
                del self._sessions[peer]
                with suppress(Exception):  # NIXL may already have removed the peer
                    self._agent.remove_remote_agent(peer)

    def write(self, peer: str, writes: Writes) -> None:
        try:
            agent = self._agent
            handle = agent.initialize_xfer(
                "WRITE",
                _descriptors(agent, writes.sources, writes.lengths),
                _descriptors(agent, writes.destinations, writes.lengths),
                peer,
            )
            state = agent.transfer(handle)
            nap = 0.0
            while state == "PROC":
                time.sleep(nap)
                nap = min(nap + 1e-5, _LONGEST_NAP)
                state = agent.check_xfer_state(handle)
            agent.release_xfer_handle(handle)
        except Exception as error:
            raise PeerLostError(f"NIXL failed to write to {peer}: {error}") from None
        if state != "DONE":
            raise PeerLostError(f"NIXL failed to write to {peer}: state {state}")

    def close(self) -> None:
        with self._lock:
            agent, self._agent = self._agent, None  # NIXL's thread ends with its agent; a current write keeps the agent
        if agent is not None:
            for registered in self._registered:
                agent.deregister_memory(registered)


def _descriptors(agent: Any, pointers: Addresses, lengths: Addresses) -> Any:
    device = np.zeros(len(pointers), np.uint64)
    return agent.get_xfer_descs(np.stack((pointers, lengths, device), axis=1), "DRAM")
