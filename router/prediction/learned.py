"""What the router has learned of its fleet from the requests it routed and from what workers report of their caches."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from indexer import Registration, Target
from indexer.index import Index
from router.cache_state.in_flight_prefixes import CHUNK_TOKENS
from router.cache_state.session_locations import SessionLocations
from router.policies.rates import Rates, RateTable
from router.policies.records import Candidate
from router.prediction.eviction_pressure import EvictionPressure
from router.prediction.output_length import OutputLengths
from router.prediction.predictions import Predictions
from router.prediction.session_turns import SessionTurns

# How often the counters of evictions are read.
_LOOK_SECONDS = 1.0


class EvictionCounts(Protocol):
    """The index, as far as it counts the blocks that targets evict."""

    @property
    def index(self) -> Index:
        """The core of the index."""

    def registered(self) -> list[Registration]:
        """Return every registration of a target."""


class Learned:
    """How fast workers are, how long answers and sessions become, what evictions cost, what follows for first tokens.

    `places`: of the sessions that were said to go on.

    `cpu_token`, `disk_token`: what loading a cached token takes, as a share of computing it.
    """

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
        self.places = SessionLocations(clock)
        self._clock = clock
        self._next_look = 0.0

    def timing(self, chosen: Candidate, tokens: int) -> RequestTiming:
        """Watch a streamed answer to a prompt of `tokens` that is sent now."""
        return RequestTiming(self, chosen, tokens, self._clock)

    def forget(self, worker: str) -> None:
        """A worker was removed."""
        self.rates.forget(worker)
        self.predictions.forget(worker)
        self.places.forget(worker)

    def seconds_per_token(self) -> float:
        """What computing a token of a prompt takes: the mean of the workers."""
        return self.rates.mean_token()

    def look_at_evictions(self, index: EvictionCounts, now: float | None = None) -> None:
        """Read how much every target that has an event stream has removed, now and then. `now`: the time by the clock,
        where it was just read."""
        if now is None:
            now = self._clock()
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_SECONDS
        removed: dict[Target, int] = {}
        for registration in index.registered():
            status = index.index.status(registration.target) if registration.source else None
            if status is not None:
                removed[registration.target] = status.counters.removed * max(status.block_sizes, default=0)
        self.pressure.removed(removed)


class RequestTiming:
    """One streamed answer, watched from the moment its request is sent.

    Its first byte says how long a prefill took only if nothing waited before it. What is not streamed says nothing: the
    first byte comes with the last.
    """

    def __init__(self, learned: Learned, chosen: Candidate, tokens: int, clock: Callable[[], float]) -> None:
        self.learned = learned
        self.chosen = chosen
        self.tokens = tokens
        self.clock = clock
        self.sent = clock()
        self.begun: float | None = None

    def first_byte(self) -> None:
        """The answer began. Only the first call counts."""
        if self.begun is not None:
            return
        self.begun = now = self.clock()
        chosen = self.chosen
        if chosen.waiting == 0:
            seconds, target = now - self.sent, chosen.target
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
        """The answer is complete, with `output_tokens`."""
        if self.begun is None:
            return
        now = self.clock()
        chosen = self.chosen
        context = chosen.context + self.tokens + output_tokens // 2
        rates = self.learned.rates.learner(chosen.target.worker, chosen.target.model)
        rates.decode_seen(output_tokens - 1, chosen.requests + 1, context, now - self.begun, now)
        self.learned.outputs.seen(chosen.target.model, output_tokens)
