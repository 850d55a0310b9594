"""Streams whose worker dies and that another worker continues: the client's text is that of a single worker."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import openai
import pytest
from router_under_test import PATIENT, RouterUnderTest, plain_client, router, until
from scripted_worker import Exchange, ScriptedWorker, scripted_workers
from simulated_workers import simulated_workers

MODEL = "simulated"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# Workers that break off stay in use, so that the next stream begins there too.
TURNS: dict[str, Any] = {
    "policy": {"name": "round_robin"},
    "proxy": {"stream_failovers": 2},
    # A pause of this machine is no reason to leave a worker out.
    "fleet": {"probe_interval": 0.2, "failures": 1000, **PATIENT},
}
USAGE = {"include_usage": True}


def chat(number: object, **more: Any) -> dict[str, Any]:
    message = {"role": "user", "content": f"Tell story {number}"}
    return {"model": MODEL, "messages": [message], "stream": True, **more}


def completion(number: object, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": f"The story {number} begins", "stream": True, **more}


# Workers


@asynccontextmanager
async def worker_process(step_s: float) -> AsyncIterator[tuple[Process, str]]:
    """A simulated worker in a process of its own, and its URL."""
    settings = json.dumps({"base_step_s": step_s})
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "simulator.worker", settings, stdout=PIPE)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            line = (await process.stdout.readline()).decode()
        yield process, line.split()[-1]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


class CutWorker:
    """A sound worker seen through a connection that breaks after `cut` bytes of a stream's body; None: never.

    `hangs`: it does not answer. `forgets`: fields that it takes out of requests, as an engine that does not know them.
    `bodies`: of the streams.
    """

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url = url
        self._session = session
        self.reset()

    def reset(self) -> None:
        self.cut: int | None = None
        self.hangs = False
        self.forgets: tuple[str, ...] = ()
        self.bodies: list[dict[str, Any]] = []

    async def forward(self, exchange: Exchange) -> None:
        body = exchange.body
        if exchange.target in (CHAT, COMPLETIONS):
            self.bodies.append(json.loads(body))
            if self.hangs:
                await exchange.until_closed()
                return
            body = json.dumps({k: v for k, v in self.bodies[-1].items() if k not in self.forgets}).encode()
        headers = {"content-type": "application/json"}
        async with self._session.request(
            exchange.method, self._url + exchange.target, data=body, headers=headers
        ) as answer:
            if not answer.content_type.startswith("text/event-stream"):
                data = await answer.read()
                await exchange.answer(data, f"{answer.status} {answer.reason}")
                return
            await exchange.begin_chunks()
            left = self.cut
            async for chunk in answer.content.iter_any():
                part = chunk if left is None else chunk[:left]
                if part:
                    await exchange.chunk(part)
                if left is not None:
                    left -= len(part)
                    if not left:
                        await exchange.hang_up()
                        return
            await exchange.chunk(b"")


Workers = tuple[CutWorker, CutWorker, list[ScriptedWorker]]
CutFleet = tuple[RouterUnderTest, CutWorker, CutWorker, ScriptedWorker]


@asynccontextmanager
async def cut_workers(ranks: int = 1) -> AsyncIterator[Workers]:
    """Run a worker that is cut, and one that is not."""
    async with aiohttp.ClientSession() as session, simulated_workers(1, dp_size=ranks) as [url]:
        cut, sound = (CutWorker(url, session) for _ in range(2))
        async with scripted_workers(cut.forward, sound.forward) as servers:
            for server in servers:
                server.answers_discovery = False
            yield cut, sound, servers


@pytest.fixture(scope="module")
async def workers() -> AsyncIterator[Workers]:
    async with cut_workers() as made:
        yield made


@asynccontextmanager
async def routed_fleet(workers: Workers, **sections: Any) -> AsyncIterator[CutFleet]:
    """Run a router in front of workers of which none is cut yet."""
    cut, sound, servers = workers
    for worker, server in zip((cut, sound), servers, strict=True):
        worker.reset()
        server.script = worker.forward
    async with router(*(server.url for server in servers), **TURNS | sections) as routed:
        yield routed, cut, sound, servers[0]


@pytest.fixture
async def fleet(workers: Workers) -> AsyncIterator[CutFleet]:
    """The shared workers behind a router of the test's own."""
    async with routed_fleet(workers) as made:
        yield made


async def stream_from(routed: RouterUnderTest, server: ScriptedWorker, path: str, body: dict[str, Any]) -> bytes:
    """The stream of a request that was first sent to a worker."""
    for _ in range(4):
        await until(routed.workers, lambda workers: all(each["state"] == "ready" for each in workers))
        before = len(server.exchanges)
        reply = await routed.call(path, body)
        assert reply.status == 200, reply.body
        if any(exchange.target == path for exchange in server.exchanges[before:]):
            return reply.body
    raise AssertionError("no request began there")


def events(stream: bytes) -> list[dict[str, Any]]:
    """Return the chunks of a complete stream, without their id and time."""
    assert stream.endswith(b"data: [DONE]\n\n"), stream
    found = [line[5:].strip() for line in stream.splitlines() if line.startswith(b"data:")]
    chunks = [json.loads(each) for each in found if each != b"[DONE]"]
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    return [{k: v for k, v in chunk.items() if k not in ("id", "created", "system_fingerprint")} for chunk in chunks]


def summary(stream: bytes) -> tuple[str, list[Any], list[Any], int]:
    """A stream's text, its reasons to end, its usage, and how many chunks had a role."""
    text, reasons, usage, roles = "", [], [], 0
    for chunk in events(stream):
        if chunk.get("usage"):
            tokens = dict(chunk["usage"])
            tokens.pop("prompt_tokens_details", None)  # what the second worker had cached is its own
            usage.append(tokens)
        for choice in chunk["choices"]:
            delta = choice.get("delta", {})
            text += choice.get("text", delta.get("content", ""))
            roles += "role" in delta
            if choice["finish_reason"]:
                reasons.append(choice["finish_reason"])
    return text, reasons, usage, roles


# The same text, wherever the worker dies


async def test_streams_of_killed_worker_continue_elsewhere() -> None:
    """At several points of their way at once: they began one after the other.

    The killed worker needs 10 s for a stream, so that all of its streams are cut on a busy machine too.
    """
    async with (
        worker_process(0.1) as (killed, victim),
        worker_process(0.002) as (_, survivor),
        router(victim, survivor, **TURNS) as routed,
        plain_client(survivor) as alone,
    ):
        begun = 0

        async def texts(client: openai.AsyncOpenAI, number: int) -> tuple[list[str], list[Any]]:
            nonlocal begun
            parts, ids, usage = [], set(), None
            if number % 2:
                stream = await client.chat.completions.create(**chat(number, max_tokens=100, stream_options=USAGE))
            else:
                stream = await client.completions.create(**completion(number, max_tokens=100, stream_options=USAGE))
            async for chunk in stream:
                ids.add(chunk.id)
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    if not parts:
                        begun += 1
                    parts.append((choice.delta.content if number % 2 else choice.text) or "")
                    parts.append(choice.finish_reason or "")
            assert len(ids) == 1
            return parts, [usage.prompt_tokens, usage.completion_tokens, usage.total_tokens]

        async def later(number: int) -> tuple[list[str], list[Any]]:
            await asyncio.sleep(0.05 * number)
            return await texts(routed.openai, number)

        numbers = range(24)
        streams = [asyncio.create_task(later(number)) for number in numbers]

        await until(lambda: begun >= len(numbers) // 2)
        killed.send_signal(signal.SIGKILL)
        got = await asyncio.gather(*streams)
        expected = await asyncio.gather(*(texts(alone, number) for number in numbers))
        assert [("".join(parts), usage) for parts, usage in got] == [
            ("".join(parts), usage) for parts, usage in expected
        ]
        assert await routed.metric("kvrouter_stream_failovers_total", worker=victim, outcome="resumed") >= 1
        assert await routed.metric("kvrouter_stream_failovers_total", outcome="ended") == 0
        await routed.until_released()


@pytest.mark.parametrize(
    ("path", "forgets"),
    [
        (CHAT, ()),
        (COMPLETIONS, ()),
        (CHAT, ("return_token_ids",)),
        (COMPLETIONS, ("return_token_ids",)),
        (COMPLETIONS, ("return_token_ids", "stream_options")),
        (CHAT, ("return_token_ids", "stream_options")),
    ],
)
async def test_stream_cut_at_any_byte_is_completed(path: str, forgets: tuple[str, ...], fleet: CutFleet) -> None:
    """Some engines send no token ids, or no usage with each chunk."""
    body = chat("x", max_tokens=5) if path == CHAT else completion("x", max_tokens=5)
    if "stream_options" not in forgets:
        body["stream_options"] = USAGE
    routed, cut, sound, server = fleet
    cut.forgets = sound.forgets = forgets
    expected = await stream_from(routed, server, path, body)
    asked = cut.bodies[-1]
    whole = len(expected) + 100 * expected.count(b"data:")  # with what is asked for, and not passed on
    points = [1, *range(50, whole, 211)]
    for point in points:
        cut.cut = point
        stream = await stream_from(routed, server, path, body)
        assert summary(stream) == summary(expected), point
    assert asked["max_tokens"] == 5
    resumed = [each for each in sound.bodies if each["max_tokens"] < 5]
    assert {each["max_tokens"] for each in resumed} == {1, 2, 3, 4}
    if path == CHAT:
        assert all(each["continue_final_message"] for each in resumed)
        assert not any(each["add_generation_prompt"] for each in resumed)
        assert all(each["messages"][-1]["role"] == "assistant" for each in resumed)
    else:
        assert all(isinstance(each["prompt"], str) is bool(forgets) for each in resumed)
    await routed.until_released()


async def test_failover_is_reported_in_a_comment(fleet: CutFleet) -> None:
    routed, cut, _, server = fleet
    cut.cut = 1500
    stream = await stream_from(routed, server, CHAT, chat("x", max_tokens=20))
    comments = [line for line in stream.splitlines() if line.startswith(b":")]
    assert len(comments) == 1
    assert b"goes on after" in comments[0]
    assert server.url.encode() not in comments[0]


async def test_chat_without_token_limit_is_completed(fleet: CutFleet) -> None:
    routed, cut, _, server = fleet
    body = chat("without a limit")
    expected = await stream_from(routed, server, CHAT, body)
    for cut.cut in (2000, len(expected) - 300, len(expected) + 1000):
        assert summary(await stream_from(routed, server, CHAT, body)) == summary(expected)
    assert summary(expected)[1] == ["stop"]


async def test_requested_usage_and_token_ids_cover_whole_stream(fleet: CutFleet) -> None:
    routed, cut, _, server = fleet
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = chat("x", max_tokens=6, stream_options=options, return_token_ids=True)
    expected = await stream_from(routed, server, CHAT, body)
    cut.cut = 2600
    stream = await stream_from(routed, server, CHAT, body)
    assert summary(stream) == summary(expected)
    assert [each["choices"][0]["token_ids"] for each in events(stream)[1:-1]] == [
        each["choices"][0]["token_ids"] for each in events(expected)[1:-1]
    ]
    assert sum("prompt_token_ids" in each for each in events(stream)) == 1


async def test_failover_is_off_by_default(workers: Workers) -> None:
    async with routed_fleet(workers, proxy={}) as (routed, cut, sound, server):
        cut.cut = 1500
        body = chat("x", max_tokens=20)
        stream = await stream_from(routed, server, CHAT, body)
        assert b"broke off" in stream
        assert cut.bodies[-1] == body
        assert not any("continue_final_message" in each for each in sound.bodies)


async def test_request_that_cannot_be_continued_exactly_ends_with_error(fleet: CutFleet) -> None:
    routed, cut, sound, server = fleet
    cut.cut = 1200
    for field in (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
        {"logprobs": True},
        {"n": 2},
        {"seed": 1},
        {"stop": ["x"]},
        {"presence_penalty": 0.5},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a+"}},
        {"vllm_xargs": {"x": 1}},
        {"bad_words": ["x"]},
    ):
        body = chat("x", max_tokens=20, **field)
        stream = await stream_from(routed, server, CHAT, body)
        assert b"broke off" in stream, field
        assert b"DONE" not in stream, field
        assert cut.bodies[-1] == body  # and is sent unchanged
        assert not any("continue_final_message" in each for each in sound.bodies), field


async def test_unused_seed_allows_failover(fleet: CutFleet) -> None:
    routed, cut, _, server = fleet
    cut.cut = 1500
    stream = await stream_from(routed, server, CHAT, chat("x", max_tokens=20, seed=1, temperature=0))
    assert summary(stream)[1] == ["length"]


async def test_stream_ends_with_error_without_another_worker(fleet: CutFleet) -> None:
    routed, cut, sound, server = fleet
    cut.cut, sound.cut = 1500, 1000
    stream = await stream_from(routed, server, CHAT, chat("x", max_tokens=20))
    assert stream.count(b'"error"') == 1
    assert b"DONE" not in stream
    assert await routed.metric("kvrouter_stream_failovers_total", outcome="resumed") == 1
    await routed.until_released()


@pytest.mark.parametrize("code", [500, 503])
async def test_error_event_of_dead_engine_starts_failover(code: int, fleet: CutFleet) -> None:
    error = {"error": {"message": "EngineCore died", "type": "InternalServerError", "param": None, "code": code}}
    chunks = [
        {"delta": {"role": "assistant", "content": ""}, "finish_reason": None},
        {"delta": {"content": "Once"}, "token_ids": [3000], "finish_reason": None},
    ]

    async def dies(exchange: Exchange) -> None:
        await exchange.begin_chunks()
        for choice in chunks:
            data = {"id": "a", "created": 1, "model": MODEL, "choices": [{"index": 0, **choice}]}
            await exchange.chunk(b"data: %b\n\n" % json.dumps(data).encode())
        await exchange.chunk(b"data: %b\n\ndata: [DONE]\n\n" % json.dumps(error).encode())
        await exchange.chunk(b"")

    routed, cut, sound, server = fleet
    forward = server.script

    async def script(exchange: Exchange) -> None:
        await (dies if exchange.target == COMPLETIONS or exchange.target == CHAT else forward)(exchange)

    server.script = script
    stream = await stream_from(routed, server, CHAT, chat("x"))
    # The token ids do not match the text, so that no other worker can continue exactly, and the error is returned.
    assert b"EngineCore died" in stream
    chunks[1] = {"delta": {}, "finish_reason": None}
    stream = await stream_from(routed, server, CHAT, chat("x"))
    assert summary(stream)[1] == ["stop"]
    assert not cut.bodies
    assert sound.bodies


async def test_disconnect_during_failover_releases_load(fleet: CutFleet) -> None:
    routed, cut, sound, server = fleet
    cut.cut, sound.hangs = 1500, True
    body = chat("x", max_tokens=20)
    async with routed.request(CHAT, body) as reply:
        if reply.headers["x-kvrouter-worker"] == server.url:
            await until(lambda: sound.bodies)
    await routed.until_released()
    assert "continue_final_message" in sound.bodies[-1]


async def test_failover_works_with_several_ranks() -> None:
    async with cut_workers(ranks=2) as ranked, routed_fleet(ranked) as (routed, cut, _, server):
        body = chat("x", max_tokens=12)
        expected = await stream_from(routed, server, CHAT, body)
        cut.cut = 1500
        assert summary(await stream_from(routed, server, CHAT, body)) == summary(expected)
