"""Questions of the index over sockets, to the router and to the index alone, which answer alike."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
from router_under_test import serving
from uvicorn.server import ServerState

from indexer import Indexer, MatchQuery, Registration, Target
from indexer.api.questions import Questions
from kvevents import BlockStored, EventBatch
from router.app.app import running_router
from router.auth import AuthGate
from router.fleet.allowed_networks import AllowedNetworks
from router.fleet.event_streams import RegisteredStreams
from router.forwarding.dispatcher import Dispatcher
from router.forwarding.request_context import RequestContexts
from router.server.http_connection import HttpConnection
from router.server.http_server import HttpServer
from router.server.serving import index_app
from router.settings import Settings
from router.tokens.tokenizers import Tokenizers

LIMITS = {"server": {"max_body_bytes": 200_000}, "limits": {"values": 20_000}, "fleet": {"probe_interval": 60}}
HELD = list(range(8))
# Ends the connection, with the same answer whatever the service.
LAST = b"GET /match HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"


def _bytes(body: Any) -> bytes:
    return body if isinstance(body, bytes) else msgspec.json.encode(body)


def question(
    body: Any, path: str = "/query", head: str = "", version: str = "1.1", method: str = "POST", length: bool = True
) -> bytes:
    data = _bytes(body)
    framing = f"Content-Length: {len(data)}\r\n" if length else ""
    return f"{method} {path} HTTP/{version}\r\nHost: 127.0.0.1\r\n{head}{framing}\r\n".encode() + data


def chunked(body: bytes, path: str = "/query", extra: bytes = b"") -> bytes:
    chunks = b"".join(b"%x%b\r\n%b\r\n" % (1, extra, body[at : at + 1]) for at in range(len(body)))
    return question(b"", path, "Transfer-Encoding: chunked\r\n", length=False) + chunks + b"0\r\n\r\n"


# The first line, headers and body of one.
Answer = tuple[bytes, dict[str, str], bytes]

ASKED = {"model": "m", "token_ids": HELD}
BODIES: dict[str, Any] = {
    "held": ASKED,
    "in part": {"model": "m", "token_ids": [*HELD[:4], 9, 9, 9, 9]},
    "nothing": {"model": "m", "token_ids": []},
    "spaces": b' { "token_ids" : [ 0 , 1,2 ,3 ]\n, "model":"m" } ',
    "a name with brackets": {"model": "m[1]", "token_ids": HELD},
    "a list in a name": b'{"model":"m","token_ids":"[1,2]"}',
    "two lists": b'{"model":"m","other":[1],"token_ids":[0,1]}',
    "another list": b'{"model":"m","other":[0,1],"token_ids":null}',
    "twice": b'{"model":"m","token_ids":[9],"token_ids":[0,1,2,3]}',
    "in an object": b'{"model":"m","token_ids":{"a":[1]}}',
    "nested": b'{"model":"m","token_ids":[[1]]}',
    "only a list": b"[1,2,3]",
    "tenant": ASKED | {"tenant_id": "other"},
    "salt and adapter": ASKED | {"cache_salt": "s", "lora_name": "l"},
    "unknown model": {"model": "unknown", "token_ids": [1]},
    "no model": {"token_ids": [1]},
    "no tokens": {"model": "m"},
    "model of another type": {"model": 5, "token_ids": [1]},
    "negative": {"model": "m", "token_ids": [-1]},
    "too high": {"model": "m", "token_ids": [2**32]},
    "fraction": b'{"model":"m","token_ids":[1.5]}',
    "exponent": b'{"model":"m","token_ids":[1e2]}',
    "leading zero": b'{"model":"m","token_ids":[01]}',
    "text": {"model": "m", "token_ids": ["a"]},
    "no JSON": b'{"model":"m","token_ids":[1,2,',
    "more than JSON": b'{"model":"m","token_ids":[1]}]',
    "no UTF-8": b'{"model":"\xff","token_ids":[1]}',
    "no bytes": b"",
    "deep": b"[" * 5000 + b"]" * 5000,
    "long": {"model": "m", "token_ids": [*HELD, *[123_456] * 15_000]},
    "long, spaces": b'{"model":"m","token_ids":[0]}' + b" " * 100_000,
    "too many values": {"model": "m", "token_ids": [1] * 45_000},
    "hashes": {"model": "m", "block_hashes": [1, 2], "block_size": 4},
    "hash too high": {"model": "m", "block_hashes": [2**64]},
    "block size 0": {"model": "m", "block_hashes": [], "block_size": 0},
    "prompt": {"model": "m", "prompt": "a b c"},
    "prompts": {"model": "m", "prompt": [[1, 2], [3]]},
    "two prompts": ASKED | {"prompt": "a"},
    "messages": {"model": "m", "messages": [{"role": "user", "content": "a"}]},
}
PATHS = ["/match", "/query", "/query_by_hash"]
_HEAD = ASKED | {"token_ids": HELD[:4]}
# By what is special about it: what is sent, each when the one before is answered, and perhaps in pieces.
SENT: dict[str, list[bytes | tuple[bytes, ...]]] = {
    **{f"bodies to {path}": [question(body, path) for body in BODIES.values()] for path in PATHS},
    **{
        f"bodies in chunks to {path}": [chunked(_bytes(body)[:100], path) for body in BODIES.values()] for path in PATHS
    },
    "the same head twice": [question(ASKED)] * 2 + [question(_HEAD), question(b"{")] + [question(ASKED)],
    "pipelined": [question(ASKED) + question(_HEAD) + question({}) + question(ASKED, "/match")],
    "pipelined beside others": [
        question(ASKED) + question(b"", "/match", method="GET", length=False) + question(_HEAD)
    ],
    "in pieces": [(question(ASKED)[:20], question(ASKED)[20:100], question(ASKED)[100:])],
    "chunked": [chunked(msgspec.json.encode(ASKED), path) for path in PATHS],
    "chunked, extensions": [chunked(msgspec.json.encode(ASKED), extra=b";a=b")],
    "chunked badly": [chunked(b"{}").replace(b"0\r\n\r\n", b"zz\r\n")],
    "expecting": [question(ASKED, head="Expect: 100-continue\r\n")],
    "HTTP/1.0": [question(ASKED, version="1.0")],
    "HTTP/1.0, kept": [question(ASKED, version="1.0", head="Connection: keep-alive\r\n")],
    "HTTP/1.1, closed": [question(ASKED, head="Connection: close\r\n")],
    "HTTP/2.0": [question(ASKED, version="2.0")],
    "upgrading": [question(ASKED, head="Connection: Upgrade\r\nUpgrade: h2c\r\n")],
    "no body": [question(b"", length=False)],
    "another host": [question(ASKED).replace(b"127.0.0.1", b"evil.example")],
    "two hosts": [question(ASKED, head="Host: b\r\n")],
    "two lengths": [question(ASKED, head="Content-Length: 3\r\n")],
    "of a page": [question(ASKED, head="Origin: http://evil.example\r\n")],
    "of another type": [question(ASKED, head="Content-Type: text/plain\r\nContent-Encoding: gzip\r\n")],
    "an id": [question(ASKED, head="X-Request-Id: mine\r\n")],
    "a key": [question(ASKED, head="Authorization: Bearer wrong\r\n")],
    **{f"{method}": [question(ASKED, method=method)] for method in ("GET", "HEAD", "PUT", "OPTIONS", "DELETE")},
    **{target: [question(ASKED, target)] for target in ("/query?a=b", "/query?", "//query", "/%71uery", "/query/")},
}


@pytest.fixture(scope="module")
async def both() -> AsyncIterator[tuple[str, str]]:
    """URLs of a router and of the index alone."""
    settings = Settings.model_validate(LIMITS)
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(running_router(settings))
        indexer = stack.enter_context(running(Indexer()))
        index = index_app(settings, indexer, Tokenizers(), RegisteredStreams(indexer, AllowedNetworks([])))
        urls = []
        for app in (router, index):
            hold(app.state.dispatcher.questions._indexer)
            urls.append(await stack.enter_async_context(serving(HttpServer(app, shutdown_timeout=1))))
        yield urls[0], urls[1]


@contextmanager
def running(indexer: Indexer) -> Iterator[Indexer]:
    indexer.start()
    try:
        yield indexer
    finally:
        indexer.stop()


def hold(indexer: Indexer) -> None:
    """Two targets, one of which holds a prompt."""
    for worker in ("w", "other"):
        indexer.register(Registration(Target(worker, 0, "m"), None, "vLLM", 4))
    indexer.index.apply(Target("w", 0, "m"), EventBatch(0.0, [BlockStored([1, 2], None, HELD, 4)]))


@pytest.mark.parametrize("name", SENT)
async def test_router_and_indexer_answer_alike(both: tuple[str, str], name: str) -> None:
    router, index = [await answers(url, SENT[name]) for url in both]
    assert router  # something was answered
    for of_router, of_index in zip(router, index, strict=True):
        if b"no_worker_available" in of_router[2]:  # a router without workers knows of no model
            assert of_index[0] == b"HTTP/1.1 404 Not Found"
        else:
            assert of_router == of_index


async def test_match_returns_held_tokens(both: tuple[str, str]) -> None:
    for url in both:
        held, again, match, last = await answers(url, [question(ASKED), question(ASKED), question(ASKED, "/match")])
        for answer in (held, again):
            instances = json.loads(answer[2])["default"]
            assert {name: each["longest_matched"] for name, each in instances.items()} == {"w": 8, "other": 0}
        assert [each["matched_tokens"] for each in json.loads(match[2])["matches"]] == [4, 0]
        assert last[0] == b"HTTP/1.1 405 Method Not Allowed"


async def test_half_closed_client_receives_response(both: tuple[str, str]) -> None:
    """The body is checked in a thread, so that the response is sent after the end of the client's data."""
    for url in both:
        for body in (BODIES["long, spaces"], BODIES["too many values"]):
            ((first, _, _),) = await answers(url, [question(body)], half_close=True)
            assert first.split()[1] == (b"200" if body is BODIES["long, spaces"] else b"413")


_BY_CHANCE = {"date", "x-request-id"}


async def answers(url: str, sent: Sequence[bytes | tuple[bytes, ...]], half_close: bool = False) -> list[Answer]:
    """Return the final responses on a connection, which a last request or the client's half-close ends."""
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    found: list[Answer] = []
    try:
        async with asyncio.timeout(60):
            for each in sent:
                for piece in each if isinstance(each, tuple) else (each,):
                    writer.write(piece)
                    await asyncio.sleep(0)
                if half_close:
                    writer.write_eof()
                found += filter(None, [await _answer(reader, bodiless=each[:5] == b"HEAD ")])
            if not half_close and found and found[-1][1].get("connection") != "close":
                writer.write(LAST)
            while answer := await _answer(reader):
                found.append(answer)
    finally:
        writer.close()
    return found


async def _answer(reader: asyncio.StreamReader, bodiless: bool = False) -> Answer | None:
    """The next; None at the end of the connection."""
    first = b"HTTP/1.1 100 "
    while first.startswith(b"HTTP/1.1 100 "):
        try:
            first, *lines = (await reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
        except asyncio.IncompleteReadError:
            return None
    headers = dict(line.decode().split(": ", 1) for line in lines)
    body = await reader.readexactly(0 if bodiless else int(headers["content-length"]))
    return first, {name: value for name, value in headers.items() if name not in _BY_CHANCE or value == "mine"}, body


# A connection without a socket, which is called directly


class Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.reads, self.closing = True, False

    def write(self, data: Any) -> None:
        self.written.append(bytes(data))

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    @property
    def statuses(self) -> list[bytes]:
        return [data.partition(b"\r\n")[0] for data in self.written]


ReadMatch = Callable[[bytes], MatchQuery | Awaitable[MatchQuery]]


@contextmanager
def connected(read_match: ReadMatch) -> Iterator[tuple[HttpConnection, Transport]]:
    """A connection to the index alone, and its other end."""
    settings = Settings()
    with running(Indexer()) as indexer:
        hold(indexer)
        app = index_app(settings, indexer, Tokenizers(), RegisteredStreams(indexer, AllowedNetworks([])))
        contexts = RequestContexts(AuthGate(settings), None, None, log=False)
        app.state.dispatcher = Dispatcher(app, contexts, settings.server, Questions(indexer, read_match))
        config: Any = HttpServer(app, shutdown_timeout=1).config
        config.load()
        protocol = config.http_protocol_class(config=config, server_state=ServerState(), app_state={})
        transport = Transport()
        protocol.connection_made(transport)
        yield protocol, transport
        protocol.connection_lost(None)


def unread(_: bytes) -> MatchQuery:
    raise NotImplementedError


OK = b"HTTP/1.1 200 OK"


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop go round until a condition holds."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - the condition is another's
            await asyncio.sleep(0)


async def test_pipelined_questions_yield_to_other_connections() -> None:
    with connected(unread) as (protocol, transport):
        protocol.data_received(question(ASKED) * 20)
        assert transport.statuses == [OK]
        assert not transport.reads
        seen = set()
        while len(transport.written) < 20:
            seen.add(len(transport.written))
            await asyncio.sleep(0)
        assert seen == set(range(1, 20))
        assert transport.reads


async def test_paused_client_receives_no_more_responses() -> None:
    with connected(unread) as (protocol, transport):
        protocol.data_received(question(ASKED))
        protocol.pause_writing()
        protocol.data_received(question(ASKED) * 3)
        assert not transport.reads
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(transport.written) == 1
        protocol.resume_writing()
        await until(lambda: len(transport.written) == 4)
        assert transport.statuses == [OK] * 4
        assert transport.reads


@pytest.mark.parametrize("later", [False, True])
async def test_internal_error_is_500_and_keeps_connection(later: bool) -> None:
    async def read(_: bytes) -> MatchQuery:
        raise NotImplementedError

    with connected(read if later else unread) as (protocol, transport):
        protocol.data_received(question(ASKED, "/match"))
        await until(lambda: bool(transport.written))
        assert transport.statuses == [b"HTTP/1.1 500 Internal Server Error"]
        assert b"This is a bug" in transport.written[0]
        protocol.data_received(question(ASKED))
        await until(lambda: len(transport.written) == 2)
        assert transport.statuses[1] == OK


async def test_question_in_flight_is_answered_during_shutdown() -> None:
    read = asyncio.Event()

    async def delayed_read(_: bytes) -> MatchQuery:
        await read.wait()
        return MatchQuery("m", HELD)

    with connected(delayed_read) as (protocol, transport):
        protocol.data_received(question(ASKED, "/match"))
        protocol.shutdown()
        assert not transport.closing
        read.set()
        await until(lambda: bool(transport.written))
        assert transport.statuses == [OK]
        assert b"connection: close" in transport.written[0]
        assert transport.closing


async def test_disconnect_cancels_question() -> None:
    left: list[str] = []

    async def delayed_read(_: bytes) -> MatchQuery:
        try:
            await asyncio.Event().wait()
        finally:
            left.append("cancelled")
        raise AssertionError

    with connected(delayed_read) as (protocol, transport):
        protocol.data_received(question(ASKED, "/match"))
        await asyncio.sleep(0)
        protocol.connection_lost(None)
        await until(lambda: bool(left))
        assert not transport.written
