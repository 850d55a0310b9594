"""WebSockets of /v1/realtime: placement, both directions, limits, tenants, and the end of the service."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from router_under_test import RouterUnderTest, router, until
from websockets.frames import Frame, Opcode
from yarl import URL

from router.auth import hashed_key

PATH = "/v1/realtime?model=m"
TOKEN = "admin"


class RealtimeWorker:
    """A worker whose WebSocket echoes messages. `behave` replaces the echo."""

    def __init__(self) -> None:
        self.url = ""
        self.headers: list[dict[str, str]] = []
        self.targets: list[str] = []
        self.sockets: list[web.WebSocketResponse] = []
        self.closed: list[int | None] = []
        self.refuses = False
        self.behave: Callable[[web.WebSocketResponse], Awaitable[None]] = self.echo

    async def echo(self, socket: web.WebSocketResponse) -> None:
        async for message in socket:
            if message.type is aiohttp.WSMsgType.TEXT:
                await socket.send_str(message.data)
            else:
                await socket.send_bytes(message.data)

    async def realtime(self, request: web.Request) -> web.StreamResponse:
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        self.targets.append(str(request.rel_url))
        if self.refuses:
            return web.json_response({"error": {"message": "no realtime here"}}, status=404)
        socket = web.WebSocketResponse(protocols=("realtime",), max_msg_size=0)
        await socket.prepare(request)
        self.sockets.append(socket)
        try:
            await self.behave(socket)
        finally:
            self.closed.append(socket.close_code)
        return socket

    async def rest(self, request: web.Request) -> web.Response:
        return web.json_response({"path": request.path})


@asynccontextmanager
async def realtime_worker() -> AsyncIterator[RealtimeWorker]:
    worker = RealtimeWorker()
    app = web.Application()

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    app.router.add_get("/v1/models", models)
    app.router.add_get("/v1/realtime", worker.realtime)
    app.router.add_post("/v1/realtime/{name}", worker.rest)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    worker.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
    try:
        yield worker
    finally:
        await runner.cleanup()


@pytest.fixture
async def worker() -> AsyncIterator[RealtimeWorker]:
    async with realtime_worker() as worker:
        yield worker


@pytest.fixture
async def routed(worker: RealtimeWorker) -> AsyncIterator[RouterUnderTest]:
    async with router(worker.url) as routed:
        yield routed


def connect(routed: RouterUnderTest, path: str = PATH, **options: Any) -> Any:
    return routed.session.ws_connect(routed.url + path, max_msg_size=0, **options)


async def closed(socket: aiohttp.ClientWebSocketResponse) -> int | None:
    """Return the code with which a WebSocket is closed."""
    async with asyncio.timeout(60):
        while not socket.closed:
            await socket.receive()
    return socket.close_code


async def test_messages_pass_in_both_directions(worker: RealtimeWorker, routed: RouterUnderTest) -> None:
    async with connect(routed, protocols=("realtime",)) as socket:
        assert socket.protocol == "realtime"
        assert socket._response.headers["x-kvrouter-worker"] == worker.url
        for message in ("{}", "é" * 1000, "x" * 1_000_000):
            await socket.send_str(message)
            assert await socket.receive_str() == message
        await socket.send_bytes(bytes(range(256)))
        assert await socket.receive_bytes() == bytes(range(256))
        await socket.ping()
    assert worker.targets == [PATH]
    await until(lambda: worker.closed)


async def test_open_session_counts_as_load(routed: RouterUnderTest) -> None:
    async with connect(routed) as socket:
        await socket.send_str("x")
        await socket.receive_str()
        assert await routed.requests_in_flight() == 1
    await routed.until_released()


async def test_sessions_go_where_the_load_is_least(worker: RealtimeWorker) -> None:
    async with realtime_worker() as other, router(worker.url, other.url) as routed, AsyncExitStack() as stack:
        for _ in range(4):
            await stack.enter_async_context(connect(routed))
        assert [len(each.targets) for each in (worker, other)] == [2, 2]


@pytest.mark.parametrize("by_worker", [False, True])
async def test_close_codes_pass_to_the_other_side(
    worker: RealtimeWorker, routed: RouterUnderTest, by_worker: bool
) -> None:
    async def close(socket: web.WebSocketResponse) -> None:
        await socket.close(code=4001, message=b"enough")

    if by_worker:
        worker.behave = close
    async with connect(routed) as socket:
        if by_worker:
            assert await closed(socket) == 4001
        else:
            await socket.close(code=4002)
    await until(lambda: worker.closed)
    assert worker.closed == [4001 if by_worker else 4002]
    await routed.until_released()


async def test_broken_worker_closes_the_client_with_1011(worker: RealtimeWorker, routed: RouterUnderTest) -> None:
    async def break_off(socket: web.WebSocketResponse) -> None:
        await socket.receive()
        assert socket._req is not None
        assert socket._req.transport is not None
        socket._req.transport.abort()

    worker.behave = break_off
    async with connect(routed) as socket:
        await socket.send_str("x")
        assert await closed(socket) == 1011
    await routed.until_released()


async def test_broken_client_closes_the_worker(worker: RealtimeWorker, routed: RouterUnderTest) -> None:
    socket = await connect(routed)
    await until(lambda: worker.sockets)
    assert socket._response.connection is not None
    assert socket._response.connection.transport is not None
    socket._response.connection.transport.abort()
    await until(lambda: worker.closed)
    await routed.until_released()


async def test_refused_handshake_is_forwarded(worker: RealtimeWorker, routed: RouterUnderTest) -> None:
    worker.refuses = True
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        await connect(routed)
    assert refused.value.status == 404
    await routed.until_released()


async def test_next_worker_is_tried_if_one_is_not_reached(worker: RealtimeWorker) -> None:
    async with AsyncExitStack() as stack:
        async with realtime_worker() as gone:
            fleet = {"probe_interval": 60.0}
            settings: dict[str, Any] = {"fleet": fleet, "policy": {"name": "round_robin"}}
            routed = await stack.enter_async_context(router(gone.url, worker.url, **settings))
        for _ in range(2):
            async with connect(routed) as socket:
                await socket.send_str("x")
                assert await socket.receive_str() == "x"
        assert len(worker.targets) == 2


async def test_plain_request_is_426(routed: RouterUnderTest) -> None:
    assert (await routed.call(PATH)).status == 426


@pytest.mark.parametrize("query", ["model=other&model=m", "model=m&model=other", "model=m&%6dodel=other"])
async def test_query_with_several_models_is_refused(
    worker: RealtimeWorker, routed: RouterUnderTest, query: str
) -> None:
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        await routed.session.ws_connect(URL(f"{routed.url}/v1/realtime?{query}", encoded=True))
    assert refused.value.status == 400
    assert not worker.targets


async def test_worker_gets_only_the_model_that_was_checked(worker: RealtimeWorker, routed: RouterUnderTest) -> None:
    target = URL(f"{routed.url}/v1/realtime?model=m&x=1;model=other", encoded=True)
    async with routed.session.ws_connect(target) as socket:
        await socket.send_str("x")
        assert await socket.receive_str() == "x"
    assert worker.targets == ["/v1/realtime?model=m&x=1%3Bmodel%3Dother"]


async def test_slow_reader_stops_the_other_side(worker: RealtimeWorker, routed: RouterUnderTest) -> None:
    """The worker cannot send more than the buffers between hold while the client does not read."""
    sent = 0

    async def flood(socket: web.WebSocketResponse) -> None:
        nonlocal sent
        for _ in range(2000):
            await socket.send_bytes(bytes(65_536))
            sent += 1

    worker.behave = flood
    async with connect(routed) as socket:
        before = -1
        while before != sent or not sent:  # until nothing more is sent
            before = sent
            await asyncio.sleep(0.3)
        assert sent < 2000
        received = 0
        while received < 2000:
            await socket.receive_bytes()
            received += 1
    assert sent == 2000


async def test_too_large_message_is_refused(routed: RouterUnderTest) -> None:
    async with connect(routed) as socket:
        await socket.send_bytes(bytes(17 * 2**20))
        assert await closed(socket) == 1009
    await routed.until_released()


@pytest.mark.parametrize(
    "limits", [{"proxy": {"idle_timeout": 0.3}}, {"constants": {"session_seconds": 0.3}}], ids=["idle", "old"]
)
async def test_idle_and_old_sessions_are_closed(worker: RealtimeWorker, limits: dict[str, Any]) -> None:
    async with router(worker.url, **limits) as routed, connect(routed) as socket:
        assert await closed(socket) == 1001
        await until(lambda: worker.closed)


async def test_sessions_end_with_1001_when_the_service_stops(worker: RealtimeWorker) -> None:
    async with aiohttp.ClientSession() as session:
        async with router(worker.url) as routed:
            socket = await session.ws_connect(routed.url + PATH)
            await socket.send_str("x")
            await socket.receive_str()
            closing = asyncio.create_task(closed(socket))
        assert await closing == 1001
        await until(lambda: worker.closed)
        assert worker.closed == [1001]


TENANTS = {"a": {"keys": [hashed_key("key-a")]}, "b": {"keys": [hashed_key("key-b")], "models": ["other"]}}


async def test_tenants_need_a_key_and_a_model_of_theirs(worker: RealtimeWorker) -> None:
    async def status(routed: RouterUnderTest, **options: Any) -> int:
        try:
            async with connect(routed, **options) as socket:
                await socket.send_str("x")
                assert await socket.receive_str() == "x"
                return 101
        except aiohttp.WSServerHandshakeError as error:
            return error.status

    for isolate, expected in ((False, 101), (True, 403)):
        tenants = {"named": TENANTS, "isolate": isolate}
        async with router(worker.url, server={"token": TOKEN}, tenants=tenants) as routed:
            assert await status(routed) == 401
            assert await status(routed, headers={"authorization": "Bearer key-a"}) == expected
            assert await status(routed, protocols=("realtime", "openai-insecure-api-key.key-a")) == expected
            assert await status(routed, headers={"authorization": "Bearer key-b"}) == 403
    assert "authorization" not in worker.headers[0]
    assert worker.headers[1]["sec-websocket-protocol"] == "realtime"


async def test_budgets_count_the_usage_of_events(worker: RealtimeWorker) -> None:
    async def answer(socket: web.WebSocketResponse) -> None:
        await socket.receive()
        await socket.send_str(json.dumps({"type": "response.done", "usage": {"input_tokens": 200, "output_tokens": 1}}))

    worker.behave = answer
    named = {"a": {"keys": [hashed_key("key-a")], "tokens_per_minute": 100}}
    key = {"authorization": "Bearer key-a"}
    async with router(worker.url, server={"token": TOKEN}, tenants={"named": named}) as routed:
        async with connect(routed, headers=key) as socket:
            await socket.send_str("x")
            await socket.receive_str()
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await connect(routed, headers=key)
    assert refused.value.status == 429


async def test_pages_of_other_sites_are_refused(worker: RealtimeWorker) -> None:
    page = {"origin": "https://chat.example.com"}
    async with router(worker.url) as routed:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await connect(routed, headers=page)
        assert refused.value.status == 403
    server = {"cors_origins": ["https://chat.example.com"]}
    async with router(worker.url, server=server) as routed, connect(routed, headers=page) as socket:
        await socket.send_str("x")


@pytest.mark.parametrize("name", ["client_secrets", "sessions", "transcription_sessions"])
async def test_rest_routes_are_forwarded(routed: RouterUnderTest, name: str) -> None:
    reply = await routed.call(f"/v1/realtime/{name}", {"model": "m"})
    assert reply.json() == {"path": f"/v1/realtime/{name}"}


async def test_alias_is_replaced_by_the_served_name(worker: RealtimeWorker) -> None:
    path = "/v1/realtime?model=voice&x=1"
    async with router(worker.url, models={"m": {"aliases": ["voice"]}}) as routed, connect(routed, path) as socket:
        await socket.send_str("x")
    assert worker.targets == ["/v1/realtime?model=m&x=1"]


async def test_usage_is_counted_over_fragments(worker: RealtimeWorker) -> None:
    event = json.dumps({"type": "response.done", "usage": {"input_tokens": 200, "output_tokens": 1}}).encode()

    async def answer(socket: web.WebSocketResponse) -> None:
        await socket.receive()
        request = socket._req
        assert request is not None
        assert request.transport is not None
        for place in range(0, len(event), 10):
            opcode = Opcode.CONT if place else Opcode.TEXT
            part = Frame(opcode, event[place : place + 10], place + 10 >= len(event))
            request.transport.write(part.serialize(mask=False))  # aiohttp writes no fragments

    worker.behave = answer
    named = {"a": {"keys": [hashed_key("key-a")], "tokens_per_minute": 100}}
    key = {"authorization": "Bearer key-a"}
    async with router(worker.url, server={"token": TOKEN}, tenants={"named": named}) as routed:
        async with connect(routed, headers=key) as socket:
            await socket.send_str("x")
            await socket.receive_str()
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await connect(routed, headers=key)
    assert refused.value.status == 429


NAMED_MODELS = [
    {"type": "session.update", "model": "MODEL"},
    {"type": "session.update", "session": {"model": "MODEL"}},
    {"type": "session.update", "session": {"audio": {"input": {"transcription": {"model": "MODEL"}}}}},
    {"type": "response.create", "response": {"model": "MODEL"}},
]


@pytest.mark.parametrize("event", NAMED_MODELS)
async def test_events_name_only_models_of_the_tenant(worker: RealtimeWorker, event: dict[str, Any]) -> None:
    named = {"a": {"keys": [hashed_key("key-a")], "models": ["m"]}}
    key = {"authorization": "Bearer key-a"}
    models = {"m": {"aliases": ["voice"]}}
    text = json.dumps(event)
    async with router(worker.url, server={"token": TOKEN}, tenants={"named": named}, models=models) as routed:
        async with connect(routed, headers=key) as socket:
            await socket.send_str(text.replace("MODEL", "m"))
            assert await socket.receive_str() == text.replace("MODEL", "m")
            await socket.send_str(text.replace("MODEL", "voice"))
            assert json.loads(await socket.receive_str()) == json.loads(text.replace("MODEL", "m"))
            content = json.dumps({"item": {"model": "other"}, "tools": [{"model": "other"}], "text": '"model"'})
            await socket.send_str(content)
            assert await socket.receive_str() == content
        for forbidden in (
            text.replace("MODEL", "other"),
            text.replace('"model"', '"mod\\u0065l"').replace("MODEL", "other"),
            text.replace('"MODEL"', '"other", "model": "m"'),
            text.replace('"MODEL"', '"m", "model": "other"'),
        ):
            async with connect(routed, headers=key) as socket:
                await socket.send_str(forbidden)
                assert await closed(socket) == 1008
            async with connect(routed, headers=key) as socket:
                await socket.send_bytes(forbidden.encode())
                assert await closed(socket) == 1008
