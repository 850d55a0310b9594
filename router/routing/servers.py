"""Who serves a name, and what stays as it is of their targets until the fleet changes: found once, not by request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    """One of a worker's ranks as the target for what it serves under a name.

    `one_of_many`: its worker has others. `weight`: that of its worker. `candidate`: it with nothing of a prompt, as it
    was when its load had changed `as_of` times; -1 when that is known not to be so any more.
    """

    worker: Worker
    served: Served
    target: Target
    load: TargetLoad
    one_of_many: bool
    weight: float
    candidate: Candidate
    as_of: int = -1


class Serving:
    """The workers that take requests of a name, as `Fleet.able` has them, and their ranks: by worker, by target, and by
    what they serve."""

    def __init__(self, workers: Sequence[Worker], name: str | None, load: LoadTable) -> None:
        self.workers = workers
        self.of_worker: dict[Worker, list[Rank]] = {}
        self.of_target: dict[Target, Rank] = {}
        self.of_served: dict[Served, list[Rank]] = {}
        for worker in workers:
            known = worker.served(name) if name is not None else None
            served = Served(known.model, known.adapter) if known else Served("", None)
            ranks = self.of_worker[worker] = [_rank(worker, dp_rank, served, load) for dp_rank in worker.ranks()]
            self.of_served.setdefault(served, []).extend(ranks)
            self.of_target.update((rank.target, rank) for rank in ranks)

    @property
    def all_usable(self) -> bool:
        """Whether a request may go to any of them, as far as that can be seen at a glance."""
        unsure = [
            worker
            for worker in self.workers
            if not worker.health.circuit.closed or worker.warming_since is not None or worker.health.ranks
        ]
        return not unsure

    def usable(self, workers: Iterable[Worker]) -> list[Rank]:
        """The ranks of some of the workers that requests may go to now."""
        usable: list[Rank] = []
        for worker in workers:
            ranks = self.of_worker[worker]
            if worker.health.ranks:
                able = worker.health.usable_ranks(worker.ranks())
                ranks = [rank for rank in ranks if rank.target.dp_rank in able]
            usable += ranks
        return usable


class Servers:
    """The workers of a fleet by the names they serve."""

    def __init__(self, fleet: Fleet, load: LoadTable) -> None:
        self._fleet = fleet
        self._load = load
        self._version = -1
        self._known: dict[tuple[str | None, bool], Serving] = {}

    def of(self, name: str | None, prefill: bool = False) -> Serving:
        """Those that take requests of a name."""
        if self._version != self._fleet.version:
            self._version = self._fleet.version
            self._known.clear()
        serving = self._known.get((name, prefill))
        if serving is None:
            serving = Serving(self._fleet.able(name, prefill), name, self._load)
            if serving.workers:  # else nobody serves it, and there is no end of such names
                self._known[name, prefill] = serving
        return serving

    def look_again(self) -> None:
        """More may have changed of any rank than its load."""
        for serving in self._known.values():
            for rank in serving.of_target.values():
                rank.as_of = -1


def _rank(worker: Worker, dp_rank: int, served: Served, load: LoadTable) -> Rank:
    target, one_of_many = worker.target(dp_rank, served.model), len(worker.ranks()) > 1
    loaded, weight = load.of(worker.url, dp_rank), worker.settings.weight
    return Rank(worker, served, target, loaded, one_of_many, weight, Candidate(target))
