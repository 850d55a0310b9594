"""The access log: one line per request with its worker, its status and its duration, and no part of its prompt."""

from __future__ import annotations

import time
from collections.abc import Iterable

import structlog

log = structlog.get_logger()

# The routing headers of a response, and their names in the log.
_CHOICE = {
    b"x-kvrouter-worker": "worker",
    b"x-kvrouter-dp-rank": "dp_rank",
    b"x-kvrouter-overlap-tokens": "overlap",
}


class AccessLine:
    """The log line of one request, from its arrival to its end."""

    def __init__(self, method: str, path: str) -> None:
        """Begin a line. `path` is without the query, which may contain anything."""
        self._arrived = time.monotonic()
        self._fields: dict[str, object] = {"method": method, "path": path, "status": None}
        self._sent = 0

    def head(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Record the head of the response."""
        self._fields["status"] = status
        self._fields |= {_CHOICE[name]: value.decode() for name, value in headers if name in _CHOICE}

    def passed(self, size: int) -> None:
        """Record that `size` bytes of the response's body were sent."""
        if size and not self._sent:
            self._fields["first_byte_ms"] = self._ms()
        self._sent += size

    def write(self, **fields: str) -> None:
        """Write the line. If the client disconnected before a response, there is no status."""
        log.info("request", **self._fields, bytes=self._sent, ms=self._ms(), **fields)

    def _ms(self) -> float:
        return round((time.monotonic() - self._arrived) * 1000, 1)
