"""Dynamo's `SelectionService` over a `Selector` (ai-dynamo-runtime 1.6.1, docs/embed.md).

Its methods have the requests, answers and errors of `dynamo.llm.SelectionService`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from http_api.errors import RequestError
from kvrouter.selection import Selector
from router.reservations.selection_service import SelectionService as Service

_KINDS = {404: "not_found", 409: "conflict", 429: "scheduler", 503: "not_ready"}
_FILTERED = "no endpoints available"


class SelectionServiceError(Exception):
    """A request that the service refuses, although it is well formed. `kind`: its category."""

    def __init__(self, message: str, kind: str, status_code: int) -> None:
        super().__init__(message)
        self.kind = kind
        self.status_code = status_code


class SelectionService:
    """Chooses workers in this process. The first asynchronous call starts it in the event loop of its caller."""

    def __init__(
        self,
        *,
        indexer_threads: int = 4,
        indexer_peers: Sequence[str] | None = None,
        replica_sync_port: int | None = None,
        replica_sync_peers: Sequence[str] | None = None,
        selection_cache: Any = None,
        session_affinity_ttl_secs: float | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Prepare a service. `settings`: sections of kvrouter's settings.

        `indexer_threads`, `selection_cache` and `session_affinity_ttl_secs` are ignored. Raises ValueError for peers:
        several routers share load by `settings`.
        """
        del indexer_threads, selection_cache, session_affinity_ttl_secs
        if indexer_peers or replica_sync_port is not None or replica_sync_peers:
            raise ValueError("Peers are not supported. Set sharing in settings to share load.")
        self._selector = Selector(settings)
        self._starting: asyncio.Task[Selector] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._down = False

    async def upsert_worker(self, worker: Any) -> Any:
        """Add a worker, or replace it, and return its record."""
        async with self._running() as service:
            return await service.workers.upsert(_named(worker))

    async def delete_worker(self, worker_id: int) -> Any:
        """Remove a worker, and return its record."""
        async with self._running() as service:
            return await service.workers.delete(worker_id)

    def list_workers(self, *, model_name: str | None = None, routing_group: str | None = None) -> Any:
        """Return the records of all workers."""
        return self._selector.service.workers.listed(model_name, routing_group) if self._runs else []

    def ready(self) -> Any:
        """Return whether any worker may be chosen."""
        if not self._runs:
            return {"ready": False, "schedulable_workers": 0, "workers": []}
        return self._selector.service.workers.ready()

    async def select(self, request: Any) -> Any:
        """Return the choice for a prompt, and reserve nothing."""
        async with self._running() as service:
            return await service.select(request)

    async def select_and_reserve(self, request: Any) -> Any:
        """Return the choice for a prompt, and reserve its load."""
        async with self._running() as service:
            return await service.select_and_reserve(request)

    async def create_reservation(self, request: Any) -> Any:
        """Reserve an earlier choice by its `selection_id`, or a given worker."""
        async with self._running() as service:
            return await service.create_reservation(request)

    async def prefill_complete(self, selection_id: str) -> None:
        """End the prefill of a reservation."""
        async with self._running() as service:
            await service.prefill_complete(selection_id)

    def add_output_block(self, selection_id: str, *, decay_fraction: float | None = None) -> None:
        """Report one more block of an answer."""
        if not self._runs:
            raise SelectionServiceError(f"reservation {selection_id} not found", "not_found", 404)
        with _Errors():
            self._selector.service.add_output_block(selection_id, {"decay_fraction": decay_fraction})

    async def free_reservation(self, selection_id: str) -> None:
        """Release a reservation."""
        async with self._running() as service:
            await service.free_reservation(selection_id)

    async def overlap_scores(self, request: Any) -> Any:
        """Return the blocks of a prompt that each worker has cached."""
        async with self._running() as service:
            return await service.overlap_scores(request)

    async def potential_loads(self, request: Any) -> Any:
        """Return the load that each worker would have with a prompt."""
        async with self._running() as service:
            return await service.potential_loads(request)

    def loads(self, *, model_name: str | None = None, routing_group: str | None = None) -> Any:
        """Return the load of each worker, by model and routing group."""
        return self._selector.service.loads(model_name, routing_group) if self._runs else []

    def shutdown(self) -> None:
        """End all reservations and everything that runs. Only the first call counts."""
        if self._down:
            return
        self._down = True
        if self._starting is not None and not (loop := self._starting.get_loop()).is_closed():
            loop.call_soon_threadsafe(self._close)

    def _close(self) -> None:
        self._closing = asyncio.get_running_loop().create_task(self._selector.close())

    @property
    def _runs(self) -> bool:
        return not self._down and self._starting is not None and self._starting.done()

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[Service]:
        """Start the selector if necessary, and yield its service. Errors become Dynamo's."""
        await self._started()
        with _Errors():
            yield self._selector.service

    async def _started(self) -> None:
        if self._down:
            raise SelectionServiceError("selection service is shutting down", "not_ready", 503)
        if self._starting is None:
            self._starting = asyncio.get_running_loop().create_task(self._selector.__aenter__())
        if not self._starting.done():
            await asyncio.shield(self._starting)


class _Errors:
    """Convert errors of requests to Dynamo's: ValueError for a wrong request, SelectionServiceError for others."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if not isinstance(error, RequestError):
            return
        if error.status in (400, 413, 422):
            raise ValueError(error.message) from error
        kind = "scheduler" if error.message.startswith(_FILTERED) else _KINDS.get(error.status, "internal")
        raise SelectionServiceError(error.message, kind, error.status) from error


def _named(worker: Any) -> Any:
    """Return a worker whose ranks are numbers, as Dynamo's are in Python and not in JSON."""
    if isinstance(worker, Mapping) and isinstance(endpoints := worker.get("kv_events_endpoints"), Mapping):
        return {**worker, "kv_events_endpoints": {int(rank): each for rank, each in endpoints.items()}}
    return worker
