"""Everything learned from routed requests and from workers' caches: rates, lengths, and the price of evictions."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Protocol

from indexer import Registration, Target
from indexer.index import Index
from router.cache_state.in_flight_prefixes import CHUNK_TOKENS
from router.cache_state.session_locations import SessionLocations
from router.policies.rates import Rates, RateTable
from router.policies.records import Candidate
from router.prediction.eviction_pressure import EvictionPressure
from router.prediction.predictions import Predictions

# The weight of a new prompt and of a new answer in their means, once there are many.
_PROMPT_WEIGHT: Final = 0.002
_ANSWER_WEIGHT: Final = 0.01
_MOST_TURNS: Final = 8.0
_FIRST_OUTPUT_TOKENS: Final = 256.0


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
        """Return the expected turns of a new session."""
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
        """Return the expected tokens of an answer.

        - `max_tokens`: the most that the answer may have; None: no limit.
        - `announced`: the tokens that the agent announced; None if it did not.
        """
        mean = self._means.get(model, (_FIRST_OUTPUT_TOKENS, 0))[0] if announced is None else announced
        return mean if max_tokens is None else min(mean, max_tokens)


# The interval in seconds at which the counters of evictions are read.
_READ_SECONDS = 1.0


class EvictionCounts(Protocol):
    """The index, as far as it counts the blocks that targets evict."""

    @property
    def index(self) -> Index:
        """The core of the index."""

    def registered(self) -> list[Registration]:
        """Return every registration of a target."""


class Learned:
    """The learned state of all models.

    - `rates`: the speed of workers.
    - `predictions`: TTFT and TPOT by these rates.
    - `outputs`: the length of answers.
    - `turns`: the turns of sessions.
    - `pressure`: the price of evictions.
    - `session_locations`: the targets to which sessions return.
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
        self.session_locations = SessionLocations(clock)
        self._clock = clock
        self._next_reading = 0.0

    def timing(self, chosen: Candidate, tokens: int) -> RequestTiming:
        """Return a timing of the streamed answer to a prompt of `tokens` tokens that is sent now."""
        return RequestTiming(self, chosen, tokens, self._clock)

    def forget(self, worker: str) -> None:
        """Forget a worker that was removed."""
        self.rates.forget(worker)
        self.predictions.forget(worker)
        self.session_locations.forget(worker)

    def seconds_per_token(self) -> float:
        """Return the mean seconds in which workers compute a token of a prompt."""
        return self.rates.mean_token()

    def read_evictions(self, index: EvictionCounts, now: float | None = None) -> None:
        """Read the evicted tokens of all targets that have an event stream, at most once a second.

        - `now`: the clock's time, if it was just read.
        """
        if now is None:
            now = self._clock()
        if now < self._next_reading:
            return
        self._next_reading = now + _READ_SECONDS
        removed: dict[Target, int] = {}
        for registration in index.registered():
            status = index.index.status(registration.target) if registration.source else None
            if status is not None:
                removed[registration.target] = status.counters.removed * max(status.block_sizes, default=0)
        self.pressure.removed(removed)


class RequestTiming:
    """The times of one streamed answer, from which rates are learned.

    The first byte measures the prefill only if no other prompt waited at the target.
    """

    def __init__(self, learned: Learned, chosen: Candidate, tokens: int, clock: Callable[[], float]) -> None:
        self.learned = learned
        self.chosen = chosen
        self.tokens = tokens
        self.clock = clock
        self.sent = clock()
        self.begun: float | None = None

    def first_byte(self) -> None:
        """Learn from the first byte of the answer. Only the first call counts."""
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
        """Learn from the complete answer of `output_tokens` tokens."""
        if self.begun is None:
            return
        now = self.clock()
        chosen = self.chosen
        context = chosen.context + self.tokens + output_tokens // 2
        rates = self.learned.rates.learner(chosen.target.worker, chosen.target.model)
        rates.decode_seen(output_tokens - 1, chosen.requests + 1, context, now - self.begun, now)
        self.learned.outputs.seen(chosen.target.model, output_tokens)
