"""HTTP/1.1 as uvicorn and httptools read it, with bounds: on the size of a request's head, and on how long it takes.

httptools refuses what could be read in two ways: several lengths, a length beside a transfer coding, bare CR or LF.
Refused here besides: what `router.http.strict_head` names.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router.http.deadline import Deadline
from router.http.strict_head import head_problem
from router.server.half_closed import probe

HEAD_BYTES = 64 * 1024
HEAD_SECONDS = 30.0


class RefusedRequestError(Exception):
    """A request that is not read any further."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """Closes connections whose next request takes too long to say what it is, and refuses heads that are too large."""

    _unreadable: str | None = None  # why what follows cannot be read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._reading_head = True
        self._head_bytes = 0
        self._deadline = Deadline(self.loop, self._late)
        self._deadline.set(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.close()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        before = self._head_bytes
        super().data_received(data)
        # The parser keeps a header to itself until it is complete.
        if self._reading_head and not self.transport.is_closing():
            self._head_bytes = before + len(data)
            if self._head_bytes > HEAD_BYTES:
                self._refuse_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begin_head()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + len(b": \r\n"))
        if self._reading_head:  # else it is a trailer, and no header
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._end_head()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        if self._owes_answers:
            self._unreadable = msg
            self.flow.pause_reading()
        else:
            super().send_400_response(msg)

    def eof_received(self) -> bool:  # type: ignore[override]
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body:
            return False
        cycle.keep_alive = False
        return probe(self.loop, self.transport, cycle.response_started)

    def shutdown(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete and self.cycle.more_body:
            self.transport.close()  # who knows when the rest comes
        else:
            super().shutdown()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._refuse_the_rest()

    def _refuse_the_rest(self) -> None:
        """Say that what came after the last request could not be read, once all before it is answered."""
        if self._unreadable is not None and not self._owes_answers and not self.transport.is_closing():
            super().send_400_response(self._unreadable)

    @property
    def _owes_answers(self) -> bool:
        """Whether a request that came whole is not answered yet."""
        return self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body

    def _begin_head(self) -> None:
        if not self._reading_head:
            self._reading_head = True
            self._deadline.set(HEAD_SECONDS)
        self._head_bytes = 0

    def _end_head(self) -> None:
        self._reading_head = False
        self._deadline.clear()
        if problem := head_problem(self.url, self.parser.get_http_version(), self.headers):
            raise RefusedRequestError(problem)

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > HEAD_BYTES:
            raise RefusedRequestError("the head is too large")  # httptools makes a parser's error of it: 400

    def _refuse_head(self) -> None:
        self.send_400_response("Request header fields too large.")

    def _late(self) -> None:
        self.transport.close()
