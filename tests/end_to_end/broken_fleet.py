"""Faults between a router and a healthy worker: a proxy of requests and a relay of events."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import zmq
import zmq.asyncio
from aiohttp import web
from running_app import running_app

from simulator.worker.settings import BUNDLED_MODEL

Frames = list[bytes]


@asynccontextmanager
async def request_proxy(
    worker: str,
    change: Callable[[str, bytes], bytes] = lambda _, body: body,
    key: str | None = None,
    buffered: bool = False,
    hidden: Collection[str] = (),
) -> AsyncIterator[str]:
    """Run a proxy in front of a worker.

    - `change`: changes the body of a request by its path.
    - `key`: the only accepted API key.
    - `buffered`: delays a response until its end.
    - `hidden`: the paths that are answered with 404.
    """

    async def handle(request: web.Request) -> web.StreamResponse:
        if key and request.method == "POST" and request.headers.get("Authorization") != f"Bearer {key}":
            return web.Response(status=401, text="no key")
        if request.path in hidden:
            return web.Response(status=404)
        body = change(request.path, await request.read())
        headers = {
            name: request.headers[name] for name in ("Content-Type", "X-data-parallel-rank") if name in request.headers
        }
        async with session.request(request.method, worker + request.path, data=body, headers=headers) as response:
            answer = web.StreamResponse(status=response.status, headers={"Content-Type": response.content_type})
            whole = await response.read() if buffered else b""
            with suppress(aiohttp.ClientConnectionResetError):  # the client left
                await answer.prepare(request)
                await answer.write(whole)
                async for chunk in response.content.iter_any():
                    await answer.write(chunk)
        return answer

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    async with aiohttp.ClientSession() as session, running_app(app) as url:
        yield url


@asynccontextmanager
async def event_relay(endpoint: str, change: Callable[[Frames], Frames | None]) -> AsyncIterator[str]:
    """Run a relay of a stream that changes every message, and drops it if `change` returns None."""
    context: Any = zmq.asyncio.Context()
    subscriber, publisher = context.socket(zmq.SUB), context.socket(zmq.PUB)
    subscriber.subscribe(b"")
    monitor = subscriber.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    subscriber.connect(endpoint)
    port = publisher.bind_to_random_port("tcp://127.0.0.1")

    async def relay() -> None:
        while True:
            if (frames := change(await subscriber.recv_multipart())) is not None:
                await publisher.send_multipart(frames)

    await monitor.recv_multipart()
    relaying = asyncio.create_task(relay())
    try:
        yield f"tcp://127.0.0.1:{port}"
    finally:
        relaying.cancel()
        await asyncio.gather(relaying, return_exceptions=True)
        subscriber.disable_monitor()
        monitor.close(0)
        context.destroy(0)


def other_tokenizer(folder: Path) -> Path:
    """Write the simulated workers' model files with another tokenizer. Return their folder."""
    model = Path(shutil.copytree(BUNDLED_MODEL, folder / "model"))
    file = model / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    for one, other in ("34", "68"):  # tokens that no probe has
        vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    file.write_text(json.dumps(tokenizer))
    return model
