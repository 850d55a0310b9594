"""The delay of other requests while a router receives one long body: python -m benchmarks.long_bodies.

A router with default settings runs in front of a worker that accepts any body. One client polls `/ready` over one
connection, and so measures the event loop. Each body is near one limit of the settings. The row without a body is the
delay of the machine itself.
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
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Annotated
from urllib.parse import urlsplit

import typer

from kvrouter.processes import KvrouterProcess
from simulator.worker.settings import BUNDLED_MODEL

_MODEL = "m"
_SIZE = 60 * 2**20
_PAUSE = 0.002  # seconds between two polls
_TIMES = 3

Sent = tuple[str, str, bytes]
"""A path, a content type and a body."""


def _completion(prompt: object, **more: object) -> Sent:
    body = json.dumps({"model": _MODEL, "prompt": prompt, **more}, ensure_ascii=False).encode()
    return "/v1/completions", "application/json", body


def _chat(*messages: object) -> Sent:
    body = json.dumps({"model": _MODEL, "messages": messages}).encode()
    return "/v1/chat/completions", "application/json", body


def _image() -> Sent:
    url = "data:image/png;base64," + "QUJD" * (_SIZE // 4)
    return _chat({"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]})


def _form(parts: int) -> Sent:
    part = b'--b\r\nContent-Disposition: form-data; name="x"\r\n\r\n' + b"\r\n-" * (_SIZE // parts // 3) + b"\r\n"
    return "/v1/audio/transcriptions", "multipart/form-data; boundary=b", part * parts + b"--b--\r\n"


def _explained(sent: Sent) -> Sent:
    path, kind, body = sent
    return "/explain", kind, b'{"path":"%b","request":%b}' % (path.encode(), body)


BODIES: dict[str, Callable[[], Sent]] = {
    "text": lambda: _completion("some words " * (_SIZE // 11)),
    "text, escaped": lambda: _completion("\n" * (_SIZE // 2)),
    "text, and a priority": lambda: _completion("some words " * (_SIZE // 11), priority=1),
    "marks in a text": lambda: _completion('"[,' * (_SIZE // 4), rid="x"),
    "999,000 tokens": lambda: _completion([number % 5000 for number in range(999_000)]),
    "a million lists": lambda: _completion([[] for _ in range(1_000_000)]),
    "a million names": lambda: _completion("x", x={str(number): 1 for number in range(1_000_000)}),
    "16,000 messages": lambda: _chat(*({"role": "user", "content": "x" * 3800} for _ in range(16_000))),
    "an image": _image,
    "a form of two parts": lambda: _form(2),
    "a form of 900 parts": lambda: _form(900),
    "a form as pages send it": lambda: ("/v1/files", "application/x-www-form-urlencoded", b"a=%41&" * (_SIZE // 6)),
    "/match, text": lambda: ("/match", *_completion("some words " * (_SIZE // 11))[1:]),
    "/explain, tokens": lambda: _explained(_completion([1] * 999_000)),
}


class _Sink(asyncio.Protocol):
    """A worker that drops what it receives."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._head, self._left = b"", 0

    def data_received(self, data: bytes) -> None:
        if not self._left:
            self._head, end, data = (self._head + data).partition(b"\r\n\r\n")
            if not end:
                return
            lines = self._head.lower().split(b"\r\n")
            lengths = [int(line[15:]) for line in lines if line.startswith(b"content-length:")]
            self._left = sum(lengths)
        self._left -= len(data)
        if self._left <= 0:
            known = self._head.startswith(b"GET /v1/models") or self._head.startswith(b"POST /v1/")
            models = json.dumps({"data": [{"id": _MODEL, "root": str(BUNDLED_MODEL)}]}).encode()
            status = b"200 OK" if known and b"/render" not in self._head else b"404 Not Found"
            self._transport.write(b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status, len(models), models))
            self._head, self._left = b"", 0


def _sink(pipe: Connection) -> None:
    async def serve() -> None:
        server = await asyncio.get_running_loop().create_server(_Sink, "127.0.0.1", 0)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(serve())


class _Asking:
    """A client that polls `/ready` within the context. `latest` is its longest delay in seconds."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self.latest = 0.0

    def __enter__(self) -> _Asking:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _ask(self) -> None:
        with socket.create_connection(self._address) as connection:
            while not self._over.is_set():
                begun = time.monotonic()
                connection.sendall(b"HEAD /ready HTTP/1.1\r\nHost: r\r\n\r\n")
                while not connection.recv(65536).endswith(b"\r\n\r\n"):
                    pass
                self.latest = max(self.latest, time.monotonic() - begun)
                time.sleep(_PAUSE)


def _send(address: tuple[str, int], sent: Sent) -> str:
    """Send a body, and return the status of the answer."""
    path, kind, body = sent
    head = f"POST {path} HTTP/1.1\r\nHost: r\r\nConnection: close\r\nContent-Type: {kind}\r\n"
    with socket.create_connection(address, timeout=120) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode())
        connection.sendall(body)
        return connection.recv(12)[9:].decode()


def _late(address: tuple[str, int], sent: Sent | None) -> tuple[float, str]:
    with _Asking(address) as asking:
        time.sleep(0.1)
        status = _send(address, sent) if sent is not None else "-"
        time.sleep(0.3)
    return asking.latest, status


def main(times: Annotated[int, typer.Option(min=1, help="Number of times that each body is sent.")] = _TIMES) -> None:
    """Send each body, and print the longest delay of others: the median of several times."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    sink = context.Process(target=_sink, args=(theirs,), daemon=True)
    sink.start()
    worker = f"http://127.0.0.1:{ours.recv()}"
    with tempfile.TemporaryDirectory(prefix="long-bodies-") as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(json.dumps({"server": {"port": 0}, "workers": [{"url": worker}]}))
        with KvrouterProcess(["serve", f"--config={config}"]) as process:
            url = urlsplit(process.wait_until_listening())
            address = (url.hostname or "", url.port or 0)
            print(f"{'body':24}{'MiB':>8}{'status':>8}{'latest answer, ms':>20}")
            for name, body in ({"none": None} | BODIES).items():
                sent = body and body()
                found = [_late(address, sent) for _ in range(times)]
                size = f"{len(sent[2]) / 2**20:.1f}" if sent else "-"
                latest = median(seconds for seconds, _ in found) * 1000
                print(f"{name:24}{size:>8}{found[-1][1]:>8}{latest:>20.0f}", flush=True)
    sink.terminate()


if __name__ == "__main__":
    typer.run(main)
