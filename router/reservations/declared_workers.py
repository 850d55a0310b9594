"""Workers that a program declares. Nothing probes them, and the proxy sends them nothing.

The program that declares a worker sends its requests, and knows its model, its blocks and its event streams.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any

from kvevents import EventSource
from kvevents.sources import canonical_source
from router.fleet.discovery import MOST_RANKS, Engine, ServedModel, WorkerDescription
from router.fleet.fleet import Fleet
from router.fleet.prober import Prober
from router.fleet.worker import Worker, url_of
from router.settings import Role, WorkerSettings


class DeclaredWorkers:
    """The declared workers of a fleet, by their ids. `source`: the source under which the fleet has them."""

    def __init__(
        self,
        fleet: Fleet,
        prober: Prober,
        source: str,
        provide: Callable[[Worker, ServedModel], Awaitable[None]],
    ) -> None:
        """Declare no worker yet. `provide`: called with each worker and its model, to load the model's tokenizer."""
        self._fleet = fleet
        self._prober = prober
        self._source = source
        self._provide = provide
        self._declared: dict[str, WorkerSettings] = {}

    def __iter__(self) -> Any:
        return iter(list(self._declared))

    def get(self, id: str) -> Worker | None:
        """Return the worker with an id; None if it is unknown."""
        settings = self._declared.get(id)
        return None if settings is None else self._fleet.at(url_of(settings))

    async def upsert(
        self,
        id: str,
        model: str,
        *,
        url: str | None = None,
        adapters: Mapping[str, str] | None = None,
        block_size: int | None = None,
        capacity: int | None = None,
        streams: Sequence[EventSource] = (),
        ranks: Sequence[int] = (0,),
        role: str = "both",
        weight: float = 1.0,
        labels: Mapping[str, str] | None = None,
    ) -> Worker:
        """Add a worker, or replace its description. It may be chosen when this returns.

        - `adapters`: the LoRA adapter behind each name that requests may use.
        - `capacity`: the blocks of each rank's KV cache; None: not known.

        Raises ValueError, which names the wrong field.
        """
        if not 1 <= len(ranks) <= MOST_RANKS:
            raise ValueError(f"dp_size: {len(ranks)} is not from 1 to {MOST_RANKS}.")
        for stream in streams:
            if stream.dp_rank not in ranks:
                raise ValueError(f"streams: rank {stream.dp_rank} is not one of {ranks[0]} to {ranks[-1]}.")
            try:
                canonical_source(stream)
            except ValueError as error:
                raise ValueError(f"streams: {error}") from error
        settings = WorkerSettings.model_validate(
            {
                "url": url or url_of_declared(id),
                "name": id,
                "model": model,
                "block_size": block_size,
                "weight": weight,
                "labels": dict(labels or {}),
                "role": Role(role),
            }
        )
        other = next((name for name, each in self._declared.items() if each.url == settings.url and name != id), None)
        if other is not None:
            raise ValueError(f"url: worker {other!r} has it too. Delete that worker first.")
        models = {name: ServedModel(name, model, adapter) for name, adapter in (adapters or {}).items()}
        models[model] = ServedModel(model, model)
        description = WorkerDescription(
            Engine.OTHER, models, tuple(streams), block_size, capacity, tuple(ranks), Role(role)
        )
        self._declared[id] = settings
        self._fleet.assign(self._source, self._declared.values())
        worker = self._fleet.at(url_of(settings))
        assert worker is not None
        self._prober.answered(worker, description)
        worker.warming_since = None  # its caller decides when it is ready
        self._fleet.health_changed()
        await self._provide(worker, models[model])
        return worker

    def remove(self, id: str) -> None:
        """Remove a worker, which ends its reservations. Unknown ids are ignored."""
        if self._declared.pop(id, None) is not None:
            self._fleet.assign(self._source, self._declared.values())


def url_of_declared(id: str) -> str:
    """Return the name in the index of a worker without a URL. No host has it."""
    return f"http://{sha256(id.encode()).hexdigest()[:32]}.invalid"
