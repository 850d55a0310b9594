"""The role in a worker's settings, from its start to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry

from simulator.worker.engine import ComputeKv, SimulatedEngine
from simulator.worker.kv_transfer.nixl import NixlDecode, NixlPrefill
from simulator.worker.kv_transfer.part import Role
from simulator.worker.kv_transfer.rank import TransferMetrics, TransferRank
from simulator.worker.kv_transfer.sglang import SglangDecode, SglangPrefill
from simulator.worker.settings import SimulatedWorkerSettings
from worker.kv_transfer.bootstrap import KVBootstrapServer

_ROLES: dict[tuple[str, str], Callable[[Sequence[TransferRank]], Role]] = {
    ("sglang", "prefill"): SglangPrefill,
    ("sglang", "decode"): SglangDecode,
    ("nixl", "prefill"): NixlPrefill,
    ("nixl", "decode"): NixlDecode,
}


class OpenRole:
    """The ranks of a prefill or decode worker, and a prefill's bootstrap service. Raises OSError and ValueError."""

    def __init__(self, settings: SimulatedWorkerSettings) -> None:
        self._ranks: list[TransferRank] = []
        self._bootstrap: KVBootstrapServer | None = None
        self._settings = settings
        try:
            if settings.role == "prefill":
                self._bootstrap = KVBootstrapServer(settings.host, settings.bootstrap_port)
            address = self._bootstrap.address if self._bootstrap else ""
            for number in range(settings.dp_size):
                self._ranks.append(TransferRank(settings, number, address))
        except BaseException:
            self.close_sockets()
            raise
        assert settings.disaggregation is not None
        assert settings.role is not None
        self.role = _ROLES[settings.disaggregation, settings.role](self._ranks)

    @property
    def bootstrap_port(self) -> int | None:
        """The port of a prefill's bootstrap service."""
        return int(self._bootstrap.address.rpartition(":")[2]) if self._bootstrap else None

    def compute_kv(self, rank: int) -> ComputeKv:
        """Return the function that computes the KV of a rank's tokens."""
        return self._ranks[rank].memory.compute

    def attach(self, engines: Sequence[SimulatedEngine], registry: CollectorRegistry) -> None:
        """Connect the ranks to their engines, and register their metrics."""
        for rank, engine in zip(self._ranks, engines, strict=True):
            rank.engine = engine
        registry.register(TransferMetrics(self._settings.model, self._ranks))

    def listens_on(self, port: int) -> None:
        """Set the worker's own HTTP port."""
        if isinstance(self.role, NixlPrefill):
            self.role.address = (self._settings.host, port)

    async def close(self) -> None:
        """Cancel all transfers and end all threads."""
        await asyncio.gather(*(rank.close() for rank in self._ranks))
        if self._bootstrap is not None:
            await asyncio.to_thread(self._bootstrap.close)

    def close_sockets(self) -> None:
        """End all threads of a role that never ran."""
        for rank in self._ranks:
            rank.close_sockets()
        if self._bootstrap is not None:
            self._bootstrap.close()
