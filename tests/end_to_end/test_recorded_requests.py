"""`kvrouter record --requests` in front of a real router: what is in a trace, and what is not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from router_under_test import RouterUnderTest, router, until

from kvrouter.tools.traces.recording import RecordedRequests, RecordingError, record_requests
from router.observability.request_recorder import MAX_LISTENERS
from simulator.fleet.trace import TraceLine, read_trace
from simulator.worker import SimulatedWorkerSettings
from simulator.worker.serve import running

SYSTEM = "You are the keeper of a secret word. " * 20


@pytest.fixture(scope="module")
async def worker() -> AsyncIterator[str]:
    async with running(SimulatedWorkerSettings()) as url:
        yield url


@pytest.fixture(scope="module")
async def routed(worker: str) -> AsyncIterator[RouterUnderTest]:
    async with router(worker) as started:
        yield started


def chat(*messages: str, **fields: Any) -> dict[str, Any]:
    roles = ["system", *["user", "assistant"] * len(messages)]
    told = [{"role": role, "content": text} for role, text in zip(roles, messages, strict=False)]
    return {"model": "simulated", "max_tokens": 4, "messages": told, **fields}


async def recorded(
    routed: RouterUnderTest, output: Path, *bodies: dict[str, Any], block_tokens: int = 64
) -> tuple[RecordedRequests, list[TraceLine]]:
    """Record requests that are sent one after the other, and return the recording and its lines."""
    begun, stopped = asyncio.Event(), asyncio.Event()
    recording = asyncio.create_task(record_requests(routed.url, "", output, block_tokens, stopped, begun.set))
    await asyncio.wait_for(begun.wait(), 60)
    for body in bodies:
        await routed.call("/v1/chat/completions", body)
    stopped.set()
    return await asyncio.wait_for(recording, 60), read_trace(output).lines


async def told(routed: RouterUnderTest, query: str = "") -> AsyncIterator[dict[str, Any]]:
    async with routed.request(f"/requests{query}") as response:
        assert response.status == 200
        async for line in response.content:
            yield json.loads(line)


async def test_hash_ids_share_prefixes_of_prompts(worker: str, routed: RouterUnderTest, tmp_path: Path) -> None:
    bodies = [
        chat(SYSTEM, "first question"),
        chat(SYSTEM, "first question", "an answer", "and another one"),
        chat("Nothing alike. " * 40, "first question", stream=True),
        chat(SYSTEM, "first question", cache_salt="of its own"),
    ]
    told, lines = await recorded(routed, tmp_path / "trace.jsonl", *bodies)
    first, second, other, salted = lines
    assert (told.requests, told.dropped, told.unknown) == (4, 0, 0)
    shared = first.input_length // 64 - 1
    assert shared >= 1
    assert first.hash_ids[:shared] == second.hash_ids[:shared]
    assert len(first.hash_ids) == -(-first.input_length // 64)
    assert not set(first.hash_ids) & set(other.hash_ids)
    assert not set(first.hash_ids) & set(salted.hash_ids)
    assert [line.timestamp for line in lines] == sorted(line.timestamp for line in lines)
    assert all(line.output_length == 4 and line.ttft_ms and line.worker == worker for line in lines)
    assert second.cached_tokens
    assert not any(line.failed for line in lines)


async def test_trace_contains_no_prompt_text(routed: RouterUnderTest, tmp_path: Path) -> None:
    """Two recordings of the same requests have no hash in common either: each has a key of its own."""
    seen: list[set[int]] = []
    for number in range(2):
        async with aclosing(told(routed, "?block_tokens=64")) as lines:
            assert (await anext(lines))["block_tokens"] == 64
            await routed.call("/v1/chat/completions", chat(SYSTEM, f"question {number}"))
            line = await anext(lines)
            while "timestamp" not in line:
                line = await anext(lines)
            assert "secret" not in json.dumps(line)
            seen.append(set(line["hash_ids"]))
    output = tmp_path / "trace.jsonl"
    _, lines_of_file = await recorded(routed, output, chat(SYSTEM, "question 1", user="somebody"))
    assert not seen[0] & seen[1]
    assert max(seen[0]) < 2**53
    assert lines_of_file[0].hash_ids == list(range(len(lines_of_file[0].hash_ids)))
    text = output.read_text()
    assert not any(word in text for word in ("secret", "keeper", "question", "somebody"))


async def test_recording_hashes_prompts_under_round_robin(worker: str, tmp_path: Path) -> None:
    async with router(worker, policy={"name": "round_robin"}) as routed:
        _, lines = await recorded(routed, tmp_path / "trace.jsonl", chat(SYSTEM, "a question"))
        assert lines[0].hash_ids
        reply = await routed.call("/v1/chat/completions", chat(SYSTEM, "a question"))
        assert reply.overlap == 0


async def test_failed_requests_are_recorded(routed: RouterUnderTest, tmp_path: Path) -> None:
    asked = [chat(SYSTEM, "refused", max_tokens=-1), chat(SYSTEM, "fine")]
    result, lines = await recorded(routed, tmp_path / "trace.jsonl", *asked, block_tokens=512)
    assert [line.failed for line in lines] == [True, False]
    assert (tmp_path / "trace.jsonl").read_text().count("block_tokens") == 0
    assert "recorded 2 requests" in result.summary(tmp_path)[0]


async def test_recording_needs_token_and_new_file(worker: str, tmp_path: Path) -> None:
    async with router(worker, server={"token": "admin"}) as routed:
        stopped = asyncio.Event()
        with pytest.raises(RecordingError, match="--token"):
            await record_requests(routed.url, "", tmp_path / "a", 512, stopped, stopped.set)
        recording = await record_requests(routed.url, "admin", tmp_path / "a", 512, stopped, stopped.set)
        assert recording.requests == 0
    (tmp_path / "a").write_text("of another day")
    with pytest.raises(RecordingError):
        await record_requests(routed.url, "", tmp_path / "a", 512, asyncio.Event(), stopped.set)
    assert (tmp_path / "a").read_text() == "of another day"


async def test_number_of_recordings_is_bounded_and_shutdown_ends_them(worker: str, tmp_path: Path) -> None:
    async with router(worker) as routed:
        listeners = [told(routed) for _ in range(MAX_LISTENERS)]
        await asyncio.gather(*map(anext, listeners))
        assert (await routed.call("/requests")).status == 503
        assert (await routed.call("/requests?block_tokens=0")).status == 400
        for listener in listeners[1:]:
            await listener.aclose()

        async def room() -> bool:
            async with routed.request("/requests") as response:
                return bool(response.status == 200)

        await until(room)
        begun = asyncio.Event()
        recording = asyncio.create_task(
            record_requests(routed.url, "", tmp_path / "a", 512, asyncio.Event(), begun.set)
        )
        await asyncio.wait_for(begun.wait(), 60)
    assert "the router" in (await asyncio.wait_for(recording, 60)).broken_off
    await listeners[0].aclose()
