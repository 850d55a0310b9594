"""Requests over HTTP/2 without TLS (prior knowledge)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    DataReceived,
    Event,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.exceptions import ProtocolError
from router_under_test import RouterUnderTest, router, until
from scripted_worker import Exchange, ScriptedWorker

from router.auth import hashed_key

PATH = "/v1/completions"
BODY = {"model": "m", "prompt": "x", "max_tokens": 1}


class Response:
    """The response of one stream. `status` is 0 before its headers."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.data = b""
        self.ended = asyncio.Event()
        self.reset = False

    def json(self) -> Any:
        return json.loads(self.data)


class Client:
    """A connection with prior knowledge of HTTP/2. `reads`: it opens its windows as it receives data."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, authority: str) -> None:
        self.reads = True
        self.terminated = False
        self.responses: dict[int, Response] = {}
        self._reader = reader
        self._writer = writer
        self._authority = authority
        self._window = asyncio.Event()
        self._connection = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self._connection.initiate_connection()
        self.flush()

    def flush(self) -> None:
        self._writer.write(self._connection.data_to_send())

    async def request(
        self, path: str = PATH, body: Any = None, method: str | None = None, **headers: str
    ) -> tuple[int, Response]:
        """Send a request, and return its stream and its response, which is read aside."""
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        method = method or ("POST" if body is not None else "GET")
        head = [(":method", method), (":scheme", "http"), (":path", path), (":authority", self._authority)]
        stream = self._connection.get_next_available_stream_id()
        self.responses[stream] = response = Response()
        head += [("content-type", "application/json"), *headers.items()]
        self._connection.send_headers(stream, head, end_stream=not data)
        while data:
            size = min(self._connection.local_flow_control_window(stream), self._connection.max_outbound_frame_size)
            if not size:
                self.flush()
                self._window.clear()
                await self._window.wait()
                continue
            self._connection.send_data(stream, data[:size], end_stream=size >= len(data))
            data = data[size:]
        self.flush()
        return stream, response

    async def call(self, path: str = PATH, body: Any = None, method: str | None = None, **headers: str) -> Response:
        """Send a request and return its whole response."""
        _, response = await self.request(path, body, method, **headers)
        async with asyncio.timeout(60):
            await response.ended.wait()
        return response

    def cancel(self, stream: int) -> None:
        self._connection.reset_stream(stream, 8)
        self.flush()

    async def read(self) -> None:
        """Read until the connection is closed. After a GOAWAY the library accepts no frame."""
        try:
            while data := await self._reader.read(65_536):
                for event in self._connection.receive_data(data):
                    self._handle(event)
                self.flush()
        except ProtocolError:
            pass
        self.terminated = True

    def open_windows(self) -> None:
        """Let the router send again, after `reads` was false."""
        self.reads = True
        for stream, response in self.responses.items():
            if response.data and not response.ended.is_set():
                self._connection.increment_flow_control_window(2**24, stream)
        self._connection.increment_flow_control_window(2**24)
        self.flush()

    def _handle(self, event: Event) -> None:
        match event:
            case ResponseReceived():
                response = self.responses[event.stream_id]
                found = {str(name): str(value) for name, value in event.headers}
                response.status, response.headers = int(found[":status"]), found
            case DataReceived():
                self.responses[event.stream_id].data += event.data
                if self.reads:
                    self._connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            case StreamEnded():
                self.responses[event.stream_id].ended.set()
            case StreamReset():
                self.responses[event.stream_id].reset = True
                self.responses[event.stream_id].ended.set()
            case WindowUpdated():
                self._window.set()


@asynccontextmanager
async def connected(routed: RouterUnderTest) -> AsyncIterator[Client]:
    address = urlsplit(routed.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    client = Client(reader, writer, address.netloc)
    reading = asyncio.create_task(client.read())
    try:
        yield client
    finally:
        reading.cancel()
        writer.close()


async def test_request_is_answered_with_routing_headers(worker: ScriptedWorker, routed: RouterUnderTest) -> None:
    async with connected(routed) as client:
        response = await client.call(body=BODY, **{"x-request-id": "mine"})
    assert (response.status, response.data) == (200, b"{}")
    assert response.headers["x-kvrouter-worker"] == worker.url
    assert (response.headers["x-request-id"], response.headers["content-length"]) == ("mine", "2")
    assert json.loads(worker.last.body) == BODY
    assert worker.last.header("x-request-id") == [b"mine"]
    await routed.until_released()


async def test_streams_are_served_at_the_same_time(worker: ScriptedWorker, routed: RouterUnderTest) -> None:
    may_end = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.begin_chunks()
        await exchange.chunk(b"data: {}\n\n")
        await may_end.wait()
        await exchange.chunk(b"data: [DONE]\n\n")
        await exchange.chunk(b"")

    worker.script = script
    async with connected(routed) as client:
        responses = [(await client.request(body=BODY | {"stream": True}))[1] for _ in range(8)]
        await until(lambda: all(response.data == b"data: {}\n\n" for response in responses))
        assert (await client.call("/health")).json()["workers"] == 1
        may_end.set()
        await until(lambda: all(response.ended.is_set() for response in responses))
    assert {response.data for response in responses} == {b"data: {}\n\ndata: [DONE]\n\n"}
    assert {response.headers["content-type"] for response in responses} == {"text/event-stream"}


async def test_large_bodies_pass_in_both_directions(worker: ScriptedWorker, routed: RouterUnderTest) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.answer(exchange.body)

    worker.script = script
    async with connected(routed) as client:
        body = BODY | {"prompt": "word " * 400_000}
        assert (await client.call(body=body)).json() == body


async def test_client_that_does_not_read_stops_the_worker(worker: ScriptedWorker, routed: RouterUnderTest) -> None:
    sent = 0

    async def script(exchange: Exchange) -> None:
        nonlocal sent
        await exchange.begin_chunks()
        for _ in range(150):
            await exchange.chunk(b"data: " + b"x" * 65_536 + b"\n\n")
            sent += 1
        await exchange.chunk(b"")

    worker.script = script
    async with connected(routed) as client:
        client.reads = False
        _, response = await client.request(body=BODY | {"stream": True})
        before = -1
        while before != sent or not response.data:  # until nothing more is sent
            before = sent
            await asyncio.sleep(0.3)
        assert sent < 150
        client.open_windows()
        await until(lambda: response.ended.is_set())
    assert len(response.data) == 150 * (65_536 + 8)
    assert not response.reset


async def test_reset_stream_closes_the_workers_request(worker: ScriptedWorker, routed: RouterUnderTest) -> None:
    closed = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.until_closed()
        closed.set()

    worker.script = script
    async with connected(routed) as client:
        stream, _ = await client.request(body=BODY)
        await until(lambda: worker.exchanges)
        client.cancel(stream)
        async with asyncio.timeout(60):
            await closed.wait()
        await routed.until_released()
        worker.script = Exchange.answer
        assert (await client.call(body=BODY)).status == 200


async def test_broken_worker_resets_the_stream(worker: ScriptedWorker, routed: RouterUnderTest) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf")
        await exchange.hang_up()

    worker.script = script
    async with connected(routed) as client:
        assert (await client.call(body=BODY)).reset


@pytest.mark.parametrize(
    ("path", "body", "method", "status"),
    [
        ("/nowhere", None, "GET", 404),
        (PATH, None, "GET", 405),
        (PATH, b"{", "POST", 400),
        (PATH, b"x" * 2000, "POST", 413),
        ("/v1/../health", None, "GET", 400),
        ("*", None, "OPTIONS", 400),
        ("/v1/realtime", None, "GET", 426),
    ],
)
async def test_refusals_have_their_status(
    worker: ScriptedWorker, path: str, body: Any, method: str, status: int
) -> None:
    async with router(worker.url, server={"max_body_bytes": 1000}) as routed, connected(routed) as client:
        response = await client.call(path, body, method)
        assert response.status == status
        assert (await client.call(body=BODY)).status == 200
    assert len(worker.exchanges) == 1


@pytest.mark.parametrize(
    "pieces",
    [
        [b"PRI /health HTTP/1.1\r\nHost: r\r\n\r\n"],
        [b"GET /health HTTP/1.1\r\nHost: r\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"],
        [b"GET /health HTTP/1.1\r\nHost: r\r\nX: ", b"PRI * HTTP/2.0\r\nbroken\r\n\r\n"],
    ],
    ids=["another target", "after a request", "within a head"],
)
async def test_only_a_preface_that_comes_first_begins_http2(routed: RouterUnderTest, pieces: list[bytes]) -> None:
    address = urlsplit(routed.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        for piece in pieces[:-1]:
            writer.write(piece)
            if piece.endswith(b"\r\n\r\n"):
                assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            else:
                await asyncio.sleep(0.1)  # so that the rest of the head arrives by itself
        writer.write(pieces[-1])
        async with asyncio.timeout(60):
            answer = await reader.read()
    finally:
        writer.close()
    assert b"HTTP/1.1 40" in answer
    assert b"\0" not in answer  # as each frame of HTTP/2 has


async def test_tenants_need_their_keys(worker: ScriptedWorker) -> None:
    tenants = {"named": {"a": {"keys": [hashed_key("key-a")]}}}
    async with router(worker.url, server={"token": "t"}, tenants=tenants) as routed, connected(routed) as client:
        assert (await client.call(body=BODY)).status == 401
        assert (await client.call(body=BODY, authorization="Bearer key-a")).status == 200
        assert (await client.call("/workers", authorization="Bearer key-a")).status == 403


async def test_head_has_no_body(routed: RouterUnderTest) -> None:
    async with connected(routed) as client:
        response = await client.call("/health", method="HEAD")
    assert (response.status, response.data) == (200, b"")


async def test_slow_body_is_408(worker: ScriptedWorker) -> None:
    async with router(worker.url, server={"body_timeout": 0.3}) as routed, connected(routed) as client:
        connection = client._connection
        stream = connection.get_next_available_stream_id()
        client.responses[stream] = response = Response()
        head = [(":method", "POST"), (":scheme", "http"), (":path", PATH), (":authority", client._authority)]
        connection.send_headers(stream, head)
        connection.send_data(stream, b"{")
        client.flush()
        await until(lambda: response.status == 408)


async def test_connection_ends_when_the_service_stops(worker: ScriptedWorker) -> None:
    async with AsyncExitStack() as stack:
        async with router(worker.url) as routed:
            client = await stack.enter_async_context(connected(routed))
            assert (await client.call(body=BODY)).status == 200
        await until(lambda: client.terminated)


async def test_cookies_are_joined_for_the_worker(worker: ScriptedWorker, routed: RouterUnderTest) -> None:
    async with connected(routed) as client:
        connection = client._connection
        stream = connection.get_next_available_stream_id()
        client.responses[stream] = response = Response()
        head = [(":method", "POST"), (":scheme", "http"), (":path", PATH), (":authority", client._authority)]
        connection.send_headers(stream, [*head, ("cookie", "a=1"), ("cookie", "b=2")])
        connection.send_data(stream, json.dumps(BODY).encode(), end_stream=True)
        client.flush()
        await until(lambda: response.status == 200)
    assert worker.last.header("cookie") == [b"a=1; b=2"]
