"""`/explain`, `kvrouter explain` and the header describe decisions without changing state."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from router_under_test import RouterUnderTest, router
from typer.testing import CliRunner

from kvrouter.cli import app
from simulator.worker import SimulatedWorkerSettings
from simulator.worker.serve import running

MODEL = "simulated"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "What is held where? " * 20}]}


@pytest.fixture(scope="module")
async def routed() -> AsyncIterator[RouterUnderTest]:
    settings = SimulatedWorkerSettings(base_step_s=0.001)
    async with running(settings) as one, running(settings) as two, router(one, two) as routed:
        await routed.until_tokenizers_are_tried()
        yield routed


async def explained(routed: RouterUnderTest, request: Any, **options: Any) -> dict[str, Any]:
    reply = await routed.call("/explain", {"request": request} | options)
    assert reply.status == 200, reply.body
    answer: dict[str, Any] = reply.json()
    return answer


async def test_explain_changes_no_load(routed: RouterUnderTest) -> None:
    before = await routed.loads()
    answer = await explained(routed, CHAT | {"user": "me"})
    assert (answer["model"], answer["session"], answer["exact"]) == (MODEL, "me", True)
    assert len(answer["candidates"]) == 2
    assert answer["candidates"][0]["total"] <= answer["candidates"][1]["total"]
    for candidate in answer["candidates"]:
        assert candidate["total"] == pytest.approx(sum(candidate["terms"].values()))
    assert await routed.loads() == before


async def test_explain_header_and_route_describe_sent_request(routed: RouterUnderTest) -> None:
    sent = await routed.call("/v1/chat/completions", CHAT | {"max_tokens": 2}, headers={"x-kvrouter-explain": "1"})
    terms = dict(pair.split("=") for pair in sent.headers["x-kvrouter-explain"].split())
    assert (terms["candidates"], terms["unit"]) == ("2", "tokens")
    assert float(terms["total"]) == pytest.approx(
        sum(float(value) for name, value in terms.items() if name not in ("total", "unit", "candidates")), rel=1e-3
    )
    answer = await explained(routed, CHAT)
    assert answer["choice"]["worker"] == sent.worker
    assert answer["unit"] == "tokens"
    assert answer["candidates"][0]["overlap"] > 0
    assert "x-kvrouter-explain" not in (await routed.call("/v1/chat/completions", CHAT | {"max_tokens": 2})).headers


@pytest.mark.parametrize(
    ("path", "request_"),
    [
        ("/v1/completions", {"model": MODEL, "prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}),
        ("/generate", {"text": "hi"}),
        ("/v1/embeddings", {"model": MODEL, "input": "hi"}),
    ],
)
async def test_explain_accepts_every_inference_path(routed: RouterUnderTest, path: str, request_: Any) -> None:
    answer = await explained(routed, request_, path=path)
    assert answer["path"] == path
    assert answer["tokens"] > 0
    assert answer["exact"] is (path != "/v1/embeddings")


async def test_command_prints_table(routed: RouterUnderTest) -> None:
    arguments = ["explain", "hi", "--model", MODEL, "--url", routed.url]
    environment = {"COLUMNS": "80", "NO_COLOR": "1"}
    shown = await asyncio.to_thread(CliRunner().invoke, app, arguments, env=environment)
    assert shown.exit_code == 0, shown.output
    assert len(re.findall(r"http://127\.0\.0\.1:\d{4,5} ", shown.output)) == 2
    assert "➤" in shown.output
    assert "prefill" in shown.output
    assert "cost in tokens" in shown.output
    refused = await asyncio.to_thread(CliRunner().invoke, app, [*arguments[:3], "nobody", *arguments[4:]])
    assert refused.exit_code == 1
    assert "does not exist" in refused.output


async def test_explain_and_health_show_the_session_and_its_room(routed: RouterUnderTest) -> None:
    request = CHAT | {"session_id": "seen", "max_tokens": 2}
    before = await explained(routed, request)
    assert before["working_set"] == {"state": "new", "tokens": 0, "charged": None, "gate": "open", "waiting": 0}
    sent = await routed.call("/v1/chat/completions", request)
    answer = await explained(routed, request)
    assert answer["working_set"]["state"] == "idle"
    assert answer["working_set"]["charged"] == {"worker": sent.worker, "dp_rank": 0}
    assert {each["worker"]: each["room"] is None for each in answer["candidates"]}[sent.worker] is False
    assert (await explained(routed, CHAT))["working_set"] is None
    health = (await routed.call("/health")).json()
    assert health["sessions"][MODEL]["live"] == 1
    assert health["sessions"][MODEL]["more"] > 0
