"""HTTP/1.1 as uvicorn and httptools read it, with bounds on the head of a request: the way without the fast lane."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from router.http.deadline import Deadline
from router.http.target import without_root
from router.server.half_closed import probe
from router.server.head_limiter import TOO_LARGE, HeadLimiter, check_head
from router.server.request_parser import RequestParser


class BoundedHttpProtocol(HttpToolsProtocol):
    """Closes connections whose next request takes too long to say what it is, and refuses heads that are too large."""

    _unreadable: str | None = None  # why what follows cannot be read
    _running: RequestResponseCycle | None = None  # the request that is answered; `cycle` is the last one that came

    def __init__(self, root_path: bytes, **given: Any) -> None:
        """`root_path`: what may stand before every path. `given`: by uvicorn."""
        super().__init__(**given)
        self._root_path = root_path

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.parser = RequestParser(self, lambda: self.headers)  # type: ignore[assignment]  # it has what is asked of it
        self._deadline = Deadline(self.loop, transport.close)
        self._limiter = HeadLimiter(self._deadline)
        self._limiter.begin()

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.close()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        before = self._limiter.size
        super().data_received(data)
        if not self.transport.is_closing() and not self._limiter.fits(before, len(data)):
            self.send_400_response(TOO_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._limiter.begin()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._limiter.add(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._limiter.add(len(name) + len(value) + len(b": \r\n"))
        if self._limiter.reading:  # else it is a trailer, and no header
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._limiter.end()
        if self._root_path:
            self.url = without_root(self.url, self._root_path)
        check_head(self.url, self.parser.get_http_version(), self.headers)
        last = self.cycle
        super().on_headers_complete()
        if last is None or last.response_complete:
            self._running = self.cycle

    def send_400_response(self, msg: str) -> None:
        """Refuse what came, once all that came whole before it is answered."""
        if self._owes_answer:
            self._unreadable = msg
            self.flow.pause_reading()
        else:
            super().send_400_response(msg)

    def eof_received(self) -> bool:  # type: ignore[override]
        if not self._owes_answer:
            return False
        self._drop_incomplete()
        self.cycle.keep_alive = False
        return probe(self.loop, self.transport, self._running is not None and self._running.response_started)

    def shutdown(self) -> None:
        if self._owes_answer:
            self._drop_incomplete()
            super().shutdown()
        else:
            self.transport.close()  # if anything is there, who knows when the rest of it comes

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._running = self.pipeline[-1][0]
        super().on_response_complete()
        if self._unreadable is not None and not self._owes_answer and not self.transport.is_closing():
            super().send_400_response(self._unreadable)

    @property
    def _owes_answer(self) -> bool:
        """Whether a request that came whole is not answered yet."""
        waiting = (self._running, *(cycle for cycle, _ in self.pipeline))
        return any(cycle is not None and not cycle.response_complete and not cycle.more_body for cycle in waiting)

    def _drop_incomplete(self) -> None:
        """Forget the last request where it did not come whole: the one before it is the last, then."""
        if self.pipeline and self._running is not None and self.cycle.more_body:
            self.pipeline.popleft()
            self.cycle = self.pipeline[0][0] if self.pipeline else self._running
