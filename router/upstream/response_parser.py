"""The answers that come over one connection, read by llhttp.

llhttp, by httptools, refuses what can be read in two ways: several lengths, a length beside a transfer coding, bare
line feeds, folded headers. Left out here: answers of 1xx, trailers, and what follows an answer.

    WAITING ──▶ HEAD ──▶ BODY ──▶ COMPLETE ──▶ FOLLOWED
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

import httptools

from router.http.headers import WITHOUT_BODY, Headers, ResponseHead

# Of an answer: of its head, those of 1xx before it, and its trailers.
MAX_HEAD_BYTES: Final = 64 * 1024
_HIGHEST_STATUS: Final = 599  # RFC 9110, 15


class ResponsePhase(Enum):
    """How far an answer has come. WAITING: no byte of it came. FOLLOWED: it is complete, and more came behind it."""

    WAITING = auto()
    HEAD = auto()
    BODY = auto()
    COMPLETE = auto()
    FOLLOWED = auto()


class Framing(Enum):
    """What ends a body: the end of the connection, or its own framing, after which the connection closes or stays."""

    UNTIL_CLOSE = auto()
    THEN_CLOSE = auto()
    KEEP_ALIVE = auto()


# Members of an enumeration are looked up in it each time.
_HEAD: Final = ResponsePhase.HEAD
_BODY: Final = ResponsePhase.BODY
_COMPLETE: Final = ResponsePhase.COMPLETE


class _RefusedAnswerError(Exception):
    """An answer that is not read any further."""


class ResponseParser:
    """Reads one answer after the other. `between_chunks`: the last thing that was read is a chunk's end."""

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
        """The next answer comes. `to_head`: it is to a HEAD request, and has no body whatever it says."""
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
        """Nothing more comes. llhttp and this object know each other."""
        self._llhttp = None

    def feed(self, data: bytes) -> str | None:
        """Read on; why the answer cannot be read any further, if it cannot."""
        llhttp = self._llhttp
        assert llhttp is not None
        if self.phase is _HEAD:
            self._head_bytes += len(data)
        try:
            llhttp.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            return f"not HTTP: {error.__context__ or error}"
        # llhttp keeps a header to itself until it is complete.
        if self.phase is _HEAD and self._head_bytes > MAX_HEAD_BYTES:
            return "the head is too large"
        return None

    @property
    def keeps_alive(self) -> bool:
        """True if another request may follow on the connection once the answer is complete."""
        return self.framing is Framing.KEEP_ALIVE and self.phase is not ResponsePhase.FOLLOWED

    def head(self) -> ResponseHead:
        """The head, once it is read."""
        return ResponseHead(self._status, self._headers)

    def take_body(self) -> bytes:
        """What came of the body since the last call."""
        pieces = self._pieces
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        return body

    # httptools

    def on_message_begin(self) -> None:
        if self.phase is _COMPLETE:
            self.phase = ResponsePhase.FOLLOWED

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.phase is not _HEAD:  # a trailer, or a second answer's
            self._trailer_bytes += _size((name, value))
            if self._trailer_bytes > MAX_HEAD_BYTES:
                raise _RefusedAnswerError("the trailers are too large")
            return
        name = name.lower()
        if name == b"content-length":
            self._framed = True
        elif name == b"transfer-encoding":
            if value.lower() != b"chunked":
                raise _RefusedAnswerError("a transfer coding that was not asked for")
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
                raise _RefusedAnswerError("a switch of protocols that was not asked for")
            self._headers = []
            self._framed = False
            return
        if status > _HIGHEST_STATUS:
            raise _RefusedAnswerError(f"a status of {status}")
        if self._head_bytes > MAX_HEAD_BYTES and sum(map(_size, self._headers)) > MAX_HEAD_BYTES:
            raise _RefusedAnswerError("the head is too large")
        self._status = status
        if self._to_head:  # llhttp waits for a body that will not come
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
