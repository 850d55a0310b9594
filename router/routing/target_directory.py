"""The targets behind each model name, looked up once for each version of the fleet."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Collection, Iterable, Sequence, Set

from http_api.errors import RequestError
from indexer import Target, TargetRows
from indexer.index import ChoiceQuestion
from router.apis.abilities import Ability
from router.cache_state.in_flight_prefixes import HolderRows
from router.cache_state.target_cache import TargetCaches
from router.fleet.discovery import WorkerDescription
from router.fleet.worker import Worker
from router.load.target_load import LoadTable
from router.routing.load_view import LoadView, PrefillShare
from router.routing.ranks import RoutableRank, ServedModel
from router.routing.state import RoutedFleet
from router.settings import WorkerSettings


class ServedRows:
    """The rows of a model's targets: in the index, and in the trees of prefixes in flight and of sent prefixes.

    - `units`: an `array("I")` of each row's block size in tokens; 0 if it is not known.
    - `windowed`: whether any of them keeps only the end of prompts, as far as it is known.
    - `roots`: the block sizes of the model, each with the hash that prompts without a cache salt start from.
    - `changes`, `until`: the index's changes when these were read, and the time until which they count.
    - `question`: what choices read beside the prompt; None before the first one.
    """

    __slots__ = ("changes", "in_flight", "index", "peers", "question", "roots", "sent", "units", "until", "windowed")

    def __init__(self, index: TargetRows) -> None:
        self.index = index
        self.in_flight = HolderRows()
        self.peers = HolderRows()
        self.sent = HolderRows()
        self.units = index.nothing[:]
        self.windowed = False
        self.roots: list[tuple[int, int]] = []
        self.changes = -1
        self.until = 0.0
        self.question: ChoiceQuestion | None = None


class ModelTargets:
    """The workers of `Fleet.able` for one name, and their ranks: in rows, by worker and by target.

    - `view`: the load of the ranks as policies see it; None before the first choice.
    - `nothing`: the overlap of an unknown prompt with each row: zeros, which are never changed.
    - `lengths`: the context length of each worker; None if all workers have the same.
    - `lacks`: what the workers lack, of those that lack an ability; empty if all lack the same.
    - `unsettled`: the workers that warm up or whose circuit is not closed.
    - `rows_of`: the rows of a model's targets, for the index and for trees of prefixes.
    - `refusing`: the workers that lack the name by their own answers; empty if all do.
    - `lacking_routes`: the workers that lack any path by their own answers.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        name: str | None,
        load: LoadTable,
        caches: TargetCaches,
        before: ModelTargets | None = None,
    ) -> None:
        """Find the ranks of a name's workers. Unchanged workers keep those of `before`."""
        self.workers = list(workers)
        self.of_worker: dict[Worker, list[RoutableRank]] = {}
        self.of_target: dict[Target, RoutableRank] = {}
        self.ranks: list[RoutableRank] = []
        self._found: dict[Worker, tuple[WorkerDescription | None, WorkerSettings]] = {}
        self.view: LoadView | None = None
        self.prefill_share: PrefillShare = PrefillShare() if before is None else before.prefill_share
        self.unsettled: list[Worker] = []
        self._health_version = -1
        served_of: dict[tuple[str, str | None, str | None], ServedModel] = {}
        for served in before.served if before is not None else ():
            served_of[served.model, served.adapter, served.replacement] = served
        for worker in workers:
            ranks = before.ranks_as_found(worker) if before is not None else None
            if ranks is None:
                key = _served(worker, name)
                if key not in served_of:
                    served_of[key] = ServedModel(*key)
                ranks = _ranks(worker, served_of[key], load, caches)
            self._found[worker] = (worker.description, worker.settings)
            self.of_worker[worker] = ranks
            for rank in ranks:
                self.of_target[rank.target] = rank
                rank.row = len(self.ranks)
                self.ranks.append(rank)
        self.nothing = array("I", bytes(4 * len(self.ranks)))
        self.lengths = _unlike_lengths(self.workers, name)
        unlike = len({worker.lacks for worker in self.workers}) > 1
        self.lacks = {worker: worker.lacks for worker in self.workers if worker.lacks} if unlike else {}
        refusing = [worker for worker in self.workers if name in worker.refused_names]
        self.refusing = refusing if len(refusing) < len(self.workers) else []
        self.lacking_routes = [worker for worker in self.workers if worker.missing_routes]
        self._name = name
        self.served: list[ServedModel] = list({ranks[0].served: None for ranks in self.of_worker.values()})
        self.rows_of: dict[ServedModel, ServedRows] = {}
        for served in self.served:
            row_of = {rank.target: rank.row for rank in self.ranks if rank.served is served}
            self.rows_of[served] = ServedRows(TargetRows(len(self.ranks), row_of))

    def ranks_as_found(self, worker: Worker) -> list[RoutableRank] | None:
        """Return the ranks of a worker, if its settings and its description have not changed since."""
        description, settings = self._found.get(worker, (None, None))
        if settings is not worker.settings or description is not worker.description:
            return None
        return self.of_worker[worker]

    def read_health(self, version: int) -> None:
        """Find the unsettled workers, unless that was done for this version of the fleet's health."""
        if self._health_version != version:
            self._health_version = version
            self.unsettled = [worker for worker in self.workers if not _settled(worker)]

    def too_short(self, tokens: int, excluded: Collection[Worker]) -> list[Worker]:
        """Return the workers whose context is too short for `tokens` of prompt and answer, if another's is longer.

        If the request fits no worker, the workers with the longest context remain, and their engine refuses it.
        """
        lengths = self.lengths
        if lengths is None:
            return []
        longest = max([length for worker, length in lengths.items() if worker not in excluded], default=0)
        needed = min(tokens, longest)
        return [worker for worker, length in lengths.items() if length < needed]

    def without_unable(self, path: str, needs: Set[Ability], excluded: Collection[Worker]) -> Collection[Worker]:
        """Return the workers to exclude, with those that lack the name, the path or an ability if any other is left."""
        routeless = [worker for worker in self.lacking_routes if worker.lacks_route(path, self._name)]
        for unable in (self.refusing, routeless, self.lacking(needs)):
            more = {*excluded, *unable}
            if any(worker not in more for worker in self.workers):
                excluded = more
        return excluded

    def lacking(self, needs: Set[Ability]) -> list[Worker]:
        """Return the workers that lack an ability."""
        return [worker for worker, lacks in self.lacks.items() if not needs.isdisjoint(lacks)] if needs else []

    def shorter(self, worker: Worker) -> list[Worker]:
        """Return the workers whose context is not longer than this worker's."""
        lengths = self.lengths
        return [] if lengths is None else [each for each in lengths if lengths[each] <= lengths.get(worker, 0)]

    def usable(self, workers: Iterable[Worker]) -> list[RoutableRank]:
        """Return the ranks of some workers that may receive requests now."""
        usable: list[RoutableRank] = []
        for worker in workers:
            ranks = self.of_worker[worker]
            if worker.health.ranks:
                able = worker.health.usable_ranks(worker.ranks())
                ranks = [rank for rank in ranks if rank.target.dp_rank in able]
            usable += ranks
        return usable


class TargetDirectory:
    """The targets of a fleet by the names that they serve."""

    def __init__(self, fleet: RoutedFleet, load: LoadTable, caches: TargetCaches) -> None:
        self._fleet = fleet
        self._load = load
        self._caches = caches
        self._version = -1
        # By name: the targets that answer requests, and those that only prefill.
        self._targets: list[dict[str | None, ModelTargets]] = [{}, {}]
        self._before = self._targets  # of the version before

    def of(self, name: str | None, prefill: bool = False) -> ModelTargets:
        """Return the targets of a name. `prefill`: those that only compute prompts."""
        if self._version != self._fleet.version:
            self._version = self._fleet.version
            self._before, self._targets = self._targets, [{}, {}]
        targets = self._targets[prefill].get(name)
        if targets is None:
            before = self._before[prefill].pop(name, None)
            targets = ModelTargets(self._fleet.able(name, prefill), name, self._load, self._caches, before)
            if targets.workers:  # names without workers are not cached: clients make them up
                self._targets[prefill][name] = targets
        targets.read_health(self._fleet.health_version)
        return targets


def _unlike_lengths(workers: Sequence[Worker], name: str | None) -> dict[Worker, int] | None:
    """Return the context length of each worker for a name; None if all have the same. An unknown one is unlimited."""
    if name is None:
        return None
    served = {worker: worker.served(name) for worker in workers}
    lengths = {worker: (known.max_model_len if known else None) or sys.maxsize for worker, known in served.items()}
    return lengths if len(set(lengths.values())) > 1 else None


def _settled(worker: Worker) -> bool:
    health = worker.health
    if worker.warming_since is not None or not health.circuit.closed:
        return False
    return all(rank.circuit.closed for rank in health.ranks.values())


def _served(worker: Worker, name: str | None) -> tuple[str, str | None, str | None]:
    """Return the model and adapter behind a name on a worker, and the path of an adapter that replaced another."""
    known = worker.served(name) if name is not None else None
    if known is None:
        return "", None, None
    return known.model, known.adapter, known.root if name in worker.replaced_adapters else None


def _ranks(worker: Worker, served: ServedModel, load: LoadTable, caches: TargetCaches) -> list[RoutableRank]:
    ranks = worker.ranks()
    of_many = len(ranks) > 1
    return [
        RoutableRank(
            worker, served, caches.of(worker.target(dp_rank, served.model)), load.of(worker.url, dp_rank), of_many
        )
        for dp_rank in ranks
    ]


def unavailable(message: str) -> RequestError:
    """Return the error of a request that no worker can receive now: 503."""
    return RequestError(
        f"{message} Try again later.", status=503, type="service_unavailable", code="no_worker_available"
    )


def unknown_model(fleet: RoutedFleet, name: str) -> RequestError:
    """Return the error of a request for an unknown model: 404 with the known names; 503 if no worker has answered."""
    known = sorted(fleet.names())
    if not known:
        return unavailable("No worker has answered yet, so no model is known.")
    return RequestError(
        f"The model {name!r} does not exist. Send one of: {', '.join(known)}.",
        status=404,
        type="not_found_error",
        param="model",
        code="model_not_found",
    )
