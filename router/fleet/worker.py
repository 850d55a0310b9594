"""One worker as the router sees it: what it is, whether it answers, how its requests go, and what is asked of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from typing import NamedTuple

from indexer import Target
from router.fleet.circuit import CircuitState
from router.fleet.discovery import Engine, ServedModel, WorkerDescription
from router.fleet.engine_metrics import EngineMetrics
from router.fleet.health import Health
from router.fleet.worker_keys import WorkerKey
from router.settings import Role, WorkerSettings

# The share of its requests that a worker gets at first.
FIRST_SHARE = 0.1
_PREFILL = Role.PREFILL
DEFAULT_BOOTSTRAP_PORT = 8998  # SGLang's, and that of vLLM's Mooncake connector


# For so long it is told that a model became another one.
_CHANGE_SECONDS = 3600.0


class ModelChange(NamedTuple):
    """What a name stood for before it stood for another model, and when that was seen, by the health's clock."""

    before: ServedModel
    at: float


def _weights(served: ServedModel) -> str:
    """What tells one model from another behind the same name, in words."""
    context = f", {served.max_model_len} tokens of context" if served.max_model_len is not None else ""
    return f"{served.root or served.name}{context}"


class WorkerState(StrEnum):
    """Where a worker stands. Only those that are ready, warming or half open are chosen as long as there are any.

    The values are what users see in `/workers`, metrics and logs.
    """

    NEW = "new"  # not asked yet what it is
    READY = "ready"
    WARMING = "warming"  # new or restarted: its share grows
    HALF_OPEN = "trial"  # it failed, and gets one request at a time
    EJECTED = "left_out"  # it fails or hangs, or is far worse than the others
    DOWN = "down"  # it does not answer
    ASLEEP = "asleep"  # its engine computes nothing until it is woken
    DRAINING = "draining"  # no new requests; those it has may finish
    DRAINED = "drained"  # they have


def url_of(settings: WorkerSettings) -> str:
    """What a worker is known by inside."""
    return str(settings.url).rstrip("/")


@dataclass(eq=False, slots=True)
class Worker:
    """One server. `problem` says why it cannot be used; None while it answers.

    `url`: the base URL, by which it is known inside. `name`: what it is called where people look. `key`: what it wants
    to be shown. `source` names where it comes from. `warming_since`: when it came up, for `slow_start` seconds.
    `replaced_adapters`: the names of adapters that have other weights than at first. `changed_models`: those that are
    others than they were, by name. `asleep`: its engine was put to sleep; `sleep_in_change`: it is being told so, and
    what its metrics say of it may be old. `look_now` is set when it should be asked again soon.
    """

    settings: WorkerSettings
    source: str = "config"
    health: Health = field(default_factory=Health)
    metrics: EngineMetrics = field(default_factory=EngineMetrics)
    slow_start: float = 0.0
    description: WorkerDescription | None = None
    problem: str | None = "not asked yet"
    failed_probes: int = 0
    targets: set[Target] = field(default_factory=set)
    draining: bool = False
    asleep: bool = False
    sleep_in_change: bool = False
    warming_since: float | None = None
    role: Role = Role.BOTH
    changed_models: dict[str, ModelChange] = field(default_factory=dict)
    replaced_adapters: set[str] = field(default_factory=set)
    look_now: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = field(init=False)
    name: str = field(init=False)
    routing_line: bytes = field(init=False, repr=False)
    key: WorkerKey = field(init=False, repr=False)
    _served_before: dict[str, ServedModel] = field(init=False, default_factory=dict, repr=False)
    _adapter_roots: dict[str, str] = field(init=False, default_factory=dict, repr=False)
    _targets_made: dict[tuple[int, str], Target] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.url = url_of(self.settings)
        self.call(self.settings.name or self.url)
        self.key = WorkerKey(self.name, self.settings)

    def call(self, name: str) -> None:
        """It is called so from now on."""
        self.name = name
        # What its answers say of it: every one does.
        self.routing_line = b"x-kvrouter-worker: %b\r\nx-kvrouter-overlap-tokens: " % name.encode()

    @property
    def up(self) -> bool:
        return self.problem is None

    @property
    def trusted(self) -> bool:
        """Whether requests go to it while there are others: a worker that failed must answer before it is tried."""
        circuit = self.health.circuit
        if circuit.closed:
            return True
        return circuit.allows and (circuit.state is CircuitState.CLOSED or not self.metrics.unanswered)

    @property
    def share(self) -> float:
        """The share of its requests that it gets: less than 1 while it is warming."""
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
        match self.health.circuit.state:
            case CircuitState.OPEN:
                return WorkerState.EJECTED
            case CircuitState.HALF_OPEN:
                return WorkerState.HALF_OPEN
        return WorkerState.WARMING if self.share < 1 else WorkerState.READY

    @property
    def reason(self) -> str | None:
        """Why it is in its state, if that is not to be wished."""
        return self.problem or self.health.circuit.reason

    def served(self, name: str) -> ServedModel | None:
        """What this worker serves under a name."""
        return self.description.models.get(name) if self.description else None

    def models(self) -> set[str]:
        """The base models it serves."""
        return {served.model for served in self.description.models.values()} if self.description else set()

    @property
    def capacity_tokens(self) -> int | None:
        """How many tokens each of its ranks can hold, if it says so."""
        known = self.description
        return known.capacity * known.block_size if known and known.capacity and known.block_size else None

    def target(self, dp_rank: int, model: str) -> Target:
        """One of its ranks, for a model."""
        target = self._targets_made.get((dp_rank, model))
        if target is None:
            target = self._targets_made[dp_rank, model] = Target(self.url, dp_rank, model)
        return target

    def takes(self, name: str | None, prefill: bool = False) -> bool:
        """Whether it may get new requests for a model or adapter of this name; None: for any.

        `prefill`: prompts to compute for others, which a worker either gets alone or not at all.
        """
        if self.problem is not None or self.draining or self.asleep or (self.role is _PREFILL) is not prefill:
            return False
        return name is None or (self.description is not None and name in self.description.models)

    @property
    def can_answer_alone(self) -> bool:
        """Whether a prefill worker can answer requests that no decode worker goes on with. SGLang's cannot."""
        return self.description is not None and self.description.engine is Engine.VLLM

    def describe(self, description: WorkerDescription) -> None:
        """It answered what it is. What it computes of a request is as the settings say, else as it says itself."""
        self.description = description
        for name, served in description.models.items():
            before = self._served_before.get(name)
            if served.adapter is None and before is not None and _weights(before) != _weights(served):
                self.changed_models[name] = ModelChange(before, self.health.clock())
            self._served_before[name] = served
            root = served.root if served.adapter is not None else None
            if root is not None and self._adapter_roots.setdefault(name, root) != root:
                self.replaced_adapters.add(name)
        self.settle(self.settings)

    def recent_changes(self) -> dict[str, tuple[str, str]]:
        """Of models that became others within the last hour: what they were, and what they are."""
        now = self.health.clock()
        return {
            name: (_weights(change.before), _weights(self._served_before[name]))
            for name, change in self.changed_models.items()
            if now - change.at < _CHANGE_SECONDS
        }

    def restarted(self) -> None:
        """It was away, and holds nothing of what it held."""
        self.asleep = False
        self._adapter_roots.clear()
        self.replaced_adapters.clear()

    def settle(self, settings: WorkerSettings) -> None:
        """Its settings are these."""
        self.settings = settings
        self.role = settings.role or (self.description.role if self.description else Role.BOTH)

    @property
    def bootstrap_port(self) -> int:
        """Where a prefill worker's bootstrap service listens."""
        described = self.description.bootstrap_port if self.description else None
        return self.settings.bootstrap_port or described or DEFAULT_BOOTSTRAP_PORT

    def ranks(self) -> tuple[int, ...]:
        """Its DP ranks."""
        return self.description.ranks if self.description else (0,)

    def rank_in_requests(self, dp_rank: int) -> int:
        """What requests call one of its ranks: vLLM counts those of its own server, which is not the first one where
        several servers share the ranks (`--data-parallel-hybrid-lb`)."""
        if self.description is None or self.description.engine is Engine.SGLANG:
            return dp_rank
        return dp_rank - min(self.description.ranks)


def takes_its_turn(worker: Worker, random: Random) -> bool:
    """Whether one request may go to a worker while there are others: it is trusted, and has warmed up or its turn has
    come."""
    if not (worker.health.circuit.closed or worker.trusted):
        return False
    return worker.warming_since is None or worker.share >= 1 or random.random() < worker.share


def choosable(
    workers: Collection[Worker], random: Random, any_has_capacity: Callable[[Worker], bool] | None = None
) -> Collection[Worker]:
    """Those of some workers that a request may go to now. Untrusted ones are used when there are no others; none
    when those that are trusted have no capacity."""
    trusted = [worker for worker in workers if worker.health.circuit.closed or worker.trusted] or workers
    free = [worker for worker in trusted if any_has_capacity(worker)] if any_has_capacity else trusted
    chosen = [w for w in free if w.warming_since is None or w.share >= 1 or random.random() < w.share]
    return chosen or free
