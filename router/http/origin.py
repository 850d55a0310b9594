"""Where a worker listens, and the head of a request to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from yarl import URL

_METHODS_WITH_BODY: Final = frozenset(("POST", "PUT", "PATCH"))
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Origin:
    """A worker's address: what its URL says. `path` stands before every target."""

    tls: bool
    host: str
    port: int
    path: bytes
    host_header: bytes

    @classmethod
    def of(cls, url: str) -> Origin:
        """The origin of a worker's URL."""
        read = URL(url)
        host, port = read.host or "", read.port or _PORTS[read.scheme]
        named = f"[{host}]" if ":" in host else host
        return cls(
            read.scheme == "https",
            host,
            port,
            read.raw_path.rstrip("/").encode(),
            (named if port == _PORTS[read.scheme] else f"{named}:{port}").encode(),
        )

    def opening(self, method: str, target: bytes, lines: bytes) -> bytes:
        """What a request's head begins with. `lines`: the headers that are about the message; more may follow."""
        return b"%b %b%b HTTP/1.1\r\nhost: %b\r\n%b" % (method.encode(), self.path, target, self.host_header, lines)


def end_of_head(method: str, body_bytes: int) -> bytes:
    """What the head of a request ends with, for a body of this size."""
    if body_bytes or method in _METHODS_WITH_BODY:
        return b"content-length: %b\r\n\r\n" % str(body_bytes).encode()
    return b"\r\n"
