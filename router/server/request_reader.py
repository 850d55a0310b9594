"""Reads a client's requests from the bytes of its connection, and passes each part on to the connection.

httptools parses the bytes, and refuses ambiguous heads: several lengths, a length beside a transfer coding, bare CR or
LF. The rules of `router.http.strict_requests`, and limits of a head's size and duration, are checked after them. A head
that was parsed before is recognized by its bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Set as AbstractSet
from typing import Final
from urllib.parse import unquote

import httptools

from router.forwarding.request_context import RequestHead
from router.http.event_loop import Deadline
from router.http.headers import LENGTH, Headers, length_of
from router.http.strict_requests import head_problem, without_root
from router.http.unparsed import CachedHead, RecentHeads
from router.server.request_parser import RequestParser

HEAD_BYTES = 64 * 1024
HEAD_SECONDS = 30.0
TOO_LARGE: Final = "Request header fields too large."


class RefusedRequestError(Exception):
    """A request that is refused with status 400. httptools turns it into a parser's error."""


class HeadLimiter:
    """Counts the bytes of the current head, and sets the deadline for it. `reading`: it is awaited or incomplete."""

    __slots__ = ("_deadline", "_size", "reading")

    def __init__(self, deadline: Deadline) -> None:
        self.reading = False
        self._size = 0
        self._deadline = deadline

    def begin(self) -> None:
        """Await a head, or count from its first bytes."""
        if not self.reading:
            self.reading = True
            self._deadline.set(HEAD_SECONDS)
        self._size = 0

    def add(self, size: int) -> None:
        """Count `size` parsed bytes of the head, or of a trailer. Raises RefusedRequestError."""
        self._size += size
        if self._size > HEAD_BYTES:
            raise RefusedRequestError("the head is too large")

    def end(self) -> None:
        """End the head: it is complete."""
        self.reading = False
        self._deadline.clear()

    @property
    def size(self) -> int:
        """The number of bytes of an incomplete head; 0 between two heads."""
        return self._size if self.reading else 0

    def fits(self, before: int, came: int) -> bool:
        """Return whether an incomplete head is within its limit: `came` bytes after `before` bytes."""
        if not self.reading:
            return True
        self._size = before + came
        return self._size <= HEAD_BYTES


def check_head(target: bytes, version: str, headers: Headers) -> None:
    """Raise RefusedRequestError for a head that another parser could read differently."""
    if problem := head_problem(target, version, headers):
        raise RefusedRequestError(problem)


class IncomingRequest:
    """A request that is being received. Names of headers are in lower case.

    - `body`: the received parts of its body, while it is within its limit.
    - `repeated_head`: its head, if its client is likely to send that again.
    """

    __slots__ = (
        "body",
        "complete",
        "expects_continue",
        "headers",
        "keep_alive",
        "method",
        "repeated_head",
        "size",
        "target",
        "version",
    )

    def __init__(self) -> None:
        self.method = b""
        self.target = b""
        self.version = ""
        self.headers: Headers = []
        self.body: list[bytes] = []
        self.size = 0
        self.keep_alive = False
        self.expects_continue = False
        self.complete = False
        self.repeated_head: RequestHead | None = None

    def make_head(self, repeated_paths: AbstractSet[bytes]) -> RequestHead:
        """Return its head. Keep it in `repeated_head` if the request is a POST to one of `repeated_paths`."""
        path, _, query = self.target.partition(b"?")
        decoded = path.decode("latin-1")
        head = RequestHead(
            self.method.decode("latin-1"),
            unquote(decoded) if "%" in decoded else decoded,
            self.target if query else path,  # an empty query is dropped
            self.headers,
        )
        if self.method == b"POST" and path in repeated_paths:
            self.repeated_head = head
        return head

    @property
    def has_body(self) -> bool:
        """The head announces a body."""
        return self.announced_size() > 0 or any(name == b"transfer-encoding" for name, _ in self.headers)

    def announced_size(self) -> int:
        """Return the bytes of the body that the head announces; 0 without a length."""
        for name, value in self.headers:
            if name == LENGTH:
                return length_of(value)
        return 0

    def take_body(self) -> bytes:
        """Return the received body, and release it: a connection keeps its last request until the next."""
        parts, self.body = self.body, []
        return parts[0] if len(parts) == 1 else b"".join(parts)


_INVALID = "Invalid HTTP request received."

_log = logging.getLogger("uvicorn.error")


class RequestReceiver:
    """A connection that receives requests. By default it ignores them."""

    def head_read(self, request: IncomingRequest) -> None:
        """Called with a request's head, or with the whole request if that has no body."""

    def body_read(self, request: IncomingRequest, data: bytes) -> None:
        """Called with the next part of a request's body."""

    def request_read(self, request: IncomingRequest) -> None:
        """Called when the whole of a request with a body was received."""

    def refuse_rest(self, problem: str) -> None:
        """Called when the received bytes cannot be parsed. All later bytes are ignored."""


class RequestReader:
    """Reads the requests of one connection. Its `on_` methods are the callbacks of httptools."""

    __slots__ = ("_cached", "_limiter", "_parser", "_receiver", "_recent", "_request", "_root_path")

    def __init__(
        self,
        receiver: RequestReceiver,
        recent: RecentHeads[RequestHead],
        deadline: Deadline,
        root_path: bytes = b"",
    ) -> None:
        """Create a reader. `recent`: the heads of recent requests, shared by all connections."""
        self._receiver = receiver
        self._root_path = root_path
        self._recent = recent
        self._limiter = HeadLimiter(deadline)
        self._cached: CachedHead[RequestHead] | None = (
            None  # of the connection's last request that was received at once
        )
        self._parser: RequestParser | None = None  # made for the first head that is not known
        self._request: IncomingRequest | None = None  # what the parser read last

    def begin(self) -> None:
        """Await the first head."""
        self._limiter.begin()

    def close(self) -> None:
        """Release the connection."""
        self._parser = self._request = None
        self._receiver = RequestReceiver()

    def read_known(self, data: bytes) -> tuple[RequestHead, bytes] | None:
        """Return head and body, if `data` is one whole request with a cached head. Its connection stays open."""
        if self._request is not None and not self._request.complete:
            return None
        cached = self._cached
        body = None if cached is None else cached.read(data)
        if body is None:
            read = self._recent.read(data)
            if read is None:
                return None
            cached, body = read
            self._cached = cached
        assert cached is not None
        self._limiter.end()
        return cached.parsed, body

    def parse(self, data: bytes) -> None:
        """Parse received bytes, and call the receiver for each part."""
        last, before = self._request, self._limiter.size
        parser = self._parser
        if parser is None:
            parser = self._parser = RequestParser(self, lambda: self._current.headers)
        try:
            parser.feed_data(data)
        except httptools.HttpParserError:
            _log.warning(_INVALID)
            self._receiver.refuse_rest(_INVALID)
        if not self._limiter.fits(before, len(data)):
            self._receiver.refuse_rest(TOO_LARGE)
        elif last is None or last.complete:
            self._remember(data, last)

    def _remember(self, data: bytes, last: IncomingRequest | None) -> None:
        request = self._request
        if request is None or request is last or request.repeated_head is None:
            return
        if request.complete and request.keep_alive:
            known = CachedHead.of(data, request.repeated_head.without_length())
            if known is not None:
                self._cached = self._recent.add(known)

    # What httptools calls

    def on_message_begin(self) -> None:
        self._request = IncomingRequest()
        self._limiter.begin()

    def on_url(self, url: bytes) -> None:
        self._current.target += url
        self._limiter.add(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._limiter.add(len(name) + len(value) + len(b": \r\n"))
        if self._limiter.reading:  # else it is a trailer
            self._current.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        request, parser = self._current, self._parser
        assert parser is not None
        self._limiter.end()
        request.method = parser.get_method()
        request.version = parser.get_http_version()
        if self._root_path:
            request.target = without_root(request.target, self._root_path)
        check_head(request.target, request.version, request.headers)
        request.keep_alive = parser.should_keep_alive() and request.version == "1.1"
        request.expects_continue = any(
            name == b"expect" and value.lower() == b"100-continue" for name, value in request.headers
        )
        if request.has_body:
            self._receiver.head_read(request)

    def on_body(self, body: bytes) -> None:
        self._receiver.body_read(self._current, body)

    def on_message_complete(self) -> None:
        request = self._current
        request.complete = True
        if request.has_body:
            self._receiver.request_read(request)
        else:
            self._receiver.head_read(request)

    @property
    def _current(self) -> IncomingRequest:
        assert self._request is not None
        return self._request
