"""What was seen before and begins as something new does, found at once: a conversation's next turn begins as its last.

Each thing is remembered under a few of its characters at certain places. What has the same characters at one of them,
looked at from the last place to the first, may begin alike; whether it does is for the finder to see, by a comparison
that is the C library's. Of several things that begin alike the one is found that was remembered last.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, TypeAlias

# The places: some near the start, then every so many characters.
_FIRST_PLACES = (1024, 2048, 4096)
_STEP = 8192
_CHARACTERS = 32
# So many things that only seemed to begin alike are looked at.
_TRIES = 4
# What it takes to remember something under one place.
_PLACE_BYTES = 300

_Key: TypeAlias = tuple[int, str | bytes]
# What was seen, with what was made of it: it has a `whole`, a text or the bytes, and a `size`, in bytes, about.
Known: TypeAlias = Any
Found: TypeAlias = Any


class _Entry:
    """Something known, and the keys of its places, from the first on."""

    def __init__(self, known: Known, keys: list[_Key], size: int) -> None:
        self.known = known
        self.keys = keys
        self.bytes = size


class PrefixCache:
    """Things seen before, the least recently used forgotten first. Any number of threads may use one."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._by_place: dict[_Key, Known] = {}
        self._entries: OrderedDict[int, _Entry] = OrderedDict()  # by the id of what is known
        self._lock = Lock()
        self.bytes = 0

    def find(self, whole: str | bytes, begun: Callable[[Known], Found]) -> Found:
        """What `begun` makes of something that may begin as this does, the further the better.

        It makes None of what does not; that is also the answer when nothing is known to.
        """
        tried: list[Known] = []
        for place in reversed(_places(whole)):
            known = self._by_place.get((place, whole[place - _CHARACTERS : place]))
            if known is None or known in tried:
                continue
            found = begun(known)
            if found is not None:
                with self._lock:
                    if id(known) in self._entries:
                        self._entries.move_to_end(id(known))
                return found
            tried.append(known)
            if len(tried) == _TRIES:
                break
        return None

    def put(self, new: Known, like: Known = None, common: int = 0, *, instead: bool = False) -> None:
        """Remember something, as far as there is room for it.

        `like`: something known, whose first `common` characters are those of the new; it is forgotten if nobody needs
        it any more beside the new, which then stands `instead` of it.
        """
        with self._lock:
            old = self._entries.get(id(like))
            whole, places = new.whole, _places(new.whole)
            keys = old.keys[: bisect_right(places, common)] if old else []
            keys += [(place, whole[place - _CHARACTERS : place]) for place in places[len(keys) :]]
            entry = _Entry(new, keys, new.size + _PLACE_BYTES * len(keys))
            if entry.bytes > self._limit:
                return
            self._by_place.update(dict.fromkeys(keys, new))
            self._entries[id(new)] = entry
            self.bytes += entry.bytes
            if instead and old:
                self._forget(old)
            while self.bytes > self._limit:
                self._forget(next(iter(self._entries.values())))

    def __len__(self) -> int:
        """The number of things."""
        return len(self._entries)

    def _forget(self, entry: _Entry) -> None:
        known = entry.known
        del self._entries[id(known)]
        self.bytes -= entry.bytes
        for key in entry.keys:
            if self._by_place.get(key) is known:
                del self._by_place[key]


def common_places(new: Any, known: Any, places: Sequence[int], count: int, beyond: int = 0) -> int:
    """How many of the first `count` places, which grow, lie in what two things begin with alike, and so much `beyond`.

    Nothing is compared twice, but where it differs.
    """
    low, high, alike = 0, count, 0
    middle = max(count - 2, 0)  # what goes on from another mostly differs in its end alone
    while low < high:
        end = places[middle] + beyond
        if new.startswith(known[alike:end], alike):
            low, alike = middle + 1, end
        else:
            high = middle
        middle = (low + high) // 2
    return low


def _places(whole: str | bytes) -> list[int]:
    length = len(whole)
    return [*(place for place in _FIRST_PLACES if place <= length), *range(_STEP, length + 1, _STEP)]
