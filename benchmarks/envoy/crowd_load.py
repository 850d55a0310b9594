"""Envoy's side of many concurrent requests on a few HTTP/2 connections, and their times to a worker.

A request's headers and body are sent, its worker is returned, its answer begins, and it ends some seconds later.

    python -m benchmarks.envoy.crowd_load PORT KIND IN_FLIGHT RATE SECONDS
    python -m benchmarks.envoy.crowd_load PORT attack

The first prints its measurements as JSON. The second opens calls and resets them, on one connection after another.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from collections.abc import Callable
from random import Random
from statistics import median, quantiles
from time import perf_counter
from typing import Any, Final

import hpack
import msgspec
import uvloop

from benchmarks.machine import LOAD_CORE, pin
from benchmarks.proxy.prompts import PATH, bodies
from router.picker import ext_proc_pb2 as pb
from router.picker.external_processor import SERVICE
from router.picker.http2 import frames
from router.picker.http2.frames import HEAD, HEAD_BYTES, frame

CONNECTIONS: Final = 4
BODY_BYTES: Final = 4096
# Shares of requests of a rough load: bodies in parts; and requests that are aborted, before or after their worker is
# known.
SLOW, LEFT = 0.2, 0.1
_PARTS, _PART_SECONDS = 4, 0.25
# seconds after which a connection of a rough load is replaced
_AWAY_SECONDS = 1.0
_DEADLINE = 60.0

_CALL: Final = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", f"/{SERVICE}/Process"),
    (":authority", "picker"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
]
_MODE = pb.ProcessingMode


class Measured(msgspec.Struct):
    """The seconds from a request's last byte to its worker, and the number of requests without one."""

    requests: int
    p50: float
    p99: float
    failed: int


def _message(**fields: Any) -> bytes:
    data = pb.ProcessingRequest(**fields).SerializeToString()
    return len(data).to_bytes(5, "big") + data


def _headers(*pairs: tuple[str, str]) -> pb.HttpHeaders:
    return pb.HttpHeaders(headers=pb.HeaderMap(headers=[pb.HeaderValue(key=k, raw_value=v.encode()) for k, v in pairs]))


def _request_head(mode: pb.ProcessingMode.BodySendMode) -> bytes:
    head = _headers((":method", "POST"), (":path", PATH), ("content-type", "application/json"))
    return _message(request_headers=head, protocol_config=pb.ProtocolConfiguration(request_body_mode=mode))


_WHOLE_HEAD = _request_head(_MODE.BUFFERED)
_PARTS_HEAD = _request_head(_MODE.FULL_DUPLEX_STREAMED)
_ANSWER_HEAD = _message(response_headers=_headers((":status", "200"), ("content-type", "text/event-stream")))
_ROUTED = (1, 3)  # fields of ProcessingResponse: the answer to headers, or to a body


class _Request:
    """One request. `sent` is the time of its last byte."""

    def __init__(self, slow: bool) -> None:
        self.slow = slow
        self.sent = 0.0
        self.routed = False


class _Connection(asyncio.Protocol):
    """A connection to the picker. `over` is set once it is closed."""

    def __init__(self, crowd: _Crowd) -> None:
        self.over = asyncio.get_running_loop().create_future()
        self.leaving = False
        self._crowd = crowd
        self._encoder = hpack.Encoder()
        self._requests: dict[int, _Request] = {}
        self._last = -1
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        windows = frames.settings({frames.INITIAL_WINDOW_SIZE: 2**20}) + frames.window_update(0, 2**30)
        self.transport.write(frames.PREFACE + windows)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._crowd.failed += len(self._requests)
        self._crowd.open -= len(self._requests)
        self._requests.clear()
        self.over.set_result(None)

    def leave(self) -> None:
        """Open no more requests, and close the connection after the open ones."""
        self.leaving = True
        self.transport.write(frames.goaway(0, frames.NO_ERROR))
        self._close_when_idle()

    def _close_when_idle(self) -> None:
        if self.leaving and not self._requests:
            self.transport.close()

    def open(self, body: bytes, slow: bool, leaves: float | None) -> None:
        """Begin a request. `leaves`: seconds after which it is aborted."""
        self._last += 2
        number, request = self._last, _Request(slow)
        self._requests[number] = request
        self._crowd.open += 1
        block = frame(frames.HEADERS, frames.END_HEADERS, number, self._encoder.encode(_CALL))
        self.transport.write(block + frame(frames.DATA, 0, number, _PARTS_HEAD if slow else _WHOLE_HEAD))
        loop = asyncio.get_running_loop()
        if slow:
            size = len(body) // _PARTS + 1
            for part in range(_PARTS):
                piece = pb.HttpBody(body=body[part * size : part * size + size], end_of_stream=part == _PARTS - 1)
                loop.call_later(part * _PART_SECONDS, self._put, number, _message(request_body=piece))
        else:
            piece = pb.HttpBody(body=body, end_of_stream=True)
            self._put(number, _message(request_body=piece))
        if leaves is not None:
            loop.call_later(leaves, self._reset, number)

    def _put(self, number: int, data: bytes, flags: int = 0) -> None:
        if number in self._requests:
            self._requests[number].sent = perf_counter()
            self.transport.write(frame(frames.DATA, flags, number, data))

    def _reset(self, number: int) -> None:
        if self._requests.pop(number, None) is not None:
            self._crowd.open -= 1
            self.transport.write(frames.reset(number, frames.CANCEL))
            self._close_when_idle()

    def data_received(self, data: bytes) -> None:
        data, at = self._buffer + data, 0
        while len(data) - at >= HEAD_BYTES:
            high, low, kind, flags, number = HEAD.unpack_from(data, at)
            end = at + HEAD_BYTES + (high << 16 | low)
            if end > len(data):
                break
            self._take(kind, flags, number, data[at + HEAD_BYTES : end])
            at = end
        self._buffer = data[at:]

    def _take(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        request = self._requests.get(number)
        if kind == frames.PING and not flags & frames.ACK:
            self.transport.write(frame(frames.PING, frames.ACK, 0, payload))
        elif kind == frames.SETTINGS and not flags & frames.ACK:
            self.transport.write(frame(frames.SETTINGS, frames.ACK, 0))
        elif request is None:
            return
        elif kind == frames.DATA and not request.routed:
            self._answered(number, request, payload)
        elif kind == frames.RST_STREAM or flags & frames.END_STREAM:
            del self._requests[number]
            self._crowd.open -= 1
            self._crowd.failed += not request.routed
            self._close_when_idle()

    def _answered(self, number: int, request: _Request, payload: bytes) -> None:
        """Handle a message: the first one for a whole body acknowledges the headers, the second one has the worker."""
        kind = payload[5] >> 3
        size = int.from_bytes(payload[1:5], "big")
        if kind == _ROUTED[0] and not request.slow:
            if size + 5 < len(payload):
                self._answered(number, request, payload[size + 5 :])
            return
        if kind not in _ROUTED:
            self._crowd.failed += 1
        request.routed = True
        self._crowd.times.append(perf_counter() - request.sent)
        self._put(number, _ANSWER_HEAD)
        asyncio.get_running_loop().call_later(self._crowd.stay, self._put, number, b"", frames.END_STREAM)


class _Crowd:
    """Requests at a rate, of which `in_flight` are open. With `rough`, some misbehave and connections are replaced."""

    def __init__(self, port: int, in_flight: int, rate: float, rough: bool) -> None:
        self.stay = in_flight / rate
        self.times: list[float] = []
        self.open = self.failed = 0
        self._port = port
        self._rate = rate
        self._rough = rough
        self._random = Random(1)
        self._bodies = bodies(BODY_BYTES, stream=True)
        self._connections: list[_Connection] = []

    async def run(self, seconds: float) -> Measured:
        """Run until all requests are in flight, and `seconds` seconds more."""
        self._connections = [await self._connected() for _ in range(CONNECTIONS)]
        begun, number, away = perf_counter(), 0, 0.0
        replaced: list[_Connection] = []
        while (now := perf_counter() - begun) < self.stay + seconds:
            if not number or now < self.stay:
                self.times.clear()
            while number < now * self._rate:
                self._begin(number)
                number += 1
            if self._rough and now - away > _AWAY_SECONDS:
                away, place = now, int(now) % CONNECTIONS
                replaced.append(self._connections[place])
                self._connections[place] = await self._connected()
                replaced[-1].leave()
            await asyncio.sleep(0.001)
        times = list(self.times)
        async with asyncio.timeout(_DEADLINE + self.stay):
            while self.open:  # noqa: ASYNC110 - the connections' own
                await asyncio.sleep(0.01)
        for each in self._connections:
            each.transport.close()
        return Measured(len(times), median(times), quantiles(times, n=100)[98], self.failed)

    async def _connected(self) -> _Connection:
        _, made = await asyncio.get_running_loop().create_connection(lambda: _Connection(self), "127.0.0.1", self._port)
        return made

    def _begin(self, number: int) -> None:
        random = self._random
        slow = self._rough and random.random() < SLOW
        leaves = random.uniform(0, self.stay) ** 2 / self.stay if self._rough and random.random() < LEFT else None
        self._connections[number % CONNECTIONS].open(self._bodies[number % len(self._bodies)], slow, leaves)


async def attack(port: int) -> None:
    """Reset calls as soon as they are opened, on one connection after another, forever."""
    block = hpack.Encoder().encode(_CALL)
    burst: Callable[[int], bytes] = lambda first: b"".join(  # noqa: E731
        frame(frames.HEADERS, frames.END_HEADERS, number, block) + frames.reset(number, frames.CANCEL)
        for number in range(first, first + 400, 2)
    )
    bursts = [burst(first) for first in range(1, 40_000, 400)]
    ended: Counter[str] = Counter()
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(frames.PREFACE + frames.settings({}))
            for each in bursts:
                writer.write(each)
                await writer.drain()
            writer.close()
        except OSError as error:
            ended[type(error).__name__] += 1
        await asyncio.sleep(0.01)


async def _measure(port: int, kind: str, in_flight: int, rate: float, seconds: float) -> None:
    measured = await _Crowd(port, in_flight, rate, kind == "rough").run(seconds)
    print(msgspec.json.encode(measured).decode())


if __name__ == "__main__":
    pin(LOAD_CORE)
    if sys.argv[2] == "attack":
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # the load shares the core, and has priority
        uvloop.run(attack(int(sys.argv[1])))
    else:
        uvloop.run(_measure(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), float(sys.argv[5])))
