"""Where sessions that were said to go on have their prefix, so that it is kept for them while their tools run.

    wanted(w)   tokens of such sessions' last prompts on w; of capacity(w) at most, since more cannot be kept there
    weight(w) = 1 + STEEP · (wanted(w) - mean of the model's targets) / capacity(w)      at least 0

What evicting costs on a target is weighted by this: what many will come back for is dear, what nobody wants is cheap.
Without a word of any session every weight is 1. A session's place is wanted from its request on until the next one
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
# Seconds that a place is kept after the answer: so many times the pause that was announced, and some more.
_PAUSES: Final = 2.0
_LEAST: Final = 5.0
_NOT_TOLD: Final = 60.0
_LONGEST: Final = 3600.0  # whatever is announced: to announce costs nothing
_MOST_PLACES: Final = 1 << 16

# What a session is known by: the salt of its prompts, and its name.
SessionKey: TypeAlias = tuple[str | None, str]


class Place:
    """One session's. `until`: when it is not wanted any more; None while a request of it is in flight."""

    __slots__ = ("_places", "key", "pause", "target", "tokens", "until")

    def __init__(self, places: SessionLocations, key: SessionKey, target: Target, tokens: int, pause: float) -> None:
        self._places = places
        self.key = key
        self.target = target
        self.tokens = tokens
        self.pause = pause
        self.until: float | None = None

    def __call__(self, failed: bool = False) -> None:
        """The request ended: the tool runs now. `failed`: it was not computed there."""
        self._places.answered(self, failed)


class SessionLocations:
    """The places of the sessions that were said to go on, the last `_MOST_PLACES` of them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._places: dict[SessionKey, Place] = {}
        self._wanted: dict[Target, int] = {}
        self._of_model: dict[str, int] = {}
        self._due: list[tuple[float, int, Place]] = []
        self._numbers = count()

    def __len__(self) -> int:
        """How many there are."""
        return len(self._places)

    def keep(self, key: SessionKey, target: Target, tokens: int, next_call: float | None) -> Place:
        """A session's request with a prompt of `tokens` goes to a target, and it comes back `next_call` seconds after
        the answer, if that is known. Returns what to call when the request ended."""
        self.leave(key)
        pause = _NOT_TOLD if next_call is None else min(max(_PAUSES * next_call, _LEAST), _LONGEST)
        place = self._places[key] = Place(self, key, target, tokens, pause)
        self._count(place, tokens)
        if len(self._places) > _MOST_PLACES:
            self.leave(next(iter(self._places)))
        return place

    def leave(self, key: SessionKey) -> None:
        """A session's place is not wanted any more."""
        place = self._places.pop(key, None)
        if place is not None:
            self._count(place, -place.tokens)

    def answered(self, place: Place, failed: bool) -> None:
        """The request that a place was made by has ended."""
        if self._places.get(place.key) is not place or place.until is not None:
            return
        if failed:
            self.leave(place.key)
            return
        place.until = self._clock() + place.pause
        heappush(self._due, (place.until, next(self._numbers), place))
        if len(self._due) > 2 * _MOST_PLACES:  # most of them are places that sessions have left since
            self._due = [each for each in self._due if self._places.get(each[2].key) is each[2]]
            heapify(self._due)

    def expire(self, now: float) -> None:
        """Let go of the places of sessions that did not come back. `now`: by the clock."""
        while self._due and self._due[0][0] <= now:
            place = heappop(self._due)[2]
            if self._places.get(place.key) is place:
                self.leave(place.key)

    def forget(self, worker: str) -> None:
        """A worker is gone, or holds nothing any more."""
        for key in [key for key, place in self._places.items() if place.target.worker == worker]:
            self.leave(key)

    def wanted(self, target: Target) -> int:
        """Tokens on a target that sessions will come back for."""
        return self._wanted.get(target, 0)

    def of(self, key: SessionKey) -> Target | None:
        """Where a session has its place, if it has one."""
        place = self._places.get(key)
        return None if place is None else place.target

    def weight(self, target: Target, targets: int, capacity: int | None) -> float:
        """What evicting there costs, compared with elsewhere: see above.

        `targets`: how many the model has; `capacity`: tokens that this one can hold, None: not known.
        """
        if not self._places or not capacity:
            return 1.0
        mean = min(self._of_model.get(target.model, 0) / targets, capacity)
        return max(1 + STEEP * (min(self.wanted(target), capacity) - mean) / capacity, 0.0)

    def _count(self, place: Place, tokens: int) -> None:
        target = place.target
        left = self._wanted.get(target, 0) + tokens
        if left:
            self._wanted[target] = left
        else:
            self._wanted.pop(target, None)
        self._of_model[target.model] = self._of_model.get(target.model, 0) + tokens
