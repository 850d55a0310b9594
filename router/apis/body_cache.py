"""Parsed requests of identical bodies: the request and its tokens are reused.

Samples of one prompt, health checks and benchmarks repeat a body byte for byte. The next turn of a conversation is a
different body and is parsed from its start.

A body is kept from its second occurrence on. Most bodies occur once, and would evict those that repeat.
"""

from __future__ import annotations

from array import array
from threading import Lock

from xxhash import xxh3_64_intdigest

from router.apis.requests import RoutedRequest

CACHE_BYTES = 64 * 2**20
# Estimated memory of a cached request: a constant, and a multiple of its body.
_OBJECTS_BYTES = 4000
_TIMES_BYTES = 4
# Slots for the keys of bodies that occurred once; a newer key replaces an older one.
_KEYS = 2**14


def body_key(body: bytes) -> int:
    """Return the hash by which a body is looked up."""
    return xxh3_64_intdigest(body)


class BodyCache:
    """Parsed requests by path and body, in two generations. It can be used by several threads."""

    def __init__(self, limit_bytes: int = CACHE_BYTES) -> None:
        self._limit = limit_bytes // 2
        self._latest: dict[int, tuple[str, bytes, RoutedRequest]] = {}
        self._before: dict[int, tuple[str, bytes, RoutedRequest]] = {}
        self._bytes = 0  # of `_latest`
        self._came = array("Q", bytes(8 * _KEYS))
        self._lock = Lock()

    @property
    def size(self) -> int:
        """The largest number of bytes that the cached requests occupy."""
        return self._bytes + (self._limit if self._before else 0)

    def get(self, key: int, path: str, body: bytes) -> RoutedRequest | None:
        """Return the parsed request of an identical body; None if it is not cached. `key` is the body's hash."""
        known = self._latest.get(key)
        if known is None:
            known = self._before.get(key)
            if known is not None:
                self._keep(key, *known)
        if known is None or known[1] != body or known[0] != path:
            return None
        return known[2]

    def put(self, key: int, path: str, body: bytes, request: RoutedRequest) -> None:
        """Cache a request whose body occurs for the second time, if there is room."""
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
