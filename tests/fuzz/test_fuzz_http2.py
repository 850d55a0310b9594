"""Generated header lists over HTTP/2: a worker receives what was sent and the router's own headers, and nothing else.

h11 reads what the worker receives, and h2 what the client receives. Both refuse what is no header.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from types import SimpleNamespace
from urllib.parse import urlsplit

import h2.events
import h11
import pytest
from budget import examples
from h2.config import H2Configuration
from h2.connection import H2Connection
from router_under_test import PATIENT, serving

from router.app.app import running_router
from router.picker.http2 import frames
from router.server.http2_requests import Http2Response
from router.server.http_server import HttpServer
from router.settings import Settings
from router.upstream.response_parser import ResponseParser, ResponsePhase

FEW = 400
_QUIET = {"probe_interval": 3600, "metrics_interval": 3600, "failures": 1_000_000, **PATIENT}
_PATH = b"/v1/completions"
# What the router adds to a response.
_ADDED = {b":status", b"server", b"content-length", b"x-request-id"}
# What the router adds to a forwarded request.
_OWN = {b"host", b"content-length", b"x-request-id", b"accept-encoding"}
_NAMES = [
    b"x-a",
    b"x-b",
    b"cookie",
    b"te",
    b"accept",
    b"user-agent",
    b"content-length",
    b"host",
    b"x-data-parallel-rank",
]
_VALUES = [b"", b"1", b"a b", b"trailers", b"text/plain", b"a: b", b"\xe4", b"4", b"a\tb"]
_BREAKS = [
    b"\r\n",
    b"\n",
    b"\r",
    b"\0",
    b" ",
    b"\t",
    b":",
    b": ",
    b"\r\nx-kv-cache-source-host-port: a:1\r\nx",
    b"A",
    b"",
]

Header = tuple[bytes, bytes]


class RawWorker:
    """A worker that keeps the requests that h11 reads, and the bytes that h11 refuses."""

    def __init__(self) -> None:
        self.got: dict[int, list[Header]] = {}
        self.refused: list[str] = []
        self.head = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        parser = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
        headers: list[Header] = []
        body = b""
        try:
            while True:
                event = parser.next_event()
                if event is h11.NEED_DATA:
                    parser.receive_data(await reader.read(65_536))
                elif isinstance(event, h11.Request):
                    headers, body = [(bytes(name), bytes(value)) for name, value in event.headers], b""
                    target = bytes(event.target)
                elif isinstance(event, h11.Data):
                    body += event.data
                elif isinstance(event, h11.EndOfMessage):
                    writer.write(self._answer(target, headers, body))
                    parser = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
                else:
                    break
        except h11.RemoteProtocolError as error:
            self.refused.append(str(error))
        finally:
            writer.close()

    def _answer(self, target: bytes, headers: list[Header], body: bytes) -> bytes:
        if target == b"/v1/models":
            answer = b'{"data": [{"id": "m"}]}'
            return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(answer), answer)
        if target == b"/health":
            return b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
        if target != _PATH:
            return b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
        self.got[json.loads(body)["user"]] = headers
        return self.head + b"\r\n{}"


class Client:
    """A connection by h2, which checks what it receives and sends whatever it is given."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        settings = H2Configuration(validate_outbound_headers=False, normalize_outbound_headers=False)
        self.h2 = H2Connection(settings)
        self._reader, self._writer = reader, writer
        self.h2.initiate_connection()

    async def request(self, headers: list[Header], body: bytes) -> int | None:
        """Return the status of the response; None if the stream was reset. A connection that ends is an error."""
        stream = self.h2.get_next_available_stream_id()
        self.h2.send_headers(stream, headers)
        self.h2.send_data(stream, body, end_stream=True)
        self._writer.write(self.h2.data_to_send())
        status = 0
        async with asyncio.timeout(60):
            while True:
                data = await self._reader.read(65_536)
                assert data, "the connection was closed"
                for event in self.h2.receive_data(data):
                    assert not isinstance(event, h2.events.ConnectionTerminated), event
                    if isinstance(event, h2.events.ResponseReceived):
                        status = int(dict(event.headers)[b":status"])
                    elif isinstance(event, h2.events.DataReceived):
                        self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                    elif isinstance(event, h2.events.StreamReset) and event.stream_id == stream:
                        return status or None
                    elif isinstance(event, h2.events.StreamEnded) and event.stream_id == stream:
                        return status
                self._writer.write(self.h2.data_to_send())


@asynccontextmanager
async def connected(worker: RawWorker) -> AsyncIterator[Client]:
    server = await asyncio.start_server(worker.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    settings = Settings.model_validate(
        {"workers": [{"url": url}], "fleet": _QUIET, "proxy": {"retry_share": 1_000_000}}
    )
    try:
        async with running_router(settings) as app, serving(HttpServer(app, shutdown_timeout=1)) as address:
            at = urlsplit(address)
            reader, writer = await asyncio.open_connection(at.hostname, at.port)
            try:
                yield Client(reader, writer)
            finally:
                writer.close()
    finally:
        server.close()


def broken(random: Random, text: bytes) -> bytes:
    """Return the text with a character somewhere that headers may not have there."""
    place = random.randrange(len(text) + 1)
    return random.choice([text[:place] + random.choice(_BREAKS) + text[place:], random.choice(_BREAKS)])


def header_list(random: Random) -> list[Header]:
    """Return headers of which about every second list is valid."""
    headers = []
    for _ in range(random.randrange(1, 5)):
        name, value = random.choice(_NAMES), random.choice(_VALUES)
        if random.random() < 0.1:
            name = broken(random, name)
        if random.random() < 0.1:
            value = broken(random, value)
        headers.append((name, value))
    return headers


def request_of(random: Random, body: bytes) -> list[Header]:
    """Return a header list with pseudo-headers."""
    pseudo = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", _PATH), (b":authority", b"r")]
    if random.random() < 0.2:
        place = random.randrange(len(pseudo))
        name, value = pseudo[place]
        pseudo[place] = (name, broken(random, value))
    headers = [*pseudo, *header_list(random)]
    if random.random() < 0.3:
        headers.append((b"content-length", b"%d" % (len(body) + random.choice([0, 0, 0, 1, -1]))))
    if random.random() < 0.05:
        random.shuffle(headers)
    return headers


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """The loop that routers run on."""
    return "asyncio", {"use_uvloop": True}


async def test_worker_receives_what_was_sent_and_the_routers_own_headers() -> None:
    worker, passed = RawWorker(), 0
    async with connected(worker) as client:
        for number, random in enumerate(examples(FEW)):
            body = json.dumps({"model": "m", "prompt": "x", "max_tokens": 1, "user": number}).encode()
            headers = request_of(random, body)
            status = await client.request(headers, body)
            assert status is None or status < 500, (status, headers)
            assert not worker.refused, (worker.refused, headers)
            if status == 200:
                passed += 1
                sent = {(name, value) for name, value in headers if name != b"cookie"}
                sent.add((b"cookie", b"; ".join(value for name, value in headers if name == b"cookie")))
                added = {name for name, value in worker.got[number] if (name, value) not in sent}
                assert added <= _OWN, (added, headers)
            else:
                assert number not in worker.got, (status, headers)
    assert passed > FEW / 20


class _Stream:
    """A stream that keeps what it sends."""

    def __init__(self) -> None:
        self.block = self.data = b""

    def begin(self, block: bytes) -> None:
        self.block = block

    def send(self, data: bytes) -> None:
        self.data += data

    def end(self, trailers: bytes) -> None:
        assert not trailers


def _received(block: bytes, data: bytes) -> list[Header]:
    """Return a response's headers, as h2 reads them. It raises ProtocolError for what HTTP/2 does not have."""
    client = H2Connection(H2Configuration(header_encoding=None))
    client.initiate_connection()
    client.send_headers(1, [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b":authority", b"r")], True)
    sent = frames.settings({}) + frames.frame(frames.HEADERS, frames.END_HEADERS, 1, block)
    events = client.receive_data(sent + frames.frame(frames.DATA, frames.END_STREAM, 1, data))
    return next(event.headers for event in events if isinstance(event, h2.events.ResponseReceived))


def test_clients_of_http2_receive_only_headers_that_it_allows() -> None:
    names = [
        *_NAMES[:2],
        *_NAMES[3:],
        *(b"connection keep-alive proxy-connection upgrade trailer X-Upper set-cookie".split()),
    ]
    passed = 0
    for random in examples(FEW):
        headers = [(random.choice(names), random.choice([*_VALUES, b" a", b"a \t"])) for _ in range(3)]
        headers = [(broken(random, name) if random.random() < 0.1 else name, value) for name, value in headers]
        parser = ResponseParser()
        parser.expect(to_head=False)
        lines = b"".join(b"%b:%b\r\n" % header for header in headers)
        if (
            parser.feed(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n%b\r\n{}" % lines)
            or parser.phase is not ResponsePhase.COMPLETE
        ):
            continue
        stream = _Stream()
        context = SimpleNamespace(id=b"1", head=SimpleNamespace(method="GET"), logged=False, answered=lambda *_: None)
        state = SimpleNamespace(default_headers=[(b"server", b"kvrouter"), (b"connection", b"close")])
        Http2Response(stream, context, state, []).begin(parser.head(), None, parser.take_body(), True)  # type: ignore[arg-type]
        received = _received(stream.block, stream.data)
        passed += 1
        written = [b"%b:%b" % header for header in headers]
        sent = {(name.lower(), value.strip()) for name, _, value in (line.partition(b":") for line in written)}
        assert {name for name, value in received if (name, value) not in sent} <= _ADDED, (received, headers)
    assert passed > FEW / 20
