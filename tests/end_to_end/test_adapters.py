"""LoRA adapters loaded and unloaded through the router."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from router_under_test import QUICK, Reply, RouterUnderTest, router, until
from scripted_worker import Exchange, ScriptedWorker, scripted_worker

from simulator.worker import SimulatedWorkerSettings
from simulator.worker.serve import running

TOKEN = {"authorization": "Bearer t"}
ADAPTER = {"lora_name": "poet", "lora_path": "/adapters/poet"}


@pytest.fixture
async def routed(urls: list[str]) -> AsyncIterator[RouterUnderTest]:
    async with router(*urls, server={"token": "t"}) as routed:
        yield routed


async def load(routed: RouterUnderTest, **more: Any) -> Reply:
    return await routed.call("/v1/load_lora_adapter", ADAPTER | more, headers=TOKEN)


async def unload(routed: RouterUnderTest, **more: Any) -> Reply:
    return await routed.call("/v1/unload_lora_adapter", {"lora_name": "poet"} | more, headers=TOKEN)


async def names(routed: RouterUnderTest, url: str) -> set[str]:
    async with routed.session.get(f"{url}/v1/models") as response:
        return {model["id"] for model in (await response.json())["data"]}


async def ask(routed: RouterUnderTest) -> Reply:
    return await routed.call("/v1/completions", {"model": "poet", "prompt": "x", "max_tokens": 1})


async def test_adapter_is_loaded_on_all_workers_and_served_at_once(routed: RouterUnderTest, urls: list[str]) -> None:
    assert (await ask(routed)).status == 404
    reply = await load(routed)
    assert reply.status == 200, reply.body
    assert [(each["worker"], each["status"]) for each in reply.json()["workers"]] == [(url, 200) for url in urls]
    assert [await names(routed, url) for url in urls] == [{"simulated", "poet"}] * 2
    assert (await ask(routed)).status == 200
    assert (await unload(routed)).status == 200
    assert [await names(routed, url) for url in urls] == [{"simulated"}] * 2
    assert (await ask(routed)).status == 404


async def test_adapter_is_loaded_on_listed_workers_only(routed: RouterUnderTest, urls: list[str]) -> None:
    assert (await load(routed, workers=urls[1:])).status == 200
    assert [await names(routed, url) for url in urls] == [{"simulated"}, {"simulated", "poet"}]
    assert (await ask(routed)).worker == urls[1]
    reply = await load(routed)  # one has it already
    assert (reply.status, reply.error["code"]) == (207, "adapter")
    assert [each["status"] for each in reply.json()["workers"]] == [200, 400]
    assert "already been loaded" in reply.json()["workers"][1]["message"]


async def test_invalid_adapter_requests_name_the_field(routed: RouterUnderTest) -> None:
    for body, field in (
        ({"lora_name": "poet"}, "lora_path"),
        ({"lora_path": "x"}, "lora_name"),
        (ADAPTER | {"workers": []}, "workers"),
        (ADAPTER | {"workers": ["http://nobody"]}, "workers"),
        (ADAPTER | {"model": "unknown"}, "model"),
    ):
        reply = await routed.call("/v1/load_lora_adapter", body, headers=TOKEN)
        assert reply.status in (400, 404)
        assert reply.error["param"] == field


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"])
async def test_adapter_changes_need_admin_token(routed: RouterUnderTest, path: str, urls: list[str]) -> None:
    assert (await routed.call(path, ADAPTER)).status == 401
    async with router(*urls) as open_to_all:
        assert (await open_to_all.call(path, ADAPTER)).status == 403
    assert await names(routed, urls[0]) == {"simulated"}


async def test_worker_added_later_loads_adapter(urls: list[str]) -> None:
    async with router(urls[0], server={"token": "t"}, fleet=QUICK) as routed:
        assert (await load(routed)).status == 200
        assert (await routed.call("/workers", {"url": urls[1]}, headers=TOKEN)).status == 201

        await until(lambda: names(routed, urls[1]), lambda found: "poet" in found)
        await unload(routed)
        async with running(SimulatedWorkerSettings()) as third:
            await routed.call("/workers", {"url": third}, headers=TOKEN)

            async def up() -> bool:
                return all(each["up"] for each in await routed.workers()) and len(await routed.workers()) == 3

            await until(up)
            assert await names(routed, third) == {"simulated"}


async def test_adapter_needs_model_in_fleet_of_several_models() -> None:
    async with (
        running(SimulatedWorkerSettings(model="a")) as first,
        running(SimulatedWorkerSettings(model="b")) as second,
        router(first, second, server={"token": "t"}) as routed,
    ):
        assert (await load(routed)).error["param"] == "model"
        reply = await load(routed, model="b")
        assert [each["worker"] for each in reply.json()["workers"]] == [second]


# Adapters of SGLang, which applies them for `BASE:NAME` and `lora_path` only

SGLANG_MODELS = {
    "data": [{"id": "tiny", "root": "tiny", "parent": None}, {"id": "one", "root": "/adapters/one", "parent": "tiny"}]
}


@pytest.fixture
async def sglang() -> AsyncIterator[ScriptedWorker]:
    async def script(exchange: Exchange) -> None:
        answers = {"/v1/models": SGLANG_MODELS, "/server_info": {"page_size": 16, "kv_events": None}}
        if exchange.target in answers:
            await exchange.answer(json.dumps(answers[exchange.target]).encode())
        else:
            await exchange.answer(status="200 OK" if exchange.method == "POST" else "404 Not Found")

    async with scripted_worker(script) as worker:
        worker.answers_discovery = False
        yield worker


MESSAGES = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("path", "sent", "received"),
    [
        ("/v1/completions", {"model": "one", "prompt": "x"}, {"model": "tiny:one", "prompt": "x"}),
        ("/v1/completions", {"model": "tiny:one", "prompt": "x"}, {"model": "tiny:one", "prompt": "x"}),
        ("/v1/completions", {"model": "tiny", "prompt": "x"}, {"model": "tiny", "prompt": "x"}),
        ("/v1/chat/completions", {"model": "one", "messages": MESSAGES}, {"model": "tiny:one", "messages": MESSAGES}),
        (
            "/v1/completions",
            {"model": "tiny", "lora_path": "one", "prompt": "x"},
            {"model": "tiny", "lora_path": "one", "prompt": "x"},
        ),
        ("/v1/embeddings", {"model": "one", "input": "x"}, {"model": "tiny:one", "input": "x"}),
        ("/generate", {"text": "x", "model": "one"}, {"text": "x", "model": "one", "lora_path": "one"}),
        ("/generate", {"text": "x", "lora_path": "one"}, {"text": "x", "lora_path": "one"}),
    ],
)
async def test_adapter_reaches_sglang_by_the_name_that_applies_it(
    sglang: ScriptedWorker, path: str, sent: dict[str, Any], received: dict[str, Any]
) -> None:
    async with router(sglang.url) as routed:
        assert (await routed.call(path, sent)).status == 200
        asked = [each for each in sglang.exchanges if each.target == path]
        assert json.loads(asked[-1].body) == received


@pytest.mark.parametrize(
    ("body", "adapter"),
    [
        ({"model": "one"}, "one"),
        ({"model": "tiny:one"}, "one"),
        ({"model": "tiny", "lora_path": "one"}, "one"),
        ({"model": "tiny", "lora_path": ["one"]}, "one"),
        ({"model": "tiny:one", "lora_path": "two"}, "one"),
        ({"model": "tiny", "lora_path": "two"}, None),
        ({"model": "tiny", "lora_path": ""}, None),
        ({"model": "tiny"}, None),
    ],
)
async def test_prefixes_of_an_adapter_of_sglang_are_its_own(
    sglang: ScriptedWorker, body: dict[str, Any], adapter: str | None
) -> None:
    async with router(sglang.url) as routed:
        for model in ("tiny", "one"):
            prompt = [ord(model[0])] * 400
            assert (await routed.call("/v1/completions", {"model": model, "prompt": prompt})).status == 200
        overlaps = [
            (await routed.call("/v1/completions", body | {"prompt": [ord(letter)] * 400})).overlap for letter in "to"
        ]
        assert [overlap > 0 for overlap in overlaps] == [adapter is None, adapter == "one"]


async def test_adapter_that_sglang_does_not_list_is_unknown(sglang: ScriptedWorker) -> None:
    async with router(sglang.url) as routed:
        assert (await routed.call("/v1/completions", {"model": "tiny:two", "prompt": "x"})).status == 404


async def test_prefixes_of_an_extra_key_are_its_own_and_no_events(sglang: ScriptedWorker) -> None:
    async with router(sglang.url) as routed:
        overlaps = []
        for key in (None, "a", "b", "a", None):
            body = {"model": "tiny", "prompt": [7] * 400} | ({"extra_key": key} if key else {})
            overlaps.append((await routed.call("/v1/completions", body)).overlap)
        assert [overlap > 0 for overlap in overlaps] == [False, False, False, True, True]
