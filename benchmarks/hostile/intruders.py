"""Hostile and broken clients: each attack is repeated, on its own connection."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random

from yarl import URL

_PATIENCE = 15.0
_INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
_PAUSE = 0.05  # mean seconds between two connections of one intruder
_BODY = json.dumps({"model": "simulated", "prompt": "x " * 50, "max_tokens": 4}).encode()

_TARGETS = [
    "/v1/models/../../sleep",
    "/v1/models/%2e%2e/%2e%2e/shutdown",
    "/v1//completions",
    "/sleep",
    "/collective_rpc",
    "/server_info",
    "/v1/load_lora_adapter",
    "//evil/v1/completions",
    "http://127.0.0.2/v1/completions",
    "*",
    "/v1/completions#x",
]
_HEADS = [
    "Transfer-Encoding: gzip, chunked",
    "Transfer-Encoding: chunked\r\nContent-Length: 5",
    "Content-Length: 5\r\nContent-Length: 6",
    "Content-Length: -1",
    "Content-Length: 99999999999999999999",
    "Host: other",
    "X: a\rb",
    "X: " + "a" * 70_000,
    "Connection: upgrade\r\nUpgrade: h2c",
    "x-data-parallel-rank: 7",
]
_BODIES = [
    b'{"model": "simulated", "prompt": [' + b"[1]," * 150_000 + b"[1]]}",
    b'{"model": "simulated", "x": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    b'{"model": "simulated", "prompt": "' + b"a " * 1_000_000 + b'"}',
    b'{"model": "simulated", "messages": [' + b"{}," * 200_000 + b"{}]}",
    b'{"model": "simulated", "model": "x", "prompt": "y"}',
    '{"model": "simulated", "prompt": "y"}'.encode("utf-16"),
    b'{"model": "simulated", "prompt": "y", "kv_transfer_params": {"remote_host": "127.0.0.2"}}',
    b'{"model": "simulated", "prompt": "y", "max_tokens": 1e400}',
    b'{"model": "' + b"m" * 100_000 + b'", "prompt": "y"}',
    b"\x00" * 100_000,
]
_CHANGES = [
    ("/workers", {"url": "http://127.0.0.1\\@127.0.0.2:80/"}),
    ("/workers", {"url": "http://169.254.169.254/", "weight": 1000}),
    ("/register", {"endpoint": "tcp://127.0.0.1:0;127.0.0.2:80", "type": "vLLM", "modelname": "m"}),
    ("/reset_prefix_cache", {}),
    ("/match", {"model": "simulated", "token_ids": [2**70, -1, 1.5]}),
    ("/query", {"model": "nothing", "token_ids": list(range(5000))}),
]


class Intruders:
    """Clients of all attacks. `statuses` counts their answers, with 0 for no answer."""

    def __init__(self, url: str, random: Random) -> None:
        self.statuses: Counter[int] = Counter()
        self._address = URL(url)
        self._random = random
        self._ways: list[Callable[[], Awaitable[bytes]]] = [
            self._bent_target,
            self._bent_head,
            self._bent_body,
            self._change,
            self._pipeline,
            self._never_reads,
            self._never_ends,
            self._slow_head,
            self._half_closes,
            self._asks_nonsense,
            self._noise,
        ]

    async def run(self, count: int, until: float) -> None:
        """Run `count` intruders until `until` on the monotonic clock."""
        await asyncio.gather(*(self._one(until) for _ in range(count)))

    async def _one(self, until: float) -> None:
        while time.monotonic() < until:
            await asyncio.sleep(self._random.expovariate(1 / _PAUSE))
            answer = b""
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(_PATIENCE):
                    answer = await self._random.choice(self._ways)()
            status = answer.removeprefix(_INTERIM)[9:12]
            self.statuses[int(status) if status.isdigit() else 0] += 1

    async def _send(self, data: bytes, half_close: bool = False, read: bool = True, linger: float = 0.0) -> bytes:
        reader, writer = await asyncio.open_connection(self._address.host, self._address.port)
        try:
            writer.write(data)
            if half_close:
                writer.write_eof()
            await asyncio.sleep(linger)
            answer = await reader.read(65536) if read else b""
            return await reader.read(65536) if answer == _INTERIM else answer
        finally:
            writer.transport.abort()

    def _post(self, path: str, body: bytes, head: str = "") -> bytes:
        more = f"{head}\r\n" if head else ""
        return f"POST {path} HTTP/1.1\r\nHost: r\r\n{more}Content-Length: {len(body)}\r\n\r\n".encode() + body

    async def _bent_target(self) -> bytes:
        return await self._send(self._post(self._random.choice(_TARGETS), _BODY))

    async def _bent_head(self) -> bytes:
        return await self._send(self._post("/v1/completions", _BODY, self._random.choice(_HEADS)))

    async def _bent_body(self) -> bytes:
        path = self._random.choice(["/v1/completions", "/v1/chat/completions", "/v1/files", "/v1/embeddings"])
        return await self._send(self._post(path, self._random.choice(_BODIES)))

    async def _change(self) -> bytes:
        path, body = self._random.choice(_CHANGES)
        return await self._send(self._post(path, json.dumps(body).encode()))

    async def _pipeline(self) -> bytes:
        return await self._send(
            self._post("/v1/completions", _BODY) * 50 + b"\x16\x03\x01 nonsense\r\n\r\n", linger=0.5
        )

    async def _never_reads(self) -> bytes:
        body = json.dumps({"model": "simulated", "prompt": "x", "max_tokens": 2000, "stream": True}).encode()
        return await self._send(self._post("/v1/completions", body) * 4, read=False, linger=3.0)

    async def _never_ends(self) -> bytes:
        return await self._send(
            b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: 60000000\r\n\r\n" + b" " * 500_000
        )

    async def _slow_head(self) -> bytes:
        return await self._send(b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nX: ", read=False, linger=5.0)

    async def _half_closes(self) -> bytes:
        return await self._send(self._post("/v1/completions", _BODY), half_close=True, read=self._random.random() < 0.5)

    async def _asks_nonsense(self) -> bytes:
        """Request an answer of the hostile workers."""
        body = json.dumps({"model": "evil", "prompt": "x", "stream": self._random.random() < 0.5}).encode()
        path = self._random.choice(["/v1/completions", "/v1/embeddings", "/v1/responses"])
        return await self._send(self._post(path, body))

    async def _noise(self) -> bytes:
        return await self._send(self._random.randbytes(self._random.randrange(1, 5000)), half_close=True)
