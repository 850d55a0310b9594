"""One line in the log for every request: where it went, what came of it, and how long it took. No word of a prompt."""

from __future__ import annotations

import time
from collections.abc import Iterable

import structlog

log = structlog.get_logger()

# What the proxy tells clients of its choice, under the names the log has for it.
_CHOICE = {
    b"x-kvrouter-worker": "worker",
    b"x-kvrouter-dp-rank": "dp_rank",
    b"x-kvrouter-overlap-tokens": "overlap",
}


class AccessLine:
    """The line of one request, from its arrival to its end."""

    def __init__(self, method: str, path: str) -> None:
        """`path` without its query, which may hold anything."""
        self._arrived = time.monotonic()
        self._fields: dict[str, object] = {"method": method, "path": path, "status": None}
        self._sent = 0

    def head(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """The head of the answer is sent."""
        self._fields["status"] = status
        self._fields |= {_CHOICE[name]: value.decode() for name, value in headers if name in _CHOICE}

    def passed(self, size: int) -> None:
        """This many bytes of the answer's body are sent."""
        if size and not self._sent:
            self._fields["first_byte_ms"] = self._ms()
        self._sent += size

    def write(self, **fields: str) -> None:
        """The request is over; clients that left before an answer have no status."""
        log.info("request", **self._fields, bytes=self._sent, ms=self._ms(), **fields)

    def _ms(self) -> float:
        return round((time.monotonic() - self._arrived) * 1000, 1)
