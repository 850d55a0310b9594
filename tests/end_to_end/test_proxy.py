"""Requests to workers and their answers back, byte for byte, whatever either side does."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
from collections.abc import AsyncIterator
from io import BytesIO
from urllib.parse import urlsplit

import aiohttp
import openai
import pytest
from router_under_test import RouterUnderTest, raw, router, until
from scripted_worker import Exchange, ScriptedWorker, scripted_worker

PATH = "/v1/completions"
BODY = b'{ "model":"m",\n "prompt" : "\\u00e9t\xc3\xa9", "unknown": [1.0, 1e2, null] }\n'


async def head_and_body(routed: RouterUnderTest, request: bytes) -> tuple[list[bytes], bytes]:
    """Send bytes; the lines of the answer's head, and its body. The request asks for the connection to be closed."""
    head, _, body = (await raw(routed, request)).partition(b"\r\n\r\n")
    return head.split(b"\r\n"), body


# Bytes


async def test_request_is_forwarded_unchanged(worker: ScriptedWorker, routed: RouterUnderTest) -> None:
    headers = (
        b"Content-Type: application/json; charset=utf-8\r\nAuthorization: Bearer secret\r\nX-Name: Zo\xc3\xab\r\n"
        b"X-Twice: 1\r\nCookie: a=b\r\nX-Twice: 2\r\nUser-Agent: test/1.0\r\nX-Empty: \r\n"
    )
    await head_and_body(
        routed,
        b"POST /v1/completions?debug=1&q=a%20b HTTP/1.1\r\nHost: public.example\r\nConnection: close\r\n"
        + headers
        + b"Content-Length: %d\r\n\r\n" % len(BODY)
        + BODY,
    )
    (request,) = worker.exchanges
    assert (request.method, request.target) == ("POST", "/v1/completions?debug=1&q=a%20b")
    assert request.body == BODY
    own = {"host", "content-length", "x-request-id"}
    assert [(name, value) for name, value in request.headers if name not in own] == [
        (name.decode().lower(), value) for name, _, value in (line.partition(b": ") for line in headers.splitlines())
    ]
    assert request.header("host") == [worker.url.removeprefix("http://").encode()]
    assert request.header("content-length") == [b"%d" % len(BODY)]


async def test_response_is_returned_unchanged(worker: ScriptedWorker, routed: RouterUnderTest) -> None:
    body = bytes(range(256))
    headers = b"content-type: application/x-odd\r\nset-cookie: a=1\r\nset-cookie: b=2\r\nx-name: Zo\xc3\xab\r\n"

    async def script(exchange: Exchange) -> None:
        await exchange.answer(body, "418 I'm a teapot", headers)

    worker.script = script
    request = b"GET /v1/files/teapot HTTP/1.1\r\nHost: r\r\nConnection: close\r\n\r\n"
    head, received = await head_and_body(routed, request)
    assert received == body
    assert head[0].startswith(b"HTTP/1.1 418")
    own = (b"date:", b"connection:", b"content-length:", b"x-kvrouter-", b"x-request-id:")
    assert [line for line in head[1:] if not line.lower().startswith(own)] == headers.splitlines()
    assert b"content-length: 256" in head
    assert b"x-kvrouter-worker: " + worker.url.encode() in head
    assert b"x-kvrouter-overlap-tokens: 0" in head


HOP_BY_HOP = {
    "connection": "X-Hop, keep-alive",
    "keep-alive": "timeout=5",
    "proxy-authenticate": "Basic",
    "proxy-authorization": "Basic eDp5",
    "te": "trailers",
    "trailer": "x-checksum",
    "upgrade": "h2c",
    "x-hop": "named by Connection",
}


async def test_hop_by_hop_headers_are_not_forwarded(worker: ScriptedWorker, routed: RouterUnderTest) -> None:
    reply = await routed.call(PATH, BODY, headers=HOP_BY_HOP | {"Expect": "100-continue", "x-end": "to end"})
    assert reply.status == 200
    names = {name for name, _ in worker.last.headers}
    assert "x-end" in names
    assert not names & {*HOP_BY_HOP, "expect", "transfer-encoding"}


async def test_hop_by_hop_headers_are_not_returned(worker: ScriptedWorker, routed: RouterUnderTest) -> None:
    async def script(exchange: Exchange) -> None:
        lines = "".join(f"{name}: {value}\r\n" for name, value in HOP_BY_HOP.items() if name != "upgrade")
        await exchange.answer(b"{}", headers=lines.encode() + b"x-end: to end\r\nserver: engine\r\ndate: then\r\n")

    worker.script = script
    reply = await routed.call(PATH, BODY)
    assert reply.headers["x-end"] == "to end"
    assert not {name.lower() for name in reply.headers} & {*HOP_BY_HOP, "server"}
    assert reply.headers.getall("date") != ["then"]
    assert len(reply.headers.getall("date")) == 1


@pytest.mark.parametrize(
    "target", ["/v1/files/a?x=%26&y=1+2", "/v1/files/a@b:c", "/v1/files?", "/v1/files?a=/../b;c='d'|{e}"]
)
async def test_paths_and_queries_are_forwarded_unchanged(
    worker: ScriptedWorker, routed: RouterUnderTest, target: str
) -> None:
    await head_and_body(routed, b"GET %b HTTP/1.1\r\nHost: r\r\nConnection: close\r\n\r\n" % target.encode())
    assert worker.last.target == target.removesuffix("?")


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "DELETE", "OPTIONS"])
async def test_other_paths_are_forwarded_with_their_methods(
    worker: ScriptedWorker, routed: RouterUnderTest, method: str
) -> None:
    reply = await routed.call("/v1/files/1", method=method)
    assert (worker.last.method, worker.last.target) == (method, "/v1/files/1")
    assert (reply.status, reply.body) == (200, b"" if method == "HEAD" else b"{}")
    assert reply.headers["content-length"] == "2"


async def test_error_response_of_worker_is_returned(worker: ScriptedWorker, routed: RouterUnderTest) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.answer(b"no such path", "404 Not Found", b"content-type: text/plain\r\nretry-after: 7\r\n")

    worker.script = script
    reply = await routed.call("/v1/embeddings", {"model": "m", "input": "x"})
    assert (reply.status, reply.body, reply.headers["retry-after"]) == (404, b"no such path", "7")


async def test_redirect_is_returned_to_client(worker: ScriptedWorker, routed: RouterUnderTest) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.answer(b"", "307 Temporary Redirect", b"location: /elsewhere\r\n")

    worker.script = script
    reply = await routed.call(PATH, BODY)
    assert (reply.status, reply.headers["location"]) == (307, "/elsewhere")
    assert len(worker.exchanges) == 1


async def test_compressed_answers_are_forwarded_unchanged(worker: ScriptedWorker, routed: RouterUnderTest) -> None:
    packed = gzip.compress(b"x" * 1000)

    async def script(exchange: Exchange) -> None:
        await exchange.answer(packed, headers=b"content-encoding: gzip\r\n")

    worker.script = script
    reply = await routed.call(PATH, BODY, headers={"accept-encoding": "gzip, br"})
    assert reply.body == packed
    assert worker.last.header("accept-encoding") == [b"identity"]


async def test_chunked_request_is_forwarded_with_length(worker: ScriptedWorker, routed: RouterUnderTest) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield BODY[:10]
        yield BODY[10:]

    async with routed.session.post(routed.url + PATH, data=pieces()) as response:
        assert response.status == 200
    assert worker.last.body == BODY
    assert worker.last.header("content-length") == [b"%d" % len(BODY)]


async def test_large_request_and_response_are_forwarded(worker: ScriptedWorker, routed: RouterUnderTest) -> None:
    body = b'{"model":"m","prompt":"' + os.urandom(2_500_000).hex().encode() + b'"}'
    answer = os.urandom(20_000_000)

    async def script(exchange: Exchange) -> None:
        await exchange.answer(answer)

    worker.script = script
    async with routed.session.post(routed.url + PATH, data=BytesIO(body)) as response:
        assert await response.read() == answer
    assert worker.last.body == body


async def test_body_over_limit_is_413(worker: ScriptedWorker) -> None:
    async with router(worker.url, server={"max_body_bytes": 1000}) as routed:
        assert (await routed.call("/v1/files", b"x" * 1000)).status == 200
        reply = await routed.call(PATH, b"x" * 1_000_000)
        assert reply.status == 413
        assert "1000 bytes" in reply.error["message"]
        assert len(worker.exchanges) == 1
        assert await routed.metric("kvrouter_requests_refused_total", status="413") == 1


# Streaming


async def test_stream_is_forwarded_piece_by_piece(worker: ScriptedWorker, routed: RouterUnderTest) -> None:
    """The worker sends a piece only when the client got the one before."""
    received: asyncio.Queue[bytes] = asyncio.Queue()
    pieces = [b"data: %d\n\n" % number for number in range(5)]

    async def script(exchange: Exchange) -> None:
        await exchange.begin_chunks()
        for piece in pieces:
            await exchange.chunk(piece)
            assert await received.get() == piece
        await exchange.chunk(b"")

    worker.script = script
    async with asyncio.timeout(60), routed.request(PATH, BODY) as response:
        assert response.content_type == "text/event-stream"
        async for piece in response.content.iter_any():
            received.put_nowait(piece)
    assert received.empty()


async def test_response_head_is_sent_before_its_body(worker: ScriptedWorker, routed: RouterUnderTest) -> None:
    begun = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.begin_chunks("application/json")
        await begun.wait()
        await exchange.chunk(b"")

    worker.script = script
    async with asyncio.timeout(60), routed.request(PATH, BODY) as response:
        begun.set()
        assert await response.read() == b""


async def test_slow_client_holds_worker_back(worker: ScriptedWorker, routed: RouterUnderTest) -> None:
    size, piece, sent = 100_000_000, b"x" * 100_000, 0

    async def script(exchange: Exchange) -> None:
        nonlocal sent
        await exchange.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        while sent < size:
            await exchange.send(piece)
            sent += len(piece)

    async def held_back() -> bool:
        before = sent
        await asyncio.sleep(0.2)
        return 0 < sent == before

    worker.script = script
    async with routed.request(PATH, BODY) as response:
        await until(held_back)
        assert 0 < sent < 30_000_000
        received = 0
        async for data in response.content.iter_any():
            received += len(data)
        assert received == size


async def test_prefill_is_pending_until_first_byte(worker: ScriptedWorker, routed: RouterUnderTest) -> None:
    first, last = asyncio.Event(), asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.begin_chunks("application/json")
        await first.wait()
        await exchange.chunk(b"[1,")
        await last.wait()
        await exchange.chunk(b"")

    worker.script = script
    prompt = "What holds the cache? " * 8
    tokens = len(prompt) // 4  # estimated from the text, without a tokenizer
    async with routed.request("/v1/completions", {"model": "m", "prompt": prompt}) as response:
        assert await routed.loads() == [{"requests": 1, "pending": tokens, "context": tokens}]
        first.set()
        await response.content.readany()
        assert await routed.loads() == [{"requests": 1, "pending": 0, "context": tokens}]
        last.set()
        await response.read()
    await routed.until_released()


# Clients that leave


@pytest.mark.parametrize("begun", [False, True])
async def test_disconnect_closes_worker_request(worker: ScriptedWorker, routed: RouterUnderTest, begun: bool) -> None:
    arrived, left = asyncio.Event(), asyncio.Event()

    async def script(exchange: Exchange) -> None:
        if begun:
            await exchange.begin_chunks()
            await exchange.chunk(b"data: 1\n\n")
        arrived.set()
        await exchange.until_closed()
        left.set()

    async def ask() -> None:
        async with routed.request(PATH, BODY) as response:
            await response.read()

    worker.script = script
    asking = asyncio.create_task(ask())
    async with asyncio.timeout(60):
        await arrived.wait()
        assert await routed.requests_in_flight() == 1
        asking.cancel()
        await left.wait()
    await routed.until_released()
    assert await routed.metric("kvrouter_requests_abandoned_total") == 1
    assert (await routed.workers())[0]["up"]


async def test_incomplete_request_is_never_routed(worker: ScriptedWorker, routed: RouterUnderTest) -> None:
    address = urlsplit(routed.url)
    _, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: 100\r\n\r\n{")
    await writer.drain()
    writer.close()
    await writer.wait_closed()

    await routed.until_metric(1, "kvrouter_requests_abandoned_total")
    assert worker.exchanges == []


# Workers that fail


async def test_request_is_retried_if_worker_refuses_connection() -> None:
    async with (
        scripted_worker() as alive,
        scripted_worker() as dead,
        router(alive.url, dead.url, policy={"name": "round_robin"}, fleet={}) as routed,
    ):
        await dead.stop()
        replies = [await routed.call(PATH, BODY) for _ in range(4)]
        assert [(reply.status, reply.worker) for reply in replies] == [(200, alive.url)] * 4
        report = {worker["worker"]: worker for worker in await routed.workers()}
        assert (report[alive.url]["up"], report[dead.url]["up"]) == (True, False)
        assert report[dead.url]["problem"]
        await routed.until_released()
        assert await routed.metric("kvrouter_requests_retried_total", worker=dead.url) == 1


async def test_request_is_retried_if_worker_closes_connection() -> None:
    async with (
        scripted_worker(Exchange.hang_up) as bad,
        scripted_worker() as good,
        router(bad.url, good.url, policy={"name": "round_robin"}) as routed,
    ):
        reply = await routed.call(PATH, BODY)
        assert (reply.status, reply.worker) == (200, good.url)
        assert (bad.last.body, good.last.body) == (BODY, BODY)
        await routed.until_released()


async def test_request_is_503_if_every_worker_fails() -> None:
    async with (
        scripted_worker(Exchange.hang_up) as one,
        scripted_worker(Exchange.hang_up) as two,
        router(one.url, two.url, fleet={}) as routed,
    ):
        reply = await routed.call(PATH, BODY)
        assert reply.status == 503
        assert (reply.error["type"], reply.error["code"]) == ("service_unavailable", "no_worker_available")
        assert (len(one.exchanges), len(two.exchanges)) == (1, 1)
        with pytest.raises(openai.InternalServerError) as refused:
            await routed.openai.completions.create(model="m", prompt="x")
        assert refused.value.status_code == 503
        await routed.until_released()


async def test_attempts_limit_retries() -> None:
    async with (
        scripted_worker(Exchange.hang_up) as one,
        scripted_worker(Exchange.hang_up) as two,
        scripted_worker(Exchange.hang_up) as three,
        router(one.url, two.url, three.url, proxy={"attempts": 2}) as routed,
    ):
        assert (await routed.call(PATH, BODY)).status == 503
        assert sum(len(worker.exchanges) for worker in (one, two, three)) == 2


async def test_recovered_worker_is_used_again() -> None:
    async with scripted_worker(Exchange.hang_up) as worker, router(worker.url) as routed:
        assert (await routed.call(PATH, BODY)).status == 503
        worker.script = Exchange.answer

        await until(lambda: routed.call(PATH, BODY), lambda reply: reply.status == 200)


async def test_idle_connections_are_kept_to_clients_and_not_to_workers(worker: ScriptedWorker) -> None:
    """Engines close idle connections after 5 s, and a request sent at that moment would be lost."""
    async with router(worker.url, fleet={"probe_interval": 60, "metrics_interval": 60}) as routed:
        address = urlsplit(routed.url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        for idle in (0, 0, 4.3):  # connections to workers are kept for 4 s
            await asyncio.sleep(idle)
            writer.write(b"GET /version HTTP/1.1\r\nHost: r\r\n\r\n")
            assert (await reader.readuntil(b"{}")).startswith(b"HTTP/1.1 200")
        writer.close()
        await writer.wait_closed()
    first, second, third = (exchange.connection for exchange in worker.exchanges)
    assert first == second != third


async def break_off(exchange: Exchange, content_type: str, sent: bytes) -> None:
    await exchange.begin_chunks(content_type)
    await exchange.chunk(sent)
    await exchange.hang_up()


@pytest.mark.parametrize("sent", [b'data: {"choices": []}\n\n', b'data: {"choices": []}\n\ndata: {"choi'])
async def test_broken_event_stream_ends_with_error_event(
    worker: ScriptedWorker, routed: RouterUnderTest, sent: bytes
) -> None:
    async def script(exchange: Exchange) -> None:
        await break_off(exchange, "text/event-stream", sent)

    worker.script = script
    reply = await routed.call(PATH, BODY)
    assert reply.body.startswith(sent)
    events = reply.body.split(b"\n\n")
    assert json.loads(events[-2].removeprefix(b"data: "))["error"]["type"] == "upstream_error"
    assert events[-1] == b""
    await routed.until_released()
    assert await routed.metric("kvrouter_answers_broken_total", worker=worker.url) == 1


async def test_openai_client_raises_error_event(worker: ScriptedWorker, routed: RouterUnderTest) -> None:
    async def script(exchange: Exchange) -> None:
        await break_off(exchange, "text/event-stream; charset=utf-8", b'data: {"choices": []}\n\n')

    worker.script = script
    stream = await routed.openai.completions.create(model="m", prompt="x", stream=True)
    with pytest.raises(openai.APIError, match="broke off"):
        async for _ in stream:
            pass


@pytest.mark.parametrize("framing", ["chunked", "content-length"])
async def test_broken_response_closes_connection(worker: ScriptedWorker, routed: RouterUnderTest, framing: str) -> None:
    async def script(exchange: Exchange) -> None:
        if framing == "chunked":
            await break_off(exchange, "application/json", b'{"choices"')
        else:
            await exchange.send(b'HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{"choices"')
            await exchange.hang_up()

    worker.script = script
    with pytest.raises(aiohttp.ClientPayloadError):
        await routed.call(PATH, BODY)
    await routed.until_released()
    assert (await routed.workers())[0]["up"]


async def test_silent_worker_is_504(worker: ScriptedWorker) -> None:
    worker.script = Exchange.until_closed
    async with router(worker.url, proxy={"idle_timeout": 0.2}) as routed:
        reply = await routed.call(PATH, BODY)
        assert reply.status == 504
        assert reply.error["type"] == "timeout_error"
        assert len(worker.exchanges) == 1
        await routed.until_released()


async def test_silent_stream_ends_with_error_event(worker: ScriptedWorker) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.begin_chunks()
        await exchange.chunk(b"data: 1\n\n")
        await exchange.until_closed()

    worker.script = script
    async with router(worker.url, proxy={"idle_timeout": 0.2}) as routed:
        reply = await routed.call(PATH, BODY)
        assert reply.body.startswith(b"data: 1\n\n")
        assert b"upstream_error" in reply.body
        await routed.until_released()


async def test_long_stream_is_not_silent(worker: ScriptedWorker) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.begin_chunks()
        for _ in range(8):
            await asyncio.sleep(0.3)
            await exchange.chunk(b"data: 1\n\n")
        await exchange.chunk(b"")

    worker.script = script
    async with router(worker.url, proxy={"idle_timeout": 2.0}) as routed:
        assert (await routed.call(PATH, BODY)).body == b"data: 1\n\n" * 8


# Ranks


@pytest.mark.parametrize("first", [0, 4])
async def test_chosen_rank_is_sent_to_worker_with_ranks(worker: ScriptedWorker, first: int) -> None:
    """A server that has not the first ranks (`--data-parallel-hybrid-lb`) counts its own."""
    streams = [{"dp_rank": first + rank, "endpoint": f"tcp://127.0.0.1:{rank + 1}"} for rank in range(3)]
    workers = [{"url": worker.url, "streams": streams}]
    unreachable = {"catch_up": 0}
    async with router(workers=workers, policy={"name": "round_robin"}, constants=unreachable) as routed:
        replies = [await routed.call(PATH, BODY, headers={"X-Data-Parallel-Rank": "7"}) for _ in range(3)]
    assert [exchange.header("x-data-parallel-rank") for exchange in worker.exchanges] == [[b"0"], [b"1"], [b"2"]]
    assert [int(reply.headers["x-kvrouter-dp-rank"]) - first for reply in replies] == [0, 1, 2]


async def test_rank_header_is_not_sent_to_worker_of_one_rank(worker: ScriptedWorker, routed: RouterUnderTest) -> None:
    reply = await routed.call(PATH, BODY)
    assert worker.last.header("x-data-parallel-rank") == []
    assert "x-kvrouter-dp-rank" not in reply.headers
