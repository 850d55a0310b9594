"""What an answer says of where it came from."""

from __future__ import annotations

from typing import Final

from router.upstream.origin import Headers, lines_of

# The line of each worker: the same ones come again and again. So many are kept.
_LINES: Final[dict[str, bytes]] = {}
_MOST: Final = 4096


class Whereabouts:
    """Where a request went: to a worker, for so many tokens that it had cached. `more`: headers for what is unusual."""

    __slots__ = ("more", "overlap", "worker")

    def __init__(self, worker: str, overlap: int, more: Headers | None = None) -> None:
        self.worker = worker
        self.overlap = overlap
        self.more = more

    def headers(self) -> Headers:
        """The headers that say so."""
        said = [
            (b"x-kvrouter-worker", self.worker.encode()),
            (b"x-kvrouter-overlap-tokens", b"%d" % self.overlap),
        ]
        return said + self.more if self.more else said

    def lines(self) -> bytes:
        """The same as they are sent."""
        line = _LINES.get(self.worker)
        if line is None:
            if len(_LINES) >= _MOST:
                _LINES.clear()
            line = _LINES[self.worker] = b"x-kvrouter-worker: %b\r\nx-kvrouter-overlap-tokens: " % self.worker.encode()
        lines = line + str(self.overlap).encode() + b"\r\n"
        return lines + lines_of(self.more) if self.more else lines
