"""The interface between a client's connection and the request that it received.

- `ServedRequest`: the request, which the connection starts, pauses and cancels.
- `ResponseWriter`: the connection, to which the request writes its response.
- `RoutingHeaders`: the headers of a response that name its worker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from mypy_extensions import mypyc_attr, trait

from router.fleet.worker import Worker
from router.http.headers import Headers, ResponseHead, lines_of
from router.http.websocket import WebSocketPeer


class RoutingHeaders:
    """The routing headers of a response: the worker, its cached tokens, and more in unusual cases."""

    __slots__ = ("_more", "_overlap", "_worker")

    def __init__(self, worker: Worker, overlap: int) -> None:
        self._worker = worker
        self._overlap = overlap
        self._more: Headers | None = None

    @property
    def worker(self) -> str:
        """The worker's name."""
        return self._worker.name

    def add(self, name: bytes, value: bytes) -> None:
        if self._more is None:
            self._more = []
        self._more.append((name, value))

    def headers(self) -> Headers:
        lines = [
            (b"x-kvrouter-worker", self._worker.name.encode()),
            (b"x-kvrouter-overlap-tokens", b"%d" % self._overlap),
        ]
        return lines + self._more if self._more else lines

    def lines(self) -> bytes:
        """Return the encoded headers."""
        lines = self._worker.routing_line + str(self._overlap).encode() + b"\r\n"
        return lines + lines_of(self._more) if self._more else lines


class ChunkWriter(Protocol):
    """The receiver of complete chunks in HTTP/1.1 framing."""

    def write(self, data: bytes) -> object:
        """Send these chunks."""


@mypyc_attr(allow_interpreted_subclasses=True)
class ResponseWriter:
    """The writer of a response to its client. It pauses, resumes and cancels the request."""

    __slots__ = ()

    def begin(self, head: ResponseHead, ours: RoutingHeaders | None, data: bytes, ended: bool) -> None:
        """Write the head with any routing headers, and the first bytes of the body. If `ended`, a length is added."""
        raise NotImplementedError

    def more(self, data: bytes, ended: bool) -> None:
        """Write more of the body."""
        raise NotImplementedError

    def comment(self, data: bytes) -> None:
        """Write bytes of a stream's body that count as nothing in logs."""
        raise NotImplementedError

    def chunks(self) -> ChunkWriter | None:
        """Return a receiver of complete chunks; None if the response is not sent in chunks."""
        return None

    def switch(
        self,
        lines: Headers,
        ours: RoutingHeaders,
        peer: WebSocketPeer,
        on_stop: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        """Answer with 101 and these headers, and hand the connection over to a peer.

        - `on_stop`: called when the server stops.
        - `on_end`: called when the connection is closed.
        """
        raise NotImplementedError

    def break_off(self) -> None:
        """Close the connection, because the response will not be completed."""
        raise NotImplementedError


@trait
class ServedRequest:
    """A received request. After `start` it answers by the `ResponseWriter` it was made with."""

    def start(self, body: bytes) -> None:
        """Called when the request is complete."""
        raise NotImplementedError

    def client_disconnected(self) -> None:
        """Called when the client disconnects."""
        raise NotImplementedError

    def pause(self) -> None:
        """Called when the client stops reading."""
        raise NotImplementedError

    def resume(self) -> None:
        """Called when the client continues reading."""
        raise NotImplementedError

    @property
    def answering(self) -> bool:
        """True if a part of the response was forwarded."""
        raise NotImplementedError
