"""Bodies that never end, or are larger than allowed, are refused by every route of both programs, and closed."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from router_under_test import router

pytestmark = pytest.mark.anyio

LIMITS = {"max_body_bytes": 100_000, "body_timeout": 0.5}
INDEX = ["/match", "/query", "/query_by_hash", "/register", "/unregister"]
ROUTER = [*INDEX, "/explain", "/workers", "/workers/drain", "/v1/audio/transcriptions"]


@pytest.fixture(scope="module")
async def router_url() -> AsyncIterator[str]:
    async with router(server=LIMITS) as routed:
        yield routed.url


@pytest.fixture(scope="module")
async def indexer_url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    config = tmp_path_factory.mktemp("indexer") / "config.yaml"
    config.write_text(json.dumps({"server": LIMITS}))
    command = [sys.executable, "-m", "kvrouter", "indexer", "--port=0", f"--config={config}"]
    process = await asyncio.create_subprocess_exec(*command, stderr=PIPE, cwd=Path(__file__).parents[2])
    assert process.stderr is not None
    listens = re.search(r"listens on (\S+)", (await process.stderr.readline()).decode())
    assert listens is not None
    yield listens.group(1)
    process.terminate()
    assert await process.wait() == 0


async def sent(url: str, path: str, head: str, body: bytes = b"", endless: bool = False, method: str = "POST") -> bytes:
    """All that is answered to a request until its connection is closed, which must be soon."""
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    writer.write(
        f"{method} {path} HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n{head}\r\n\r\n".encode() + body
    )

    async def go_on() -> None:
        while True:
            writer.write(b"1000\r\n" + b" " * 4096 + b"\r\n")
            await writer.drain()

    sending = asyncio.create_task(go_on()) if endless else None
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


async def refuses(url: str, path: str) -> None:
    announced = await sent(url, path, f"content-length: {2**30}", b"{")
    assert announced.startswith(b"HTTP/1.1 413 ")
    endless = await sent(url, path, "transfer-encoding: chunked", endless=True)
    assert endless.startswith(b"HTTP/1.1 413 ") or not endless  # a client that goes on sending may be cut off
    for head, body in (("content-length: 9", b"{"), ("transfer-encoding: chunked", b"1\r\n{\r\n")):
        slow = await sent(url, path, head, body)
        assert slow.startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("path", ROUTER)
async def test_the_router_reads_no_body_without_bounds(router_url: str, path: str) -> None:
    await refuses(router_url, path)


@pytest.mark.parametrize("router_url", ["fast"], indirect=True)
async def test_a_refused_client_reads_the_end_of_its_answer_while_it_still_sends(router_url: str) -> None:
    place = urlsplit(router_url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    writer.write(b"POST /match HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n{" % 2**20)
    async with asyncio.timeout(30):
        assert (await reader.read()).startswith(b"HTTP/1.1 413 ")
    for _ in range(3):  # to who had closed, the second would fail
        writer.write(b" ")
        await asyncio.sleep(0)
        assert not writer.transport.is_closing()
    writer.transport.abort()


@pytest.mark.parametrize("path", ["/live", "/dump", "/requests"])
async def test_an_answer_that_began_ends_with_a_body_that_nobody_wants(
    router_url: str, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    for head in ("transfer-encoding: chunked", f"content-length: {2**30}"):
        answer = await sent(router_url, path, head, b"5\r\n{", method="GET")
        assert answer == b"" or answer.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 4"))
    assert not any(record.exc_info for record in caplog.records)


@pytest.mark.parametrize("path", INDEX)
async def test_the_indexer_reads_no_body_without_bounds(indexer_url: str, path: str) -> None:
    await refuses(indexer_url, path)
