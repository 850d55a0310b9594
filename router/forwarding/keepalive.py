"""Comments in a stream while its engine is silent, so that load balancers do not cut it (`proxy.keepalive_interval`).

The head of the response is sent with the first comment, before a worker has answered. Head and comments are no answer:
the request can still be sent to another worker. What fails afterwards is an error event of the request's API.
"""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from http_api.errors import RequestError
from kvevents.decoding import read_json
from router.apis.endpoints import error_event, event_of_error, is_anthropic
from router.forwarding.exchange import ChunkWriter, ResponseWriter, RoutingHeaders
from router.forwarding.retries import broken_off
from router.http.compression import Decompressor
from router.http.headers import ResponseHead

_HEAD: Final = ResponseHead(
    200, [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
)
_COMMENT: Final = b": keep-alive\n\n"
_PING: Final = b'event: ping\ndata: {"type": "ping"}\n\n'
_OK: Final = 200
# Bytes of a worker's error that are kept.
_MOST_OF_AN_ERROR: Final = 1024 * 1024
# The endings of events. A blank line in a chunk of its own may belong to an incomplete event.
_EVENT_ENDS: Final = (b"\n\n", b"\r\n\r\n")
_CHUNK_ENDS: Final = (b"\n\n\r\n", b"\r\n\r\n\r\n")
_LONE_LINE_END: Final = b"\r\n\n\r\n"


class KeepaliveWriter(ResponseWriter):
    """A response to a client that receives a comment whenever nothing was written for `interval` seconds.

    - `begun`: the head was sent.
    """

    __slots__ = (
        "_between_events",
        "_client",
        "_decompressor",
        "_early",
        "_interval",
        "_loop",
        "_path",
        "_status",
        "_timer",
        "_whole",
        "_written_at",
        "begun",
    )

    def __init__(
        self, client: ResponseWriter, path: str, interval: float, loop: asyncio.AbstractEventLoop, arrived: float
    ) -> None:
        """Create the writer over the client's own one. `arrived`: when the silence began, by the clock of the loop."""
        self.begun = False
        self._client = client
        self._path = path
        self._interval = interval
        self._loop = loop
        self._early = False  # the head was sent before a worker's
        self._status = _OK
        self._whole: bytes | None = None  # the beginning of a response that is not a stream, behind an early head
        self._decompressor: Decompressor | None = None
        self._between_events = True
        self._written_at = arrived
        self._timer: asyncio.TimerHandle | None = None
        self._wait()

    def stop(self) -> None:
        """Write no more comments, because the request has ended."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def begin(self, head: ResponseHead, ours: RoutingHeaders | None, data: bytes, ended: bool) -> None:
        if not self._early:
            self.begun = True
            if ended or not head.is_stream or head.length or head.compressed:
                self.stop()
            self._client.begin(head, ours, data, ended)
            self._wrote(data)
            return
        if head.compressed:
            self._decompressor = Decompressor()
        if not (head.is_stream and head.status == _OK):
            self._status, self._whole = head.status, b""
        self.more(data, ended)

    def more(self, data: bytes, ended: bool) -> None:
        if self._decompressor is not None:
            data = self._decompressor.read(data)
        if self._whole is not None:
            self._whole = (self._whole + data)[:_MOST_OF_AN_ERROR]
            if not ended:
                return
            data = self._event(self._whole)
        if ended:
            self.stop()
        self._client.more(data, ended)
        self._wrote(data)

    def chunks(self) -> ChunkWriter | None:
        chunks = self._client.chunks()
        return None if chunks is None else _WatchedChunks(self, chunks)

    def break_off(self) -> None:
        self.stop()
        if self._whole is None:
            self._client.break_off()
        else:
            self._client.more(error_event(self._path, broken_off()), True)

    def wrote_chunks(self, chunks: bytes) -> None:
        """Record complete chunks that were written to the client."""
        self._written_at = self._loop.time()
        self._between_events = chunks.endswith(_CHUNK_ENDS) and not chunks.endswith(_LONE_LINE_END)

    def _wrote(self, data: bytes) -> None:
        if data:
            self._written_at = self._loop.time()
            self._between_events = data.endswith(_EVENT_ENDS)

    def _wait(self) -> None:
        self._timer = self._loop.call_at(self._written_at + self._interval, self._check)

    def _check(self) -> None:
        """Write a comment if nothing was written for the interval, unless an event is incomplete."""
        now = self._loop.time()
        if now >= self._written_at + self._interval:
            if not self.begun:
                self.begun = self._early = True
                self._client.begin(_HEAD, None, b"", False)
            if self._between_events:
                self._client.comment(_PING if is_anthropic(self._path) else _COMMENT)
            self._written_at = now
        self._wait()

    def _event(self, body: bytes) -> bytes:
        """Return the event for a whole body that is not a stream: an error, or an answer that was not streamed."""
        try:
            answer = read_json(body)
        except msgspec.DecodeError:
            answer = None
        if isinstance(answer, dict) and (self._status < 400 or "error" in answer):
            data = msgspec.json.encode(answer)
            return b"data: " + data + b"\n\n" if self._status < 400 else event_of_error(self._path, data)
        text = body.decode(errors="replace").strip() or f"The worker answered with status {self._status}."
        return error_event(self._path, RequestError(text, status=self._status, type="upstream_error"))


class _WatchedChunks:
    """Writes chunks, and shows them to a `KeepaliveWriter`."""

    __slots__ = ("_chunks", "_owner")

    def __init__(self, owner: KeepaliveWriter, chunks: ChunkWriter) -> None:
        self._owner = owner
        self._chunks = chunks

    def write(self, data: bytes) -> None:
        self._chunks.write(data)
        self._owner.wrote_chunks(data)
