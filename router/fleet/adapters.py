"""LoRA adapters on the workers: loaded and unloaded on all that serve a model, or on some of them.

What was loaded on all is remembered, and a worker that comes later, or comes back, is told too. That ends with the
process: adapters that are to outlive it belong into the engines' own arguments.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import structlog

from router.fleet.discovery import Engine, ServedModel
from router.fleet.worker import Worker
from router.fleet.worker_commands import Told, tell

log = structlog.get_logger()

# An adapter may have to be downloaded first.
_SECONDS = 300.0
_RETRY_SECONDS = 60.0
# Adapters that are remembered.
_MOST_KEPT = 1000


@dataclass(frozen=True, slots=True)
class _Kept:
    model: str
    body: dict[str, Any]


class Adapters:
    """Tells workers what to load."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._kept: dict[str, _Kept] = {}
        self._tried: dict[tuple[str, str], float] = {}  # worker and adapter, and when
        self._loading: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """End what is told to workers that came."""
        for task in self._loading:
            task.cancel()
        await asyncio.gather(*self._loading, return_exceptions=True)

    async def load(self, workers: Sequence[Worker], body: dict[str, Any], model: str | None) -> list[Told]:
        """Have workers load an adapter. `model`: the base model whose later workers load it too; None: they do not."""
        told = await asyncio.gather(*(self._tell(worker, "load_lora_adapter", body) for worker in workers))
        if model is not None and any(each.well for each in told) and len(self._kept) < _MOST_KEPT:
            self._kept[body["lora_name"]] = _Kept(model, body)
        return told

    async def unload(self, workers: Sequence[Worker], body: dict[str, Any]) -> list[Told]:
        """Have workers unload one. No later worker loads it any more."""
        self._kept.pop(body["lora_name"], None)
        return await asyncio.gather(*(self._tell(worker, "unload_lora_adapter", body) for worker in workers))

    def provide(self, worker: Worker, model: ServedModel) -> None:
        """A worker serves this model: have it load what the others have, if it has not."""
        for name, kept in list(self._kept.items()):
            if kept.model != model.name or worker.served(name) is not None:
                continue
            now = time.monotonic()
            if now - self._tried.get((worker.url, name), -_RETRY_SECONDS) < _RETRY_SECONDS:
                continue
            self._tried[worker.url, name] = now
            loading = asyncio.create_task(self._provide(worker, name, kept), name=f"load {name} at {worker.name}")
            self._loading.add(loading)
            loading.add_done_callback(self._loading.discard)

    def removed(self, worker: Worker) -> None:
        """A worker is gone."""
        for key in [key for key in self._tried if key[0] == worker.url]:
            del self._tried[key]

    async def _provide(self, worker: Worker, name: str, kept: _Kept) -> None:
        told = await self._tell(worker, "load_lora_adapter", kept.body)
        if told.well and self._kept.get(name) is not kept:  # it was unloaded meanwhile
            await self._tell(worker, "unload_lora_adapter", {"lora_name": name})
        log.info("adapter", worker=worker.name, adapter=name, status=told.status, message=told.message)
        worker.look_now.set()

    async def _tell(self, worker: Worker, what: str, body: dict[str, Any]) -> Told:
        sglang = worker.description is not None and worker.description.engine is Engine.SGLANG
        return await tell(self._session, worker, f"/{what}" if sglang else f"/v1/{what}", _SECONDS, body)
