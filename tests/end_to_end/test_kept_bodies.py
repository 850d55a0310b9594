"""A request's body is released once it is answered, by its connection and without the garbage collector.

Garbage is looked for rarely (`router.server.serving`): what is part of a cycle would stay for thousands of requests.
"""

from __future__ import annotations

import asyncio
import gc
import json
from urllib.parse import urlsplit

import pytest
from envoy_client import EnvoyStream, Mode
from grpc_call import channel_to
from picker_under_test import JSON, PATH, STREAM, picker
from router_under_test import router
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
                async with asyncio.timeout(30):
                    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 ")
            del body
            await routed.until_released()
            worker.exchanges.clear()
            assert holders() == []
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
            assert holders() == []
        finally:
            gc.enable()
            gc.unfreeze()
