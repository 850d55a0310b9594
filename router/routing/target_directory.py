"""The targets behind each name. They are looked up once for each version of the fleet, not for each request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from indexer import Target
from router.fleet.discovery import WorkerDescription
from router.fleet.fleet import Fleet, Worker
from router.fleet.load import LoadTable, TargetLoad
from router.holdings.speculation import chunk_root
from router.policies import Candidate
from router.settings import WorkerSettings


class ServedModel:
    """What workers serve under the name a request uses: one object for all of them. `root`: the hash before the first
    chunk of its prompts, but for those with a salt."""

    def __init__(self, model: str, adapter: str | None) -> None:
        self.model = model
        self.adapter = adapter
        self.root = chunk_root(model, adapter, None)


class RoutableRank:
    """One of a worker's ranks as the target for what it serves under a name.

    `one_of_many`: its worker has others. `weight`: that of its worker. `candidate`: the rank with nothing of a prompt,
    made from version `candidate_version` of its load; -1 once that is out of date. `place`: among those that serve the
    same.
    """

    def __init__(
        self, worker: Worker, served: ServedModel, target: Target, load: TargetLoad, one_of_many: bool
    ) -> None:
        self.worker = worker
        self.served = served
        self.target = target
        self.load = load
        self.one_of_many = one_of_many
        self.weight = worker.settings.weight
        self.candidate = Candidate(target)
        self.candidate_version = -1
        self.place = 0


class ModelTargets:
    """The workers that take requests of a name, as `Fleet.able` has them, and their ranks: by worker, by target, and by
    what they serve."""

    def __init__(
        self, workers: Sequence[Worker], name: str | None, load: LoadTable, before: ModelTargets | None = None
    ) -> None:
        """`before`: what was found of the name the last time. The ranks of workers that are as they were stay."""
        self.workers = list(workers)
        self.of_worker: dict[Worker, list[RoutableRank]] = {}
        self.of_target: dict[Target, RoutableRank] = {}
        self.of_served: dict[ServedModel, list[RoutableRank]] = {}
        self._found: dict[Worker, tuple[WorkerDescription | None, WorkerSettings]] = {}
        served_of = (
            {(served.model, served.adapter): served for served in before.of_served} if before is not None else {}
        )
        for worker in workers:
            ranks = before.ranks_as_found(worker) if before is not None else None
            if ranks is None:
                model, adapter = _served(worker, name)
                served = served_of.get((model, adapter))
                if served is None:
                    served = served_of[model, adapter] = ServedModel(model, adapter)
                ranks = _ranks(worker, served, load)
            self._found[worker] = (worker.description, worker.settings)
            self.of_worker[worker] = ranks
            same = self.of_served.setdefault(ranks[0].served, [])
            for rank in ranks:
                self.of_target[rank.target] = rank
                rank.candidate_version = -1
                rank.place = len(same)
                same.append(rank)
        self.ranks = list(self.of_target.values())

    def ranks_as_found(self, worker: Worker) -> list[RoutableRank] | None:
        """The ranks of a worker, if it is as it was when they were found."""
        description, settings = self._found.get(worker, (None, None))
        if settings is not worker.settings or description is not worker.description:
            return None
        return self.of_worker[worker]

    @property
    def all_usable(self) -> bool:
        """Whether a request may go to any of them; False where that takes a closer look."""
        for worker in self.workers:
            health = worker.health
            if not health.circuit.closed or worker.warming_since is not None or health.ranks:
                return False
        return True

    def usable(self, workers: Iterable[Worker]) -> list[RoutableRank]:
        """The ranks of some of the workers that requests may go to now."""
        usable: list[RoutableRank] = []
        for worker in workers:
            ranks = self.of_worker[worker]
            if worker.health.ranks:
                able = worker.health.usable_ranks(worker.ranks())
                ranks = [rank for rank in ranks if rank.target.dp_rank in able]
            usable += ranks
        return usable


class TargetDirectory:
    """The workers of a fleet by the names they serve."""

    def __init__(self, fleet: Fleet, load: LoadTable) -> None:
        self._fleet = fleet
        self._load = load
        self._version = -1
        # By name: of workers that answer, and of those that compute prompts for others.
        self._targets: list[dict[str | None, ModelTargets]] = [{}, {}]
        self._before = self._targets  # of the last version

    def of(self, name: str | None, prefill: bool = False) -> ModelTargets:
        """Those that take requests of a name."""
        if self._version != self._fleet.version:
            self._version = self._fleet.version
            self._before, self._targets = self._targets, [{}, {}]
        targets = self._targets[prefill].get(name)
        if targets is None:
            before = self._before[prefill].pop(name, None)
            targets = ModelTargets(self._fleet.able(name, prefill), name, self._load, before)
            if targets.workers:  # else no worker serves it, and there is no end of such names
                self._targets[prefill][name] = targets
        return targets

    def invalidate(self) -> None:
        """Any rank may have changed: let all candidates be made again."""
        for by_name in self._targets:
            for targets in by_name.values():
                for rank in targets.ranks:
                    rank.candidate_version = -1


def _served(worker: Worker, name: str | None) -> tuple[str, str | None]:
    """The model and adapter that a worker serves under a name."""
    known = worker.served(name) if name is not None else None
    return (known.model, known.adapter) if known else ("", None)


def _ranks(worker: Worker, served: ServedModel, load: LoadTable) -> list[RoutableRank]:
    targets = [worker.target(dp_rank, served.model) for dp_rank in worker.ranks()]
    of_many = len(targets) > 1
    return [RoutableRank(worker, served, target, load.of(worker.url, target.dp_rank), of_many) for target in targets]
