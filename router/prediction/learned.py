"""Everything learned from routed requests and from workers' caches: rates, lengths, and the price of evictions.

The price of evictions follows from the share of evicted tokens that later requests need again:

    g = lost / evicted     both in tokens, averaged over `HORIZON` seconds, g at most 0.92
    μ(w) = g / (1 - g)     while w is full, else 0: the later cost of evicting for one token of prefill

A target is full if it evicted within `HORIZON` seconds, or if less than a tenth of its capacity is free. So prompts go
where there is room before anything was lost.

`lost` counts the prefixes that were routed before and that no worker holds now. What a worker loads from a pool is not
lost: it costs its load. `evicted` is read from the event streams. A worker without events counts as full, as a warm
cache is. Memory is bounded: one prefix in `STRIDE` chunks is remembered, and the least recently seen are forgotten.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping, Set
from math import exp
from typing import Final, Protocol

from indexer import Registration, Target
from indexer.index import Index
from indexer.shared_prefixes import make_shared_prefixes
from kvevents import Tier
from router.apis.requests import RoutedRequest
from router.cache_state.in_flight_prefixes import CHUNK_TOKENS
from router.cache_state.prefix_demand import PrefixDemand
from router.cache_state.recent_prefixes import RecentPrefixes
from router.load.peer_load import PeerLoad
from router.load.target_load import ReservedLoad
from router.policies.rates import Rates, RateTable
from router.policies.records import Candidate
from router.prediction.predictions import Predictions

HORIZON = 120.0
MOST_LOST = 0.92
# A target with a smaller free share of its capacity counts as full.
_LEAST_FREE: Final = 0.1
# Fewer evicted tokens (50 blocks of 512) are too few to compute a share from.
LEAST_EVICTED = 25_600
# The weight of a new prompt and of a new answer in their means, once there are many.
_PROMPT_WEIGHT: Final = 0.002
_ANSWER_WEIGHT: Final = 0.01
_MOST_TURNS: Final = 8.0
_FIRST_OUTPUT_TOKENS: Final = 256.0
# The interval in seconds at which the counters of evictions are read.
_READ_SECONDS = 1.0


class DecayingSum:
    """A sum whose parts decay: `horizon` seconds after it was added, a part counts 1/e."""

    def __init__(self, horizon: float) -> None:
        self._horizon = horizon
        self._sum = 0.0
        self._at = 0.0

    def add(self, amount: float, now: float) -> None:
        """Add an amount. `now`: in seconds of any clock."""
        self._sum = self.at(now) + amount
        self._at = now

    def at(self, now: float) -> float:
        return self._sum and self._sum * exp((self._at - now) / self._horizon)

    def __bool__(self) -> bool:
        return self._sum > 0


class EvictionPressure:
    """The price of evictions μ, computed from every routed prompt and from what targets remove.

    - `demand`: how many sessions asked for each prefix, of which one in `stride` hashes is read.
    """

    def __init__(
        self, chunk: int, stride: int = 16, remembered: int = 1 << 17, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Create the pressure of a router that has routed nothing.

        - `chunk`: the tokens of each hash of a prompt.
        - `stride`: one in this many hashes is remembered.
        """
        self._chunk = chunk
        self.stride = stride
        self._remembered = remembered
        self._clock = clock
        self._routed = RecentPrefixes(make_shared_prefixes())
        self.demand = PrefixDemand(chunk * stride, remembered // stride)
        self._asked_tokens = DecayingSum(HORIZON)
        self._lost = DecayingSum(HORIZON)
        self._evicted = DecayingSum(HORIZON)
        self._removed: dict[Target, int] = {}
        self._last_removal: dict[Target, float] = {}
        self._without_room: set[Target] = set()

    def routed(
        self, hashes: array[int], held: int, reached: int = 0, price: float = 0.0, target: Target | None = None
    ) -> None:
        """Record a routed prompt by its hashes.

        - `held`: the most tokens of it that any worker holds.
        - `reached`: the tokens that its target holds and loads.
        - `price`: the cost of a loaded token, as a share of a computed one.
        - `target`: the one that computes and answers it; `None` if there is no single one.
        """
        read = hashes[self.stride - 1 :: self.stride]
        if not read:
            return
        known = self._routed.remember(read, self._remembered)
        now, unit = self._clock(), self._chunk * self.stride
        self.demand.routed(hashes, read, known, now, target, reached)
        self._asked_tokens.add(len(hashes) * self._chunk, now)
        lost = max(known - max(held, reached) // unit, 0) * unit + price * max(min(known * unit, reached) - held, 0)
        if lost > 0:
            self._lost.add(lost, now)

    def asked(self, hashes: array[int], held: int, now: float) -> list[tuple[int, float]]:
        """Return the parts of a prompt that several sessions asked for, as `PrefixDemand` does."""
        return self.demand.asked(hashes[self.stride - 1 :: self.stride], held, now)

    def removed(self, tokens: Mapping[Target, int], without_room: Set[Target] = frozenset()) -> None:
        """Record the tokens that each target with an event stream has removed since it became known.

        `without_room`: the targets that hold nearly as much as they can.
        """
        now = self._clock()
        self._without_room = set(without_room)
        for target, count in tokens.items():
            before = self._removed.get(target, count)
            if count > before:
                self._evicted.add(count - before, now)
                self._last_removal[target] = now
        unregistered = self._removed.keys() - tokens.keys()
        self._removed = dict(tokens)
        for target in unregistered:
            self._last_removal.pop(target, None)

    def price(self) -> float:
        """Return g / (1 - g) now; 0 while no stream reports evictions."""
        if not self._removed or not self._lost:
            return 0.0
        now = self._clock()
        lost_share = min(self._lost.at(now) / max(self._evicted.at(now), LEAST_EVICTED), MOST_LOST)
        return lost_share / (1 - lost_share)

    def lost_share(self) -> float:
        """Return the evicted tokens that prompts asked for again, as a share of all their tokens; 0 if few evict."""
        now = self._clock()
        lost, evicted = self._lost.at(now), self._evicted.at(now)
        enough = lost > 0 and evicted >= max(LEAST_EVICTED, lost / 2)
        return lost / self._asked_tokens.at(now) if enough else 0.0

    def moved_turns(self) -> tuple[float, float]:
        """Return the turns of the last minutes that followed others, and how many of them were computed elsewhere."""
        return self.demand.moved(self._clock())

    def observes(self, target: Target) -> bool:
        """Return whether an event stream reports what a target holds."""
        return target in self._removed

    def full(self, target: Target) -> bool:
        """Return whether a target counts as full. One without an event stream does."""
        if target not in self._removed or target in self._without_room:
            return True
        last = self._last_removal.get(target)
        return last is not None and self._clock() - last < HORIZON

    def __len__(self) -> int:
        return self._routed.chunks


class SessionTurns:
    """The mean turns of a session, by model: from 1 to 8.

    A turn's prompt is the conversation so far and something new. If a share h of the prompts' tokens is cached, about
    1 / (1 - h) requests arrive for each new session.
    """

    def __init__(self) -> None:
        self._shares: dict[str, tuple[float, int]] = {}

    def seen(self, model: str, cached: int, tokens: int) -> None:
        """Count a prompt of `tokens` tokens, of which the best target had `cached` tokens."""
        mean, count = self._shares.get(model, (0.0, 0))
        count += 1
        share = cached / max(tokens, 1)
        self._shares[model] = (mean + max(1 / count, _PROMPT_WEIGHT) * (share - mean), count)

    def expected(self, model: str) -> float:
        share, _ = self._shares.get(model, (0.0, 0))
        return 1 / max(1 - share, 1 / _MOST_TURNS)


class OutputLengths:
    """The mean tokens of an answer, by model."""

    def __init__(self) -> None:
        self._means: dict[str, tuple[float, int]] = {}

    def seen(self, model: str, tokens: int) -> None:
        """Count an answer of `tokens` tokens."""
        mean, count = self._means.get(model, (_FIRST_OUTPUT_TOKENS, 0))
        count += 1
        self._means[model] = (mean + max(1 / (count + 1), _ANSWER_WEIGHT) * (tokens - mean), count)

    def expected(self, model: str, max_tokens: int | None, announced: int | None = None) -> float:
        """Return the expected tokens of an answer, from its limit and the announced tokens, if it has them."""
        mean = self._means.get(model, (_FIRST_OUTPUT_TOKENS, 0))[0] if announced is None else announced
        return mean if max_tokens is None else min(mean, max_tokens)

    def of_request(self, model: str, prompt: RoutedRequest) -> float:
        """Return the expected tokens of all answers to a request."""
        announced = None if prompt.hints is None else prompt.hints.output_tokens
        return self.expected(model, prompt.max_tokens, announced) * prompt.answers


class EvictionCounts(Protocol):
    """The index, as far as it counts the blocks that targets evict."""

    @property
    def index(self) -> Index:
        """The core of the index."""

    def registered(self) -> list[Registration]:
        """Return every registration of a target."""


class Learned:
    """The learned state of all models. `evictions_due`: when `read_evictions` is due."""

    def __init__(
        self,
        start: Rates,
        clock: Callable[[], float] = time.monotonic,
        cpu_token: float = 0.0,
        disk_token: float = 0.0,
    ) -> None:
        self.rates = RateTable(start, clock)
        self.predictions = Predictions(self.rates, cpu_token, disk_token, clock)
        self.outputs = OutputLengths()
        self.turns = SessionTurns()
        self.pressure = EvictionPressure(CHUNK_TOKENS, clock=clock)
        self._clock = clock
        self.evictions_due = 0.0

    def timing(
        self, chosen: Candidate, tokens: int, reservation: ReservedLoad, peers: PeerLoad, computes: bool = True
    ) -> RequestTiming:
        """Return a timing of the streamed answer to a prompt of `tokens` tokens that is sent now.

        - `reservation`: the load that it reserved.
        - `peers`: the load of other routers.
        - `computes`: whether the target computes the prompt itself.
        """
        return RequestTiming(self, chosen, tokens, reservation, peers, self._clock, computes)

    def forget(self, worker: str) -> None:
        """Forget a worker that was removed."""
        self.rates.forget(worker)
        self.predictions.forget(worker)

    def seconds_per_token(self) -> float:
        """Return the mean seconds in which workers compute a token of a prompt."""
        return self.rates.mean_token()

    def read_evictions(self, index: EvictionCounts, now: float | None = None) -> None:
        """Read the evicted tokens of all targets that have an event stream. It is due again after a second."""
        if now is None:
            now = self._clock()
        self.evictions_due = now + _READ_SECONDS
        removed, without_room = dict[Target, int](), set[Target]()
        for registration in index.registered():
            status = index.index.status(registration.target) if registration.source else None
            if status is not None:
                removed[registration.target] = status.counters.removed * max(status.block_sizes, default=0)
                if registration.capacity and status.blocks[Tier.GPU] > (1 - _LEAST_FREE) * registration.capacity:
                    without_room.add(registration.target)
        self.pressure.removed(removed, without_room)


class RequestTiming:
    """The times of one streamed answer, from which rates are learned.

    The first byte measures the prefill only if the target had no other prompt until then. An engine computes prompts
    that arrive meanwhile in the same steps.
    """

    def __init__(
        self,
        learned: Learned,
        chosen: Candidate,
        tokens: int,
        reservation: ReservedLoad,
        peers: PeerLoad,
        clock: Callable[[], float],
        computes: bool = True,
    ) -> None:
        self.computes = computes
        self.learned = learned
        self.chosen = chosen
        self.tokens = tokens
        self.reservation = reservation
        self.peers = peers
        self.clock = clock
        self.sent = clock()
        self.begun: float | None = None
        self.loaded: tuple[float, float] | None = None

    def sent_again(self) -> None:
        """Measure from now on, because the request was held back until now."""
        self.sent = self.clock()

    def first_byte(self) -> None:
        """Learn from the first byte of the answer. Only the first call counts.

        The seconds of a load do not count as computing time. If no other load precedes it, `loaded` has the seconds
        until the first byte, and those of computing among them.
        """
        if self.begun is not None:
            return
        self.begun = now = self.clock()
        if not self.computes:
            return
        chosen = self.chosen
        target = chosen.target
        alone = chosen.waiting == 0 and self.reservation.is_latest
        if alone and not self.peers.of(target.worker, target.dp_rank).waiting:
            seconds = now - self.sent
            if chosen.source is not None:
                computing = self.learned.rates.prefill_seconds(
                    target.worker, target.model, self.tokens, chosen.reused, chosen.requests, chosen.context
                )
                if not chosen.source.waiting:
                    self.loaded = seconds, computing
                return
            if chosen.cpu or chosen.disk:
                return
            if self.reservation.is_late and self.learned.rates.learner(target.worker, target.model).learned:
                return  # it waited in the engine
            self.learned.rates.prefill_seen(
                target.worker,
                target.model,
                self.tokens,
                chosen.overlap,
                chosen.requests,
                chosen.context,
                seconds,
                now,
            )

    def end(self, output_tokens: int) -> None:
        """Learn from the complete answer of `output_tokens` tokens."""
        if self.begun is None:
            return
        now = self.clock()
        chosen = self.chosen
        context = chosen.context + self.tokens + output_tokens // 2
        rates = self.learned.rates.learner(chosen.target.worker, chosen.target.model)
        rates.decode_seen(output_tokens - 1, chosen.requests + 1, context, now - self.begun, now)
        self.learned.outputs.seen(chosen.target.model, output_tokens)
        self.reservation.answered(output_tokens, now - self.begun)
