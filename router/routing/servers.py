"""Who serves a name, and what stays as it is of their targets until the fleet changes: found once, not by request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from indexer import Target
from router.fleet.fleet import Fleet, Worker
from router.policies import Candidate
from router.routing.load import LoadTable, TargetLoad


class Served(NamedTuple):
    """What a worker serves under the name a request uses."""

    model: str
    adapter: str | None


@dataclass(slots=True, eq=False)
class Rank:
    """One of a worker's ranks as the target for a model.

    `weight`: that of its worker. `candidate`: it with nothing of a prompt, as a request found it last.
    """

    target: Target
    load: TargetLoad
    weight: float
    candidate: Candidate


@dataclass(slots=True, eq=False)
class Server:
    """A worker that serves a name."""

    worker: Worker
    served: Served
    all_ranks: list[Rank]

    @property
    def ranks(self) -> Sequence[Rank]:
        """Those that requests may go to now."""
        health = self.worker.health
        if not health.ranks:
            return self.all_ranks
        usable = health.usable_ranks(self.worker.ranks())
        return [rank for rank in self.all_ranks if rank.target.dp_rank in usable]


class Servers:
    """The workers of a fleet by the names they serve."""

    def __init__(self, fleet: Fleet, load: LoadTable) -> None:
        self._fleet = fleet
        self._load = load
        self._version = -1
        self._known: dict[tuple[str | None, bool], dict[Worker, Server]] = {}

    def of(self, name: str | None, prefill: bool = False) -> dict[Worker, Server]:
        """Those that take requests of a name, as `Fleet.able` has them."""
        if self._version != self._fleet.version:
            self._version = self._fleet.version
            self._known.clear()
        servers = self._known.get((name, prefill))
        if servers is None:
            servers = {worker: self._server(worker, name) for worker in self._fleet.able(name, prefill)}
            if servers:  # else nobody serves it, and there is no end of such names
                self._known[name, prefill] = servers
        return servers

    def _server(self, worker: Worker, name: str | None) -> Server:
        served = worker.served(name) if name is not None else None
        model, weight = served.model if served else "", worker.settings.weight
        targets = [worker.target(dp_rank, model) for dp_rank in worker.ranks()]
        ranks = [Rank(each, self._load.of(worker.url, each.dp_rank), weight, Candidate(each)) for each in targets]
        return Server(worker, Served(model, served.adapter if served else None), ranks)
