"""A selector that several handles of one deployment share, for `kvrouter.adapters.ray`.

A handle is a process that sends requests. Every `BEAT_SECONDS` it reports the requests that it has in flight. The
reservations of others of its requests end then, and all of them end `SILENT_SECONDS` after its last report.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvrouter.selection import NoWorker, Prompt, Selector, Stream

BEAT_SECONDS: Final = 5.0
SILENT_SECONDS: Final = 30.0
MOST_ADAPTERS: Final = 1000


@dataclass(frozen=True, slots=True)
class ReplicaDescription:
    """The report of a replica: its blocks, event streams, adapters and DP ranks."""

    block_size: int | None = None
    capacity: int | None = None
    streams: tuple[Stream, ...] = ()
    adapters: tuple[str, ...] = ()
    dp_size: int = 1


@dataclass(slots=True)
class _Handle:
    """A handle's last report: its reservations, and the replicas that it can reach."""

    heard_at: float
    held: set[str] = field(default_factory=set)
    replicas: set[str] = field(default_factory=set)


class SharedSelector:
    """Chooses replicas for the requests of all handles, and holds their load."""

    def __init__(self, model: str, settings: Mapping[str, Any] | None = None) -> None:
        """Prepare a selector. `model`: the name of what all replicas serve. Raises ValueError for wrong settings."""
        self.selector = Selector(settings)
        self._model = model
        self._replicas: dict[str, ReplicaDescription] = {}
        self._adapters: dict[str, None] = {}
        self._handles: dict[str, _Handle] = {}
        self._choices = 0

    async def start(self) -> None:
        """Start the selector in this event loop."""
        await self.selector.__aenter__()

    async def close(self) -> None:
        """End all reservations, and the selector."""
        await self.selector.close()

    async def upsert(self, handle: str, id: str, described: ReplicaDescription) -> None:
        """Add a replica, or replace its description. Raises ValueError, which names the wrong field.

        It is removed by `delete`, or when the handles that report do not report it any more.
        """
        self._heard(handle).replicas.add(id)
        if self._replicas.get(id) != described:
            await self._declare(id, described)

    async def _declare(self, id: str, described: ReplicaDescription) -> None:
        await self.selector.upsert_worker(
            id,
            model=self._model,
            adapters=list({**self._adapters, **dict.fromkeys(described.adapters)}),
            block_size=described.block_size,
            capacity=described.capacity,
            streams=described.streams,
            dp_size=described.dp_size,
        )
        self._replicas[id] = described

    async def delete(self, id: str) -> None:
        """Remove a replica, and end its reservations. Unknown ids are ignored."""
        if self._replicas.pop(id, None) is not None:
            await self.selector.delete_worker(id)

    async def reserve(
        self, handle: str, id: str, prompt: Prompt, allowed: Collection[str]
    ) -> tuple[str, int, Sequence[str]]:
        """Choose a replica, and reserve its load until `release`. A reservation of the same id is released first.

        Returns its id, the DP rank, and the allowed replicas that are unknown here. Raises NoWorker if all are.
        """
        await self.release(id)
        missing = [each for each in allowed if each not in self._replicas]
        if len(missing) == len(allowed):
            raise NoWorker("None of the replicas is known.")
        if prompt.adapter is not None:
            await self._learn(prompt.adapter)
        held = await self.selector.reserve(prompt, id=id, allowed=allowed, expiry=SILENT_SECONDS)
        self._heard(handle).held.add(id)
        self._choices += 1
        return held.worker.name, held.selection.rank.target.dp_rank, missing

    async def _learn(self, adapter: str) -> None:
        """Let all replicas serve an adapter, because they load it when a request asks for it."""
        if adapter in self._adapters:
            return
        if len(self._adapters) >= MOST_ADAPTERS:
            raise ValueError(f"adapter: {MOST_ADAPTERS} adapters are known already.")
        self._adapters[adapter] = None
        for id, described in list(self._replicas.items()):
            await self._declare(id, described)

    async def release(self, id: str, failed: bool = False) -> None:
        """Release the load of a request. An id that is not held is ignored. `failed`: its replica failed."""
        held = self.selector.reservation(id)
        if held is not None:
            held.release(failed=failed)

    async def beat(self, handle: str, in_flight: Collection[str], replicas: Collection[str]) -> Sequence[str]:
        """Renew the reservations of a handle's requests, and end its others. Returns the ids of all known replicas.

        - `replicas`: the ids of those that the handle can reach.
        """
        known = self._heard(handle)
        running = known.held.intersection(in_flight)
        for id in known.held - running:
            await self.release(id)
        for id in running:
            if (held := self.selector.reservation(id)) is not None:
                held.progress()
        known.held, known.replicas = running, set(replicas)
        self._handles = {name: each for name, each in self._handles.items() if not _silent(each)}
        for id in self._replicas.keys() - set().union(*[each.replicas for each in self._handles.values()]):
            await self.delete(id)
        return list(self._replicas)

    def _heard(self, handle: str) -> _Handle:
        known = self._handles.setdefault(handle, _Handle(0.0))
        known.heard_at = time.monotonic()
        return known

    def silent(self) -> bool:
        """Return whether no handle reports any more."""
        return all(_silent(each) for each in self._handles.values())

    async def status(self) -> dict[str, Any]:
        """Return the requests in flight by replica, the number of handles, and that of all choices."""
        loads = self.selector.loads()
        return {
            "in_flight": {id: sum(load.requests for load in each) for id, each in loads.items()},
            "handles": len(self._handles),
            "choices": self._choices,
        }


def _silent(handle: _Handle) -> bool:
    return time.monotonic() - handle.heard_at > SILENT_SECONDS
