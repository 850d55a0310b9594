"""What an answer says of where it came from."""

from __future__ import annotations

from typing import Final

from router.http.headers import Headers, lines_of
from router.http.origin import without_credentials

# The line of each worker: the same ones come again and again. At most `_MOST` are kept.
_LINES: Final[dict[str, bytes]] = {}
_MOST: Final = 4096


class RoutingHeaders:
    """Where a request went: the worker, the tokens that it had cached, and more where it is unusual."""

    __slots__ = ("_more", "_overlap", "_worker")

    def __init__(self, worker: str, overlap: int) -> None:
        self._worker = without_credentials(worker)
        self._overlap = overlap
        self._more: Headers | None = None

    @property
    def worker(self) -> str:
        """Where it went."""
        return self._worker

    def add(self, name: bytes, value: bytes) -> None:
        """Say this besides."""
        if self._more is None:
            self._more = []
        self._more.append((name, value))

    def headers(self) -> Headers:
        """The headers that say so."""
        said = [
            (b"x-kvrouter-worker", self._worker.encode()),
            (b"x-kvrouter-overlap-tokens", b"%d" % self._overlap),
        ]
        return said + self._more if self._more else said

    def lines(self) -> bytes:
        """The same as they are sent."""
        line = _LINES.get(self._worker)
        if line is None:
            if len(_LINES) >= _MOST:
                _LINES.clear()
            line = _LINES[self._worker] = (
                b"x-kvrouter-worker: %b\r\nx-kvrouter-overlap-tokens: " % self._worker.encode()
            )
        lines = line + str(self._overlap).encode() + b"\r\n"
        return lines + lines_of(self._more) if self._more else lines
