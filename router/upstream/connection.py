"""One connection to a worker: a request at a time, and its answer as it comes.

llhttp, by httptools, reads the answer and refuses what can be read in two ways: several lengths, a length beside a
transfer coding, bare line feeds, folded headers. Left out here: answers of 1xx, trailers, and what follows an answer.
Where llhttp stands between two chunks it need not see those that come whole: they change nothing of where it stands.
Nor need it see a head that it has read before, until something comes that is no whole chunk.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Final

import httptools
from mypy_extensions import mypyc_attr

from router.http.cached_head import CachedHead, HeadPrefix, head_size
from router.http.chunks import END, LAST, body_of, body_size
from router.http.deadline import Deadline
from router.http.headers import Headers
from router.http.response_head import WITHOUT_BODY, ResponseHead

if TYPE_CHECKING:
    from router.upstream.pool import Upstream, UpstreamRequest

# Of an answer: of its head, those of 1xx before it, and its trailers.
MAX_HEAD_BYTES: Final = 64 * 1024
_HIGHEST_STATUS: Final = 599  # RFC 9110, 15
_QUICKACK: Final[int] = getattr(socket, "TCP_QUICKACK", -1)  # Linux alone has it


class UpstreamError(Exception):
    """A worker's answer did not come, or not to its end."""


class UnreachableError(UpstreamError):
    """No connection could be made."""


class UpstreamTimeoutError(UpstreamError):
    """A worker said nothing for too long."""


class _RefusedAnswerError(Exception):
    """An answer that is not read any further."""


@mypyc_attr(allow_interpreted_subclasses=True)
class ResponseHandler:
    """Who gets an answer. After `ended` or `failed`, or once it called off the request, nothing more is called."""

    __slots__ = ()

    def answered(self, head: ResponseHead, data: bytes, ended: bool) -> None:
        """The head came, and as much of the body as came with it."""
        raise NotImplementedError

    def more(self, data: bytes, ended: bool) -> None:
        """More of the body came."""
        raise NotImplementedError

    def failed(self, error: UpstreamError) -> None:
        """The answer did not come, or will not go on."""
        raise NotImplementedError


@mypyc_attr(allow_interpreted_subclasses=True)
class ChunkForwarder:
    """Where whole chunks of an answer's body go as they come, of whole lines."""

    __slots__ = ()

    def pass_on(self, chunks: bytes) -> bool:
        """Chunks came; false when they have to be looked at, and were not passed on."""
        raise NotImplementedError


class CachedStreamHead:
    """How a worker's answers in chunks begin, and what the parser said of such a head."""

    __slots__ = ("head", "said")

    def __init__(self, head: bytes, said: ResponseHead) -> None:
        self.head = HeadPrefix(head, dated=True)
        self.said = said


class UpstreamConnection:
    """A connection to a worker, as asyncio's protocols are. `current`: the request it is used for; None while idle."""

    __slots__ = (
        "_chunk_ended",
        "_complete",
        "_deadline",
        "_early_bytes",
        "_followed",
        "_forwarder",
        "_framed",
        "_headers",
        "_heard",
        "_home",
        "_loop",
        "_parser",
        "_paused",
        "_pieces",
        "_quiet",
        "_reusable",
        "_status",
        "_told",
        "_trailer_bytes",
        "_transport",
        "_unparsed",
        "_used",
        "current",
        "idle",
        "idle_since",
    )

    def __init__(self, home: Upstream) -> None:
        self._forwarder: ChunkForwarder | None = None
        self._quiet = True  # since the last look of the deadline
        self.current: UpstreamRequest | None = None
        self.idle = False
        self.idle_since = 0.0
        self._home = home
        self._loop = asyncio.get_running_loop()
        self._deadline = Deadline(self._loop, self._late, self._lives)
        self._parser: httptools.HttpResponseParser | None = None  # once there is an answer that it has to read
        self._transport: asyncio.Transport = None  # type: ignore[assignment]
        self._paused = False
        self._used = False
        self._heard = False
        self._expect_nothing()

    def _expect_nothing(self) -> None:
        self._status = 0
        self._headers: Headers = []
        self._trailer_bytes = self._early_bytes = 0
        self._pieces: list[bytes] = []
        self._framed = self._reusable = self._complete = self._followed = self._told = False
        self._chunk_ended = False
        self._forwarder = None
        self._unparsed: bytes | None = None  # the head of an answer that the parser knows nothing of

    def send(self, current: UpstreamRequest) -> None:
        """Write a request; its leg is told of the answer."""
        self.current = current
        if self._status:  # of the last answer that was parsed
            self._expect_nothing()
        self._heard = False
        self._quiet = True
        self._transport.write(current.request)
        if current.body:
            self._transport.write(current.body)
        self._deadline.set(self._home.idle_timeout)

    def pause(self) -> None:
        """Read no more for now: the client does not either."""
        if not self._paused:
            self._paused = True
            self._deadline.clear()
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self._paused:
            self._paused = False
            if self.current is not None:
                self._deadline.set(self._home.idle_timeout)
            if not self._transport.is_closing():
                self._transport.resume_reading()

    def abort(self) -> None:
        """Close at once. Nobody is told."""
        self.current = self._forwarder = None
        self._deadline.close()
        self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._home.opened(self)

    def data_received(self, data: bytes) -> None:
        forwarder = self._forwarder
        if forwarder is not None:
            if body_size(data) and forwarder.pass_on(data):
                self._quiet = False
                return
            self._forwarder = None
        current = self.current
        if current is None:
            self._transport.abort()  # nothing was asked
            return
        first = not self._heard
        self._heard = True
        if first:
            if current.method != "HEAD" and self._begins_as_known(current, data):
                return
        elif self._unparsed is not None and self._goes_on(current, data):
            return
        self._parse(data, first)

    def _begins_as_known(self, current: UpstreamRequest, data: bytes) -> bool:
        """Tell of an answer whose head was read before; false when the parser has to look."""
        known = self._home.known_head
        if known is not None and (body := known.read(data)) is not None:
            self._reusable = True
            self._release()
            current.answered(known.said, body, True)
            return True
        stream = self._home.known_stream
        if stream is None or not stream.head.of(data):
            return False
        chunks = data[stream.head.size :]
        beginning = body_of(chunks) if chunks else b""
        if beginning is None:
            return False
        self._unparsed = stream.head.seen
        self._status = stream.said.status
        self._framed = self._reusable = self._told = True
        self._quiet = False
        current.answered(stream.said, beginning, False)
        if self.current is current:
            self._acknowledge_less()
            if chunks:
                self._forwarder = current.forwarder
        return True

    def _goes_on(self, current: UpstreamRequest, data: bytes) -> bool:
        """Tell of whole chunks, and of the end, behind a head that was read before; false as above."""
        ended = data[-len(LAST) :] == LAST
        chunks = data[: -len(LAST)] if ended else data
        body = body_of(chunks) if chunks else b""
        if body is None:
            return False
        self._quiet = False
        if ended:
            self._complete = True
            self._unparsed = None
            self._release()
        current.more(body, ended)
        if self.current is current:
            self._forwarder = current.forwarder
        return True

    def eof_received(self) -> None:
        """Nothing more comes: asyncio closes the connection."""

    def pause_writing(self) -> None:
        """A request is in the transport's hands, however large."""

    def resume_writing(self) -> None:
        """The same."""

    def _parse(self, data: bytes, first: bool) -> None:
        if not self._status:
            self._early_bytes += len(data)
        problem = None
        if self._parser is None:
            self._parser = httptools.HttpResponseParser(self)
        try:
            if self._unparsed is not None:
                unparsed, self._unparsed = self._unparsed, None
                self._parser.feed_data(unparsed)
                self._trailer_bytes = 0  # those headers were none
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            problem = f"not HTTP: {error.__context__ or error}"
        if not self._status:
            # The parser keeps a header to itself until it is complete.
            if problem is None and self._early_bytes > MAX_HEAD_BYTES:
                problem = "the head is too large"
            if problem is not None:
                self._fail(UpstreamError(problem))
            return
        self._deadline.set(self._home.idle_timeout)
        pieces = self._pieces
        passed = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        if problem is None or self._complete:
            if first and self._reusable and not self._followed:
                self._remember(data)
            self._tell(passed, self._complete)
            self._let_pass(data)
        else:
            self._tell(passed, False)
            self._fail(UpstreamError(problem))

    def _let_pass(self, data: bytes) -> None:
        """From here on chunks may pass as they come, when a line, its chunk and what was read end here."""
        # Only the size of the next chunk could have begun; when that line came whole, the parser has told of the chunk.
        if self._chunk_ended and self.current is not None and data.endswith(END):
            self._forwarder = self.current.forwarder

    def _remember(self, data: bytes) -> None:
        """An answer came, or its beginning. The next one may begin in the same way."""
        if self._status in WITHOUT_BODY or not data.startswith(b"HTTP/1.1 %d" % self._status):
            return  # or one of 1xx before it
        head = ResponseHead(self._status, self._headers)
        if self._complete:
            self._home.known_head = CachedHead.of(data, head.without_length(), dated=True) or self._home.known_head
        elif head.is_stream and not head.length:
            self._home.known_stream = CachedStreamHead(data[: head_size(data)], head)

    def _tell(self, data: bytes, ended: bool) -> None:
        """Pass on what came. When it was the end, the connection is free before that is told."""
        current = self.current
        if current is None or not (data or ended or not self._told):
            return
        if ended:
            self._release()
        elif self._told and current.handler is not None:
            current.handler.more(data, False)
            return
        if self._told:
            current.more(data, ended)
        else:
            self._told = True
            head = ResponseHead(self._status, self._headers)
            current.answered(head, data, ended)
            if head.is_stream and self.current is current:
                self._acknowledge_less()

    def _acknowledge_less(self) -> None:
        """Have every other segment of a stream acknowledged, not each one as it is read, which takes much of the time.

        Where they come seldom Linux goes back to each by itself.
        """
        if _QUICKACK < 0:
            return
        connected = self._transport.get_extra_info("socket")
        if connected is not None:
            connected.setsockopt(socket.IPPROTO_TCP, _QUICKACK, 0)

    def _release(self) -> None:
        """The answer is complete: keep the connection, if another request can follow on it."""
        self.current = None
        self._used = True
        self._deadline.clear()
        self.resume()
        if self._reusable and not self._followed and not self._transport.get_write_buffer_size():
            self._home.keep(self)
        else:
            self._deadline.close()
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.close()
        self._parser = None  # which knows this connection
        self._home.closed(self)
        if self.current is None:
            return
        if self._status and not self._framed and exc is None:
            self._complete = True
            self._tell(b"", True)  # its end is the end of the connection
            return
        error = UpstreamError(str(exc) or type(exc).__name__ if exc else "the worker hung up")
        self._fail(error, unheard=self._used and not self._heard)

    def _lives(self) -> bool:
        """Whether chunks passed since the last look."""
        quiet, self._quiet = self._quiet, True
        return not quiet

    def _late(self) -> None:
        self._fail(UpstreamTimeoutError(f"no byte within {self._home.idle_timeout:g} s"))

    def _fail(self, error: UpstreamError, unheard: bool = False) -> None:
        current, self.current, self._forwarder = self.current, None, None
        self._deadline.close()
        self._transport.abort()
        if current is not None:
            current.broke(error, unheard)

    # httptools

    def on_message_begin(self) -> None:
        self._followed = self._complete

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._status:  # a trailer, or a second answer's
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
        if self._complete:
            return
        parser = self._parser
        assert parser is not None
        status = parser.get_status_code()
        if status < 200:
            if status == 101:
                raise _RefusedAnswerError("a switch of protocols that was not asked for")
            self._headers = []
            self._framed = False
            return
        if status > _HIGHEST_STATUS:
            raise _RefusedAnswerError(f"a status of {status}")
        if self._early_bytes > MAX_HEAD_BYTES and sum(map(_size, self._headers)) > MAX_HEAD_BYTES:
            raise _RefusedAnswerError("the head is too large")
        self._status = status
        without_body = status in WITHOUT_BODY
        self._framed = self._framed or without_body
        self._reusable = self._framed and parser.should_keep_alive()
        if self.current is not None and self.current.method == "HEAD":  # the parser waits for a body that will not come
            self._framed, self._reusable, self._complete = True, False, True

    def on_body(self, data: bytes) -> None:
        if not self._complete:
            self._pieces.append(data)

    def on_chunk_header(self) -> None:
        self._chunk_ended = False

    def on_chunk_complete(self) -> None:
        self._chunk_ended = True

    def on_message_complete(self) -> None:
        self._chunk_ended = False
        if self._status:
            self._complete = True


def _size(header: tuple[bytes, bytes]) -> int:
    return len(header[0]) + len(header[1]) + len(b": \r\n")
