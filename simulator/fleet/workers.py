"""The simulated workers as the router sees them: records of the fleet, and an index that receives their events."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import cast

from indexer import DEFAULT_TENANT, Match, MatchQuery, Registration, RowMatches, Target, TargetRows, make_index
from indexer.hashing import Namespace, PackedPrompt, namespace_hash
from indexer.streams.sequence import StreamState
from indexer.streams.session import StreamSession
from kvevents import BlockRemoved, BlockStored, EngineHash, EventBatch, EventSource
from router.fleet.discovery import Engine, ServedModel, WorkerDescription
from router.fleet.engine_metrics import EngineMetrics
from router.fleet.health import Health
from router.fleet.worker import Worker
from router.settings import Role, WorkerSettings
from simulator.fleet.engine import Progress
from simulator.fleet.trace import engine_hash, tokens_of

MODEL = "simulated"
_SOURCE = EventSource(0, "inproc://simulated")
_NAME = "http://worker-{}:8000"


def worker_number(target: Target) -> int:
    """Return the number of a target's worker."""
    return int(target.worker.split("-")[1].split(":")[0])


class SimulatedWorkers:
    """The fleet of a simulated router: workers with one DP rank each, which can always be reached."""

    version = 0
    health_version = 0

    may_be_full: Collection[Worker] = ()

    def full(self) -> Collection[Worker]:
        """Return the workers that refused a request as full."""
        return [worker for worker in self._refused if worker.health.full]

    def refused(self, worker: Worker) -> None:
        """Close a worker that refused a request as full."""
        worker.health.close()
        if worker not in self._refused:
            self._refused.append(worker)

    def __init__(
        self,
        roles: Sequence[Role],
        capacity: int,
        block_tokens: int,
        clock: Callable[[], float],
        labels: Sequence[Mapping[str, str]] = (),
    ) -> None:
        """Create workers of these roles, whose caches hold `capacity` blocks of `block_tokens` tokens.

        They have `labels` in turn.
        """
        self.disaggregated = any(role is not Role.BOTH for role in roles)
        served = {MODEL: ServedModel(MODEL, MODEL)}
        description = WorkerDescription(Engine.VLLM, served, (_SOURCE,), block_tokens, capacity)
        self.workers: list[Worker] = []
        self._refused: list[Worker] = []
        for number, role in enumerate(roles):
            own = dict(labels[number % len(labels)]) if labels else {}
            given = {"url": _NAME.format(number), "role": role, "labels": own}
            settings = WorkerSettings.model_validate(given)
            worker = Worker(settings, health=Health(clock=clock), metrics=EngineMetrics(clock=clock))
            worker.describe(description)
            worker.problem, worker.targets = None, {worker.target(0, MODEL)}
            self.workers.append(worker)
        self._prefilling = [worker for worker in self.workers if worker.role is Role.PREFILL]
        self._answering = [worker for worker in self.workers if worker.role is not Role.PREFILL]
        self.targets = [worker.target(0, MODEL) for worker in self.workers]
        self.registrations = [
            Registration(target, _SOURCE, Engine.VLLM, block_tokens, capacity=capacity) for target in self.targets
        ]

    def able(self, name: str | None, prefill: bool = False) -> Sequence[Worker]:
        """Return the workers that receive requests for a name, or only their prefills if `prefill` is true."""
        return self._prefilling if prefill and name == MODEL else self._answering if name == MODEL else ()

    def model_of(self, name: str) -> str | None:
        """Return the model behind a name."""
        return MODEL if name == MODEL else None

    def names(self) -> set[str]:
        """Return the names that requests may use."""
        return {MODEL}

    def awaits(self, name: str, prefill: bool = False) -> bool:  # noqa: ARG002
        """Return False: no request waits for a first worker, because every worker exists from the start."""
        return False


@dataclass(slots=True)
class _LiveStream:
    """The state of an event stream that loses no batch."""

    began_at: float
    state: StreamState = StreamState.LIVE
    first_missing: bool = False


class EventIndex:
    """The core of the router's index. The simulation applies the events of workers to it, and no socket is opened."""

    def __init__(self, registrations: Sequence[Registration], events: bool, clock: Callable[[], float]) -> None:
        """Add workers. `events`: whether they report events."""
        self.index = make_index()
        self.registrations = 0
        self._clock = clock
        self._block_tokens = registrations[0].block_size or 0
        self._root = namespace_hash(Namespace(MODEL, DEFAULT_TENANT, None, None, self._block_tokens))
        self._registrations = [each if events else replace(each, source=None) for each in registrations]
        self._streams = {each.target: _LiveStream(clock()) for each in registrations if events}
        for registration in registrations:
            self.index.add(registration.target, capacity=registration.capacity)

    def registered(self) -> list[Registration]:
        """Return the registrations of all workers."""
        return self._registrations

    @property
    def salted(self) -> Set[Target]:
        """No targets."""
        return frozenset()

    def roots(self, model: str, adapter: str | None, cache_salt: str | None) -> list[tuple[int, int]]:  # noqa: ARG002
        """Return the block size of all workers, with the hash that every prompt starts from."""
        return [(self._block_tokens, self._root)]

    def match_rows(self, query: MatchQuery, rows: TargetRows, found: RowMatches) -> None:
        """Add to `found` the tokens of a prompt that each row's target holds. The last token is always computed."""
        size, prompt = self._block_tokens, PackedPrompt.of(query.token_ids)
        self.index.match_rows(self._root, size, prompt, (len(prompt) - 1) // size, rows, found)

    def held(self, query: MatchQuery) -> list[Match]:
        """Return what each target holds of a prompt. The last token is always computed."""
        size, prompt = self._block_tokens, PackedPrompt.of(query.token_ids)
        return self.index.match_from(self._root, size, prompt, (len(prompt) - 1) // size)

    def block_size(self, target: Target) -> int | None:  # noqa: ARG002
        """Return the block size of a target in tokens."""
        return self._block_tokens

    def window(self, target: Target) -> int | None:  # noqa: ARG002
        """Return None: simulated engines keep prompts whole."""
        return None

    def clear(self, target: Target) -> None:
        """Forget everything that a target holds."""
        self.index.clear(target)

    def stream(self, target: Target) -> StreamSession | None:
        """Return the state of a target's event stream; None without events."""
        return cast(StreamSession | None, self._streams.get(target))

    def agree(self, target: Target) -> None:
        """Ignore it, because no batch is missing."""

    def resync(self, target: Target) -> bool:
        """Read a target's events again, which restores what the index has. Return False for a target without events."""
        stream = self._streams.get(target)
        if stream is None:
            return False
        stream.began_at = self._clock()
        return True


def events_of(progress: Progress, block_tokens: int) -> EventBatch:
    """Return the events by which an engine reports the blocks that it stored and removed."""
    batch = EventBatch(0.0, [], 0)
    for medium, stored, removed in (
        (None, progress.stored, progress.removed),
        ("CPU", progress.host_stored, progress.host_removed),
    ):
        for parent, blocks in stored:
            parent_hash = None if parent is None else engine_hash(parent)
            hashes: list[EngineHash] = [engine_hash(block) for block in blocks]
            tokens = tokens_of(blocks, block_tokens)
            batch.events.append(BlockStored(hashes, parent_hash, tokens, block_tokens, medium=medium))
        if removed:
            batch.events.append(BlockRemoved([engine_hash(block) for block in removed], medium=medium))
    return batch
