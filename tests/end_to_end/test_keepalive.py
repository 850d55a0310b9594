"""Comments in streams whose engine is silent (`proxy.keepalive_interval`)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from router_under_test import RouterUnderTest, router, until
from scripted_worker import Exchange, ScriptedWorker, scripted_workers
from simulated_pairs import routed as routed_pairs
from simulated_pairs import simulated_pairs
from test_stream_failover import completion, cut_workers, routed_fleet, summary

COMMENT = b": keep-alive\n\n"
PING = b'event: ping\ndata: {"type": "ping"}\n\n'
EVENT = b'data: {"choices": []}\n\n'
DONE = b"data: [DONE]\n\n"
COMPLETIONS = "/v1/completions"
BODY = {"model": "m", "prompt": "x", "max_tokens": 1, "stream": True}
MESSAGES = {"model": "m", "max_tokens": 1, "stream": True, "messages": [{"role": "user", "content": "x"}]}
KEEPALIVE = {"keepalive_interval": 0.05}


class Received:
    """A response that is being read."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.data = b""

    def comments(self, comment: bytes = COMMENT) -> int:
        return self.data.count(comment)

    def without_comments(self, comment: bytes = COMMENT) -> bytes:
        return self.data.replace(comment, b"")

    async def until_comments(self, count: int, comment: bytes = COMMENT) -> None:
        await until(lambda: self.comments(comment) >= count)


@asynccontextmanager
async def asked(routed: RouterUnderTest, body: Any, path: str = COMPLETIONS) -> AsyncIterator[Received]:
    """Send a request and read its response aside. Leave after its end."""
    received = Received()

    async def read() -> None:
        async with routed.request(path, body) as response:
            received.status = response.status
            received.headers = {name.lower(): value for name, value in response.headers.items()}
            async for data in response.content.iter_any():
                received.data += data

    reading = asyncio.create_task(read())
    try:
        yield received
        await reading
    finally:
        reading.cancel()


@asynccontextmanager
async def routed_to(
    *scripts: Callable[[Exchange], Any], **settings: Any
) -> AsyncIterator[tuple[RouterUnderTest, list[ScriptedWorker]]]:
    async with scripted_workers(*scripts) as workers:
        given = {"proxy": KEEPALIVE, "policy": {"name": "round_robin"}} | settings
        async with router(*(worker.url for worker in workers), **given) as routed:
            yield routed, workers


async def test_silent_engine_is_covered_by_comments_and_its_stream_is_unchanged() -> None:
    may_begin, may_go_on = asyncio.Event(), asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await may_begin.wait()
        await exchange.begin_chunks()
        await exchange.chunk(EVENT)
        await may_go_on.wait()
        await exchange.chunk(EVENT + DONE)
        await exchange.chunk(b"")

    async with routed_to(script) as (routed, _):
        async with asked(routed, BODY) as received:
            await received.until_comments(2)
            may_begin.set()
            await until(lambda: EVENT in received.data)
            before = received.comments()
            await received.until_comments(before + 2)
            may_go_on.set()
        assert received.without_comments() == EVENT + EVENT + DONE
        assert received.data.endswith(DONE)
        assert received.status == 200
        assert received.headers["content-type"].startswith("text/event-stream")
        assert "x-request-id" in received.headers
        assert not [name for name in received.headers if name.startswith("x-kvrouter")]
        await routed.until_released()
        assert await routed.metric("kvrouter_requests_total", status="200") == 1
        async with asked(routed, BODY) as quick:  # the connection has no comment after the end
            pass
        assert quick.without_comments() == EVENT + EVENT + DONE


async def test_no_comment_is_inside_an_event() -> None:
    may_end = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.begin_chunks()
        await exchange.chunk(EVENT + EVENT[:9])
        await may_end.wait()
        await exchange.chunk(EVENT[9:] + DONE)
        await exchange.chunk(b"")

    async with routed_to(script) as (routed, _), asked(routed, BODY) as received:
        await until(lambda: EVENT in received.data)
        await asyncio.sleep(0.3)  # several intervals
        assert received.data.endswith(EVENT + EVENT[:9])  # a comment may stand before the first event
        may_end.set()
    assert received.data.endswith(EVENT + EVENT + DONE)


async def test_streams_get_no_comments_by_default() -> None:
    may_begin = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await may_begin.wait()
        await exchange.answer(EVENT, headers=b"content-type: text/event-stream\r\n")

    async with routed_to(script, proxy={}) as (routed, _), asked(routed, BODY) as received:
        await asyncio.sleep(0.3)
        assert received.status == 0
        may_begin.set()
    assert received.data == EVENT


async def test_answers_that_are_not_streamed_get_no_comments() -> None:
    may_begin = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await may_begin.wait()
        await exchange.answer()

    async with routed_to(script) as (routed, _), asked(routed, BODY | {"stream": False}) as received:
        await asyncio.sleep(0.3)
        assert received.status == 0
        may_begin.set()
    assert (received.status, received.data) == (200, b"{}")
    assert "x-kvrouter-worker" in received.headers


async def test_messages_get_pings() -> None:
    may_begin = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await may_begin.wait()
        await exchange.answer(b'{"type":"error","error":{"type":"invalid_request_error","message":"no"}}', "400 Bad")

    async with routed_to(script) as (routed, _), asked(routed, MESSAGES, "/v1/messages") as received:
        await received.until_comments(2, PING)
        may_begin.set()
    rest = received.without_comments(PING)
    assert rest.startswith(b"event: error\ndata: ")
    assert json.loads(rest.removeprefix(b"event: error\ndata: "))["error"]["message"] == "no"


async def test_request_is_retried_after_comments() -> None:
    may_break = asyncio.Event()

    async def breaks(exchange: Exchange) -> None:
        if not may_break.is_set():
            await may_break.wait()
            await exchange.hang_up()
            return
        await exchange.begin_chunks()
        await exchange.chunk(EVENT + DONE)
        await exchange.chunk(b"")

    async with routed_to(breaks, breaks) as (routed, workers), asked(routed, BODY) as received:
        await received.until_comments(2)
        may_break.set()
    assert received.without_comments() == EVENT + DONE
    assert [len(worker.exchanges) for worker in workers] == [1, 1]


@pytest.mark.parametrize("body", [b'{"error": {"message": "too long", "code": 400}}', b"too long"])
async def test_later_error_of_a_worker_is_an_event(body: bytes) -> None:
    may_answer = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await may_answer.wait()
        await exchange.answer(body, "400 Bad Request")

    async with routed_to(script) as (routed, _), asked(routed, BODY) as received:
        await received.until_comments(1)
        may_answer.set()
    assert received.status == 200
    event = received.without_comments()
    assert json.loads(event.removeprefix(b"data: "))["error"]["message"] == "too long"


async def test_worker_that_breaks_off_after_comments_is_an_event() -> None:
    may_break = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await may_break.wait()
        await exchange.hang_up()

    async with routed_to(script) as (routed, _):
        async with asked(routed, BODY) as received:
            await received.until_comments(1)
            may_break.set()
        event = json.loads(received.without_comments().removeprefix(b"data: "))
        assert "worker" in event["error"]["message"]
        await routed.until_released()


async def test_held_request_gets_comments_and_its_refusal_is_an_event() -> None:
    may_end = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.begin_chunks()
        await exchange.chunk(EVENT)
        await may_end.wait()
        await exchange.chunk(DONE)
        await exchange.chunk(b"")

    admission = {"requests": 1, "timeout": 0.5}
    async with routed_to(script, admission=admission) as (routed, _), asked(routed, BODY) as first:
        await until(lambda: first.data)
        async with asked(routed, BODY) as held:
            await held.until_comments(2)
        error = json.loads(held.without_comments().removeprefix(b"data: "))["error"]
        assert (held.status, error["type"]) == (200, "rate_limit_error")
        may_end.set()
    assert first.without_comments() == EVENT + DONE


async def test_refusal_before_the_first_comment_keeps_its_status() -> None:
    async with routed_to(Exchange.answer) as (routed, _):
        assert (await routed.call(COMPLETIONS, BODY | {"model": "unknown"})).status == 404


async def test_openai_client_reads_a_stream_with_comments() -> None:
    may_begin = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await may_begin.wait()
        await exchange.begin_chunks()
        await exchange.chunk(b'data: {"id": "a", "choices": [{"index": 0, "text": "hello"}]}\n\n' + DONE)
        await exchange.chunk(b"")

    async with routed_to(script) as (routed, _):
        asking = asyncio.create_task(routed.openai.completions.create(model="m", prompt="x", stream=True))
        stream = await asking  # the head is here before the worker's
        may_begin.set()
        assert [chunk.choices[0].text async for chunk in stream] == ["hello"]


async def test_stream_of_a_pair_gets_comments() -> None:
    """The prefill takes longer than the interval."""
    async with (
        simulated_pairs("sglang", prefill={"prefill_s_per_token": 0.005}) as pairs,
        routed_pairs(pairs, proxy=KEEPALIVE) as routed,
    ):
        body = {"model": "simulated", "prompt": "a b c d " * 100, "max_tokens": 2, "stream": True}
        async with asked(routed, body) as received:
            pass
    assert received.comments() >= 1
    assert received.without_comments().endswith(DONE)
    assert b'"error"' not in received.data


async def test_continued_stream_gets_comments() -> None:
    """The interval is shorter than a step of the engine."""
    proxy = {"stream_failovers": 2, "keepalive_interval": 0.002}
    async with cut_workers() as workers, routed_fleet(workers, proxy=proxy) as (routed, cut, sound, _):
        body = completion(1, max_tokens=20)
        cut.cut = 2000
        streams = [(await routed.call(COMPLETIONS, body)).body for _ in range(4)]
        assert len(sound.bodies) >= len(cut.bodies) > 0
    assert all(COMMENT in stream for stream in streams)
    assert len({str(summary(stream.replace(COMMENT, b""))[:2]) for stream in streams}) == 1
