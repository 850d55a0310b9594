"""Endless and too large bodies are refused by every route of the router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import pytest
from router_under_test import router

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
        async with asyncio.timeout(30):
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
    async with asyncio.timeout(30):
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
