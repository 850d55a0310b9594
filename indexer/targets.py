"""Targets of the index: their identity, registration, display names, and the counters of their blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from indexer.pools.layout import PoolLayout
from kvevents import EventSource


class Target(NamedTuple):
    """One DP rank of a worker, for one model and tenant: a tuple, because its hash is cheap and needed often."""

    worker: str
    dp_rank: int
    model: str
    tenant: str = "default"


@dataclass(frozen=True, slots=True)
class Registration:
    """A target, and the event stream to follow for it.

    - `adapter`: the LoRA of events that name none.
    - `capacity`: number of blocks in the engine's own memory; None if it is unknown.
    - `additional_salt`: name of a variant of the model (RFC 1403). Blocks of different variants never match.
    - `pool_layout`: the layout of its objects in a shared pool; None if it is not known. It changes no stream.
    """

    target: Target
    source: EventSource | None
    engine: str = ""
    block_size: int | None = None
    adapter: str | None = None
    capacity: int | None = None
    additional_salt: str | None = None
    pool_layout: PoolLayout | None = field(default=None, compare=False)


@dataclass(slots=True)
class HoldingsCounters:
    """Counters of the events and blocks of a target since its registration."""

    stored: int = 0
    removed: int = 0
    cleared: int = 0
    unknown_removed: int = 0
    orphans_dropped: int = 0
    over_capacity: int = 0
    ignored: int = 0


class WorkerNames:
    """Display names of workers, which the index knows by URL. `changes` counts every `set` and `forget`."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self.changes = 0

    def get(self, worker: str) -> str:
        """Return a worker's display name, or its URL if it has none."""
        return self._names.get(worker, worker)

    def about(self, target: Target) -> dict[str, str | int]:
        """Return the log fields that identify a target."""
        return {"worker": self.get(target.worker), "dp_rank": target.dp_rank, "model": target.model}

    def set(self, worker: str, name: str) -> None:
        """Give a worker a display name."""
        self._names[worker] = name
        self.changes += 1

    def forget(self, worker: str) -> None:
        """Remove a worker's display name."""
        self._names.pop(worker, None)
        self.changes += 1
