"""The workers of the selection service: those that clients register, and the others of the router.

Workers with the same model and routing group are a partition. A choice is made among the workers of one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final

import msgspec

from http_api.errors import RequestError
from indexer import Indexer
from kvevents import EventSource
from router.fleet.fleet import Fleet
from router.fleet.worker import Worker
from router.reservations.declared_workers import DeclaredWorkers
from router.reservations.selection_bodies import (
    DEFAULT,
    PartitionBody,
    WorkerBody,
    WorkerFields,
    bad_request,
    not_found,
    read_body,
    unavailable,
    unprocessable,
)

MOST_WORKERS: Final = 8192
MOST_ADAPTERS: Final = 1000
_HIGHEST_ID: Final = 2**64 - 1


class Member:
    """A worker of a partition. `record`: as it was registered; None for a worker that the router knows otherwise."""

    def __init__(self, worker: Worker, record: WorkerBody | None) -> None:
        self.id = id_of(worker) if record is None else record.worker_id
        self.worker = worker
        self.record = record
        self.endpoint = worker.url if record is None else record.endpoint or ""
        self.taints = frozenset(() if record is None else record.taints)


class Members:
    """The workers of one partition that may be chosen, and all others of the fleet."""

    def __init__(self, members: list[Member], fleet: Fleet) -> None:
        self.of_worker = {member.worker: member for member in members}
        self.of_id = {member.id: member for member in members}
        self.others = [worker for worker in fleet.workers if worker not in self.of_worker]

    def without(self, allowed: Collection[Member]) -> list[Worker]:
        """Return the workers to exclude, so that only the allowed members are left."""
        left = {member.worker for member in allowed}
        return [*self.others, *(worker for worker in self.of_worker if worker not in left)]


class WorkerCatalogue:
    """The workers that may be chosen, and their records. `version`: incremented with each change by a client."""

    def __init__(
        self,
        fleet: Fleet,
        indexer: Indexer,
        declared: DeclaredWorkers,
        check_streams: Callable[[Sequence[EventSource]], Awaitable[Sequence[EventSource]]] | None = None,
    ) -> None:
        """Register no worker yet.

        - `check_streams`: returns the event streams to follow, by address. Raises ValueError for one that may not be
          followed. None: all may.
        """
        self._fleet = fleet
        self._indexer = indexer
        self._declared = declared
        self._check_streams = check_streams
        self._records: dict[int, WorkerBody] = {}
        self._adapters: dict[str, dict[str, str]] = {}  # by model: the adapter behind each internal name
        self._members_found: dict[tuple[str, str], Members] = {}
        self._members_version = (-1, -1)
        self._version = 0

    async def upsert(self, body: Any) -> dict[str, Any]:
        """Add a worker, or replace it. It may be chosen when this returns, unless its record says why not."""
        return await self._apply(read_body(body, WorkerBody))

    async def patch(self, id: int, body: Any) -> dict[str, Any]:
        """Replace the given fields of a worker."""
        record = self._record(id)
        changes = read_body(body, WorkerFields)
        given = {name for name in changes.__struct_fields__ if getattr(changes, name) not in (None, [], {})}
        changed = msgspec.structs.replace(record, **{name: getattr(changes, name) for name in given})
        return await self._apply(changed)

    async def delete(self, id: int) -> dict[str, Any]:
        """Remove a worker, and end its reservations."""
        record = self._record(id)
        del self._records[id]
        self._version += 1
        self._declared.remove(str(id))
        return _catalogued(record, "unschedulable", [])

    def listed(self, model_name: str | None = None, routing_group: str | None = None) -> list[dict[str, Any]]:
        """Return the records of all workers: those that were registered here, and the others of the router."""
        found = []
        for record in self.all_records():
            if model_name in (None, record.model_name) and routing_group in (None, record.routing_group):
                found.append(_catalogued(record, *self._lifecycle(record)))
        return found

    def ready(self) -> dict[str, Any]:
        """Return whether any worker may be chosen, with the records of all workers."""
        workers = self.listed()
        count = sum(worker["lifecycle"] == "schedulable" for worker in workers)
        return {"ready": count > 0, "schedulable_workers": count, "workers": workers}

    def records(self) -> list[WorkerBody]:
        """Return the workers that were registered here."""
        return list(self._records.values())

    # Partitions

    async def _apply(self, record: WorkerBody) -> dict[str, Any]:
        id = record.worker_id
        if id > _HIGHEST_ID:
            raise unprocessable(f"worker_id: {id} is above {_HIGHEST_ID}")
        before = self._records.get(id)
        if before is None and len(self._records) >= MOST_WORKERS:
            raise RequestError(f"{MOST_WORKERS} workers are registered. Delete one of them first.", status=409)
        if before is not None and before.model_name != record.model_name:
            self._declared.remove(str(id))
        self._records[id] = record
        self._version += 1
        missing = _missing(record)
        if missing or self._known(record) is not None:
            self._declared.remove(str(id))
        else:
            try:
                await self._declare(record)
            except ValueError as error:
                self._declared.remove(str(id))
                return _catalogued(record, "incomplete", [f"reconciliation failed: {error}"])
        return _catalogued(record, *self._lifecycle(record))

    async def _declare(self, record: WorkerBody) -> None:
        start, size = record.data_parallel_start_rank or 0, _size(record)
        sources = [
            EventSource(rank, endpoint, record.replay_endpoint if size == 1 else None)
            for rank, endpoint in _endpoints(record).items()
        ]
        checked = sources if self._check_streams is None else await self._check_streams(sources)
        await self._declared.upsert(
            str(record.worker_id),
            record.model_name,
            adapters=self._adapters.get(record.model_name),
            block_size=record.block_size,
            capacity=record.total_kv_blocks or None,
            streams=checked,
            ranks=range(start, start + size),
        )

    def _known(self, record: WorkerBody) -> Worker | None:
        """Return the worker at a record's endpoint that the router knows otherwise."""
        return None if record.endpoint is None else self._fleet.at(record.endpoint.rstrip("/"))

    def _worker_of(self, record: WorkerBody) -> Worker | None:
        return self._known(record) or self._declared.get(str(record.worker_id))

    def _lifecycle(self, record: WorkerBody) -> tuple[str, list[str]]:
        """Return the state of a worker, and why it cannot be chosen."""
        missing = _missing(record)
        if missing:
            return "incomplete", missing
        worker = self._worker_of(record)
        if worker is None:
            return "incomplete", ["reconciliation failed: register the worker again"]
        if worker.draining:
            return "draining", ["the worker is drained"]
        if not worker.takes_work or worker.served(record.model_name) is None:
            return "unschedulable", [worker.reason or f"the worker does not serve {record.model_name}"]
        return "schedulable", []

    def _record(self, id: int) -> WorkerBody:
        record = self._records.get(id)
        if record is None:
            raise not_found(f"worker {id} not found")
        return record

    def all_records(self) -> list[WorkerBody]:
        """Return the registered workers, and a record of each other worker of the router with its first model."""
        records = list(self._records.values())
        taken = {worker for record in records if (worker := self._worker_of(record)) is not None}
        for worker in self._fleet.generating:
            if worker not in taken and worker.description is not None:
                for model in worker.description.base_models()[:1]:
                    records.append(self._record_of(worker, model.name))
        return records

    def _record_of(self, worker: Worker, model: str) -> WorkerBody:
        """Return the record of a worker that was not registered here."""
        ranks = worker.ranks()
        return WorkerBody(
            worker_id=id_of(worker),
            model_name=model,
            endpoint=worker.url,
            block_size=self.block_size(worker),
            data_parallel_start_rank=ranks[0],
            data_parallel_size=len(ranks),
        )

    def members(self, asked: PartitionBody) -> Members:
        """Return the workers of a partition. Raises RequestError (503) if none of them may be chosen."""
        members = self.found_members(asked.model_name, asked.routing_group)
        if not members.of_worker:
            if not any(self._lifecycle(record)[0] == "schedulable" for record in self.all_records()):
                raise unavailable("no schedulable workers are available")
            raise unavailable(
                f"no schedulable workers for model={asked.model_name} routing_group={asked.routing_group}"
            )
        return members

    def found_members(self, model: str, group: str) -> Members:
        version = self._fleet.version, self._version
        if version != self._members_version:
            self._members_version = version
            self._members_found.clear()
        members = self._members_found.get((model, group))
        if members is None:
            found, taken = [], set()
            for record in self._records.values():
                worker = self._worker_of(record)
                if worker is None:
                    continue
                taken.add(worker)
                if (record.model_name, record.routing_group) == (model, group) and worker.accepts(model):
                    found.append(Member(worker, record))
            if group == DEFAULT:
                found += [Member(worker, None) for worker in self._fleet.able(model) if worker not in taken]
            members = Members(found, self._fleet)
            if members.of_worker:  # Unknown names are not cached: their number has no limit.
                self._members_found[model, group] = members
        return members

    def block_size(self, worker: Worker) -> int:
        for target in worker.targets:
            if size := self._indexer.block_size(target):
                return size
        return (worker.description and worker.description.block_size) or 16

    async def adapter_name(self, model: str, adapter: str) -> str:
        """Return the name of a model's adapter in requests. Registered workers serve any adapter."""
        for worker, served in self._fleet.serving(adapter):
            if served.model == model and worker.accepts(adapter):
                return adapter
        name = f"{model}:{adapter}"
        known = self._adapters.setdefault(model, {})
        if name not in known:
            if len(known) >= MOST_ADAPTERS:
                raise bad_request(f"lora_name: {MOST_ADAPTERS} adapters of {model} are known already")
            known[name] = adapter
            for record in [each for each in self._records.values() if each.model_name == model]:
                if self._declared.get(str(record.worker_id)) is not None:
                    await self._declare(record)
        return name


def id_of(worker: Worker) -> int:
    """Return the id of a worker that was not registered here: it depends on its URL alone."""
    return int.from_bytes(blake2b(worker.url.encode(), digest_size=8).digest(), "big")


def _missing(record: WorkerBody) -> list[str]:
    """Return what a worker lacks to be chosen, in words. Without any event stream, its cache is predicted."""
    missing = []
    if not record.endpoint:
        missing.append("endpoint is required")
    if not record.block_size:
        missing.append("block_size must be greater than 0")
    if _size(record) == 0:
        missing.append("data_parallel_size must be greater than 0")
    endpoints, start = _endpoints(record), record.data_parallel_start_rank or 0
    if endpoints:
        missing += [
            f"kv_events endpoint is required for dp_rank {rank}"
            for rank in range(start, start + min(_size(record), 4096))
            if not endpoints.get(rank)
        ]
    return missing


def _size(record: WorkerBody) -> int:
    return 1 if record.data_parallel_size is None else record.data_parallel_size


def _endpoints(record: WorkerBody) -> Mapping[int, str]:
    if record.kv_events_endpoints or record.kv_events_endpoint is None or _size(record) != 1:
        return record.kv_events_endpoints
    return {record.data_parallel_start_rank or 0: record.kv_events_endpoint}


def _catalogued(record: WorkerBody, lifecycle: str, reasons: list[str]) -> dict[str, Any]:
    """Return the answer that describes a worker. Dynamo leaves empty maps of endpoints and reasons out."""
    known = {
        "worker_id": record.worker_id,
        "model_name": record.model_name,
        "routing_group": record.routing_group,
        "lifecycle": lifecycle,
    }
    known |= {name: getattr(record, name) for name in WorkerFields.__struct_fields__}
    known["url"] = http_url_of(record.endpoint or "")
    if record.kv_events_endpoints:
        known["kv_events_endpoints"] = {str(rank): each for rank, each in record.kv_events_endpoints.items()}
    else:
        del known["kv_events_endpoints"]
    if reasons:
        known["not_schedulable_reasons"] = reasons
    return known


def http_url_of(endpoint: str) -> str | None:
    return endpoint if endpoint.startswith(("http://", "https://")) else None
