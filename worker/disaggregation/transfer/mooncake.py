"""Transfers by Mooncake's engine, for sites with RDMA: the extra `mooncake`, and Debian's libibverbs1.

Mooncake writes to any address that a peer names, and its own port needs no secret. Therefore grants only bind honest
senders. Restrict access to that port.
"""

from __future__ import annotations

from collections.abc import Sequence

from worker.disaggregation.transfer.engine import PeerLostError, Region
from worker.disaggregation.transfer.one_sided import OneSidedEndpoint
from worker.disaggregation.transfer.runs import Writes


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
