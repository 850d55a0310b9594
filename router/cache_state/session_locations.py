"""Where sessions that were said to go on have their prefix, so that it is kept for them while their tools run.

    wanted(w)   tokens of such sessions' last prompts on w; of capacity(w) at most, since more cannot be kept there
    weight(w) = 1 + STEEP · (wanted(w) - mean of the model's targets) / capacity(w)      at least 0

What evicting costs on a target is weighted by this: what many will come back for is dear, what nobody wants is cheap.
Without a word of any session every weight is 1. A session's location is wanted from its request on until the next one
comes, or twice the pause that was announced, an hour at most, has passed since the answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Final, TypeAlias

from indexer import Target

STEEP: Final = 2.0
# Seconds that a location is kept after the answer: so many times the pause that was announced, and some more.
_PAUSES: Final = 2.0
_SHORTEST: Final = 5.0
_DEFAULT_PAUSE: Final = 60.0
_LONGEST: Final = 3600.0  # whatever is announced: to announce costs nothing
_MOST_LOCATIONS: Final = 1 << 16

# What a session is known by: the salt of its prompts, and its name.
SessionKey: TypeAlias = tuple[str | None, str]


class SessionLocation:
    """One session's. `until`: when it is not wanted any more; None while a request of it is in flight."""

    __slots__ = ("_locations", "key", "pause", "target", "tokens", "until")

    def __init__(self, locations: SessionLocations, key: SessionKey, target: Target, tokens: int, pause: float) -> None:
        self._locations = locations
        self.key = key
        self.target = target
        self.tokens = tokens
        self.pause = pause
        self.until: float | None = None

    def __call__(self, failed: bool = False) -> None:
        """The request ended: the tool runs now. `failed`: it was not computed there."""
        self._locations.answered(self, failed)


class SessionLocations:
    """The locations of the sessions that were said to go on, the last `_MOST_LOCATIONS` of them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._locations: dict[SessionKey, SessionLocation] = {}
        self._retained: dict[Target, int] = {}
        self._retained_of_model: dict[str, int] = {}
        self._due: list[tuple[float, int, SessionLocation]] = []
        self._numbers = count()

    def __len__(self) -> int:
        """How many there are."""
        return len(self._locations)

    def record(self, key: SessionKey, target: Target, tokens: int, next_call: float | None) -> SessionLocation:
        """A session's request with a prompt of `tokens` goes to a target, and it comes back `next_call` seconds after
        the answer, if that is known. Returns what to call when the request ended."""
        self.drop(key)
        pause = _DEFAULT_PAUSE if next_call is None else min(max(_PAUSES * next_call, _SHORTEST), _LONGEST)
        location = self._locations[key] = SessionLocation(self, key, target, tokens, pause)
        self._count(location, tokens)
        if len(self._locations) > _MOST_LOCATIONS:
            self.drop(next(iter(self._locations)))
        return location

    def drop(self, key: SessionKey) -> None:
        """A session's location is not wanted any more."""
        location = self._locations.pop(key, None)
        if location is not None:
            self._count(location, -location.tokens)

    def answered(self, location: SessionLocation, failed: bool) -> None:
        """The request that a location was made by has ended."""
        if self._locations.get(location.key) is not location or location.until is not None:
            return
        if failed:
            self.drop(location.key)
            return
        location.until = self._clock() + location.pause
        heappush(self._due, (location.until, next(self._numbers), location))
        if len(self._due) > 2 * _MOST_LOCATIONS:  # most of them are locations that sessions have left since
            self._due = [each for each in self._due if self._locations.get(each[2].key) is each[2]]
            heapify(self._due)

    def expire(self, now: float) -> None:
        """Let go of the locations of sessions that did not come back. `now`: by the clock."""
        while self._due and self._due[0][0] <= now:
            location = heappop(self._due)[2]
            if self._locations.get(location.key) is location:
                self.drop(location.key)

    def forget(self, worker: str) -> None:
        """A worker is gone, or holds nothing any more."""
        for key in [key for key, location in self._locations.items() if location.target.worker == worker]:
            self.drop(key)

    def retained_tokens(self, target: Target) -> int:
        """Tokens on a target that sessions will come back for."""
        return self._retained.get(target, 0)

    def get(self, key: SessionKey) -> Target | None:
        """Where a session has its location, if it has one."""
        location = self._locations.get(key)
        return None if location is None else location.target

    def weight(self, target: Target, targets: int, capacity: int | None) -> float:
        """What evicting there costs, compared with elsewhere: see above.

        `targets`: how many the model has; `capacity`: tokens that this one can hold, None: not known.
        """
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
