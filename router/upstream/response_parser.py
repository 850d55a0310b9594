"""The responses on one connection, parsed by llhttp.

llhttp, in httptools, refuses ambiguous responses: several lengths, a length beside a transfer coding, bare line feeds,
folded headers. The parser skips 1xx responses, trailers, and everything after the response.

    WAITING ──▶ HEAD ──▶ BODY ──▶ COMPLETE ──▶ FOLLOWED
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

import httptools

from router.http.headers import WITHOUT_BODY, Headers, ResponseHead

# Limit for the head of a response with 1xx heads before it, and for its trailers.
MAX_HEAD_BYTES: Final = 64 * 1024
_HIGHEST_STATUS: Final = 599  # RFC 9110, 15


class ResponsePhase(Enum):
    """The progress of a response. WAITING: no byte was received. FOLLOWED: more bytes follow the complete response."""

    WAITING = auto()
    HEAD = auto()
    BODY = auto()
    COMPLETE = auto()
    FOLLOWED = auto()


class Framing(Enum):
    """The end of a body: the end of the connection, or its own framing, after which it is closed or kept."""

    UNTIL_CLOSE = auto()
    THEN_CLOSE = auto()
    KEEP_ALIVE = auto()


# Constants, because the lookup of an enumeration's member is slow.
_HEAD: Final = ResponsePhase.HEAD
_BODY: Final = ResponsePhase.BODY
_COMPLETE: Final = ResponsePhase.COMPLETE


class _RefusedAnswerError(Exception):
    """A response that is not parsed further."""


class ResponseParser:
    """A parser of consecutive responses. `between_chunks`: the last parsed byte is the end of a chunk."""

    __slots__ = (
        "_framed",
        "_head_bytes",
        "_headers",
        "_llhttp",
        "_pieces",
        "_status",
        "_to_head",
        "_trailer_bytes",
        "between_chunks",
        "framing",
        "phase",
    )

    def __init__(self) -> None:
        self._llhttp: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self.expect(to_head=False)

    def expect(self, to_head: bool) -> None:
        """Prepare for the next response. `to_head`: the request was HEAD, so there is no body."""
        self.phase = _HEAD
        self.framing = Framing.UNTIL_CLOSE
        self.between_chunks = False
        self._status = 0
        self._headers: Headers = []
        self._pieces: list[bytes] = []
        self._framed = False
        self._to_head = to_head
        self._head_bytes = self._trailer_bytes = 0

    def close(self) -> None:
        """Break the reference cycle between llhttp and this object."""
        self._llhttp = None

    def feed(self, data: bytes) -> str | None:
        """Parse more bytes. Return the problem if the response cannot be parsed further, else None."""
        llhttp = self._llhttp
        assert llhttp is not None
        if self.phase is _HEAD:
            self._head_bytes += len(data)
        try:
            llhttp.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            return f"not HTTP: {error.__context__ or error}"
        # llhttp reports a header only when it is complete.
        if self.phase is _HEAD and self._head_bytes > MAX_HEAD_BYTES:
            return "the head is too large"
        return None

    @property
    def keeps_alive(self) -> bool:
        """True if another request may be sent on the connection after this response."""
        return self.framing is Framing.KEEP_ALIVE and self.phase is not ResponsePhase.FOLLOWED

    def head(self) -> ResponseHead:
        return ResponseHead(self._status, self._headers, self.framing is not Framing.KEEP_ALIVE)

    def take_body(self) -> bytes:
        """Return the bytes of the body since the last call."""
        pieces = self._pieces
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        return body

    # httptools

    def on_message_begin(self) -> None:
        if self.phase is _COMPLETE:
            self.phase = ResponsePhase.FOLLOWED

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.phase is not _HEAD:  # a header of the trailers, or of a second response
            self._trailer_bytes += _size((name, value))
            if self._trailer_bytes > MAX_HEAD_BYTES:
                raise _RefusedAnswerError("the trailers are too large")
            return
        name = name.lower()
        if name == b"content-length":
            self._framed = True
        elif name == b"transfer-encoding":
            if value.lower() != b"chunked":
                raise _RefusedAnswerError("an unsupported transfer coding")
            self._framed = True
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self.phase is not _HEAD:
            return
        llhttp = self._llhttp
        assert llhttp is not None
        status = llhttp.get_status_code()
        if status < 200:
            if status == 101:
                raise _RefusedAnswerError("an unexpected switch of protocols")
            self._headers = []
            self._framed = False
            return
        if status > _HIGHEST_STATUS:
            raise _RefusedAnswerError(f"a status of {status}")
        if self._head_bytes > MAX_HEAD_BYTES and sum(map(_size, self._headers)) > MAX_HEAD_BYTES:
            raise _RefusedAnswerError("the head is too large")
        self._status = status
        if self._to_head:  # llhttp would wait for a body
            self.framing, self.phase = Framing.THEN_CLOSE, _COMPLETE
            return
        self.phase = _BODY
        if self._framed or status in WITHOUT_BODY:
            self.framing = Framing.KEEP_ALIVE if llhttp.should_keep_alive() else Framing.THEN_CLOSE

    def on_body(self, data: bytes) -> None:
        if self.phase is _BODY:
            self._pieces.append(data)

    def on_chunk_header(self) -> None:
        self.between_chunks = False

    def on_chunk_complete(self) -> None:
        self.between_chunks = True

    def on_message_complete(self) -> None:
        self.between_chunks = False
        if self.phase is _BODY:
            self.phase = _COMPLETE


def _size(header: tuple[bytes, bytes]) -> int:
    return len(header[0]) + len(header[1]) + len(b": \r\n")
