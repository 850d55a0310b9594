"""What was seen before and begins as something new does, found at once: a conversation's next turn begins as its last.

Each thing is remembered under a few of its characters at certain places. What has the same characters at one of them
is compared up to there, by the C library, from the last place to the first. So of several things that begin alike the
one is found that was remembered last, and what they have in common beyond that place is for the finder to see.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import Generic, Protocol, TypeVar

Whole = TypeVar("Whole", str, bytes)

# The places: some near the start, then every so many characters.
_FIRST_PLACES = (1024, 2048, 4096)
_STEP = 8192
_CHARACTERS = 32
# What it takes to remember something under one place.
_PLACE_BYTES = 300


class Remembered(Protocol[Whole]):
    """A text or the bytes that were seen, with what was made of it. `size` in bytes, about."""

    whole: Whole
    size: int


Known = TypeVar("Known", bound=Remembered)  # type: ignore[type-arg]


class Beginnings(Generic[Known]):
    """Things seen before, the least recently used forgotten first. Any number of threads may use one."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._by_place: dict[tuple[int, str | bytes], Known] = {}
        self._known: OrderedDict[int, Known] = OrderedDict()  # by id
        self._lock = Lock()
        self.bytes = 0

    def find(self, whole: str | bytes) -> Known | None:
        """Something that begins as this does, the further the better; None when nothing is known to."""
        with self._lock:
            for place in reversed(_places(whole)):
                known = self._by_place.get((place, whole[place - _CHARACTERS : place]))
                if known is not None and whole.startswith(known.whole[:place]):
                    self._known.move_to_end(id(known))
                    return known
        return None

    def put(self, new: Known, instead_of: Known | None = None) -> None:
        """Remember something, as far as there is room for it; and forget what nobody needs any more beside it."""
        whole = new.whole
        with self._lock:
            size = _size(new)
            if size <= self._limit:
                for place in _places(whole):
                    self._by_place[place, whole[place - _CHARACTERS : place]] = new
                self._known[id(new)] = new
                self.bytes += size
            if instead_of is not None:
                self._forget(instead_of)
            while self.bytes > self._limit:
                self._forget(next(iter(self._known.values())))

    def __len__(self) -> int:
        """The number of things."""
        return len(self._known)

    def _forget(self, known: Known) -> None:
        if self._known.pop(id(known), None) is None:
            return
        self.bytes -= _size(known)
        whole = known.whole
        for place in _places(whole):
            key = place, whole[place - _CHARACTERS : place]
            if self._by_place.get(key) is known:
                del self._by_place[key]


def _places(whole: str | bytes) -> list[int]:
    length = len(whole)
    return [*(place for place in _FIRST_PLACES if place <= length), *range(_STEP, length + 1, _STEP)]


def _size(known: Known) -> int:
    return known.size + _PLACE_BYTES * len(_places(known.whole))
