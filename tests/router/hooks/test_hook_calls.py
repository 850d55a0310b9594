"""Hooks without a router: what slow, failing and hanging functions cost, and what a check of keys remembers."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from waiting import until

from http_api.errors import RequestError
from router.hooks import hook_threads, key_check
from router.hooks.hooks import Hooks
from router.hooks.interface import Answer, Refusal, Request
from router.hooks.key_check import KeyCheck, KeyCheckError

BODY = b'{"model": "m", "temperature": 1.0, "messages": []}'


def request(body: bytes = BODY, **options: Any) -> Request:
    return Request("id", "POST", "/v1/chat/completions", [(b"accept", b"*/*")], body, **options)


def answer() -> Answer:
    unknown: dict[str, Any] = dict.fromkeys(
        ["worker", "dp_rank", "prefill_worker", "prompt_tokens", "completion_tokens", "cached_tokens", "first_byte"]
    )
    texts: dict[str, Any] = dict.fromkeys(["id", "method", "path", "model", "tenant", "session", "program"], "")
    return Answer(status=200, routed_tokens=0, received=0.0, duration=0.0, **texts, **unknown)


def hooks_of(
    *before: Callable[[Request], Any], deadline: float = 0.1, fails_open: bool = False, **options: Any
) -> Hooks:
    return Hooks([(each.__name__, each) for each in before], [], deadline, fails_open, **options)


def results(hooks: Hooks, place: int = 0) -> dict[str, int]:
    return {name: count for name, count in hooks.tallies[place].counts.items() if count}


@pytest.fixture
def released() -> Any:
    """An event that ends the functions of a test that block."""
    event = threading.Event()
    yield event
    event.set()


def blocking(event: threading.Event, is_async: bool) -> Callable[[Request], Any]:
    def plain(request: Request) -> None:
        request.set_field("temperature", 0)
        event.wait(60)

    async def coroutine(request: Request) -> None:
        request.set_field("temperature", 0)
        await asyncio.sleep(60)

    return coroutine if is_async else plain


def raising(request: Request) -> None:
    raise KeyError(request.path)


async def returning(request: Request) -> str:  # noqa: ARG001
    return "a text"


async def test_changes_reach_the_next_function_and_the_request() -> None:
    def first(given: Request) -> None:
        given.set_field("temperature", 0)
        given.remove_field("messages")
        given.set_header("X-Team", "a")
        given.remove_header("accept")
        given.session = "s"
        given.notes["user"] = 7

    async def second(given: Request) -> None:
        assert given.fields == {"model": "m", "temperature": 0}
        assert (given.headers["x-team"], given.session, given.notes) == ("a", "s", {"user": 7})
        given.set_field("top_p", 0.5)
        assert given.fields["top_p"] == 0.5

    hooks = hooks_of(first, second, deadline=30.0)
    changed = await hooks.before(request(), False)
    assert json.loads(changed.body) == {"model": "m", "temperature": 0, "top_p": 0.5}
    assert changed.received_headers() == [(b"x-team", b"a"), (b"x-kvrouter-session-id", b"s")]
    await hooks.close()


async def test_refusal_ends_the_request_and_later_functions() -> None:
    called: list[Request] = []
    hooks = hooks_of(lambda _: Refusal(402, "No credit is left.", "credit", 30), called.append, deadline=30.0)
    with pytest.raises(RequestError, match="No credit") as refused:
        await hooks.before(request(), False)
    assert (refused.value.status, refused.value.code, refused.value.retry_after) == (402, "credit", 30)
    assert (called, results(hooks)) == ([], {"refused": 1})
    await hooks.close()


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_function_that_hangs_costs_its_deadline(released: threading.Event, is_async: bool) -> None:
    hooks = hooks_of(blocking(released, is_async))
    with pytest.raises(RequestError) as refused:
        await hooks.before(request(), False)
    assert (refused.value.status, refused.value.code) == (503, "hook_failed")
    hooks_open = hooks_of(blocking(released, is_async), fails_open=True)
    assert (await hooks_open.before(request(), False)).body == BODY
    assert results(hooks) == results(hooks_open) == {"late": 1}
    released.set()
    await hooks.close()
    await hooks_open.close()


@pytest.mark.parametrize("function", [raising, returning])
async def test_an_error_is_closed_or_open_as_set(function: Callable[[Request], Any]) -> None:
    closed, opened = hooks_of(function, deadline=30.0), hooks_of(function, deadline=30.0, fails_open=True)
    with pytest.raises(RequestError, match="check of this request failed"):
        await closed.before(request(), False)
    assert (await opened.before(request(), False)).body == BODY
    (finding,) = closed.findings()
    assert finding["finding"] == "hook_failed"
    assert ("KeyError" if function is raising else "returned str") in finding["detail"]
    assert results(opened) == {"error": 1}
    await closed.close()
    await opened.close()


async def test_functions_that_block_do_not_block_the_event_loop(released: threading.Event) -> None:
    async def blocks(_: Request) -> None:
        released.wait(60)

    hooks = hooks_of(blocks, fails_open=True, deadline=30.0)
    running = asyncio.create_task(hooks.before(request(), False))
    await until(lambda: asyncio.sleep(0, len(hooks._threads._running)), lambda count: count == 1)
    assert not running.done()  # this loop has run meanwhile
    released.set()
    assert (await running).body == BODY
    await hooks.close()


@pytest.mark.parametrize("is_async", [False, True])
async def test_calls_that_never_end_are_bounded(
    released: threading.Event, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hook_threads, "MOST_CALLS", 4)

    async def blocks(_: Request) -> None:
        released.wait(60)

    hooks = hooks_of(blocks if is_async else blocking(released, False), fails_open=True, deadline=0.05)
    for _ in range(6):
        await hooks.before(request(), False)
    assert results(hooks) == {"late": 4, "dropped": 2}
    released.set()
    await until(lambda: asyncio.sleep(0, len(hooks._threads._running)), lambda count: count == 0)
    await hooks.before(request(), False)
    assert results(hooks) == {"late": 4, "dropped": 2, "ok": 1}
    await hooks.close()


async def test_fixed_headers_and_invalid_values_are_errors() -> None:
    given = request()
    for name, value in (("Content-Length", "1"), ("host", "a"), ("x y", "1"), ("x", "1\r\ny: 2"), ("", "1")):
        with pytest.raises(ValueError, match="header"):
            given.set_header(name, value)
    with pytest.raises(ValueError, match="cannot be changed"):
        given.remove_header("content-type")
    assert given.changed().received_headers() == [(b"accept", b"*/*")]


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b"--boundary", b"\xff", b"[" * 100_000])
async def test_bodies_without_fields_are_kept(body: bytes) -> None:
    given = request(body)
    assert given.fields == {}
    given.set_field("a", 1)
    given.remove_field("b")
    assert given.changed().body == body


async def test_an_unknown_tenant_is_an_error() -> None:
    def choose(given: Request) -> None:
        given.tenant = given.fields["model"]

    hooks = hooks_of(choose, deadline=30.0, tenants=["gold"])
    chosen = await hooks.before(request(b'{"model": "gold"}', key="k"), True)
    assert chosen.tenant == "gold"
    with pytest.raises(RequestError, match="failed"):
        await hooks.before(request(), True)
    await hooks.close()


async def test_a_key_that_no_function_accepts_is_refused() -> None:
    hooks = hooks_of(lambda _: None, deadline=30.0, tenants=["gold"])
    with pytest.raises(RequestError) as refused:
        await hooks.before(request(key="k"), True)
    assert refused.value.status == 401
    await hooks.close()


async def test_functions_after_an_answer_delay_nothing(released: threading.Event) -> None:
    seen: list[Answer] = []

    async def fails(_: Answer) -> None:
        raise KeyError

    def waits(_: Answer) -> None:
        released.wait(60)

    hooks = Hooks([], [("fails", fails), ("waits", waits), ("notes", seen.append)], 30.0, True)
    begun = time.monotonic()
    hooks.after(answer())
    assert time.monotonic() - begun < 20
    await until(lambda: asyncio.sleep(0, [results(hooks, place) for place in (0, 2)]), lambda found: all(found))
    assert (results(hooks), results(hooks, 1), results(hooks, 2)) == ({"error": 1}, {}, {"ok": 1})
    released.set()
    await hooks.close()
    assert results(hooks, 1) == {"ok": 1}
    assert len(seen) == 1


class KeyService:
    """A service that knows some keys, and counts questions."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.statuses: dict[str, int] = {"good": 204, "bad": 403, "broken": 500}
        self.waiting: asyncio.Event | None = None

    async def answer(self, asked: web.Request) -> web.Response:
        key = asked.headers["authorization"].removeprefix("Bearer ")
        self.asked.append(key)
        if self.waiting is not None:
            await self.waiting.wait()
        return web.Response(status=self.statuses.get(key, 401), headers={"x-kvrouter-tenant": "gold"})


@pytest.fixture
async def service() -> AsyncIterator[tuple[KeyService, str, aiohttp.ClientSession]]:
    known = KeyService()
    app = web.Application()
    app.router.add_get("/check", known.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    async with aiohttp.ClientSession() as session:
        yield known, f"http://127.0.0.1:{runner.addresses[0][1]}/check", session
    await runner.cleanup()


async def test_keys_are_remembered_and_asked_for_once(service: tuple[KeyService, str, aiohttp.ClientSession]) -> None:
    known, url, session = service
    now = 0.0
    check = KeyCheck(url, session, 60.0, 30.0, lambda: now)
    assert await asyncio.gather(*(check.check("good") for _ in range(5))) == ["gold"] * 5
    for _ in range(2):
        for key in ("bad", "unknown", ""):
            with pytest.raises(RequestError) as refused:
                await check.check(key)
            assert refused.value.status == 401
    assert known.asked == ["good", "bad", "unknown"]
    now = 6.0  # a refused key is asked for again
    known.statuses["bad"] = 200
    assert [await check.check(key) for key in ("bad", "good")] == ["gold"] * 2
    assert known.asked[3:] == ["bad"]
    now = 61.0
    await check.check("good")
    assert known.asked[4:] == ["good"]
    await check.close()


async def test_service_without_answer_is_a_failure(service: tuple[KeyService, str, aiohttp.ClientSession]) -> None:
    known, url, session = service
    with pytest.raises(KeyCheckError, match="answers 500"):
        await KeyCheck(url, session, 60.0, 30.0).check("broken")
    with pytest.raises(KeyCheckError, match="refused the connection"):
        await KeyCheck("http://127.0.0.1:1/", session, 60.0, 30.0).check("good")
    known.waiting = asyncio.Event()
    hooks = hooks_of(deadline=0.1, key_check=KeyCheck(url, session, 60.0, 0.1), tenants=["gold"])
    with pytest.raises(RequestError) as refused:
        await hooks.before(request(key="good"), True)
    assert refused.value.code == "hook_failed"
    known.waiting.set()
    await hooks.close()


async def test_remembered_keys_are_bounded(
    service: tuple[KeyService, str, aiohttp.ClientSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    known, url, session = service
    monkeypatch.setattr(key_check, "MOST_CACHED", 2)
    check = KeyCheck(url, session, 60.0, 30.0, lambda: 0.0)
    await check.check("good")
    for number in range(4):
        with pytest.raises(RequestError):
            await check.check(f"unknown {number}")
    await check.check("good")
    assert known.asked.count("good") == 1  # refused keys evict only refused ones
    assert len(check._refused._known) == 2


async def test_a_key_needs_a_known_tenant(service: tuple[KeyService, str, aiohttp.ClientSession]) -> None:
    _, url, session = service
    hooks = hooks_of(deadline=30.0, key_check=KeyCheck(url, session, 60.0, 30.0), tenants=["silver"])
    with pytest.raises(RequestError, match="failed"):
        await hooks.before(request(key="good"), True)
    assert "'gold'" in hooks.findings()[0]["detail"]
    await hooks.close()
