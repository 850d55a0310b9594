"""HTTP/1.1 on both sides of the router, byte by byte. Ambiguous messages are refused, and never forwarded."""

from __future__ import annotations

import asyncio
import re
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest
from router_under_test import RouterUnderTest, router, serving, until
from scripted_worker import Exchange, ScriptedWorker, scripted_worker

from router.app.app import running_router
from router.server import http_server, request_reader
from router.server.http_server import HttpServer
from router.settings import Settings

BODY = b'{"model":"m","prompt":[1]}'
POST = b"POST /v1/completions HTTP/1.1\r\nHost: r\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
WHOLE = POST + LENGTH + b"\r\n" + BODY
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: r\r\n\r\n"
LIMITS = {"max_body_bytes": 1000, "body_timeout": 0.3}
SOON = {"retry_interval": 0.05}


class Answer(NamedTuple):
    """A response. `body` excludes the sizes of its chunks."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes


class Wire:
    """A client's connection."""

    def __init__(self, reader: StreamReader, writer: StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> Answer:
        """The head of the next answer."""
        async with asyncio.timeout(60):
            first, *lines = (await self.reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(b": ") for line in lines)}
        return Answer(int(first.split(b" ")[1]), headers, b"")

    async def answer(self) -> Answer:
        """The next answer, whole."""
        head = await self.head()
        async with asyncio.timeout(60):
            if head.headers.get(b"transfer-encoding") == b"chunked":
                body = b""
                while size := int(await self.reader.readline(), 16):
                    body += (await self.reader.readexactly(size + 2))[:-2]
                await self.reader.readexactly(2)
            else:
                body = await self.reader.readexactly(int(head.headers.get(b"content-length", b"0")))
        return head._replace(body=body)

    async def rest(self) -> bytes:
        """Everything until the connection is closed."""
        async with asyncio.timeout(60):
            with suppress(ConnectionError):
                return await self.reader.read()
        return b""


@asynccontextmanager
async def wire(url: str) -> AsyncIterator[Wire]:
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        yield Wire(reader, writer)
    finally:
        writer.close()


@pytest.fixture(scope="module")
async def running() -> AsyncIterator[tuple[ScriptedWorker, RouterUnderTest]]:
    quiet = {"probe_interval": 60, "metrics_interval": 60, "failures": 1000}
    limits = LIMITS
    async with (
        scripted_worker() as worker,
        router(worker.url, server=limits, fleet=quiet, constants=SOON, proxy={"client_timeout": 0.5}) as routed,
    ):
        yield worker, routed


@pytest.fixture
async def worker(running: tuple[ScriptedWorker, RouterUnderTest]) -> AsyncIterator[ScriptedWorker]:
    worker, routed = running

    await until(routed.workers, lambda workers: workers[0]["up"])  # the test before may have broken it
    worker.script = Exchange.answer
    worker.exchanges.clear()
    yield worker
    await routed.until_released()


@pytest.fixture
def url(running: tuple[ScriptedWorker, RouterUnderTest]) -> str:
    return running[1].url


def answering(data: bytes, then_close: bool = False) -> object:
    async def script(exchange: Exchange) -> None:
        await exchange.send(data)
        if then_close:
            exchange.writer.close()

    return script


# What clients send

REFUSED = [
    POST + LENGTH + b"Content-Length: 3\r\n\r\n" + BODY,
    POST + LENGTH + LENGTH + b"\r\n" + BODY,
    POST + b"Content-Length: 26, 26\r\n\r\n" + BODY,
    POST + b"Content-Length: 26 \r\nContent-Length: 26\r\n\r\n" + BODY,
    POST + b"Content-Length: +26\r\n\r\n" + BODY,
    POST + b"Content-Length: 0x1a\r\n\r\n" + BODY,
    POST + b"Content-Length: 99999999999999999999999\r\n\r\n" + BODY,
    POST + b"Content-Length : 26\r\n\r\n" + BODY,
    POST + LENGTH + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    POST + b"Transfer-Encoding: chunked\r\n" + LENGTH + b"\r\n0\r\n\r\n",
    POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    POST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    POST + b"Transfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n",
    CHUNKED + b"xyz\r\n\r\n0\r\n\r\n",
    CHUNKED + b"1a\n" + BODY + b"\r\n0\r\n\r\n",
    CHUNKED + b"1a\r\n" + BODY + b"XX0\r\n\r\n",
    CHUNKED + b"-1a\r\n" + BODY + b"\r\n0\r\n\r\n",
    CHUNKED + b"0x1a\r\n" + BODY + b"\r\n0\r\n\r\n",
    CHUNKED + b"ffffffffffffffffff\r\n" + BODY,
    POST + LENGTH + b"X-A: one\nX-B: two\r\n\r\n" + BODY,
    POST + LENGTH + b"X-A: one\r\n folded\r\n\r\n" + BODY,
    POST + LENGTH + b"X-A: one\rX-B: two\r\n\r\n" + BODY,
    POST + LENGTH + b"X-A: one\x00two\r\n\r\n" + BODY,
    POST + LENGTH + b"X A: one\r\n\r\n" + BODY,
    POST + LENGTH + b": no name\r\n\r\n" + BODY,
    POST.replace(b"\r\n", b"\n") + LENGTH.replace(b"\r\n", b"\n") + b"\n" + BODY,
    POST + LENGTH + b"X-A: " + b"a" * 70_000 + b"\r\n\r\n" + BODY,
    POST + LENGTH + b"X-A: one\r\n" * 10_000 + b"\r\n" + BODY,
    POST + b"X-A: " + b"a" * 200_000,
    POST.replace(b"HTTP/1.1", b"HTTP/1.1 ") + LENGTH + b"\r\n" + BODY,
    POST.replace(b"HTTP/1.1", b"HTTP/9.9") + LENGTH + b"\r\n" + BODY,
    POST.replace(b"/v1", b"http://evil.example/v1") + LENGTH + b"\r\n" + BODY,
    POST.replace(b"HTTP/1.1", b"HTTP/2.0") + LENGTH + b"\r\n" + BODY,
    POST.replace(b"HTTP/1.1", b"HTTP/0.9") + LENGTH + b"\r\n" + BODY,
    POST + b"Content-Length: -1\r\n\r\n" + BODY,
    POST + b"Content-Length: 3, 26\r\n\r\n" + BODY,
    b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: r\r\n\r\n",
    b"GET http://evil.example/v1/x HTTP/1.1\r\nHost: r\r\n\r\n",
    b"GET http:@evil.example/v1/x HTTP/1.1\r\nHost: r\r\n\r\n",
    b"GET @evil.example/x HTTP/1.1\r\nHost: r\r\n\r\n",
    b"GET //evil.example/x HTTP/1.1\r\nHost: r\r\nConnection: close\r\n\r\n",
    b"CONNECT evil.example:80 HTTP/1.1\r\nHost: r\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: r\r\n\r\n",
    b"GET /x HTTP/1.1 \r\n smuggled\r\n\r\n",
    *(
        b"GET /v1/models HTTP/1.1\r\nHost: %b\r\n\r\n" % host
        for host in (b"%zz:", b"[::::]", b"[::1", b"a b", b"user@r", b"r/x", b"r:x", b"r:123456", b":80", b"\xe4")
    ),
    b"\x16\x03\x01\x02\x00\x01\x00\x01",
]


@pytest.mark.parametrize("sent", REFUSED)
async def test_ambiguous_request_is_not_forwarded(worker: ScriptedWorker, url: str, sent: bytes) -> None:
    async with wire(url) as client:
        with suppress(ConnectionError):
            await client.send(sent)
        answer = await client.rest()
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") <= 1
    assert worker.exchanges == []


@pytest.mark.parametrize("sent", REFUSED)
async def test_ambiguous_request_is_not_forwarded_after_known_head(
    worker: ScriptedWorker, url: str, sent: bytes
) -> None:
    async with wire(url) as client:
        for _ in range(2):
            await client.send(WHOLE)
            assert (await client.answer()).status == 200
        with suppress(ConnectionError):
            await client.send(sent)
        answer = await client.rest()
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400 ")
    assert [exchange.body for exchange in worker.exchanges] == [BODY, BODY]


async def test_repeated_request_head_keeps_its_own_body(worker: ScriptedWorker, url: str) -> None:
    async def echo(exchange: Exchange) -> None:
        await exchange.answer(exchange.body, headers=b"content-type: application/json\r\n")

    worker.script = echo
    bodies = [BODY[:-1] + b" " * number + b"}" for number in (0, 1, 80, 7, 0, 300)]
    requests = [POST + b"Content-Length: %d\r\n\r\n" % len(body) + body for body in bodies]
    async with wire(url) as client:
        for request, body in zip(requests, bodies, strict=True):
            await client.send(request)
            assert (await client.answer()).body == body
        await client.send(requests[2] + requests[3])  # at once
        assert [(await client.answer()).body for _ in range(2)] == bodies[2:4]
        await client.send(requests[5][:-200])  # in pieces
        await asyncio.sleep(0)
        await client.send(requests[5][-200:] + HEALTH)
        assert (await client.answer()).body == bodies[5]
        assert (await client.answer()).status == 200
        await client.send(requests[1])
        assert (await client.answer()).body == bodies[1]
    ids = [exchange.header("x-request-id") for exchange in worker.exchanges]
    assert len({request_id for (request_id,) in ids}) == len(ids) == 10


async def test_repeated_response_head_keeps_its_own_body(worker: ScriptedWorker, url: str) -> None:
    answers = [
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nx-a: 1\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\nx-a: 1\r\n\r\nother answer",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\nx-a: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nx-a: 1\r\n\r\n",
        b"HTTP/1.1 422 No\r\nContent-Length: 2\r\nx-a: 1\r\n\r\nno",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nx-a: 1\r\nConnection: close\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nx-a: 1\r\n\r\nyes",
    ]
    async with wire(url) as client:
        for data in answers:
            worker.script = answering(data, then_close=b"close" in data)  # type: ignore[assignment]
            await client.send(WHOLE)
            answer = await client.answer()
            assert (answer.body, answer.headers[b"x-a"]) == (
                data.rpartition(b"\r\n\r\n")[2],
                data[data.index(b"x-a") + 5 :][:1],
            )
            assert answer.status == int(data.rpartition(b"HTTP/1.1 ")[2][:3])
            assert b"connection" not in answer.headers


async def test_repeated_stream_head_keeps_its_own_events(worker: ScriptedWorker, url: str) -> None:
    head = (
        b"HTTP/1.1 200 OK\r\nDate: Mon, 02 Nov 2026 10:00:0%d GMT\r\nx-a: 1\r\n"
        b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    event, last = b"9\r\ndata: 1\n\n\r\n", b"0\r\n\r\n"
    answers = [
        (head % 1 + event + event + last, b"data: 1\n\n" * 2),
        (head % 2 + event + event + last, b"data: 1\n\n" * 2),
        (head % 3 + last, b""),
        (head % 4 + event + b"3;a=b\r\nyes\r\n" + last, b"data: 1\n\nyes"),
        (head % 5 + event + b"0\r\nx-trailer: 1\r\n\r\n", b"data: 1\n\n"),
        ((head % 6).replace(b"x-a: 1", b"x-a: 2") + event + last, b"data: 1\n\n"),
        (head % 7 + event + last, b"data: 1\n\n"),
    ]
    async with wire(url) as client:
        for data, body in answers:
            worker.script = answering(data)
            await client.send(WHOLE)
            answer = await client.answer()
            assert (answer.status, answer.body) == (200, body)
            assert answer.headers[b"x-a"] == data[data.index(b"x-a") + 5 :][:1]
            assert b"2026 10:00:0" not in answer.headers[b"date"]
    assert len(worker.exchanges) == len(answers)


@pytest.mark.parametrize(
    "sent",
    [
        WHOLE,
        b"\r\n" + WHOLE,
        CHUNKED + b"1a\r\n" + BODY + b"\r\n0\r\n\r\n",
        CHUNKED + b"1A;name=value\r\n" + BODY + b"\r\n0\r\n\r\n",
        CHUNKED + b"001a\r\n" + BODY + b"\r\n0\r\nX-Trailer: 1\r\n\r\n",
        CHUNKED + b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n",
    ],
)
@pytest.mark.parametrize("piece", [1, 7, 10_000])
async def test_valid_framing_is_forwarded_with_content_length(
    worker: ScriptedWorker, url: str, sent: bytes, piece: int
) -> None:
    async with wire(url) as client:
        for start in range(0, len(sent), piece):
            await client.send(sent[start : start + piece])
        assert (await client.answer()).body == b"{}"
        await client.send(WHOLE)
        assert (await client.answer()).body == b"{}"
    assert [exchange.body for exchange in worker.exchanges] == [BODY, BODY]
    for exchange in worker.exchanges:
        assert exchange.header("content-length") == [b"%d" % len(BODY)]
        assert not exchange.header("transfer-encoding")
        assert not exchange.header("x-trailer")


async def test_pipelined_requests_are_served_in_order(worker: ScriptedWorker, url: str) -> None:
    at_once = most = 0

    async def script(exchange: Exchange) -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0.01)
        at_once -= 1
        await exchange.answer(exchange.body)

    worker.script = script
    bodies = [b'{"model":"m","prompt":[%d]}' % number for number in range(6)]
    requests = [POST + b"Content-Length: %d\r\n\r\n" % len(body) + body for body in bodies]
    async with wire(url) as client:
        await client.send(HEALTH.join([b"", *requests[:3], b""]) + b"".join(requests[3:]) + HEALTH[:20])
        answers = [await client.answer() for _ in range(10)]
        await client.send(HEALTH[20:])
        answers.append(await client.answer())
    assert [answer.status for answer in answers] == [200] * 11
    assert [answer.body for answer in answers if answer.body in bodies] == bodies
    assert [b"workers_up" in answer.body for answer in answers] == [True, False] * 3 + [True] + [False] * 3 + [True]
    assert most == 1


async def test_invalid_pipelined_data_is_refused_after_responses(worker: ScriptedWorker, url: str) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.begin_chunks()
        await exchange.chunk(b"data: 1\n\n")
        await asyncio.sleep(0.05)
        await exchange.chunk(b"")

    worker.script = script
    async with wire(url) as client:
        await client.send(WHOLE + b"\x16\x03\x01 nonsense\r\n\r\n")
        assert (await client.answer()).body == b"data: 1\n\n"
        assert (await client.rest()).startswith(b"HTTP/1.1 400 ")
    assert len(worker.exchanges) == 1


async def test_unknown_upgrade_is_ignored(worker: ScriptedWorker, url: str) -> None:
    wish = b"\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n"
    async with wire(url) as client:
        await client.send(HEALTH.replace(b"\r\n\r\n", wish))
        assert (await client.answer()).status == 200
        await client.send(WHOLE + HEALTH.replace(b"\r\n\r\n", wish))
        assert [(await client.answer()).status for _ in range(2)] == [200, 200]
        await client.send(WHOLE)
        assert (await client.answer()).status == 200
    assert len(worker.exchanges) == 2


@pytest.mark.parametrize("path", [b"/v1/completions", b"/v1/files"])
@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
async def test_body_of_upgrade_request_is_forwarded(
    worker: ScriptedWorker, url: str, path: bytes, protocol: bytes
) -> None:
    """Java's client wishes for HTTP/2 with every request that it sends, its first body too."""
    head = b"POST %b HTTP/1.1\r\nHost: r\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: %b\r\n" % (path, protocol)
    chunked = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    async with wire(url) as client:
        for request in (head + LENGTH + b"\r\n" + BODY, head + b"Transfer-Encoding: chunked\r\n\r\n" + chunked):
            await client.send(request)
            assert (await client.answer()).status == 200
            await client.send(request[:-3])
            await client.send(request[-3:] + WHOLE)
            assert [(await client.answer()).status for _ in range(2)] == [200, 200]
    assert [exchange.body for exchange in worker.exchanges] == [BODY] * 6


@pytest.mark.parametrize("rest", [b"Content-Length: 9\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n0x3"])
async def test_whole_requests_are_answered_before_broken_one(worker: ScriptedWorker, url: str, rest: bytes) -> None:
    """Two requests wait, and the third one is incomplete or invalid."""
    there, released = asyncio.Event(), asyncio.Event()

    async def script(exchange: Exchange) -> None:
        there.set()
        await released.wait()
        await exchange.answer()

    worker.script = script
    async with wire(url) as client:
        await client.send(WHOLE + HEALTH + POST + rest)
        client.writer.write_eof()
        await there.wait()
        released.set()
        answers = (await client.rest()).replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")
    statuses = re.findall(rb"HTTP/1.1 (\d+)", answers)
    assert statuses in ([b"200", b"200"], [b"200", b"200", b"400"])
    assert len(worker.exchanges) == 1


async def test_data_after_connection_close_is_ignored(worker: ScriptedWorker, url: str) -> None:
    async with wire(url) as client:
        await client.send(WHOLE.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + WHOLE)
        answer = await client.answer()
        assert (answer.status, answer.headers[b"connection"]) == (200, b"close")
        assert await client.rest() == b""
    assert len(worker.exchanges) == 1


async def test_expect_100_continue_is_answered(worker: ScriptedWorker, url: str) -> None:
    async with wire(url) as client:
        await client.send(POST + LENGTH + b"Expect: 100-continue\r\n\r\n")
        assert (await client.head()).status == 100
        assert worker.exchanges == []
        await client.send(BODY)
        assert (await client.answer()).status == 200
        await client.send(WHOLE)
        assert (await client.answer()).status == 200
    assert [exchange.body for exchange in worker.exchanges] == [BODY, BODY]


@pytest.mark.parametrize(
    "sent",
    [
        POST + b"Content-Length: 1001\r\n\r\n" + b"x" * 1001,
        CHUNKED + b"1f4\r\n%b\r\n" % (b"x" * 500) * 3 + b"0\r\n\r\n",
    ],
)
async def test_too_large_body_is_413(worker: ScriptedWorker, url: str, sent: bytes) -> None:
    async with wire(url) as client:
        await client.send(sent)
        answer = await client.answer()
    assert answer.status == 413
    assert b"server.max_body_bytes" in answer.body
    assert worker.exchanges == []


async def test_missing_body_is_408(worker: ScriptedWorker, url: str) -> None:
    async with wire(url) as client:
        await client.send(POST + LENGTH + b"\r\n" + BODY[:5])
        answer = await client.answer()
    assert answer.status == 408
    assert worker.exchanges == []


async def test_incomplete_head_is_closed_after_timeout(
    worker: ScriptedWorker, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with wire(url) as client:
        await client.send(WHOLE)
        assert (await client.answer()).status == 200
        monkeypatch.setattr(request_reader, "HEAD_SECONDS", 0.2)
        await client.send(POST)
        assert await client.rest() == b""
    for sent in (b"", POST):
        async with wire(url) as client:
            await client.send(sent)
            assert await client.rest() == b""
    assert len(worker.exchanges) == 1


async def test_http_1_0_body_ends_with_connection(worker: ScriptedWorker, url: str) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.begin_chunks()
        await exchange.chunk(b"data: 1\n\n")
        await asyncio.sleep(0.05)  # what ends at once has a length
        await exchange.chunk(b"data: 2\n\n")
        await exchange.chunk(b"")

    old = WHOLE.replace(b"HTTP/1.1", b"HTTP/1.0")
    async with wire(url) as client:
        await client.send(old + WHOLE)
        answer = await client.answer()
        assert (answer.status, answer.body, answer.headers[b"connection"]) == (200, b"{}", b"close")
        assert await client.rest() == b""
    assert len(worker.exchanges) == 1
    worker.script = script
    async with wire(url) as client:
        await client.send(old)
        everything = await client.rest()
    assert b"data: 1\n\n" in everything
    assert b"data: 2\n\n" in everything


async def test_half_close_during_response_is_a_disconnect(worker: ScriptedWorker, url: str) -> None:
    left = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.begin_chunks()
        await exchange.chunk(b"data: 1\n\n")
        await exchange.until_closed()
        left.set()

    worker.script = script
    async with wire(url) as client:
        await client.send(WHOLE)
        assert (await client.head()).status == 200
        client.writer.write_eof()
        async with asyncio.timeout(60):
            await left.wait()


async def test_half_close_within_body_is_a_disconnect(url: str) -> None:
    async with wire(url) as client:
        await client.send(WHOLE[:-1])
        client.writer.write_eof()
        async with asyncio.timeout(60):
            assert await client.rest() == b""


async def test_client_that_stops_reading_is_closed_after_timeout(
    worker: ScriptedWorker, running: tuple[ScriptedWorker, RouterUnderTest]
) -> None:
    left = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 200 OK\r\ncontent-length: 100000000\r\n\r\n")
        try:
            for _ in range(1000):
                await exchange.send(b"x" * 100_000)
        except ConnectionError:
            left.set()

    worker.script = script
    routed = running[1]
    async with wire(routed.url) as client:
        await client.send(WHOLE)
        async with asyncio.timeout(60):
            await left.wait()
        await routed.until_released()
        assert not client.reader.at_eof()  # it has not even looked
        client.writer.transport.abort()


async def test_refused_request_without_a_body_keeps_its_connection(worker: ScriptedWorker, url: str) -> None:
    async with wire(url) as client:
        for path, status in ((b"/v1/completions", 405), (b"/unknown", 404), (b"/health", 200)):
            await client.send(b"GET %b HTTP/1.1\r\nHost: r\r\n\r\n" % path)
            answer = await client.answer()
            assert (answer.status, b"connection" in answer.headers) == (status, False)
        await client.send(WHOLE)
        assert (await client.answer()).status == 200
    assert len(worker.exchanges) == 1


async def test_head_response_has_no_body(worker: ScriptedWorker, url: str) -> None:
    async with wire(url) as client:
        for path, status in ((b"/health", b"200"), (b"/version", b"200"), (b"/unknown", b"404")):
            await client.send(b"HEAD %b HTTP/1.1\r\nHost: r\r\n\r\n" % path)
            async with asyncio.timeout(60):
                head = await client.reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 " + status)
            assert b"\r\ncontent-length: " in head
        await client.send(HEALTH)
        assert (await client.answer()).status == 200
    assert [exchange.method for exchange in worker.exchanges] == ["HEAD"]


# What workers answer

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"


@pytest.mark.parametrize(
    ("sent", "body"),
    [
        (
            CONTINUE + HEAD + b"content-length: 2\r\n\r\n{}",
            b"{}",
        ),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n1;a=b\r\n}\r\n0\r\nx-trailer: 1\r\n\r\n", b"{}"),
        (HEAD + b"Transfer-Encoding: Chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", b"{}"),
        (HEAD + b"content-length: 2\r\n\r\n{}HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nother", b"{}"),
        (HEAD + b"content-length: 2\r\nconnection: close\r\n\r\n{}trailing", b"{}"),
        (HEAD + b"content-length: 0\r\n\r\n", b""),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\n{}", b"{}"),
    ],
)
async def test_valid_response_is_forwarded(worker: ScriptedWorker, url: str, sent: bytes, body: bytes) -> None:
    worker.script = answering(sent)  # type: ignore[assignment]
    async with wire(url) as client:
        for _ in range(2):
            await client.send(WHOLE)
            answer = await client.answer()
            assert answer.status in (200, 204)
            assert answer.body == body
            assert b"x-trailer" not in answer.headers


async def test_response_without_length_is_chunked(worker: ScriptedWorker, url: str) -> None:
    worker.script = answering(HEAD + b"\r\n{}", then_close=True)  # type: ignore[assignment]
    async with wire(url) as client:
        for _ in range(2):
            await client.send(WHOLE)
            answer = await client.answer()
            assert (answer.status, answer.body, answer.headers[b"transfer-encoding"]) == (200, b"{}", b"chunked")


@pytest.mark.parametrize(
    "sent",
    [
        HEAD + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        HEAD + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}",
        HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        HEAD + b"x-a: one\nx-b: two\r\ncontent-length: 2\r\n\r\n{}",
        HEAD + b"x-a: one\r\n folded\r\ncontent-length: 2\r\n\r\n{}",
        HEAD + b"x-a: one\x01\r\ncontent-length: 2\r\n\r\n{}",
        HEAD + b"x-a: " + b"a" * 70_000 + b"\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 4000,
        b"nonsense\r\n\r\n",
    ],
)
async def test_ambiguous_response_is_503(worker: ScriptedWorker, url: str, sent: bytes) -> None:
    worker.script = answering(sent)  # type: ignore[assignment]
    async with wire(url) as client:
        await client.send(WHOLE)
        answer = await client.answer()
    assert answer.status == 503
    assert b"x-kvrouter-worker" not in answer.headers


@pytest.mark.parametrize(
    "sent",
    [
        HEAD + b"content-length: 10\r\n\r\n{",
        HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\n{}XX0\r\n\r\n",
    ],
)
async def test_broken_response_never_looks_complete(worker: ScriptedWorker, url: str, sent: bytes) -> None:
    worker.script = answering(sent, then_close=True)  # type: ignore[assignment]
    async with wire(url) as client:
        await client.send(WHOLE)
        answer = await client.head()
        assert answer.status == 200
        rest = await client.rest()
    if b"content-length" in answer.headers:
        assert len(rest) < int(answer.headers[b"content-length"])
    else:
        assert not rest.endswith(b"0\r\n\r\n")


EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
# Pieces that a worker sends, and the bytes that its client receives. Whole chunks of events are forwarded unchanged,
# with the worker's capital letters, and all other bytes are framed again.
PIECES = [
    (EVENTS + b"9\r\ndata: 1\n\n\r\n", b"9\r\ndata: 1\n\n\r\n"),
    (b"B\r\ndata: 234\n\n\r\n", b"B\r\ndata: 234\n\n\r\n"),
    (b"3\r\n:a\n\r\n3\r\n:b\n\r\n", b"3\r\n:a\n\r\n3\r\n:b\n\r\n"),
    (b"B\r\ndata", b"4\r\ndata\r\n"),
    (b": 901\n\n\r\n", b"7\r\n: 901\n\n\r\n"),
    (b"B\r\ndata: 234\n\n\r\n", b"B\r\ndata: 234\n\n\r\n"),
    (b"00B;a=b\r\ndata: 567\n\n\r\n", b"b\r\ndata: 567\n\n\r\n"),
    (b"0\r\nx-trailer: 1\r\n\r\n", b"0\r\n\r\n"),
]


async def check_in_steps(client: Wire, worker: ScriptedWorker, pieces: list[bytes], shown: list[bytes]) -> None:
    """Have a worker send each piece when its client has seen what is `shown` of the one before."""
    seen = asyncio.Semaphore(1)

    async def script(exchange: Exchange) -> None:
        for piece in pieces:
            await seen.acquire()
            await exchange.send(piece)
        exchange.writer.close()

    worker.script = script
    await client.send(WHOLE)
    assert (await client.head()).status == 200
    for expected in shown:
        async with asyncio.timeout(60):
            assert await client.reader.readexactly(len(expected)) == expected
        seen.release()


async def test_chunks_of_events_are_forwarded_unchanged(worker: ScriptedWorker, url: str) -> None:
    async with wire(url) as client:
        await check_in_steps(client, worker, [sent for sent, _ in PIECES], [shown for _, shown in PIECES])


@pytest.mark.parametrize("end", [b"", b"9\r\nda", b"9\r\n", b"9", b"zz\r\ndata: 1\n\n\r\n", b"9\r\ndata: 1\n\nXX"])
async def test_broken_stream_stays_framed_after_forwarded_chunks(worker: ScriptedWorker, url: str, end: bytes) -> None:
    (first, shown_first), (second, shown_second) = PIECES[:2]
    async with wire(url) as client:
        await check_in_steps(client, worker, [first, second, end], [shown_first, shown_second])
        body = b""
        async with asyncio.timeout(60):
            while size := int(await client.reader.readline(), 16):
                body += (await client.reader.readexactly(size + 2))[:-2]
            assert await client.reader.readexactly(2) == b"\r\n"
    assert b"upstream_error" in body


async def test_closed_idle_connection_is_retried(worker: ScriptedWorker, url: str) -> None:
    async def script(exchange: Exchange) -> None:
        if sum(each.connection == exchange.connection for each in worker.exchanges) > 1:
            await exchange.hang_up()  # as if the connection was closed before the request
        else:
            await exchange.answer()

    worker.script = script
    async with wire(url) as client:
        for _ in range(3):
            await client.send(WHOLE)
            answer = await client.answer()
            assert (answer.status, answer.body) == (200, b"{}")
            assert b"x-kvrouter-attempts" not in answer.headers
    first, again, reconnected, *_ = (exchange.connection for exchange in worker.exchanges)
    assert first == again != reconnected


async def test_request_is_not_resent_once_response_began(worker: ScriptedWorker, url: str) -> None:
    async def script(exchange: Exchange) -> None:
        if sum(each.connection == exchange.connection for each in worker.exchanges) > 1:
            await exchange.send(b"HTTP/1.1 2")
            await exchange.hang_up()
        else:
            await exchange.answer()

    worker.script = script
    async with wire(url) as client:
        await client.send(WHOLE)
        assert (await client.answer()).status == 200
        await client.send(WHOLE)
        assert (await client.answer()).status == 503
    assert len(worker.exchanges) == 2


async def test_early_response_is_forwarded() -> None:
    """A worker that refuses a large body at once, and does not read it."""

    async def early(reader: StreamReader, writer: StreamWriter) -> None:
        head = b""
        with suppress(asyncio.IncompleteReadError):  # the router may give a connection up before it asks there
            head = await reader.readuntil(b"\r\n\r\n")
        if b"/v1/completions" in head:
            writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 3\r\n\r\nbig")
            await writer.drain()
            await asyncio.sleep(5)
        elif b"/v1/models" in head:
            writer.write(b'HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 20\r\n\r\n{"data":[{"id":"m"}]')
            writer.write(b"}")
        writer.close()

    server = await asyncio.start_server(early, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    body = b'{"model":"m","prompt":[%b1]}' % (b"1," * 5_000_000)
    async with server, router(f"http://127.0.0.1:{port}") as routed:
        async with wire(routed.url) as client:
            await client.send(POST + b"Content-Length: %d\r\n\r\n" % len(body))
            await client.send(body)
            answer = await client.answer()
        assert answer.status in (413, 503)
        await routed.until_released()


# The server


async def test_shutdown_finishes_requests_in_flight() -> None:
    arrived, finish = asyncio.Event(), asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.begin_chunks()
        await exchange.chunk(b"data: 1\n\n")
        arrived.set()
        await finish.wait()
        await exchange.chunk(b"data: 2\n\n")
        await exchange.chunk(b"")

    async with scripted_worker(script) as worker:
        settings = Settings(workers=[{"url": worker.url}])  # type: ignore[list-item]
        async with running_router(settings) as app:
            server = HttpServer(app, shutdown_timeout=5)
            async with serving(server) as url, wire(url) as busy, wire(url) as idle:
                await idle.send(HEALTH)
                assert (await idle.answer()).status == 200
                await busy.send(WHOLE)
                await busy.head()
                await arrived.wait()
                server.should_exit = True
                assert await idle.rest() == b""
                finish.set()
                answered = await busy.rest()
    assert b"data: 2" in answered
    assert answered.endswith(b"0\r\n\r\n")
    assert len(worker.exchanges) == 1


async def test_idle_client_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "KEEP_ALIVE_SECONDS", 1)
    async with scripted_worker() as worker:
        settings = Settings(workers=[{"url": worker.url}])  # type: ignore[list-item]
        async with (
            running_router(settings) as app,
            serving(HttpServer(app, shutdown_timeout=5)) as url,
            wire(url) as ours,
            wire(url) as ordinary,
        ):
            await ours.send(WHOLE)
            assert (await ours.answer()).status == 200
            await ordinary.send(HEALTH)
            assert (await ordinary.answer()).status == 200
            assert [await ours.rest(), await ordinary.rest()] == [b"", b""]
