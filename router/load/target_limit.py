"""The limit of a DP rank that computes itself: how many requests and tokens its engine can run at once.

    memory   the most tokens that running requests will need at once: their prompts, shared prefixes once, and their
             answers up to their expected length. At most `_USABLE` of the KV cache. Each preemption lowers the share,
             and it recovers slowly
    slots    the requests that the engine runs while others wait although it has memory. One more may be sent, so that
             the next one begins at once when one ends, and so that an engine that can run more shows it

The router's own counts decide. The engine's metrics, which lag, only correct them: by the memory that requests of other
clients use, and by preemptions. What an engine does not report is no limit. If it does not report its queue, late first
bytes show that requests wait there.
"""

from __future__ import annotations

from math import inf
from typing import Final

from router.fleet.engine_metrics import EngineView

# The share of the KV cache that requests may need, because the lengths of answers are only expected.
_USABLE: Final = 0.95
# The factor by which a preemption lowers that share, its lowest value, and the share that it recovers each second.
_LOWERED: Final = 0.9
_LEAST_USABLE: Final = 0.5
_RECOVERED: Final = 0.002
# The seconds after which a lowered share has an effect. Preemptions until then do not lower it again.
_EFFECT_SECONDS: Final = 10.0
# The share of the KV cache in use up to which requests wait in the engine for slots, and not for memory.
_ROOM: Final = 0.9
# The weight of an answer in the mean speed of answers.
_ANSWER_WEIGHT: Final = 0.05
# A first byte is late by this factor of its prediction, and by these seconds. From then on one request may wait for its
# first byte, and a tenth more with each one in time.
_LATE: Final = 2.0
_LATE_SECONDS: Final = 1.0
_MORE_UNANSWERED: Final = 0.1
# The factors by which `delay` changes with each scrape, and its highest value. Without streamed answers no rates are
# learned, so that predictions are those of the settings.
_SLOWER: Final = 1.25
_FASTER: Final = 0.98
_SLOWEST: Final = 16.0
# The number of scrapes in a row that show the same number of running requests while others wait.
_STEADY: Final = 3


def late_seconds(predicted: float) -> float:
    """Return the seconds after which a first byte is late. `predicted`: those of all prompts until then."""
    return max(_LATE * predicted, _LATE_SECONDS)


def peak_tokens(running: list[tuple[float, float]]) -> int:
    """Return the most tokens that requests hold at once until they end, if all generate tokens at one rate.

    - `running`: the tokens that each will generate, and those that it holds now.
    """
    peak = held = 0.0
    for count, (left, holds) in enumerate(sorted(running, reverse=True), 1):
        held += holds
        peak = max(peak, held + count * left)  # just before this one ends, the longer ones are still there
    return int(peak)


class TargetLimit:
    """The limit of a DP rank.

    - `slots`: the most requests that it runs; None if that is not known.
    - `capacity`: the tokens that its KV cache holds; None if that is not known.
    - `memory`: the tokens that its requests may need; None without a `capacity`.
    - `unanswered`: the most requests that may wait for a first byte, if its engine reports no limit.
    - `delay`: the factor by which prefills exceed their prediction, as the queue of its engine shows.
    - `token_seconds`: the seconds in which its answers grow by a token; 0 if that is not known.
    """

    def __init__(self) -> None:
        self.slots: int | None = None
        self.capacity: int | None = None
        self.memory: int | None = None
        self.unanswered = inf
        self.delay = 1.0
        self.token_seconds = 0.0
        self._usable = _USABLE
        self._unseen = 0  # tokens of requests that no router sent
        self._preemptions: int | None = None
        self._running = 0
        self._steady = 0
        self._read_at = 0.0
        self._lowered_at = -inf

    def discovered(self, capacity: int | None) -> None:
        """Take the tokens that the KV cache holds from the description of a worker, until its metrics are read."""
        if self.capacity is None and capacity is not None and not self._read_at:
            self.capacity, self.memory = capacity, int(_USABLE * capacity)

    def read(self, engine: EngineView, capacity: int | None, needed: int, now: float) -> None:
        """Read what an engine reports.

        - `capacity`: the tokens that its KV cache holds.
        - `needed`: the tokens that requests of all routers need.
        - `now`: in seconds of any clock.
        """
        self._usable = min(self._usable + _RECOVERED * max(now - self._read_at, 0.0), _USABLE)
        self._read_at = now
        preempted = self._preemptions is not None and engine.preemptions > self._preemptions
        self._preemptions = engine.preemptions
        if preempted and now >= self._lowered_at + _EFFECT_SECONDS:
            self._usable, self._lowered_at = max(self._usable * _LOWERED, _LEAST_USABLE), now
        self.capacity = capacity
        if capacity is None:
            self.memory = None
        else:
            used = int((engine.kv_usage or 0.0) * capacity)
            self._unseen = max(used - needed, 0) if engine.unseen else 0
            self.memory = int(self._usable * capacity) - self._unseen
        self._read_slots(engine)

    def _read_slots(self, engine: EngineView) -> None:
        running = engine.running
        if self.slots is not None and running > self.slots:
            self.slots = None  # they were seen while something else limited the engine
        waits_for_slot = bool(engine.queue) and (engine.kv_usage or 0.0) < _ROOM
        self._steady = self._steady + 1 if waits_for_slot and running == self._running else int(waits_for_slot)
        self._running = running
        if self._steady >= _STEADY and running:
            self.slots = running

    def first_byte(self, late: bool) -> None:
        """Learn from a first byte how many requests may wait for theirs."""
        self.unanswered = 1.0 if late else self.unanswered + _MORE_UNANSWERED

    def delayed(self, queues: bool) -> None:
        """Learn how long prefills take. `queues`: several of them wait in the engine."""
        self.delay = min(self.delay * _SLOWER, _SLOWEST) if queues else max(self.delay * _FASTER, 1.0)

    def generated(self, seconds: float) -> None:
        """Learn the speed of answers from the seconds between the tokens of one."""
        known = self.token_seconds
        self.token_seconds = known + _ANSWER_WEIGHT * (seconds - known) if known else seconds

    def has_slot(self, requests: float) -> bool:
        """Return whether one more request may be sent to the engine, which has this number of them."""
        return self.slots is None or requests <= self.slots
