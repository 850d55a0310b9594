"""`kvrouter replay-trace` against real routers, and in simulation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from router_under_test import router
from running_app import running_app
from simulated_workers import simulated_workers
from typer.testing import CliRunner

from kvrouter.cli import app
from kvrouter.tools.traces.live import LiveTarget, ReplayError, replay_live
from simulator.fleet.trace import Trace, TraceLine

BLOCK = 64


@pytest.fixture(scope="module")
async def workers() -> AsyncIterator[list[str]]:
    async with simulated_workers(2, prefill_s_per_token=1e-6) as urls:
        yield urls


def trace(*, conversations: int = 4, turns: int = 3, apart: float = 150.0) -> Trace:
    """Conversations over one system prompt of two blocks; each turn adds a block."""
    lines = []
    for turn in range(turns):
        for conversation in range(conversations):
            ids = [0, 1, *(100 * (conversation + 1) + number for number in range(turn + 1))]
            at = apart * turn + 10 * conversation
            lines.append(TraceLine(at, len(ids) * BLOCK - 7, 3, ids, session_id=f"s{conversation}"))
    return Trace(lines, BLOCK)


def target(url: str, label: str = "router", **changes: object) -> LiveTarget:
    fields = {"model": None, "api_key": "", "speed": 1.0, "max_tokens": 16, "seed": f"seed/{label}"} | changes
    return LiveTarget(label, url, **fields)  # type: ignore[arg-type]


async def test_replayed_prompts_share_prefixes_of_trace(workers: list[str]) -> None:
    told: list[None] = []
    async with router(*workers) as routed:
        # A turn that is sent before the previous answer ends would find nothing cached.
        run = await replay_live(trace(apart=2000), target(routed.url), lambda: told.append(None))
    assert len(told) == len(run.answers) == 12
    assert run.errors() == []
    assert [answer.prompt_tokens for answer in run.answers] == [line.input_length for line in trace().lines]
    assert all(answer.output_tokens == 3 and answer.worker in workers for answer in run.answers)
    assert all(answer.ttft and answer.ttft <= answer.seconds for answer in run.answers)
    later = run.answers[4:]
    # Whatever was a full block of the turn before, to the engine's own blocks of 16; one conversation after the other.
    assert all((answer.cached_tokens or 0) >= 2 * BLOCK for answer in later)
    assert run.figures.hit_rate == pytest.approx(0.7, abs=0.15)
    assert sum(run.busy_seconds().values()) == pytest.approx(sum(answer.seconds for answer in run.answers))


async def test_routers_receive_different_prompts(workers: list[str]) -> None:
    async with router(workers[0]) as routed:
        runs = [
            await replay_live(trace(turns=1), target(routed.url, label), lambda: None)
            for label in ("one", "two", "one")
        ]
    first, other, again = (run.answers[0].cached_tokens for run in runs)
    assert (first, other) == (0, 0)
    assert again


async def test_text_is_sent_to_server_without_token_ids(workers: list[str]) -> None:
    from aiohttp import ClientSession, web

    async def complete(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not isinstance(body["prompt"], str) or "ignore_eos" in body:
            return web.json_response({"error": {"message": "prompt must be a string"}}, status=400)
        async with ClientSession() as session, session.post(f"{workers[0]}/v1/completions", json=body) as answer:
            return web.Response(body=await answer.read(), content_type=answer.content_type)

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "simulated"}]})

    server = web.Application()
    server.add_routes([web.post("/v1/completions", complete), web.get("/v1/models", models)])
    async with running_app(server) as url:
        run = await replay_live(trace(), target(url), lambda: None)
    assert run.errors() == []
    assert any("text" in note for note in run.notes)
    assert all((answer.cached_tokens or 0) > 0 for answer in run.answers[4:])
    lengths = zip(run.answers, trace().lines, strict=True)
    assert all(0.7 < answer.prompt_tokens / line.input_length < 1.5 for answer, line in lengths)


async def test_refusals_and_unreachable_routers_are_reported(workers: list[str]) -> None:
    too_long = Trace([TraceLine(0, 100_000, 1, list(range(196))), *trace(turns=1).lines])
    async with router(*workers) as routed:
        run = await replay_live(too_long, target(routed.url), lambda: None)
        with pytest.raises(ReplayError, match="nobody"):
            await replay_live(trace(), target(routed.url, model="nobody"), lambda: None)
    assert run.figures.failed == 1
    assert run.errors()[0][0].startswith("status 400")
    with pytest.raises(ReplayError, match="does not list its models"):
        await replay_live(trace(), target("http://127.0.0.1:9"), lambda: None)


async def test_command_compares_two_routers(workers: list[str], tmp_path: Path) -> None:
    path, page, results = tmp_path / "trace.jsonl", tmp_path / "report.html", tmp_path / "results.json"
    lines = [
        {"timestamp": line.timestamp, "input_length": 500, "output_length": 2, "hash_ids": line.hash_ids[:1]}
        for line in trace(turns=1).lines
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    async with router(*workers) as one, router(*workers, policy={"name": "round_robin"}) as two:
        arguments = ["replay-trace", path, "--url", f"new={one.url}", "--url", f"old={two.url}", "--speed", "2"]
        arguments += ["-o", page, "--json", results]
        result = await asyncio.to_thread(CliRunner().invoke, app, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    told = json.loads(results.read_text())
    assert [run["label"] for run in told["runs"]] == ["new", "old"]
    assert [run["figures"]["failed"] for run in told["runs"]] == [0, 0]
    assert "Results of each router" in page.read_text()
