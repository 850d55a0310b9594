"""The engines of a fleet and a router before them, event by event.

The router sees what real ones see: what the engines stored and removed some time after they did, its own requests in
flight, and first bytes and ends as they come. It chooses by the policies of `router.policies`, with the load kept by
`router.load.target_load`, the price of evictions by `eviction_pressure`, and requests held as `late_binding` says.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from math import inf
from random import Random
from typing import NamedTuple

from indexer import Target
from router.admission.admission import TRIES
from router.cache_state.in_flight_prefixes import CHUNK_TOKENS
from router.cache_state.sent_prefixes import SentPrefixes
from router.load.target_load import Reservation, TargetLoad
from router.policies import Candidate, Decision, Policy, Request
from router.policies.rates import prefill_seconds
from router.prediction.eviction_pressure import EvictionPressure
from router.routing.late_binding import NO_TIME_TO_SPARE, held_order, is_busy, is_sooner
from router.routing.load_view import PrefillShare
from router.settings import AdmissionSettings
from simulator.fleet.engine import Engine, Progress
from simulator.fleet.profiles import Profile
from simulator.fleet.sides import Knowledge
from simulator.fleet.trace import BLOCK_TOKENS, TracedRequest

EVENT_DELAY = (0.003, 0.280)  # seconds, from what an engine did to when the router knows
LINGER = 2.0  # seconds that an ended prompt still counts as cached soon
_LOOK_SECONDS = 1.0
_MEAN_OUTPUT = 256.0
TIMEOUT = AdmissionSettings().timeout


@dataclass(slots=True)
class Outcome:
    """What became of a request: times in seconds, tokens served from the cache, the worker's number.

    `sent`: when the worker got it. One that was refused never begins.
    """

    request: TracedRequest
    begun: float = inf
    ended: float = inf
    cached: int = 0
    worker: int = -1
    sent: float = inf

    @property
    def refused(self) -> bool:
        """Whether it was sent to no worker, once the run has ended."""
        return self.worker < 0


class HeldRequest(NamedTuple):
    """One that waits in the router, sorted by when its turn is."""

    order: float
    number: int
    outcome: Outcome


@dataclass(slots=True)
class _InFlight:
    outcome: Outcome
    worker: int
    reservation: Reservation


class _View:
    """Which worker holds which block, as bits of an integer, by the events that have come."""

    def __init__(self, workers: int) -> None:
        self._everybody = (1 << workers) - 1
        self._held: dict[int, int] = {}
        self._expected: dict[int, int] = {}
        self._promised: Counter[tuple[int, int]] = Counter()

    def stored(self, worker: int, blocks: list[int]) -> None:
        for block in blocks:
            self._held[block] = self._held.get(block, 0) | 1 << worker

    def removed(self, worker: int, blocks: list[int]) -> None:
        for block in blocks:
            left = self._held.get(block, 0) & ~(1 << worker)
            if left:
                self._held[block] = left
            else:
                self._held.pop(block, None)

    def slo(self, worker: int, blocks: tuple[int, ...]) -> None:
        """A prompt was sent to a worker: it will hold it soon."""
        for block in blocks:
            self._promised[worker, block] += 1
            self._expected[block] = self._expected.get(block, 0) | 1 << worker

    def settle(self, worker: int, blocks: tuple[int, ...]) -> None:
        """A promise ends."""
        for block in blocks:
            self._promised[worker, block] -= 1
            if not self._promised[worker, block]:
                del self._promised[worker, block]
                self._expected[block] &= ~(1 << worker)
                if not self._expected[block]:
                    del self._expected[block]

    def answered(self, worker: int, blocks: tuple[int, ...], cached: int, sent: float) -> None:
        """A prompt was answered: its events have told, or will."""

    def overlaps(self, blocks: tuple[int, ...]) -> dict[int, int]:
        """How many leading blocks each worker holds or will hold soon; those that hold none are left out."""
        found: dict[int, int] = {}
        held, expected = self._held, self._expected
        following = self._everybody
        for place, block in enumerate(blocks):
            still = following & (held.get(block, 0) | expected.get(block, 0))
            if still != following and place:
                _note(found, following & ~still, place)
            following = still
            if not still:
                return found
        _note(found, following, len(blocks))
        return found


class _SentView(_View):
    """The same by what was sent to workers, for those without events, as `router.cache_state.sent_prefixes` has it.

    `learns`: their answers tell how much of a prompt was found.
    """

    def __init__(self, targets: list[Target], learns: bool, clock: Callable[[], float]) -> None:
        super().__init__(len(targets))
        self._targets = targets
        self._numbers = {target: number for number, target in enumerate(targets)}
        self._learns = learns
        self._sent_prefixes = SentPrefixes(clock)

    def stored(self, worker: int, blocks: list[int]) -> None:
        """No event tells."""

    def removed(self, worker: int, blocks: list[int]) -> None:
        """No event tells."""

    def answered(self, worker: int, blocks: tuple[int, ...], cached: int, sent: float) -> None:
        """A prompt was answered, of which so many blocks were cached."""
        target, hashes = self._targets[worker], array("Q", blocks)
        if self._learns:
            self._sent_prefixes.compare(target, hashes, cached * CHUNK_TOKENS, sent)
        self._sent_prefixes.remember(target, hashes, None)

    def overlaps(self, blocks: tuple[int, ...]) -> dict[int, int]:
        found = super().overlaps(blocks)
        for target, tokens in self._sent_prefixes.overlaps(array("Q", blocks)).items():
            number = self._numbers[target]
            found[number] = max(found.get(number, 0), tokens // CHUNK_TOKENS)
        return found


def _note(found: dict[int, int], bits: int, blocks: int) -> None:
    while bits:
        low = bits & -bits
        found[low.bit_length() - 1] = blocks
        bits ^= low


class Fleet:
    """One run of a trace."""

    def __init__(
        self,
        profile: Profile,
        workers: int,
        kv_tokens: int,
        policy: Policy,
        late_binding: bool,
        random: Random,
        block_tokens: int = BLOCK_TOKENS,
        knowledge: Knowledge = Knowledge.EVENTS,
    ) -> None:
        self._now = 0.0
        self._profile = profile
        self._policy = policy
        self._block_tokens = block_tokens
        self._late_binding = late_binding
        self._random = random
        self._engines = [Engine(profile, kv_tokens, block_tokens) for _ in range(workers)]
        self._targets = [Target(f"w{number}", 0, "m") for number in range(workers)]
        self._loads = [TargetLoad(clock=self._clock) for _ in range(workers)]
        self._view = (
            _View(workers)
            if knowledge is Knowledge.EVENTS
            else _SentView(self._targets, knowledge is Knowledge.REPORTED, self._clock)
        )
        self._known_at = [0.0] * workers  # until when each worker's events are on their way, in order
        self._pressure = EvictionPressure(block_tokens, stride=1, clock=self._clock)
        self._removed = [0] * workers
        self._next_look = 0.0
        self._in_flight: dict[int, _InFlight] = {}  # by the identity of the request
        self._held: list[HeldRequest] = []
        self._prefill_share = PrefillShare()
        self._numbers = count()
        self._timed: list[tuple[float, int, int, object]] = []  # (time, number, worker, what becomes known)

    def run(self, requests: Sequence[TracedRequest], on_arrival: Callable[[], None] = lambda: None) -> list[Outcome]:
        """Replay a trace to its end. `on_arrival` is called for each request."""
        outcomes = [Outcome(request) for request in requests]
        wake: list[tuple[float, int]] = []
        coming = iter(outcomes)
        arriving = next(coming, None)
        while True:
            while wake and wake[0][0] != self._engines[wake[0][1]].next_event:
                heappop(wake)  # it was planned again since
            arrival = arriving.request.arrival if arriving else inf
            timed = self._timed[0][0] if self._timed else inf
            engine = wake[0][0] if wake else inf
            self._now = min(arrival, timed, engine)
            if self._now == inf:
                return outcomes
            touched: set[int] = set()
            if timed == self._now:
                touched = self._learn()
            elif engine == self._now:
                worker = heappop(wake)[1]
                touched = {worker} | self._progress(worker, self._engines[worker].advance())
            elif arriving is not None:
                touched = self._place(arriving)
                on_arrival()
                arriving = next(coming, None)
            for worker in touched:
                if self._engines[worker].next_event < inf:
                    heappush(wake, (self._engines[worker].next_event, worker))

    def _clock(self) -> float:
        return self._now

    def _later(self, seconds: float, worker: int, what: object) -> None:
        heappush(self._timed, (self._now + seconds, next(self._numbers), worker, what))

    def _learn(self) -> set[int]:
        """Events arrive, a prompt is let go, or a held request's time is over. Returns the worker that got that."""
        _, _, worker, what = heappop(self._timed)
        if isinstance(what, Progress):
            self._view.stored(worker, what.stored)
            self._view.removed(worker, what.removed)
            self._removed[worker] += len(what.removed) * self._block_tokens
        elif isinstance(what, tuple):
            self._view.settle(worker, what)
        elif isinstance(what, Outcome):
            held = next((each for each in self._held if each.outcome is what), None)
            return set() if held is None else self._time_over(held)
        return set()

    def _progress(self, worker: int, progress: Progress) -> set[int]:
        """What an engine did. Returns the workers that got held requests."""
        for sequence in progress.begun:
            flight = self._in_flight[id(sequence.request)]
            flight.outcome.begun = self._now
            flight.outcome.cached = sequence.cached
            flight.reservation.first_byte()
        for sequence in progress.ended:
            flight = self._in_flight.pop(id(sequence.request))
            flight.outcome.ended = self._now
            cached = flight.outcome.cached // self._block_tokens
            self._view.answered(worker, sequence.request.blocks, cached, flight.outcome.sent)
            flight.reservation.release()
            self._later(LINGER, worker, sequence.request.blocks)
        if progress.stored or progress.removed:
            due = max(self._now + self._random.uniform(*EVENT_DELAY), self._known_at[worker])
            self._known_at[worker] = due
            self._later(due - self._now, worker, progress)
        return self._retry() if self._held and (progress.begun or progress.ended) else set()

    def _place(self, outcome: Outcome) -> set[int]:
        """A request arrives. Returns the worker that got it, if any did."""
        return self._bind_or_hold(outcome, self._choose(outcome.request))

    def _bind_or_hold(self, outcome: Outcome, choice: Candidate) -> set[int]:
        placed = self._unless_held(outcome.request, choice)
        if placed is None:
            self._hold(HeldRequest(self._order(outcome.request, choice), next(self._numbers), outcome))
            return set()
        return {self._bind(outcome, placed)}

    def _order(self, request: TracedRequest, choice: Candidate) -> float:
        return held_order(request.arrival, self._prefill(request, choice))

    def _hold(self, held: HeldRequest) -> None:
        """Let a request wait, as long as `admission.timeout` says at most."""
        insort(self._held, held)
        self._later(TIMEOUT, 0, held.outcome)

    def _time_over(self, held: HeldRequest) -> set[int]:
        """A request was held too long: it goes to its choice, however busy."""
        self._held.remove(held)
        return {self._bind(held.outcome, self._choose(held.outcome.request))}

    def _retry(self) -> set[int]:
        """Let held requests choose again, as long as any worker has room."""
        bound: set[int] = set()
        for held in self._held[:TRIES]:
            if all(self._is_busy(load) for load in self._loads):
                break
            request = held.outcome.request
            placed = self._unless_held(request, self._choose(request))
            if placed is not None:
                self._held.remove(held)
                bound.add(self._bind(held.outcome, placed))
        return bound

    def _is_busy(self, load: TargetLoad) -> bool:
        return is_busy(load, crowded=len(self._held) > len(self._loads))

    def _unless_held(self, request: TracedRequest, choice: Candidate) -> Candidate | None:
        """The choice, or another by which a request is answered sooner, unless it has to wait."""
        load = self._loads[self._targets.index(choice.target)]
        if not self._late_binding or not is_busy(load, crowded=True):
            return choice
        sooner = self._sooner(request, choice)
        if sooner is None and self._is_busy(load):
            return None
        return sooner or choice

    def _sooner(self, request: TracedRequest, choice: Candidate) -> Candidate | None:
        """What is free and answers sooner than a choice that is busy, while the fleet has time to spare."""
        prefilling = self._prefill_share.average
        if prefilling >= NO_TIME_TO_SPARE:
            return None
        candidates = self._candidates(request)
        free = [each for each, load in zip(candidates, self._loads, strict=True) if not is_busy(load, crowded=True)]
        if not free:
            return None
        other = self._policy(free, _asked(request)).chosen
        return other if is_sooner(other, choice, request.input_tokens, prefilling) else None

    def _choose(self, request: TracedRequest) -> Candidate:
        return self._decide(request).chosen

    def _decide(self, request: TracedRequest) -> Decision:
        self._prefill_share.see(sum(load.pending > 0 for load in self._loads) / len(self._loads), self._now)
        return self._policy(self._candidates(request), _asked(request))

    def _candidates(self, request: TracedRequest) -> list[Candidate]:
        if self._now >= self._next_look:
            self._next_look = self._now + _LOOK_SECONDS
            self._pressure.removed(dict(zip(self._targets, self._removed, strict=True)))
        price = self._pressure.price()
        overlaps = self._view.overlaps(request.blocks[: (request.input_tokens - 1) // self._block_tokens])
        candidates = []
        for worker, (target, load) in enumerate(zip(self._targets, self._loads, strict=True)):
            engine = self._engines[worker]
            candidate = Candidate(
                target,
                overlaps.get(worker, 0) * self._block_tokens,
                load.requests,
                load.pending,
                load.context,
                load.waiting,
                kv_usage=engine.kv_usage,
            )
            if price and self._pressure.evicting(target):
                candidate.eviction = price * self._eviction_weight(target)
            candidates.append(candidate)
        return candidates

    def _eviction_weight(self, target: Target) -> float:  # noqa: ARG002
        """What evicting costs there, compared with elsewhere."""
        return 1.0

    def _prefill(self, request: TracedRequest, choice: Candidate) -> float:
        """Seconds that a prefill is expected to take."""
        rates = self._profile.rates
        return prefill_seconds(rates, request.input_tokens, choice.overlap, choice.requests, choice.context)

    def _bind(self, outcome: Outcome, choice: Candidate) -> int:
        request = outcome.request
        worker = outcome.worker = self._targets.index(choice.target)
        outcome.sent = self._now
        uncached = max(request.input_tokens - choice.overlap, 1)
        prefill = self._prefill(request, choice)
        reservation = Reservation(self._loads[worker], uncached, request.input_tokens, prefill, streamed=True)
        self._in_flight[id(request)] = _InFlight(outcome, worker, reservation)
        best = max(self._view.overlaps(request.blocks).values(), default=0)
        self._pressure.routed(request.blocks, best * self._block_tokens)
        self._view.slo(worker, request.blocks)
        self._engines[worker].submit(request, self._now)
        return worker


def _asked(request: TracedRequest) -> Request:
    return Request(request.input_tokens, _MEAN_OUTPUT, request.session)
