"""The targets that hold the prefixes of sessions which continue, so that these prefixes are kept while tools run.

    retained(w)  tokens of these sessions' last prompts on w; at most capacity(w), because more cannot be kept there
    weight(w)  = 1 + STEEP · (retained(w) - mean of the model's targets) / capacity(w)      at least 0

The cost of an eviction on a target is multiplied by its weight. So evictions are expensive where many sessions return,
and cheap where none does. If no agent announces anything, every weight is 1.

A session's tokens are retained from its request until its next request. They are released earlier if twice the
announced pause has passed since the answer, and after an hour at the latest.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Final, TypeAlias

from indexer import Target

STEEP: Final = 2.0
# A location is kept for this multiple of the announced pause, in seconds within these bounds.
_PAUSES: Final = 2.0
_SHORTEST: Final = 5.0
_LONGEST: Final = 3600.0  # a bound, because announcing a long pause costs the agent nothing
# The seconds that it is kept if no pause is announced.
_DEFAULT_PAUSE: Final = 60.0
_MOST_LOCATIONS: Final = 1 << 16

# The key of a session: the salt of its prompts, and its name.
SessionKey: TypeAlias = tuple[str | None, str]


class SessionLocation:
    """The target and the tokens of one session. Call it when the session's request ends.

    - `pause`: the seconds that the location is kept after the answer.
    """

    __slots__ = ("_locations", "key", "pause", "target", "tokens", "until")

    def __init__(self, locations: SessionLocations, key: SessionKey, target: Target, tokens: int, pause: float) -> None:
        self._locations = locations
        self.key = key
        self.target = target
        self.tokens = tokens
        self.pause = pause
        self.until: float | None = None

    def __call__(self, failed: bool = False) -> None:
        """End the session's request. `failed`: the target did not compute it."""
        self._locations.answered(self, failed)


class SessionLocations:
    """The locations of the last `_MOST_LOCATIONS` sessions that continue."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._locations: dict[SessionKey, SessionLocation] = {}
        self._retained: dict[Target, int] = {}
        self._retained_of_model: dict[str, int] = {}
        self._due: list[tuple[float, int, SessionLocation]] = []
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._locations)

    def record(self, key: SessionKey, target: Target, tokens: int, next_call: float | None) -> SessionLocation:
        """Record that a session's request is sent to a target. Returns the callback for the end of the request.

        - `next_call`: the announced seconds from the answer to the session's next request; None: not announced.
        """
        self.drop(key)
        pause = _DEFAULT_PAUSE if next_call is None else min(max(_PAUSES * next_call, _SHORTEST), _LONGEST)
        location = self._locations[key] = SessionLocation(self, key, target, tokens, pause)
        self._count(location, tokens)
        if len(self._locations) > _MOST_LOCATIONS:
            self.drop(next(iter(self._locations)))
        return location

    def drop(self, key: SessionKey) -> None:
        """Drop the location of a session that ends or moves."""
        location = self._locations.pop(key, None)
        if location is not None:
            self._count(location, -location.tokens)

    def answered(self, location: SessionLocation, failed: bool) -> None:
        """Start the pause of a session whose request ended, or drop its location if the request `failed`."""
        if self._locations.get(location.key) is not location or location.until is not None:
            return
        if failed:
            self.drop(location.key)
            return
        location.until = self._clock() + location.pause
        heappush(self._due, (location.until, next(self._numbers), location))
        if len(self._due) > 2 * _MOST_LOCATIONS:  # most of them were dropped before they were due
            self._due = [each for each in self._due if self._locations.get(each[2].key) is each[2]]
            heapify(self._due)

    def expire(self, now: float) -> None:
        """Drop the locations of sessions that have not returned in time. `now`: the clock's time."""
        while self._due and self._due[0][0] <= now:
            location = heappop(self._due)[2]
            if self._locations.get(location.key) is location:
                self.drop(location.key)

    def forget(self, worker: str) -> None:
        """Drop all locations on a worker that was removed or whose cache was reset."""
        for key in [key for key, location in self._locations.items() if location.target.worker == worker]:
            self.drop(key)

    def retained_tokens(self, target: Target) -> int:
        """Return the tokens on a target that sessions will return for."""
        return self._retained.get(target, 0)

    def get(self, key: SessionKey) -> Target | None:
        """Return the target that holds a session's prefix; None if there is no location."""
        location = self._locations.get(key)
        return None if location is None else location.target

    def weight(self, target: Target, targets: int, capacity: int | None) -> float:
        """Return the factor for an eviction's cost on one of `targets` targets. `capacity`: its tokens, if known."""
        if not self._locations or not capacity:
            return 1.0
        mean = min(self._retained_of_model.get(target.model, 0) / targets, capacity)
        return max(1 + STEEP * (min(self.retained_tokens(target), capacity) - mean) / capacity, 0.0)

    def _count(self, location: SessionLocation, tokens: int) -> None:
        target = location.target
        retained = self._retained.get(target, 0) + tokens
        if retained:
            self._retained[target] = retained
        else:
            self._retained.pop(target, None)
        self._retained_of_model[target.model] = self._retained_of_model.get(target.model, 0) + tokens
