"""One run of a trace: simulated engines behind the router's own selection and admission, in virtual time.

Real parts: the policy, the selector, the queue, the placement, the index, and everything that the router learns.
Simulated parts: the engines, the delay of their events, their metrics, and what their answers report.

The simulation calls the router as forwarding does: place or wait, record in flight, first byte, answered, release. If
another worker computes the prompt, that worker receives it first, and the decode worker when the prompt is computed.

One file, because both sides of a request's way share its outcome and the clock.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from random import Random

import structlog

from http_api.errors import RequestError
from router.admission.ticket import Ticket
from router.apis.identities import Identity
from router.apis.requests import RoutedRequest
from router.apis.usage import Usage
from router.fleet.health import Outcome as AttemptOutcome
from router.prediction.slo import SLO
from router.routing.assignment import Assignment
from router.settings import Role
from router.sharing import SharingChannel
from simulator.fleet.engine import Engine, EngineRequest, Handover, Profile, Progress
from simulator.fleet.simulated_router import Knowledge, Side, SimulatedRouter, build_router
from simulator.fleet.sources import SimulatedPool, SourceSpec, sources_of
from simulator.fleet.trace import BLOCK_TOKENS, TracedRequest, prompt_of
from simulator.fleet.transfers import Network, NetworkSpec
from simulator.fleet.virtual_time import VirtualTimeLoop
from simulator.fleet.workers import MODEL, EventIndex, SimulatedWorkers, events_of

EVENT_DELAY = (0.003, 0.280)  # seconds from a change in an engine's cache until the router's index has it
_BYTES_PER_TOKEN = 4
_PATH = "/v1/chat/completions"
_NETWORK = NetworkSpec()


@dataclass(slots=True)
class Outcome:
    """A request's times in seconds of the run, its cached tokens, and its worker. A refused request never begins.

    - `loaded`: the part of its cached tokens that its worker loaded from the pool or a peer.
    - `prefill`, `prefilled`: the worker that computed its prompt for another, and when; -1 if its own did.
    - `moved`: the tokens of its prompt that its worker fetched from there.
    - `refused_at`, `retry_after`: when the router refused it, and the seconds of its `Retry-After`.
    - `engine_refusals`: how often an engine refused it as full.
    - `number`: makes the end of its prompt unique. `sent_again`: whether it was refused and is sent again.
    """

    request: TracedRequest
    begun: float = inf
    ended: float = inf
    cached: int = 0
    worker: int = -1
    sent: float = inf
    loaded: int = 0
    prefill: int = -1
    prefilled: float = inf
    moved: int = 0
    refused_at: float = inf
    retry_after: int | None = None
    engine_refusals: int = 0
    number: int = 0
    sent_again: bool = False

    @property
    def refused(self) -> bool:
        """True if no worker received the request. Valid once the run has ended."""
        return self.worker < 0


@dataclass(frozen=True, slots=True)
class FleetSpec:
    """The engines of a run.

    - `kv_tokens`: the tokens that each cache holds, in blocks of `block_tokens`.
    - `unlike`: the profiles of the first engines, if these differ from the others.
    - `sources`: where engines load blocks from; None for nowhere.
    - `prefill`, `decode`: the first engines only prefill, and the next ones only decode. The others do both.
    - `network`: the links between them.
    - `labels`: the labels of the workers, in turn.
    """

    profile: Profile
    workers: int
    kv_tokens: int
    block_tokens: int = BLOCK_TOKENS
    unlike: tuple[Profile, ...] = ()
    sources: SourceSpec | None = None
    prefill: int = 0
    decode: int = 0
    network: NetworkSpec = _NETWORK
    labels: tuple[Mapping[str, str], ...] = ()

    @property
    def roles(self) -> list[Role]:
        """The role of each engine."""
        separate = [Role.PREFILL] * self.prefill + [Role.DECODE] * self.decode
        return separate + [Role.BOTH] * (self.workers - len(separate))

    @property
    def profiles(self) -> list[Profile]:
        """The profile of each engine."""
        return [*self.unlike, *[self.profile] * (self.workers - len(self.unlike))]


@dataclass(slots=True)
class _InFlight:
    outcome: Outcome
    assignment: Assignment
    router: SimulatedRouter


class Simulation:
    """One run of a trace."""

    def __init__(
        self, spec: FleetSpec, side: Side, random: Random, loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        """Create a run. `random` breaks the policy's ties, and delays the events. Without a `loop`, time is virtual."""
        self.spec = spec
        self.side = side
        self.random = random
        self.loop = loop or VirtualTimeLoop()
        self._start = self.loop.time()
        self._index = EventIndex(self._make_workers().registrations, side.knowledge is Knowledge.EVENTS, self.loop.time)
        self._pools: SimulatedPool | None = None
        self.engines = [Engine(profile, spec.kv_tokens, spec.block_tokens) for profile in spec.profiles]
        self._network = Network(spec.network, spec.roles)
        if spec.sources is not None:
            caches = [engine.cache for engine in self.engines]
            transfer = self._network.transfer if spec.prefill else None
            made = sources_of(spec.sources, caches, spec.block_tokens, transfer)
            for engine, sources in zip(self.engines, made, strict=True):
                engine.sources = sources
                if sources.pool is not None:
                    self._pools = SimulatedPool(sources.pool, spec.block_tokens)
        self.routers = self.make_routers()
        for router in self.routers:
            router.observer.start(spec.block_tokens, spec.kv_tokens)
        self._timers: list[asyncio.TimerHandle | None] = [None] * spec.workers
        self._targets = self.routers[0].workers.targets
        self._numbers = {target: number for number, target in enumerate(self._targets)}
        self._known_at = [0.0] * spec.workers  # when the last sent event of each worker arrives
        self._in_flight: dict[int, _InFlight] = {}  # by the identity of the request
        self._waiting: set[asyncio.Task[None]] = set()
        self._scraped: dict[int, str] = {}  # the last metrics of each worker
        self._scrapes = 0
        # Unchanged metrics are read again once a second, so that they do not expire.
        self._reads_again = max(round(1 / side.metrics_interval), 1)
        self._outcomes: list[Outcome] = []
        self._until = inf
        self._unanswered = 0
        self._done = self.loop.create_future()

    def make_routers(self) -> list[SimulatedRouter]:
        """Return the routers before the workers: one."""
        return [self.make_router()]

    def make_router(self, *channels: SharingChannel) -> SimulatedRouter:
        """Return one router. `channels`: what it shares its load over."""
        return build_router(
            self._make_workers(),
            self._index,
            self.side,
            self.random,
            self.loop.time,
            channels,
            self.spec.sources,
            self._pools,
        )

    def router_of(self, outcome: Outcome) -> SimulatedRouter:  # noqa: ARG002
        """Return the router that receives a request."""
        return self.routers[0]

    def arriving(self, outcome: Outcome, prompt: RoutedRequest, router: SimulatedRouter) -> None:
        """Receive a request before it is placed. Subclasses that record choices override this method."""

    def comes_again(self, outcome: Outcome) -> bool:  # noqa: ARG002
        """Return whether a refused request arrives again after its `Retry-After`. Subclasses override this method."""
        return False

    def _make_workers(self) -> SimulatedWorkers:
        capacity = self.spec.kv_tokens // self.spec.block_tokens
        spec = self.spec
        return SimulatedWorkers(spec.roles, capacity, spec.block_tokens, self.loop.time, spec.labels)

    def run(
        self,
        requests: Sequence[TracedRequest],
        on_arrival: Callable[[], None] = lambda: None,
        until: float = inf,
    ) -> list[Outcome]:
        """Replay a trace to its end, once, and return the outcomes in the order of arrival.

        - `on_arrival`: called for each request with a fixed arrival.
        - `until`: the time from which no request follows an answer.
        """
        self._until = until
        outcomes = self._outcomes = [Outcome(request) for request in requests]
        try:
            with _without_warnings():
                self.loop.run_until_complete(self._replay(outcomes, on_arrival))
        finally:
            self.loop.close()
        return sorted(outcomes, key=lambda outcome: outcome.request.arrival)

    async def _replay(self, outcomes: list[Outcome], on_arrival: Callable[[], None]) -> None:
        if not outcomes:
            return
        self._unanswered = len(outcomes)
        coming = enumerate(outcomes.copy())
        for router in self.routers:
            router.state.sharing.start()
        self._scrape()

        def schedule() -> None:
            following = next(coming, None)
            if following is not None:
                self.loop.call_at(self._start + following[1].request.arrival, arrive, *following)

        def arrive(number: int, outcome: Outcome) -> None:
            self._place(number, outcome)
            on_arrival()
            schedule()

        schedule()
        await self._done
        for router in self.routers:
            await router.state.sharing.kill()

    def _now(self) -> float:
        return self.loop.time() - self._start

    # The router's side

    def _place(self, number: int, outcome: Outcome) -> None:
        request, now = outcome.request, self.loop.time()
        outcome.number = number
        tokens = [prompt_of(request, number, self.spec.block_tokens)]
        hints = request.hints if self.side.hints else None
        identity = Identity(request.session, request.program) if request.session else None
        prompt = RoutedRequest(MODEL, streamed=request.streamed, identity=identity, hints=hints, path=_PATH)
        prompt = prompt.tokenized(tokens)
        slo = None
        if self.side.slos and (wanted := request.slo) is not None:
            slo = SLO(wanted.ttft, wanted.tpot, now, wanted.service_level, wanted.refuses_late)
        size = _BYTES_PER_TOKEN * prompt.tokens
        ticket = Ticket(request.priority, tokens=prompt.tokens, size=size, arrived=now, slo=slo)
        router = self.router_of(outcome)
        self.arriving(outcome, prompt, router)
        router.observer.arrives(request)
        try:
            assignment = router.admission.place(prompt, (), ticket, now)
        except RequestError as error:
            self._refused(outcome, error)
            return
        if assignment is None or not self._sent(router, prompt, outcome, ticket, assignment):
            task = self.loop.create_task(self._wait(router, prompt, outcome, ticket))
            self._waiting.add(task)
            task.add_done_callback(self._waiting.discard)

    async def _wait(self, router: SimulatedRouter, prompt: RoutedRequest, outcome: Outcome, ticket: Ticket) -> None:
        try:
            while True:
                assignment = await router.admission.wait(prompt, (), ticket)
                if self._sent(router, prompt, outcome, ticket, assignment):
                    return
        except RequestError as error:
            self._refused(outcome, error)

    def _refused(self, outcome: Outcome, error: RequestError) -> None:
        """End a request that the router refused."""
        outcome.refused_at, outcome.retry_after = self._now(), error.retry_after
        if error.retry_after is not None and self.comes_again(outcome):
            self._arrive_later(outcome.request, error.retry_after, outcome.number)
        self._end()

    def _sent(
        self, router: SimulatedRouter, prompt: RoutedRequest, outcome: Outcome, ticket: Ticket, assignment: Assignment
    ) -> bool:
        """Send a request to its worker. Return False if the worker refuses it as full, so that it waits again."""
        now = self.loop.time()
        router.placement.record_in_flight(prompt, assignment, now)
        first = assignment.prefill or assignment
        if self.engines[self._numbers[first.target]].full:
            outcome.engine_refusals += 1
            router.workers.refused(first.worker)
            first.attempt.end(AttemptOutcome.FULL, now=now)
            assignment.release(now)
            router.admission.returned(prompt, ticket)
            return False
        worker = outcome.worker = self._numbers[assignment.target]
        outcome.sent = self._now()
        router.observer.sent(outcome.request, assignment.target)
        self._in_flight[id(outcome.request)] = _InFlight(outcome, assignment, router)
        computing = assignment.prefill or assignment
        source = computing.decision.chosen.source
        peer = None if source is None or source.peer is None else self.engines[self._numbers[source.peer]].sources
        if assignment.prefill is not None:
            worker = outcome.prefill = self._numbers[assignment.prefill.target]
        self.engines[worker].submit(outcome.request, now, peer, prefill_only=assignment.prefill is not None)
        self._plan(worker)
        return True

    # The engines' side

    def _plan(self, worker: int) -> None:
        """Schedule the next event of an engine."""
        timer, due = self._timers[worker], self.engines[worker].next_event
        if timer is not None:
            if timer.when() == due:
                return
            timer.cancel()
        self._timers[worker] = self.loop.call_at(due, self._advance, worker) if due < inf else None

    def _advance(self, worker: int) -> None:
        self._timers[worker] = None
        progress = self.engines[worker].advance()
        self._plan(worker)
        now = self.loop.time()
        for handover in progress.fetched:
            sender = self._in_flight[id(handover.computed.request)].outcome.prefill
            self.engines[sender].release(handover.computed, now)
            self._plan(sender)
        for computed in progress.begun:
            if computed.prefill_only:
                self._prefilled(computed)
            else:
                self._first_byte(computed)
        for computed in progress.ended:
            self._answered(computed)
        if (
            progress.stored or progress.removed or progress.host_stored or progress.host_removed
        ) and self.side.knowledge is Knowledge.EVENTS:
            self._report(worker, progress)

    def _prefilled(self, computed: EngineRequest) -> None:
        """Send a request to its decode worker, because its prompt was computed."""
        request, now = computed.request, self.loop.time()
        flight = self._in_flight[id(request)]
        outcome, prefill = flight.outcome, flight.assignment.prefill
        assert prefill is not None
        outcome.prefilled, outcome.cached = self._now(), computed.cached
        prefill.attempt.heard(now)
        prefill.attempt.end(AttemptOutcome.SUCCEEDED, now=now)
        prefill.first_byte(now)
        prefill.release(now)
        flight.assignment.prefilled()
        transfer = partial(self._network.transfer, outcome.prefill, outcome.worker)
        self.engines[outcome.worker].submit(request, now, fetched=Handover(computed, transfer))
        self._plan(outcome.worker)

    def _first_byte(self, computed: EngineRequest) -> None:
        flight = self._in_flight[id(computed.request)]
        flight.outcome.begun = self._now()
        if computed.fetched is None:
            flight.outcome.cached, flight.outcome.loaded = computed.cached, computed.loaded
        else:
            flight.outcome.moved = computed.loaded
        outcome = flight.outcome
        if outcome.request.streamed:
            self._seen(flight)
        flight.router.observer.began(outcome.request, flight.assignment.target, outcome.begun - outcome.request.arrival)

    def _seen(self, flight: _InFlight) -> None:
        """Let the router see the first byte of an answer."""
        now = self.loop.time()
        flight.assignment.attempt.heard(now)
        flight.assignment.first_byte(now)

    def _answered(self, computed: EngineRequest) -> None:
        request = computed.request
        flight = self._in_flight.pop(id(request))
        if not request.streamed:
            self._seen(flight)
        flight.outcome.ended = self._now()
        now = self.loop.time()
        flight.assignment.attempt.end(AttemptOutcome.SUCCEEDED, now=now)
        cached = None if self.side.knowledge is Knowledge.SENT else computed.cached
        if computed.fetched is not None and cached is not None:
            cached += computed.loaded
        flight.router.placement.answered(flight.assignment, Usage(request.input_tokens, request.output_tokens, cached))
        tpot = (flight.outcome.ended - flight.outcome.begun) / max(request.output_tokens - 1, 1)
        flight.router.observer.ended(request, flight.assignment.target, tpot)
        flight.assignment.release(now)
        self._follow(request)
        self._end()

    def _follow(self, request: TracedRequest) -> None:
        """Schedule the request that follows an answer."""
        if request.following is not None and self._now() + request.pause < self._until:
            self._arrive_later(request.following, request.pause)

    def _arrive_later(self, request: TracedRequest, seconds: float, number: int | None = None) -> None:
        """Let a request arrive in some seconds. `number`: that of the refused request that is sent again, if any."""
        outcome = Outcome(replace(request, arrival=self._now() + seconds), sent_again=number is not None)
        self.loop.call_later(seconds, self._place, len(self._outcomes) if number is None else number, outcome)
        self._outcomes.append(outcome)
        self._unanswered += 1

    def _end(self) -> None:
        """Count a request that was answered or refused."""
        self._unanswered -= 1
        if not self._unanswered:
            self._done.set_result(None)

    def _report(self, worker: int, progress: Progress) -> None:
        """Apply an engine's events to the index after their delay, in their order."""
        due = max(self.loop.time() + self.random.uniform(*EVENT_DELAY), self._known_at[worker])
        self._known_at[worker] = due
        batch = events_of(progress, self.spec.block_tokens)
        self.loop.call_at(due, self._index.index.apply, self._targets[worker], batch)

    def _scrape(self) -> None:
        """Let the routers read the metrics of all engines, at their interval."""
        for worker, engine in enumerate(self.engines):
            metrics = (
                f"vllm:num_requests_running {engine.running}\n"
                f"vllm:num_requests_waiting {engine.waiting}\n"
                f"vllm:kv_cache_usage_perc {engine.kv_usage}\n"
                f"vllm:num_preemptions_total {engine.preemptions}\n"
            )
            if self._scraped.get(worker) == metrics and self._scrapes % self._reads_again:  # nothing to read
                continue
            self._scraped[worker] = metrics
            for router in self.routers:
                router.scraped(router.workers.workers[worker], metrics)
        self._scrapes += 1
        self.loop.call_later(self.side.metrics_interval, self._scrape)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Keep the router's log lines out of a simulation's output."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**before)
