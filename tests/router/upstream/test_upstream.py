"""The connections to a worker: which are kept, for how long, and the head of a request over them."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import struct
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import uvloop
from waiting import until

from router.http.headers import forwarded_lines
from router.upstream import (
    ChunkForwarder,
    Origin,
    ResponseHandler,
    ResponseHead,
    UnreachableError,
    UpstreamError,
    Upstreams,
    UpstreamTimeoutError,
)
from router.upstream import pool as pool_module
from router.upstream.connection import UpstreamConnection
from router.upstream.pool import end_of_head

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


class Remembering(ResponseHandler):
    """A handler that keeps all received parts."""

    def __init__(self) -> None:
        self.head: ResponseHead | None = None
        self.body = b""
        self.error: UpstreamError | None = None
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_head(self, head: ResponseHead, data: bytes, ended: bool) -> None:
        self.head = head
        self.on_body(data, ended)

    def on_body(self, data: bytes, ended: bool) -> None:
        self.body += data
        if ended:
            self.over.set_result(None)

    def on_failed(self, error: UpstreamError) -> None:
        self.error = error
        self.over.set_result(None)


class Passing(ChunkForwarder):
    """Takes chunks."""

    def __init__(self) -> None:
        self.passed: list[bytes] = []

    def forward(self, chunks: bytes) -> bool:
        self.passed.append(chunks)
        return True


Serve = Callable[[StreamReader, StreamWriter], Awaitable[None]]


async def never(reader: StreamReader, _: StreamWriter) -> None:
    await reader.read()


async def always_ok(reader: StreamReader, writer: StreamWriter) -> None:
    while await reader.readuntil(b"\r\n\r\n"):
        writer.write(OK)


@asynccontextmanager
async def served(serve: Serve = always_ok, patience: float = 5.0) -> AsyncIterator[tuple[Upstreams, str]]:
    async def quietly(reader: StreamReader, writer: StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(quietly, "127.0.0.1", 0)
    upstreams = Upstreams(ssl.create_default_context(), patience, patience)
    async with server:
        yield upstreams, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await upstreams.close()
        await until(lambda: not upstreams.open_connections)


async def ask(upstreams: Upstreams, url: str) -> Remembering:
    handler = Remembering()
    upstreams.get(url).send(handler, "GET", b"/x", b"", b"")
    await asyncio.wait_for(handler.over, 60)
    return handler


async def test_connections_are_used_again_the_latest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served() as (upstreams, url):
        await asyncio.gather(*(ask(upstreams, url) for _ in range(5)))
        upstream = upstreams.get(url)
        assert (upstream.open_connections, upstream.idle_connections) == (5, 5)
        assert (await ask(upstreams, url)).body == b"{}"
        assert (upstream.open_connections, upstream.idle_connections) == (5, 5)
        monkeypatch.setattr(pool_module, "MAX_IDLE", 5)
        await asyncio.gather(*(ask(upstreams, url) for _ in range(9)))
        assert upstream.idle_connections == 5


async def test_idle_connections_are_dropped_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "KEEPALIVE_SECONDS", 0.1)

    async with served() as (upstreams, url):
        await asyncio.gather(*(ask(upstreams, url) for _ in range(3)))
        await until(lambda: not upstreams.open_connections)
        assert (await ask(upstreams, url)).body == b"{}"


async def test_removed_worker_finishes_its_requests() -> None:
    async def slowly(reader: StreamReader, writer: StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.1)
        writer.write(OK)
        await reader.read()

    async with served(slowly) as (upstreams, url):
        asking = asyncio.create_task(ask(upstreams, url))
        await asyncio.sleep(0.05)
        upstreams.forget(url)
        assert (await asking).body == b"{}"
        await until(lambda: not upstreams.open_connections)


async def test_closing_fails_requests_in_flight() -> None:
    received = asyncio.Event()

    async def silent(reader: StreamReader, writer: StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        received.set()
        await never(reader, writer)

    async with served(silent) as (upstreams, url):
        asking = asyncio.create_task(ask(upstreams, url))
        await received.wait()
        await upstreams.close()
        assert (await asking).error is not None


async def test_failures_have_their_kinds() -> None:
    async with served(never, patience=0.1) as (upstreams, url):
        assert isinstance((await ask(upstreams, url)).error, UpstreamTimeoutError)
        assert isinstance((await ask(upstreams, "http://127.0.0.1:1")).error, UnreachableError)
        assert isinstance((await ask(upstreams, "http://no.such.host.invalid")).error, UnreachableError)


async def test_aborted_request_calls_its_handler_no_more() -> None:
    async with served() as (upstreams, url):
        for sent in (False, True):
            if sent:
                await ask(upstreams, url)  # an idle connection: the request is written at once
            handler = Remembering()
            upstreams.get(url).send(handler, "GET", b"/x", b"", b"").abort()
            await asyncio.sleep(0.05)
            assert not handler.over.done()


def head_of(url: str, method: str, target: bytes, lines: bytes = b"", size: int = 0) -> bytes:
    return Origin.of(url).opening(method, target, lines) + end_of_head(method, size)


@pytest.mark.parametrize(
    ("url", "host", "target"),
    [
        ("http://worker", b"worker", b"/v1/x?a=b"),
        ("http://worker:80", b"worker", b"/v1/x?a=b"),
        ("http://worker:8000/base", b"worker:8000", b"/base/v1/x?a=b"),
        ("https://worker", b"worker", b"/v1/x?a=b"),
        ("https://[::1]:8443", b"[::1]:8443", b"/v1/x?a=b"),
    ],
)
def test_the_head_of_a_request(url: str, host: bytes, target: bytes) -> None:
    headers = [
        (b"host", b"public"),
        (b"connection", b"X-Hop, keep-alive"),
        (b"x-hop", b"1"),
        (b"x-end", b"2"),
        (b"content-length", b"7"),
        (b"expect", b"100-continue"),
        (b"transfer-encoding", b"chunked"),
    ]
    assert head_of(url, "POST", b"/v1/x?a=b", forwarded_lines(headers), 5) == (
        b"POST %b HTTP/1.1\r\nhost: %b\r\nx-end: 2\r\ncontent-length: 5\r\n\r\n" % (target, host)
    )
    assert b"content-length" not in head_of(url, "GET", b"/")
    assert b"content-length: 0\r\n" in head_of(url, "POST", b"/")


@pytest.mark.parametrize("request_id", [b"", b"1"])
async def test_a_workers_key_is_shown_unless_the_request_has_one_or_must_not(request_id: bytes) -> None:
    heads: list[bytes] = []

    async def remembers(reader: StreamReader, writer: StreamWriter) -> None:
        while True:
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

    async with served(remembers) as (upstreams, url):
        for shown, lines, add_worker_key, expected in (
            (b"Bearer a", b"x: 1\r\n", True, [b"Bearer a"]),
            (b"Bearer a", b"x: 1\r\n", False, []),
            (b"Bearer a", b"x: 1\r\n", True, [b"Bearer a"]),
            (b"Bearer a", b"authorization: Bearer own\r\n", True, [b"Bearer own"]),
            (b"Bearer b", b"x: 1\r\n", True, [b"Bearer b"]),
            (None, b"x: 1\r\n", True, []),
        ):
            upstream = upstreams.get(url)
            upstreams.show(url, shown)
            handler = Remembering()
            upstream.send(handler, "GET", b"/", lines, b"", request_id, add_worker_key=add_worker_key)
            await asyncio.wait_for(handler.over, 60)
            assert re.findall(rb"authorization: (.*)\r\n", heads[-1]) == expected


async def test_stalled_stream_times_out_after_forwarded_chunks() -> None:
    event = b"9\r\ndata: 1\n\n\r\n"

    async def stops(reader: StreamReader, writer: StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + event)
        for _ in range(4):
            await asyncio.sleep(0.15)
            writer.write(event)
        await reader.read()

    async with served(stops, patience=0.5) as (upstreams, url):
        handler, forwarder = Remembering(), Passing()
        request = upstreams.get(url).send(handler, "GET", b"/x", b"", b"")
        request.forwarder = forwarder
        await asyncio.wait_for(handler.over, 60)
        assert isinstance(handler.error, UpstreamTimeoutError)
        assert b"".join(forwarder.passed) == event * 4


@pytest.mark.skipif(not hasattr(socket, "TCP_QUICKACK"), reason="only Linux can be set to acknowledge less")
def test_not_every_segment_of_a_stream_is_acknowledged() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    segments_in = struct.Struct("140xI")  # where linux/tcp.h has it in tcp_info
    chunks = 20

    class Counting(Remembering):
        def __init__(self, came: asyncio.Semaphore) -> None:
            super().__init__()
            self._came = came

        def on_body(self, data: bytes, ended: bool) -> None:
            super().on_body(data, ended)
            self._came.release()

    async def acknowledged() -> int:
        came, counts = asyncio.Semaphore(0), []

        async def streams(reader: StreamReader, writer: StreamWriter) -> None:
            connection = writer.get_extra_info("socket")
            await reader.readuntil(b"\r\n\r\n")
            for piece in (head, *[b"9\r\ndata: 1\n\n\r\n"] * chunks):
                writer.write(piece)
                await came.acquire()
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, segments_in.size)
            counts.extend(segments_in.unpack(info))
            writer.write(b"0\r\n\r\n")

        async with served(streams) as (upstreams, url):
            handler = Counting(came)
            upstreams.get(url).send(handler, "GET", b"/x", b"", b"")
            await asyncio.wait_for(handler.over, 60)
        return int(counts[0])

    # After a long pause of the machine, Linux acknowledges each packet again.
    assert any(asyncio.run(acknowledged()) < chunks for _ in range(10))


@pytest.mark.derives
def test_connection_cancelled_while_opening_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def give_up() -> None:
        async with served() as (upstreams, url):
            upstream = upstreams.get(url)
            opened = upstream.opened
            given_up = asyncio.Event()

            def give_up_now(connection: UpstreamConnection) -> None:
                opened(connection)
                sent.abort()
                given_up.set()

            monkeypatch.setattr(upstream, "opened", give_up_now)
            sent = upstream.send(Remembering(), "GET", b"/", b"", b"")
            await given_up.wait()
            await until(lambda: not upstreams.open_connections)

    uvloop.run(give_up())


def test_pause_of_the_router_is_not_a_late_connection() -> None:
    """libuv calls timers that are due before it reads that a connection is open."""
    seconds = 0.2

    async def connect_and_pause() -> None:
        async with served() as (_, url):
            upstreams = Upstreams(ssl.create_default_context(), seconds, 60)
            handler = Remembering()
            upstreams.get(url).send(handler, "GET", b"/", b"", b"")
            await asyncio.sleep(0)
            time.sleep(2 * seconds)  # noqa: ASYNC251
            await asyncio.wait_for(handler.over, 60)
            assert (handler.error, handler.body) == (None, b"{}")
            await upstreams.close()

    uvloop.run(connect_and_pause())
