"""Bodies are limited in memory, and released once their requests are answered."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import pytest
from envoy_client import EnvoyStream, Mode
from grpc_call import channel_to
from picker_under_test import JSON, PATH, STREAM, picker
from router_under_test import router, until
from scripted_worker import MODEL, Exchange, scripted_worker

MARK = "kept" * 8
REQUESTS = [
    ("/v1/completions", {"prompt": MARK * 2000}),
    ("/v1/completions", {"prompt": MARK * 20_000}),  # long ones are read in a thread
    ("/v1/completions", {"prompt": 1, "x": MARK * 20_000}),  # refused
    ("/v1/embeddings", {"input": MARK * 20_000}),
    ("/v1/files", {"x": MARK * 20_000}),
]


def holders() -> list[str]:
    """Return the types of the objects that refer to a large part of a request's body."""
    marks = (MARK, MARK.encode())

    def is_kept(held: object) -> bool:
        return type(held) in (str, bytes) and len(held) > 10_000 and marks[type(held) is bytes] in held  # type: ignore

    found = (type(each).__name__ for each in gc.get_objects() if any(map(is_kept, gc.get_referents(each))))
    return [kind for kind in found if kind != "Exchange"]  # which is the worker's


async def test_router_keeps_no_body_after_response() -> None:
    async def forgetting(exchange: Exchange) -> None:
        exchange.body = b""
        await exchange.answer()

    async with scripted_worker(forgetting) as worker, router(worker.url) as routed:
        address = urlsplit(routed.url)
        opened = []
        gc.collect()
        gc.freeze()  # what is there already is not looked at
        gc.disable()
        try:
            for path, fields in REQUESTS:
                body = json.dumps({"model": MODEL, **fields}).encode()
                reader, writer = await asyncio.open_connection(address.hostname, address.port)
                opened.append(writer)
                head = f"POST {path} HTTP/1.1\r\nHost: r\r\nContent-Length: {len(body)}\r\n\r\n".encode()
                writer.write(head + body)
                async with asyncio.timeout(60):
                    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 ")
            del body
            await routed.until_released()
            worker.exchanges.clear()
            await until(lambda: holders() == [])  # the live page reads its sample once a second
            for writer in opened:
                writer.close()
                await writer.wait_closed()
            await routed.call("/health")
            assert holders() == []
        finally:
            gc.enable()
            gc.unfreeze()


@pytest.mark.parametrize("mode", [Mode.FULL_DUPLEX_STREAMED, Mode.BUFFERED], ids=["streamed", "buffered"])
async def test_picker_keeps_no_body_after_response(mode: int) -> None:
    body = json.dumps({"model": MODEL, "prompt": MARK * 2000}).encode()
    async with (
        scripted_worker() as worker,
        picker(worker.url) as (side, port),
        channel_to(port) as channel,
    ):
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            for answered in (True, False):
                stream = EnvoyStream(channel, mode)
                await stream.head(PATH, JSON)
                if mode == Mode.BUFFERED:
                    await stream.receive()
                await stream.body(body)
                await stream.receive()
                if mode != Mode.BUFFERED:
                    await stream.receive()
                if answered:
                    await stream.answer_head(200, STREAM)
                    await stream.receive()
                await stream.finish()
            del stream
            await side.until_released()
            del body
            await until(lambda: holders() == [])
        finally:
            gc.enable()
            gc.unfreeze()


LIMITS = {"max_body_bytes": 100_000, "body_timeout": 0.5}
PATHS = [
    *("/match", "/query", "/query_by_hash", "/register", "/unregister"),
    *("/explain", "/workers", "/workers/drain", "/v1/audio/transcriptions"),
]


@pytest.fixture(scope="module")
async def router_url() -> AsyncIterator[str]:
    async with router(server=LIMITS) as routed:
        yield routed.url


async def sent(url: str, path: str, head: str, body: bytes = b"", endless: bool = False, method: str = "POST") -> bytes:
    """Send a request, and return all bytes received until its connection is closed."""
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    writer.write(
        f"{method} {path} HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n{head}\r\n\r\n".encode() + body
    )

    async def keep_sending() -> None:
        while True:
            writer.write(b"1000\r\n" + b" " * 4096 + b"\r\n")
            await writer.drain()

    sending = asyncio.create_task(keep_sending()) if endless else None
    try:
        async with asyncio.timeout(60):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        if sending is not None:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        writer.transport.abort()


async def check_bounds(url: str, path: str) -> None:
    announced = await sent(url, path, f"content-length: {2**30}", b"{")
    assert announced.startswith(b"HTTP/1.1 413 ")
    endless = await sent(url, path, "transfer-encoding: chunked", endless=True)
    assert endless.startswith(b"HTTP/1.1 413 ") or not endless  # the connection may be reset while the client sends
    for head, body in (("content-length: 9", b"{"), ("transfer-encoding: chunked", b"1\r\n{\r\n")):
        slow = await sent(url, path, head, body)
        assert slow.startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("path", PATHS)
async def test_router_bounds_size_and_time_of_bodies(router_url: str, path: str) -> None:
    await check_bounds(router_url, path)


async def test_refused_client_reads_response_while_sending(router_url: str) -> None:
    place = urlsplit(router_url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    writer.write(b"POST /match HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n{" % 2**20)
    async with asyncio.timeout(60):
        assert (await reader.read()).startswith(b"HTTP/1.1 413 ")
    for _ in range(3):  # the second write fails if the router has closed
        writer.write(b" ")
        await asyncio.sleep(0)
        assert not writer.transport.is_closing()
    writer.transport.abort()


@pytest.mark.parametrize("path", ["/live", "/dump", "/requests"])
async def test_unused_body_ends_streamed_response(router_url: str, path: str, caplog: pytest.LogCaptureFixture) -> None:
    for head in ("transfer-encoding: chunked", f"content-length: {2**30}"):
        answer = await sent(router_url, path, head, b"5\r\n{", method="GET")
        assert answer == b"" or answer.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 4"))
    assert not any(record.exc_info for record in caplog.records)
