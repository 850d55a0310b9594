"""Requests beside floods over WebSockets of `/v1/realtime`: python -m benchmarks.realtime_flood.

A router with default settings is in front of a worker that reads everything. Floods, the worker and the client are
processes of their own. The row without a flood is the delay of the machine itself. The first line has the memory of a
router with sockets whose messages never end, beside `limits.arriving_bytes`.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer
from aiohttp import web
from websockets.frames import Frame, Opcode

from benchmarks.machine import resident_bytes
from kvrouter.processes import KvrouterProcess
from kvrouter.tools.traces.results import percentile
from router.settings import LimitSettings

_HANDSHAKE = (
    b"GET /v1/realtime?model=m HTTP/1.1\r\nHost: r\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)
_BODY = b'{"model":"m","prompt":"x"}'
_REQUEST = b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
_PAUSE = 0.005
_UNFINISHED = 3 * 2**20
_SOCKETS = 200

Address = tuple[str, int]


def _frames(opcode: Opcode, data: bytes, count: int) -> bytes:
    return Frame(opcode, data).serialize(mask=True) * count


FLOODS: dict[str, Callable[[], bytes]] = {
    "none": bytes,
    "frames of one byte": lambda: _frames(Opcode.TEXT, b"x", 20_000),
    "pings, never read": lambda: _frames(Opcode.PING, bytes(125), 2_000),
    "pings and bytes": lambda: _frames(Opcode.PING, b"", 1) + _frames(Opcode.TEXT, b"x", 1) * 10_000,
    "messages of 8 MiB": lambda: _frames(Opcode.TEXT, b'{"model":' + b" " * 2**23 + b'"m"}', 1),
}


async def _models(_: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "m"}]})


async def _completion(_: web.Request) -> web.Response:
    return web.json_response({"choices": [{"text": "x"}]})


async def _realtime(request: web.Request) -> web.WebSocketResponse:
    session = web.WebSocketResponse(max_msg_size=0)
    await session.prepare(request)
    async for _ in session:
        pass
    return session


def _worker(pipe: Connection) -> None:
    async def serve() -> None:
        app = web.Application()
        app.add_routes(
            [
                web.get("/v1/models", _models),
                web.post("/v1/completions", _completion),
                web.get("/v1/realtime", _realtime),
            ]
        )
        runner = web.AppRunner(app)
        await runner.setup()
        listening = socket.create_server(("127.0.0.1", 0))
        await web.SockSite(runner, listening).start()
        pipe.send(listening.getsockname()[1])
        await asyncio.Event().wait()

    asyncio.run(serve())


def _opened(address: Address) -> socket.socket:
    connection = socket.create_connection(address)
    connection.sendall(_HANDSHAKE)
    assert connection.recv(4096).startswith(b"HTTP/1.1 101")
    return connection


def _flood(address: Address, data: bytes, ready: Connection) -> None:
    """Send data over a WebSocket without end, and open the next one when it is closed."""
    ready.send(None)
    while True:
        with suppress(OSError), _opened(address) as connection:
            while True:
                connection.sendall(data)


def _unfinished(address: Address, ready: Connection) -> None:
    """Open WebSockets with messages that never end."""
    data = Frame(Opcode.TEXT, bytes(_UNFINISHED)).serialize(mask=True)[:-1]
    held = [_opened(address) for _ in range(_SOCKETS)]
    for connection in held:
        with suppress(OSError):  # it was closed
            connection.sendall(data)
    ready.send(None)
    threading.Event().wait()


def _delays(address: Address, seconds: float, answer: Connection) -> None:
    """Send requests one after another, and send their delays in seconds."""
    found: list[float] = []
    with socket.create_connection(address) as connection:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            begun = time.monotonic()
            connection.sendall(_REQUEST)
            data = connection.recv(65_536)
            assert data.startswith(b"HTTP/1.1 200"), data
            found.append(time.monotonic() - begun)
            time.sleep(_PAUSE)
    answer.send(found)


def _row(name: str, delays: list[float]) -> None:
    shown = (percentile(delays, 0.5), percentile(delays, 0.99), max(delays))
    print(f"{name:24}{len(delays):>10}{''.join(f'{seconds * 1000:>10.1f}' for seconds in shown)}", flush=True)


def main(seconds: Annotated[float, typer.Option(min=1, help="Seconds of each flood.")] = 15.0) -> None:
    """Run each flood over two WebSockets, and print the delays of requests in milliseconds."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()

    def started(target: Callable[..., None], *args: object) -> multiprocessing.process.BaseProcess:
        process = context.Process(target=target, args=(*args, theirs), daemon=True)
        process.start()
        return process

    worker = started(_worker)
    workers = [{"url": f"http://127.0.0.1:{ours.recv()}"}]
    with tempfile.TemporaryDirectory(prefix="realtime-flood-") as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(json.dumps({"server": {"port": 0}, "workers": workers}))
        with KvrouterProcess(["serve", f"--config={config}"]) as process:
            url = urlsplit(process.wait_until_listening())
            address = (url.hostname or "", url.port or 0)
            before = resident_bytes(process.pid)
            sockets = started(_unfinished, address)
            ours.recv()
            time.sleep(1)
            grown, sent = (resident_bytes(process.pid) - before) / 2**20, _SOCKETS * _UNFINISHED / 2**20
            limit = LimitSettings().arriving_bytes / 2**20
            print(f"{_SOCKETS} unfinished messages, {sent:.0f} MiB: {grown:.0f} MiB of memory; limit {limit:.0f} MiB")
            sockets.kill()
            sockets.join()
            print(f"{'flood':24}{'requests':>10}{'p50':>10}{'p99':>10}{'most':>10}")
            for name, data in FLOODS.items():
                floods = [started(_flood, address, data()) for _ in range(2 if name != "none" else 0)]
                for _ in floods:
                    ours.recv()
                started(_delays, address, seconds)
                _row(name, ours.recv())
                for flood in floods:
                    flood.kill()
                    flood.join()
    worker.kill()


if __name__ == "__main__":
    typer.run(main)
