"""Workers that interrupt answers, lie and send nonsense, and an event stream of nonsense."""

from __future__ import annotations

import asyncio
import json
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import msgspec
import zmq
import zmq.asyncio

EVIL = "evil"
_ANSWERS = [
    b"",
    b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n",
    b"HTTP/1.1 999 Odd\r\ncontent-length: 0\r\n\r\n",
    b"HTTP/1.1 307 Temporary Redirect\r\nlocation: /tokenize\r\ncontent-length: 0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: 100000000\r\n\r\n{}",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-type: text/event-stream\r\n\r\nffffff\r\ndata: ",
    b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nx-kvrouter-worker: me\r\n\r\n{}HTTP/1.1 200 OK\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nx: " + b"a" * 200_000,
    b"HTTP/1.1 200 OK\r\ncontent-length: 14\r\n\r\n" + b'{"usage": NaN}',
    b"\x00" * 1000,
]
_DESCRIPTIONS: list[object] = [
    {"dp_size": 10**12, "page_size": 0, "kv_events_config": {"publisher": "zmq", "endpoint": "tcp://a:0;b:1"}},
    {"dp_size": -1, "page_size": 10**30, "max_total_num_tokens": "many"},
    {"sources": [{"endpoint": f"tcp://127.0.0.1:{port}", "dp_rank": port} for port in range(1, 20_000)]},
    [[[[[]]]]],
    "nothing",
]


class HostileWorker:
    """A worker that serves a model by name.

    With `lies` it also lies about itself; otherwise it only interrupts answers.
    """

    def __init__(self, model: str, lies: bool, random: Random) -> None:
        self._model = model
        self._lies = lies
        self._random = random

    async def start(self) -> str:
        """Listen, and return the URL."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def stop(self) -> None:
        """Stop listening."""
        self._server.close()

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            writer.write(self._answer(head))
            await writer.drain()
            await asyncio.sleep(self._random.random() / 10)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()

    def _answer(self, head: bytes) -> bytes:
        method, target, _ = head.split(b" ", 2)
        if method == b"POST":
            return self._random.choice(_ANSWERS) if self._lies else b""
        if target == b"/v1/models":
            return _json({"data": [{"id": self._model}]})
        if not self._lies:
            return b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
        return self._random.choice([*_ANSWERS, *(_json(description) for description in _DESCRIPTIONS)])


# A block that waits for its prefix, and many removals of it.
_FLOOD = msgspec.msgpack.encode(
    [1.0, [["BlockStored", [2], 1, [1] * 16, 16, None, "GPU"], ["BlockRemoved", [2] * 50_000, "GPU"]], 0]
)


def _json(value: object) -> bytes:
    body = json.dumps(value).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


class HostileStream:
    """A publisher of nonsense events. `sent` counts its messages."""

    def __init__(self, random: Random) -> None:
        self.sent = 0
        self._random = random
        self._socket = zmq.asyncio.Context.instance().socket(zmq.PUB)
        self.endpoint = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"

    def close(self) -> None:
        """Stop publishing."""
        self._socket.close(linger=0)

    async def run(self, rate: float, until: float) -> None:
        """Send `rate` messages a second until `until` on the monotonic clock."""
        number = 0
        while time.monotonic() < until:
            await asyncio.sleep(1 / rate)
            number += self._random.choice([1] * 20 + [0, -1, 5, 2**40])
            sequence = (number % 2**64).to_bytes(8, "big")
            await self._socket.send_multipart([b"", sequence[: self._random.choice([8] * 20 + [3])], self._payload()])
            self.sent += 1

    def _payload(self) -> bytes:
        random = self._random
        if random.random() < 0.1:
            return random.randbytes(random.randrange(2000))
        if random.random() < 0.1:
            return _FLOOD
        timestamp = random.choice([1.0] * 5 + [float("nan"), float("inf"), -1e308, 2**63])
        return msgspec.msgpack.encode(
            [timestamp, [self._event() for _ in range(random.randrange(20))], random.choice([0, 7, -1])]
        )

    def _event(self) -> list[object]:
        random = self._random
        hashes = [random.getrandbits(64) for _ in range(random.randrange(8))]
        size = random.choice([16] * 8 + [0, 1, -1, 2**40])
        match random.randrange(5):
            case 0:
                return ["BlockRemoved", hashes, random.choice(["GPU", "?", None])]
            case 1:
                return ["AllBlocksCleared"] if random.random() < 0.1 else ["Unknown", hashes]
            case 2:
                return ["BlockStored", hashes, random.getrandbits(64), [1] * 16 * len(hashes), size, None, "GPU"]
        tokens = [random.randrange(1000) for _ in range(16 * len(hashes))]
        return ["BlockStored", hashes, None, tokens, size, None, "GPU", None, None, random.choice([None, 0, 1, 9])]


@asynccontextmanager
async def hostile_workers(random: Random) -> AsyncIterator[tuple[list[dict[str, object]], HostileStream]]:
    """Run two workers and yield their settings: one only interrupts customers' requests, one lies and has the
    stream.
    """
    stream = HostileStream(random)
    breaking, lying = HostileWorker("simulated", False, random), HostileWorker(EVIL, True, random)
    streams = [{"dp_rank": 0, "endpoint": stream.endpoint}]
    named: list[dict[str, object]] = [
        {"url": await breaking.start()},
        {"url": await lying.start(), "model": EVIL, "block_size": 16, "streams": streams},
    ]
    try:
        yield named, stream
    finally:
        breaking.stop()
        lying.stop()
        stream.close()
