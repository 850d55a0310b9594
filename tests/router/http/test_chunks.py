"""Chunks of events that are forwarded unchanged: they are read as llhttp reads them, in any pieces."""

from __future__ import annotations

import asyncio
import ssl
from itertools import pairwise

import httptools
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from router.apis.usage import HiddenUsage, Usage, UsageTail
from router.fleet.health import Health
from router.forwarding.response import EventStream
from router.http.unparsed import body_size
from router.upstream import ChunkForwarder, ResponseHandler, ResponseHead, Upstream, UpstreamError, UpstreamRequest
from router.upstream.connection import ConnectionState, UpstreamConnection

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
TLS = ssl.create_default_context()
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2}}\n\n'


def chunk(body: bytes, form: bytes = b"%x\r\n") -> bytes:
    return form % len(body) + body + b"\r\n"


class Transport(asyncio.Transport):
    closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def abort(self) -> None:
        self.closed = True

    close = abort

    def get_write_buffer_size(self) -> int:
        return 0


class Remembering(ResponseHandler):
    """A handler that accepts unparsed chunks after the head if `passes`, and keeps all received bytes."""

    def __init__(self, passes: bool) -> None:
        self.sent: UpstreamRequest | None = None
        self.body = b""
        self.passed: list[bytes] = []
        self.ended = self.failed = self.kept = False
        self._passes = passes

    def on_head(self, head: ResponseHead, data: bytes, ended: bool) -> None:  # noqa: ARG002
        self.on_body(data, ended)
        if self._passes and self.sent is not None:
            self.sent.forwarder = Remembered(self)

    def on_body(self, data: bytes, ended: bool) -> None:
        self.body += data
        self.ended = ended

    def on_failed(self, error: UpstreamError) -> None:  # noqa: ARG002
        self.failed = True


class Remembered(ChunkForwarder):
    def __init__(self, handler: Remembering) -> None:
        self._handler = handler

    def forward(self, chunks: bytes) -> bool:
        if b"no" in chunks:
            return False
        self._handler.passed.append(chunks)
        self._handler.body += read_by_llhttp(chunks)
        return True


def read_by_llhttp(chunks: bytes) -> bytes:
    """The body of whole chunks. Raises when they are no whole chunks, or the last one is among them."""
    body, ended, open_chunks = [], [], []

    class Read:
        def on_body(self, data: bytes) -> None:
            body.append(data)

        def on_chunk_header(self) -> None:
            open_chunks.append(1)

        def on_chunk_complete(self) -> None:
            open_chunks.pop()

        def on_message_complete(self) -> None:
            ended.append(1)

    parser = httptools.HttpResponseParser(Read())
    parser.feed_data(HEAD + chunks)
    assert not ended
    assert not open_chunks
    parser.feed_data(b"0\r\n\r\n")  # it stands between two chunks
    assert ended
    return b"".join(body)


def received(pieces: list[bytes], passes: bool) -> Remembering:
    """Return what the handler gets of a response in these pieces."""

    async def main() -> Remembering:
        upstream = Upstream("http://127.0.0.1:1", TLS, 5.0, 5.0)
        connection, transport = UpstreamConnection(upstream), Transport()
        connection.connection_made(transport)
        handler = Remembering(passes)
        handler.sent = UpstreamRequest(handler, "POST", b"", b"")
        connection.send(handler.sent)
        for piece in pieces:
            if connection.current is not None and not transport.closed:
                connection.data_received(piece)
        handler.kept = connection.state is ConnectionState.IDLE
        connection.connection_lost(None)
        upstream.retire()
        return handler

    return asyncio.run(main())


lines = st.binary(max_size=40).map(lambda text: text + b"\n") | st.sampled_from(
    [b"data: a\n\n", b"\n", b"\r\n", b"0\r\n"]
)
bodies = lines | st.binary(min_size=1, max_size=40) | st.integers(1, 5000).map(lambda size: b"x" * (size - 1) + b"\n")
forms = st.sampled_from(
    [b"%x\r\n", b"%x\r\n", b"%x\r\n", b"%X\r\n", b"00%x\r\n", b"%x;a=b\r\n", b"%x \r\n", b"0x%x\r\n", b"+%x\r\n"]
)
parts = st.builds(chunk, bodies, forms) | st.sampled_from(
    [b"0\r\n\r\n", b"0\r\nA: b\r\n\r\n", b"zz\r\n", b"5\r\n", b"\r\n"]
)


@given(st.lists(parts, max_size=12), st.lists(st.integers(0, 10_000), max_size=8), st.booleans())
@example(
    parts=[chunk(b"a\n"), chunk(b"b\n"), b"3", b"2\r\nx\n\r\n", b"x" * (0x32 - 4) + b"\r\n"], cuts=[], by_part=True
)
@example(parts=[chunk(b"a\n"), chunk(b"b\n") + b"9\r\na\n\r\n", b"2\r\nc\n\r\n"], cuts=[], by_part=True)
def test_forwarded_chunks_equal_the_parsed_chunks(parts: list[bytes], cuts: list[int], by_part: bool) -> None:
    answer = b"".join(parts)
    if by_part:
        pieces = [HEAD, *parts]
    else:
        places = [0, *sorted(cut % (len(answer) + 1) for cut in cuts), len(answer)]
        pieces = [HEAD, *(answer[start:end] for start, end in pairwise(places) if start < end)]
    read = received(pieces, passes=False)
    behind = [HEAD + pieces[1], *pieces[2:]] if pieces[1:] else pieces
    for others in (pieces, behind):
        other = received(others, passes=True)
        assert (other.body, other.ended, other.failed) == (read.body, read.ended, read.failed)
        assert other.kept == read.kept
        assert all(each.endswith(b"\n\r\n") for each in other.passed)


def test_chunks_of_events_pass_without_being_touched() -> None:
    events = [chunk(b"data: %d\n\n" % number) for number in range(9)]
    handler = received([HEAD, events[0], *events[1:4], events[4] + events[5], *events[6:], b"0\r\n\r\n"], passes=True)
    assert handler.passed == [*events[1:4], events[4] + events[5], *events[6:]]
    assert handler.ended


def test_unforwarded_chunks_are_parsed() -> None:
    yes, no = chunk(b"data: yes\n\n"), chunk(b"data: no\n\n")
    handler = received([HEAD, yes, yes, no, no, yes, yes + no, yes], passes=True)
    assert handler.passed == [yes, yes, yes]
    said = ["yes", "yes", "no", "no", "yes", "yes", "no", "yes"]
    assert handler.body.decode() == "".join(f"data: {word}\n\n" for word in said)


def test_chunks_after_half_a_chunk_are_forwarded() -> None:
    event = chunk(b"data: 1\n\n")
    handler = received([HEAD, event, event, event[:5], event[5:], event, event + event[:4]], passes=True)
    assert handler.passed == [event, event]
    assert handler.body == b"data: 1\n\n" * 5 + b"d"
    assert handler.failed


@given(st.lists(parts, max_size=4))
def test_sizes(parts: list[bytes]) -> None:
    data = b"".join(parts)
    if size := body_size(data):
        assert len(read_by_llhttp(data)) == size


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\r\n",
        b"2\r\na\n",
        b"2\r\na\n\r",
        b"2\r\nab\r\n",
        b"2\r\na\n\r\n2",
        b"2\r\na\n\r\n2\r",
        b"0\r\n\r\n",
        b"5a",
    ],
)
def test_incomplete_chunk_has_no_size(data: bytes) -> None:
    assert body_size(data) == 0


class Client:
    """A writer that keeps the response to the client."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)


def test_forwarded_stream_reports_progress_and_usage_in_separate_or_joined_chunks() -> None:
    client, now = Client(), 1.0
    worker = Health(clock=lambda: now)
    rank = worker.begin(10, dp_rank=1, one_of_many=True).health
    tail = UsageTail()
    stream = EventStream(client, rank, tail, None)
    now = 5.0
    chunks = [chunk(b'data: {"usage":null}\n\n'), chunk(USAGE), chunk(b"data: [DONE]\n\n")]
    for each in chunks:
        assert stream.forward(each)
    assert client.written == chunks
    assert tail.usage() == Usage(9, 2, None)
    assert worker.last_byte == rank.last_byte == 5.0
    assert worker.begin(10).health is worker
    tail = UsageTail()
    stream = EventStream(Client(), Health(), tail, None)
    assert stream.forward(chunk(b'data: {"usage":null}\n\n') + chunk(USAGE) + chunk(b"data: [DONE]\n\n"))
    assert tail.usage() == Usage(9, 2, None)


def test_usage_filter_forwards_complete_events_without_usage() -> None:
    client, hidden = Client(), HiddenUsage()
    stream = EventStream(client, Health(), UsageTail(), hidden)
    event = chunk(b"data: 1\n\n")
    assert stream.forward(event)
    assert not stream.forward(chunk(USAGE))
    assert not stream.forward(chunk(b"data: half of an event\n"))
    hidden.filter(b"data: half of an event\n", False)
    assert not stream.forward(event)
    hidden.filter(b"\n", False)
    assert stream.forward(event)
    assert client.written == [event, event]
