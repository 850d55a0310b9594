"""httptools' parser of requests, for a service that speaks HTTP/1.1 alone: a wish for another protocol is passed over.

llhttp takes a request with `Upgrade` to end at its head, and what follows to be the other protocol. Clients send that
header with whole requests (Java's with every one, for HTTP/2): RFC 9110, 7.8 has a server ignore it, which means that
the body is the request's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import httptools

from router.http.headers import Headers


class RequestEvents(Protocol):
    """The callbacks of the parser, as httptools names them."""

    def on_message_begin(self) -> None: ...
    def on_url(self, url: bytes) -> None: ...
    def on_header(self, name: bytes, value: bytes) -> None: ...
    def on_headers_complete(self) -> None: ...
    def on_body(self, body: bytes) -> None: ...
    def on_message_complete(self) -> None: ...


class RequestParser:
    """Parses the requests of a connection. `headers` returns the current request's, with names in lower case."""

    def __init__(self, events: RequestEvents, headers: Callable[[], Headers]) -> None:
        self._events = events
        self._headers = headers
        self._parser = self._new_parser(_Events(events, self))

    def feed_data(self, data: bytes) -> None:
        """Parse received bytes. Raises httptools.HttpParserError."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            rest = data[upgrade.args[0] :]
            self._go_on()
            if rest:
                self.feed_data(rest)

    def get_method(self) -> bytes:
        method: bytes = self._parser.get_method()
        return method

    def get_http_version(self) -> str:
        return self._parser.get_http_version()

    def should_keep_alive(self) -> bool:
        return self._parser.should_keep_alive()

    def should_upgrade(self) -> bool:
        """Return False: requests for another protocol are served as HTTP/1.1."""
        return False

    def body_follows(self) -> bool:
        """Return whether a request with `Upgrade`, which llhttp ends at its head, has a body."""
        return self._parser.should_upgrade() and bool(self._framing())

    def _framing(self) -> bytes:
        for name, value in self._headers():
            if (name == b"content-length" and value.strip() != b"0") or name == b"transfer-encoding":
                return b"%b: %b\r\n" % (name, value)
        return b""

    def _go_on(self) -> None:
        """Parse the rest of a request with `Upgrade` with a new parser, after a head that frames the body equally."""
        framing, keep_alive = self._framing(), self._parser.should_keep_alive()
        events = _Events(self._events, self, muted=bool(framing))
        self._parser = self._new_parser(events)
        if framing:
            connection = b"" if keep_alive else b"Connection: close\r\n"
            self._parser.feed_data(b"POST / HTTP/1.1\r\n%b%b\r\n" % (framing, connection))
            events.muted = False

    @staticmethod
    def _new_parser(events: _Events) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(events)
        # Answer a request although more follows it that it said would not: uvicorn does.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser


class _Events:
    """Forwards the parser's callbacks, except while `muted`: then the parser reads a head that the server wrote."""

    def __init__(self, events: RequestEvents, parser: RequestParser, muted: bool = False) -> None:
        self._events = events
        self._parser = parser
        self.muted = muted
        heard = self._unless_muted if muted else (lambda call: call)
        self.on_message_begin = heard(events.on_message_begin)
        self.on_url = heard(events.on_url)
        self.on_header = heard(events.on_header)
        self.on_headers_complete = heard(events.on_headers_complete)
        self.on_body = events.on_body

    def on_message_complete(self) -> None:
        if not self._parser.body_follows():
            self._events.on_message_complete()

    def _unless_muted(self, call: Callable[..., None]) -> Callable[..., None]:
        def unless_muted(*parts: bytes) -> None:
            if not self.muted:
                call(*parts)

        return unless_muted
