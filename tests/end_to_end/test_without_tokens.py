"""Workers without events and without a tokenizer: prompts are routed by their text, by what was sent where."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from router_under_test import RouterUnderTest, router, until
from scripted_worker import Exchange, ScriptedWorker, scripted_worker, scripted_workers

from kvrouter.tools.doctor.run import run_doctor
from router.settings import Settings, WorkerSettings

CHAT = "/v1/chat/completions"
LONG = "The cache of a worker holds what it computed before. " * 40


class TextEngine:
    """Keeps the last `most` prompts as text, a token a letter, and reports what it found of a prompt."""

    def __init__(self, most: int = 1000) -> None:
        self.most = most
        self.seen: list[str] = []
        self.cached: list[int] = []

    async def answer(self, exchange: Exchange) -> None:
        body = json.loads(exchange.body)
        text = body.get("prompt") or "".join(f"<{each['role']}>{each['content']}" for each in body["messages"])
        cached = max((_common(text, known) for known in self.seen), default=0)
        self.seen = [*self.seen, text][-self.most :]
        self.cached.append(cached)
        usage = {
            "prompt_tokens": len(text),
            "completion_tokens": 1,
            "prompt_tokens_details": {"cached_tokens": min(cached, len(text) - 1)},
        }
        choice = {"index": 0, "message": {"role": "assistant", "content": "Yes."}, "finish_reason": "stop"}
        await exchange.answer(json.dumps({"choices": [choice], "usage": usage}).encode())


def _common(a: str, b: str) -> int:
    return next((place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Fleet:
    def __init__(self, routed: RouterUnderTest, engines: list[TextEngine], workers: list[ScriptedWorker]) -> None:
        self.routed = routed
        self.engines = engines
        self.workers = workers

    async def chat(self, *turns: str, system: str = LONG, **more: Any) -> str:
        """Send a chat, and return its worker."""
        roles = ("user", "assistant")
        messages = [{"role": roles[place % 2], "content": text} for place, text in enumerate(turns)]
        body = {"model": "m", "messages": [{"role": "system", "content": system}, *messages], **more}
        answer = await self.routed.call(CHAT, body)
        assert answer.status == 200, answer.body
        return str(answer.worker)


async def first_event(routed: RouterUnderTest) -> dict[str, Any]:
    """Return the first update of `/live`."""
    async with routed.request("/live") as response:
        async for line in response.content:
            if line.startswith(b"data: "):
                event: dict[str, Any] = json.loads(line[6:])
                return event
    raise AssertionError("the feed is empty")


@asynccontextmanager
async def fleet(count: int = 3, most: int = 1000, **sections: Any) -> AsyncIterator[Fleet]:
    engines = [TextEngine(most) for _ in range(count)]
    async with (
        scripted_workers(*(engine.answer for engine in engines)) as workers,
        router(*(worker.url for worker in workers), **sections) as routed,
    ):

        async def tried() -> bool:
            found = (await routed.call("/workers")).json()["tokenizers"]
            return bool(found) and found["m"]["source"] == "text"

        await until(tried)
        yield Fleet(routed, engines, workers)


async def test_requests_with_shared_text_stay_together() -> None:
    async with fleet() as served:
        answered = Counter([await served.chat("What is it?") for _ in range(12)])
        assert sorted(answered.values()) == [12]
        completions = Counter(
            [
                (await served.routed.call("/v1/completions", {"model": "m", "prompt": f"{LONG} {number}"})).worker
                for number in range(12)
            ]
        )
        assert sorted(completions.values()) == [12]


async def test_conversations_stay_with_their_worker() -> None:
    async with fleet() as served:
        homes = {}
        for number in range(6):
            homes[number] = await served.chat("First?", system=f"{number} {LONG}")
        for turn in ("Second?", "Third?"):
            for number, home in homes.items():
                assert await served.chat("First?", "Yes.", turn, system=f"{number} {LONG}") == home


async def test_roles_and_salts_separate_prompts() -> None:
    async with fleet(1) as served:

        async def overlap(**more: Any) -> int:
            body = {"model": "m", "messages": [{"role": "user", "content": LONG}], **more}
            answer = await served.routed.call(CHAT, body)
            return int(answer.overlap or 0)

        assert await overlap() == 0
        assert await overlap() > len(LONG) // 4 - 64
        assert await overlap(cache_salt="mine") == 0
        assert await overlap(messages=[{"role": "system", "content": LONG}]) == 0


async def test_routing_by_text_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    async with fleet(1) as served:
        await served.chat("What is it?")
        health = await served.routed.health()
        (found,) = health["findings"]
        assert found["finding"] == "prompts_by_text"
        event = await first_event(served.routed)
        assert "by their text only" in event["about"]["models"]["m"]["tokens"]
        assert "routed by their text only" in found["detail"]
        assert "models.m.tokenizer" in found["detail"]
        tokenizer = (await served.routed.call("/workers")).json()["tokenizers"]["m"]
        assert (tokenizer["source"], tokenizer["prompts"]["text"]) == ("text", 1)
        assert await served.routed.metric("kvrouter_tokenizer", model="m", source="text") == 1
        printed = capsys.readouterr().out
        assert "prompts are routed by their text only" in printed
        assert "a worker is asked" not in printed


async def test_audit_compares_shares_of_engine_tokens() -> None:
    async with fleet(1) as served:
        for turn in range(4):
            await served.chat("What is it?", *["Yes.", "And?"] * turn)
        labels = {"model": "m"}
        predicted = await served.routed.metric("kvrouter_audit_predicted_tokens_total", **labels)
        cached = await served.routed.metric("kvrouter_audit_cached_tokens_total", **labels)
        assert cached > 3 * len(LONG)
        assert 0.9 * cached < predicted <= cached


async def test_retained_tokens_are_learned_from_usage() -> None:
    # One prompt at a time, as an engine with a single slot does.
    async with fleet(1, most=1, constants={"linger": 0}) as served:
        (engine,) = served.engines
        for _ in range(8):
            for number in range(3):
                await served.chat("What is it?", system=f"{number} {LONG}")
        assert max(engine.cached) < 64
        wrong = await served.routed.metric("kvrouter_audit_wrong_tokens_total", model="m")
        assert wrong < 2.5 * len(LONG)  # it was predicted once or twice
        ranks = (await served.routed.call("/workers")).json()["workers"][0]["ranks"]
        assert 0 < ranks[0]["retention"]["tokens"] < 3 * len(LONG) / 4


@asynccontextmanager
async def unnamed() -> AsyncIterator[str]:
    """A worker that lists no models."""
    engine = TextEngine()

    async def script(exchange: Exchange) -> None:
        if exchange.target == "/v1/models":
            await exchange.answer(b'{"object": "list", "data": []}')
        elif exchange.method == "GET" or exchange.target.endswith(("/tokenize", "/render")):
            await exchange.answer(status="404 Not Found")
        else:
            await engine.answer(exchange)

    async with scripted_worker(script) as worker:
        worker.answers_discovery = False
        yield worker.url


async def test_worker_without_listed_models_needs_model_setting() -> None:
    async with unnamed() as url:
        async with router(url) as routed:
            (found,) = await routed.findings()
            assert (found["finding"], found["worker"]) == ("no_models", url)
            assert "set `model` for it" in found["detail"]
        async with router(workers=[{"url": url, "model": "mine"}]) as routed:
            assert (await routed.call("/v1/completions", {"model": "mine", "prompt": "x"})).status == 200

            async def by_text() -> bool:
                found = await routed.findings()
                return [each["finding"] for each in found] == ["prompts_by_text"]

            await until(by_text)


async def test_doctor_reports_missing_models_and_text_routing(capsys: pytest.CaptureFixture[str]) -> None:
    async with unnamed() as url, fleet(1) as served:
        settings = Settings(workers=[WorkerSettings(url=each) for each in (url, served.workers[0].url)])
        capsys.readouterr()
        assert not await run_doctor(settings, None, 1.0, as_json=False)
        printed = capsys.readouterr().out
        assert "no_models" in printed
        assert "prompts_by_text" in printed


async def test_incompatible_tokenize_route_is_ignored() -> None:
    engine = TextEngine()

    async def script(exchange: Exchange) -> None:  # as llama.cpp's server, which reads `content`
        if exchange.target == "/tokenize":
            await exchange.answer(
                json.dumps({"tokens": [1] * len(json.loads(exchange.body).get("content", ""))}).encode()
            )
        elif exchange.target == "/v1/models":
            await exchange.answer(b'{"data": [{"id": "m"}]}')
        elif exchange.method == "GET" or exchange.target.endswith("/render"):
            await exchange.answer(status="404 Not Found")
        else:
            await engine.answer(exchange)

    async with scripted_worker(script) as worker:
        worker.answers_discovery = False
        async with router(worker.url) as routed:
            await until(
                lambda: routed.call("/workers"), lambda reply: reply.json()["tokenizers"]["m"]["source"] == "text"
            )
            body = {"model": "m", "prompt": LONG}
            await routed.call("/v1/completions", body)
            assert int((await routed.call("/v1/completions", body)).overlap or 0) > len(LONG) // 4 - 64
