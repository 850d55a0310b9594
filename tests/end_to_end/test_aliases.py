"""Other names for models: what clients ask for, and what workers are asked for."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from router_under_test import RouterUnderTest, router, until
from scripted_worker import Exchange, ScriptedWorker, scripted_worker

from simulator.worker import SimulatedWorkerSettings
from simulator.worker.serve import running

MODELS = {"simulated": {"aliases": ["gpt-4o", "default"]}, "poet": {"aliases": ["bard"]}}


@pytest.fixture
async def routed() -> AsyncIterator[RouterUnderTest]:
    async with (
        running(SimulatedWorkerSettings(adapters=("poet",))) as url,
        router(url, models=MODELS) as routed,
    ):
        yield routed


async def test_alias_is_answered_by_its_model(routed: RouterUnderTest) -> None:
    message = [{"role": "user", "content": "Hello"}]
    for alias, name in (("gpt-4o", "simulated"), ("default", "simulated"), ("bard", "poet")):
        answers = [
            await routed.openai.chat.completions.create(model=model, messages=message, max_tokens=4)  # type: ignore[arg-type]
            for model in (alias, name)
        ]
        assert answers[0].choices[0].message.content == answers[1].choices[0].message.content
        assert answers[0].model == name


async def test_models_are_listed_with_aliases(routed: RouterUnderTest) -> None:
    models = {model.id: model async for model in routed.openai.models.list()}
    assert set(models) == {"simulated", "poet", "gpt-4o", "default", "bard"}
    assert models["bard"].parent == "simulated"  # type: ignore[attr-defined]
    assert (await routed.openai.models.retrieve("gpt-4o")).id == "gpt-4o"


async def test_match_and_explain_resolve_aliases(routed: RouterUnderTest) -> None:
    chat = {"messages": [{"role": "user", "content": "Hello " * 50}], "max_tokens": 1}
    await routed.call("/v1/chat/completions", {"model": "simulated", **chat})
    explained = (await routed.call("/explain", {"request": {"model": "gpt-4o", **chat}})).json()
    assert explained["model"] == "simulated"

    async def matched(name: str) -> Any:
        return (await routed.call("/match", {"model": name, **chat})).json()

    await until(lambda: matched("simulated"), lambda matched: matched["matches"][0]["matched_tokens"])
    assert await matched("default") == await matched("simulated")
    error = (await routed.call("/v1/chat/completions", {"model": "gpt-5", **chat})).error
    assert "default, gpt-4o" in error["message"]


async def test_tenant_may_be_limited_to_an_alias() -> None:
    key = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b"  # of "secret"
    tenants = {"named": {"a": {"keys": [key], "models": ["gpt-4o"]}}}
    async with (
        running(SimulatedWorkerSettings(adapters=("poet",))) as url,
        router(url, models=MODELS, tenants=tenants, server={"token": "t"}) as routed,
    ):
        headers = {"authorization": "Bearer secret"}
        body = {"model": "default", "prompt": "x", "max_tokens": 1}
        assert (await routed.call("/v1/completions", body, headers=headers)).status == 200
        assert (await routed.call("/v1/completions", body | {"model": "bard"}, headers=headers)).status == 403


async def served(exchange: Exchange) -> None:
    await exchange.answer(exchange.body)


async def test_alias_changes_only_the_model_field() -> None:
    models = {"m": {"aliases": ["x"]}}
    async with scripted_worker(served) as worker, router(worker.url, models=models) as routed:
        body = b'{ "input": "\\u00e9",  "model" : "x", "float": 1.0e5 }'
        await routed.call("/v1/embeddings", body)
        assert worker.last.body == body.replace(b'"x"', b'"m"')
        form = (
            b'--edge\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n\x00\xff\r\n'
            b'--edge\r\nContent-Disposition: form-data; name="model"\r\n\r\nx\r\n--edge--\r\n'
        )
        headers = {"content-type": "multipart/form-data; boundary=edge"}
        await routed.call("/v1/audio/transcriptions", form, headers=headers)
        assert worker.last.body == form.replace(b"\r\n\r\nx\r\n", b"\r\n\r\nm\r\n")
        assert await _asked_for(worker, routed, "m") == "m"


async def _asked_for(worker: ScriptedWorker, routed: RouterUnderTest, name: str) -> str:
    await routed.call("/v1/completions", {"model": name, "prompt": "x"})
    model: str = json.loads(worker.last.body)["model"]
    return model
