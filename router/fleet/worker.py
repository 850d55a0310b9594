"""One worker: its description, state, health and metrics, and whether it receives requests."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from enum import StrEnum
from random import Random
from typing import NamedTuple

from indexer import Target
from router.apis.abilities import NO_ABILITIES, Ability
from router.fleet.circuit import CircuitState
from router.fleet.discovery import Engine, ServedModel, WorkerDescription
from router.fleet.engine_metrics import EngineMetrics
from router.fleet.health import Health
from router.fleet.worker_keys import WorkerKey
from router.settings import Role, WorkerSettings

# The share of its requests that a worker receives at the beginning of its warm-up.
FIRST_SHARE = 0.1
# The default port of SGLang's bootstrap service, and of vLLM's Mooncake connector.
DEFAULT_BOOTSTRAP_PORT = 8998
_PREFILL = Role.PREFILL
_ENCODE = Role.ENCODE
_ANSWERS_KEPT = 20
# Missing routes of one worker that are remembered, and for how many seconds: what answers in front of an engine that
# starts may have no routes yet.
_MOST_MISSING_ROUTES = 64
MISSING_ROUTE_SECONDS = 600.0
# Seconds for which a replaced model is reported.
_CHANGE_SECONDS = 3600.0


class ModelChange(NamedTuple):
    """The model that a name meant before it was replaced, and the time of the change by the health's clock."""

    before: ServedModel
    at: float


def _weights(served: ServedModel) -> str:
    """Describe in words what distinguishes models with the same name."""
    context = f", {served.max_model_len} tokens of context" if served.max_model_len is not None else ""
    return f"{served.root or served.name}{context}"


class WorkerState(StrEnum):
    """The state of a worker, as users see it. If a ready, warming or half-open worker exists, others are not chosen."""

    NEW = "new"  # not probed yet
    READY = "ready"
    WARMING = "warming"  # new or restarted: its share of requests grows
    HALF_OPEN = "half_open"  # receives one request at a time after an ejection
    EJECTED = "ejected"  # fails, hangs, or is an outlier
    DOWN = "down"  # does not answer probes
    ASLEEP = "asleep"  # its engine computes nothing until it is woken
    PAUSED = "paused"  # its engine computes nothing until it is continued
    DRAINING = "draining"  # receives no new requests, and has requests in flight
    DRAINED = "drained"  # receives no new requests, and has no requests in flight


def url_of(settings: WorkerSettings) -> str:
    """Return the base URL by which the router identifies a worker."""
    return str(settings.url).rstrip("/")


@dataclass(frozen=True, slots=True)
class EngineState:
    """The state of an engine that commands of this router or of other routers set.

    - `at`: when it was last changed, in nanoseconds since the epoch. The latest state is valid for all routers.
    - `released`: the tags of memory that it has released.
    - `lost_at`: when it last lost its cache by a command.
    """

    at: int = 0
    paused: bool = False
    released: frozenset[str] = frozenset()
    lost_at: int = 0


@dataclass(eq=False, slots=True)
class Worker:
    """One worker, which is one server URL.

    - `slow_start`: seconds of warm-up.
    - `problem`: why it is down; None while it is up.
    - `refused_at`: when it was first found to accept no connections; None while it accepts them.
    - `starts`: the number of times that it answered a probe after it was new or down.
    - `targets`: its targets that are registered with the index.
    - `engine`: what commands did to its engine.
    - `sleep_in_change`: a command to sleep is running, so that its metrics may be outdated.
    - `warming_since`: the beginning of its warm-up; None: it is warm.
    - `changed_models`: models that were replaced under the same name.
    - `refused_names`: names that it answered with 404 since its last answered probe, although it listed them.
    - `lacks`: the abilities that it lacks, by its description or by its answers.
    - `missing_routes`: the paths that its engine lacks by its answers, for all names (None) or for one name. Each has
      the time of the last answer, by the health's clock.
    - `no_handover`: paths on which its engine refused to compute a prompt for, or with, another worker.
    - `probe_began`: when the unanswered probe began; None if the last probe was answered.
    - `answer_seconds`: the durations of its last answers to probes and scrapes.
    - `probed`: set for a moment when a probe ends.
    - `routing_line`: the header lines that name it in its answers.
    """

    settings: WorkerSettings
    source: str = "config"
    health: Health = field(default_factory=Health)
    metrics: EngineMetrics = field(default_factory=EngineMetrics)
    slow_start: float = 0.0
    description: WorkerDescription | None = None
    problem: str | None = "not asked yet"
    failed_probes: int = 0
    refused_at: float | None = None
    starts: int = 0
    targets: set[Target] = field(default_factory=set)
    draining: bool = False
    asleep: bool = False
    engine: EngineState = EngineState()
    sleep_in_change: bool = False
    warming_since: float | None = None
    role: Role = Role.BOTH
    changed_models: dict[str, ModelChange] = field(default_factory=dict)
    replaced_adapters: set[str] = field(default_factory=set)
    refused_names: set[str] = field(default_factory=set)
    lacks: frozenset[Ability] = NO_ABILITIES
    missing_routes: dict[tuple[str, str | None], float] = field(default_factory=dict)
    no_handover: set[str] = field(default_factory=set)
    probe_began: float | None = None
    answer_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_ANSWERS_KEPT))
    probe_now: asyncio.Event = field(default_factory=asyncio.Event)
    probed: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = field(init=False)
    name: str = field(init=False)
    routing_line: bytes = field(init=False, repr=False)
    key: WorkerKey = field(init=False, repr=False)
    _served_before: dict[str, ServedModel] = field(init=False, default_factory=dict, repr=False)
    _adapter_roots: dict[str, str] = field(init=False, default_factory=dict, repr=False)
    _targets_made: dict[tuple[int, str], Target] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.url = url_of(self.settings)
        self.set_name(self.settings.name or self.url)
        self.key = WorkerKey(self.name, self.settings)

    def set_name(self, name: str) -> None:
        """Set the name that logs, metrics and answers show."""
        self.name = name
        self.routing_line = b"x-kvrouter-worker: %b\r\nx-kvrouter-overlap-tokens: " % name.encode()

    @property
    def up(self) -> bool:
        """True if it answers probes."""
        return self.problem is None

    @property
    def trusted(self) -> bool:
        """True if it is chosen while other workers exist. A half-open worker must answer scrapes first."""
        circuit = self.health.circuit
        if circuit.closed:
            return True
        return circuit.allows and (circuit.state is CircuitState.CLOSED or not self.metrics.unanswered)

    @property
    def share(self) -> float:
        """The share of its requests that it receives: less than 1 during its warm-up."""
        if self.warming_since is None or not self.slow_start:
            return 1.0
        return min(max((self.health.clock() - self.warming_since) / self.slow_start, FIRST_SHARE), 1.0)

    @property
    def state(self) -> WorkerState:
        if self.draining:
            return WorkerState.DRAINING if self.health.attempts else WorkerState.DRAINED
        if not self.up:
            return WorkerState.DOWN if self.failed_probes or self.description else WorkerState.NEW
        if self.asleep:
            return WorkerState.ASLEEP
        if self.engine.paused:
            return WorkerState.PAUSED
        match self.health.circuit.state:
            case CircuitState.OPEN:
                return WorkerState.EJECTED
            case CircuitState.HALF_OPEN:
                return WorkerState.HALF_OPEN
        return WorkerState.WARMING if self.share < 1 else WorkerState.READY

    @property
    def computes(self) -> bool:
        """True if its engine is neither asleep nor paused."""
        return not (self.asleep or self.engine.paused)

    @property
    def reason(self) -> str | None:
        """The reason why it is down or ejected; None while it is neither."""
        return self.problem or self.health.circuit.reason

    def served(self, name: str) -> ServedModel | None:
        """Return the model or adapter that it serves under a name; None for an encode worker, which answers nothing."""
        return self.description.models.get(name) if self.description and self.role is not _ENCODE else None

    def models(self) -> set[str]:
        """Return the base models that it serves; none for an encode worker."""
        if self.description is None or self.role is _ENCODE:
            return set()
        return {served.model for served in self.description.models.values()}

    def work(self) -> frozenset[tuple[bool, str]]:
        """Return what it shares with workers of the same work: whether it is an encode worker, with each base model."""
        known = self.description.models.values() if self.description is not None else ()
        return frozenset([(self.role is _ENCODE, served.model) for served in known])

    @property
    def capacity_tokens(self) -> int | None:
        """The number of tokens that the KV cache of each rank holds; None if the worker does not report it."""
        known = self.description
        return known.capacity * known.block_size if known and known.capacity and known.block_size else None

    def target(self, dp_rank: int, model: str) -> Target:
        target = self._targets_made.get((dp_rank, model))
        if target is None:
            target = self._targets_made[dp_rank, model] = Target(self.url, dp_rank, model)
        return target

    def accepts(self, name: str | None, prefill: bool = False) -> bool:
        """Return whether it may receive requests for a name (None: any), whatever its circuit; or only prefills."""
        if not self.takes_work or self.role is _ENCODE or (self.role is _PREFILL) is not prefill:
            return False
        return name is None or (self.description is not None and name in self.description.models)

    @property
    def takes_work(self) -> bool:
        """True if it may receive new work of its role, whatever its circuit."""
        return self.problem is None and not self.draining and self.computes

    @property
    def encodes_items(self) -> bool:
        """True if the router sends it media items. SGLang's encode workers receive theirs from other workers."""
        return self.role is _ENCODE and self.description is not None and self.description.engine is not Engine.SGLANG

    def encodes_as(self, name: str, model: str | None) -> str | None:
        """Return the name in its requests for items of chats for `name`; None if it may not receive them.

        `model`: the base model behind the name.
        """
        if self.description is None or not self.encodes_items or not self.takes_work:
            return None
        known = self.description.models
        return name if name in known else model if model in known else None

    @property
    def can_answer_alone(self) -> bool:
        """True if a prefill worker can also decode. Prefill workers of SGLang cannot."""
        return self.description is not None and self.description.engine is Engine.VLLM

    def describe(self, description: WorkerDescription) -> None:
        """Apply a description from a probe, and record replaced models and adapters."""
        if self.description is None or self.description.lacks != description.lacks:
            self.lacks = description.lacks
        if self.description is None or self.description.models != description.models:
            self.missing_routes = {route: at for route, at in self.missing_routes.items() if route[1] is None}
        self.description = description
        for name, served in description.models.items():
            before = self._served_before.get(name)
            if served.adapter is None and before is not None and _weights(before) != _weights(served):
                self.changed_models[name] = ModelChange(before, self.health.clock())
            self._served_before[name] = served
            root = served.root if served.adapter is not None else None
            if root is not None and self._adapter_roots.setdefault(name, root) != root:
                self.replaced_adapters.add(name)
        self.apply_settings(self.settings)

    def recent_changes(self) -> dict[str, tuple[str, str]]:
        """Return the models that were replaced within the last hour: the old and the new one, in words."""
        now = self.health.clock()
        return {
            name: (_weights(change.before), _weights(self._served_before[name]))
            for name, change in self.changed_models.items()
            if now - change.at < _CHANGE_SECONDS
        }

    @property
    def probe_unanswered(self) -> float:
        """Seconds since the begin of an unanswered probe; 0 without one."""
        return 0.0 if self.probe_began is None else self.health.clock() - self.probe_began

    def note_answer(self) -> None:
        """Record that it answered a probe."""
        if self.probe_began is not None:
            self.answer_seconds.append(self.probe_unanswered)
            self.probe_began = None

    def note_refusal(self) -> None:
        """Record that the worker refused a connection, because its process ended."""
        if self.refused_at is None:
            self.refused_at = self.health.clock()

    def restarted(self) -> None:
        """Forget sleep, a pause and adapters of the time before a restart."""
        self.asleep = False
        self.forget_commands()
        self.forget_refusals()
        self._adapter_roots.clear()
        self.replaced_adapters.clear()

    def forget_commands(self) -> bool:
        """Forget a pause and released memory, because it has a new process. Return whether there was either."""
        rested = self.engine.paused or bool(self.engine.released)
        self.asleep = self.asleep and not self.engine.released
        self.engine = replace(self.engine, paused=False, released=frozenset())
        return rested

    def forget_refusals(self) -> bool:
        """Forget what it lacked by its answers. Return whether it lacked anything."""
        described = NO_ABILITIES if self.description is None else self.description.lacks
        lacked = bool(self.refused_names or self.missing_routes or self.no_handover) or self.lacks != described
        self.refused_names, self.lacks = set(), described
        self.missing_routes, self.no_handover = {}, set()
        return lacked

    def lacks_route(self, path: str, name: str | None) -> bool:
        """Return whether its engine answered lately that it lacks a path."""
        since = self.health.clock() - MISSING_ROUTE_SECONDS
        return any(self.missing_routes.get((path, each), since) > since for each in (None, name))

    def note_missing_route(self, path: str, name: str | None) -> None:
        """Record that its engine lacks a path, for one name or for all. The oldest record is dropped above a limit."""
        self.missing_routes.pop((path, name), None)
        self.missing_routes[path, name] = self.health.clock()
        if len(self.missing_routes) > _MOST_MISSING_ROUTES:
            self.missing_routes.pop(next(iter(self.missing_routes)))

    def apply_settings(self, settings: WorkerSettings) -> None:
        """Apply settings. Their role overrides the described role."""
        self.settings = settings
        self.role = self.role_with(self.description)

    def role_with(self, description: WorkerDescription | None) -> Role:
        """Return the role that it has with a description."""
        return self.settings.role or (description.role if description else Role.BOTH)

    @property
    def bootstrap_port(self) -> int:
        """The port of a prefill worker's bootstrap service."""
        described = self.description.bootstrap_port if self.description else None
        return self.settings.bootstrap_port or described or DEFAULT_BOOTSTRAP_PORT

    def ranks(self) -> tuple[int, ...]:
        """Return its DP ranks."""
        return self.description.ranks if self.description else (0,)

    def rank_in_requests(self, dp_rank: int) -> int:
        """Return a rank's number in requests: vLLM numbers each server's ranks from 0 (`--data-parallel-hybrid-lb`)."""
        if self.description is None or self.description.engine is Engine.SGLANG:
            return dp_rank
        return dp_rank - min(self.description.ranks)


def has_turn(worker: Worker, random: Random) -> bool:
    """Return whether a worker, by its circuit and warm-up, may receive one request while others exist."""
    if not (worker.health.circuit.closed or worker.trusted):
        return False
    return worker.warming_since is None or worker.share >= 1 or random.random() < worker.share


def choosable(
    workers: Collection[Worker], random: Random, any_has_capacity: Callable[[Worker], bool] | None = None
) -> Collection[Worker]:
    """Return the workers that a request may be sent to now; those with open circuits only if no others exist.

    If the trusted workers have no capacity, no worker is returned.
    """
    trusted = [worker for worker in workers if worker.health.circuit.closed or worker.trusted] or workers
    free = [worker for worker in trusted if any_has_capacity(worker)] if any_has_capacity else trusted
    chosen = [w for w in free if w.warming_since is None or w.share >= 1 or random.random() < w.share]
    return chosen or free
