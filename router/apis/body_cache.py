"""Requests that came before, byte for byte: what was read of them, and the tokens they became, are used again.

Samples of one prompt, health checks and benchmarks send the same body many times. A conversation's next turn is another
body, and is read from its start: that takes less time than to find out how far it is the same.

Most bodies come once. They are not kept: they would drive out those that come again, and memory that is used again at
once is in the processor's caches.
"""

from __future__ import annotations

from array import array
from threading import Lock

from xxhash import xxh3_64_intdigest

from router.apis.requests import RoutedRequest

CACHE_BYTES = 64 * 2**20
# What a request takes beside its body, and how many times the body what was read of it takes.
_OBJECTS_BYTES = 4000
_TIMES_BYTES = 4
# Of bodies that came once the keys are kept, each in a place of its own until another takes it.
_KEYS = 2**14


def body_key(body: bytes) -> int:
    """What a body is looked up by."""
    return xxh3_64_intdigest(body)


class BodyCache:
    """Requests by path and body: those that came lately, and as many from before. Any number of threads may use one."""

    def __init__(self, limit_bytes: int = CACHE_BYTES) -> None:
        self._limit = limit_bytes // 2
        self._latest: dict[int, tuple[str, bytes, RoutedRequest]] = {}
        self._before: dict[int, tuple[str, bytes, RoutedRequest]] = {}
        self._bytes = 0  # of the latest
        self._came = array("Q", bytes(8 * _KEYS))
        self._lock = Lock()

    @property
    def size(self) -> int:
        """What they take at most, in bytes."""
        return self._bytes + (self._limit if self._before else 0)

    def get(self, key: int, path: str, body: bytes) -> RoutedRequest | None:
        """What was read of the same body, if it is known. `key`: that of the body."""
        known = self._latest.get(key)
        if known is None:
            known = self._before.get(key)
            if known is not None:
                self._keep(key, *known)
        if known is None or known[1] != body or known[0] != path:
            return None
        return known[2]

    def put(self, key: int, path: str, body: bytes, request: RoutedRequest) -> None:
        """Remember a request that comes for the second time, as far as there is room for it."""
        place = key % _KEYS
        if self._came[place] == key:
            self._keep(key, path, body, request)
        else:
            self._came[place] = key

    def _keep(self, key: int, path: str, body: bytes, request: RoutedRequest) -> None:
        size = _OBJECTS_BYTES + _TIMES_BYTES * len(body)
        with self._lock:
            if self._bytes + size > self._limit:
                self._before, self._latest, self._bytes = self._latest, {}, 0
            if size <= self._limit:
                self._latest[key] = (path, body, request)
                self._bytes += size
