"""What an answer says of where it came from."""

from __future__ import annotations

from router.fleet.worker import Worker
from router.http.headers import Headers, lines_of


class RoutingHeaders:
    """Where a request went: the worker, the tokens that it had cached, and more where it is unusual."""

    __slots__ = ("_more", "_overlap", "_worker")

    def __init__(self, worker: Worker, overlap: int) -> None:
        self._worker = worker
        self._overlap = overlap
        self._more: Headers | None = None

    @property
    def worker(self) -> str:
        """Where it went, by name."""
        return self._worker.name

    def add(self, name: bytes, value: bytes) -> None:
        """Say this besides."""
        if self._more is None:
            self._more = []
        self._more.append((name, value))

    def headers(self) -> Headers:
        """The headers that say so."""
        said = [
            (b"x-kvrouter-worker", self._worker.name.encode()),
            (b"x-kvrouter-overlap-tokens", b"%d" % self._overlap),
        ]
        return said + self._more if self._more else said

    def lines(self) -> bytes:
        """The same as they are sent."""
        lines = self._worker.routing_line + str(self._overlap).encode() + b"\r\n"
        return lines + lines_of(self._more) if self._more else lines
