"""Workers that lack a model or adapter which the router expects there, and adapters that engines load by themselves."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from grpc_call import channel_to
from picker_under_test import PickerUnderTest, picker
from router_under_test import QUICK, RouterUnderTest, router, until
from scripted_worker import Exchange, Script, ScriptedWorker, scripted_worker

from router.auth import hashed_key
from simulator.worker import SimulatedWorkerSettings
from simulator.worker.serve import running

# Without 404 answers, only the first probe describes a worker.
SELDOM = {"probe_interval": 600.0, "probe_timeout": 30.0, "stall_seconds": 30.0}
FAST: dict[str, Any] = {"base_step_s": 0.001, "prefill_s_per_token": 0.0, "decode_s_per_sequence": 0.0}
ADAPTER = {"lora_name": "poet", "lora_path": "/adapters/poet"}
GENERATION = {"model": "poet", "prompt": "x", "max_tokens": 1}
VLLM = b'{"error": {"message": "The model `poet` does not exist.", "type": "NotFoundError", "code": 404}}'
SGLANG = b'{"error": {"message": "The following requested LoRA adapters are not loaded: poet"}}'


async def change(routed: RouterUnderTest, url: str, command: str) -> None:
    async with routed.session.post(f"{url}/v1/{command}_lora_adapter", json=ADAPTER) as response:
        assert response.status == 200, await response.read()


@pytest.mark.parametrize("body", [GENERATION, GENERATION | {"stream": True}])
async def test_an_adapter_that_a_worker_unloaded_is_served_by_another(body: dict[str, Any]) -> None:
    settings = SimulatedWorkerSettings(adapters=("poet",), **FAST)
    async with running(settings) as first, running(settings) as second, router(first, second, fleet=SELDOM) as routed:
        await change(routed, first, "unload")
        replies = await asyncio.gather(*(routed.call("/v1/completions", body) for _ in range(40)))
        assert {(reply.status, reply.worker) for reply in replies} == {(200, second)}

        async def described_anew() -> bool:
            later = [await routed.call("/v1/completions", body) for _ in range(10)]
            return all("x-kvrouter-attempts" not in reply.headers for reply in later)

        await until(described_anew)


class Lacking:
    """A worker that lists an adapter and answers requests for it with an error, or serves it."""

    def __init__(self, status: str = "", error: bytes = b"", headers: bytes = b"") -> None:
        self.status = status
        self.error = error
        self.headers = headers
        self.probes = self.requests = 0
        self.answers_probes = asyncio.Event()
        self.answers_probes.set()

    async def answer(self, exchange: Exchange) -> None:
        if exchange.target == "/v1/models":
            self.probes += 1
            await self.answers_probes.wait()
            models = [{"id": "m"}, {"id": "poet", "parent": "m"}]
            await exchange.answer(json.dumps({"data": models}).encode())
        elif exchange.target in ("/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/audio/speech"):
            self.requests += 1
            await exchange.answer(self.error or b"{}", self.status or "200 OK", self.headers)
        else:
            await exchange.answer(status="404 Not Found")


async def lacking(stack: AsyncExitStack, *workers: Lacking) -> RouterUnderTest:
    urls = []
    for each in workers:
        worker = await stack.enter_async_context(scripted_worker(each.answer))
        worker.answers_discovery = False
        urls.append(worker.url)
    return await stack.enter_async_context(router(*urls, fleet=SELDOM, policy={"name": "round_robin"}))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", GENERATION),
        ("/v1/embeddings", {"model": "poet", "input": "x"}),
        ("/v1/responses", {"model": "poet", "input": "x"}),
        ("/v1/audio/speech", {"model": "poet", "input": "x"}),
    ],
)
@pytest.mark.parametrize(
    "answer",
    [
        ("404 Not Found", VLLM, b""),
        ("400 Bad Request", SGLANG, b""),
        ("400 Bad Request", gzip.compress(SGLANG), b"content-encoding: gzip\r\n"),
    ],
    ids=["404", "400", "gzip"],
)
async def test_every_request_for_inference_is_tried_elsewhere(
    path: str, body: Any, answer: tuple[str, bytes, bytes]
) -> None:
    async with AsyncExitStack() as stack:
        lacks = Lacking(*answer)
        routed = await lacking(stack, lacks, Lacking())
        replies = [await routed.call(path, body) for _ in range(8)]
        assert {reply.status for reply in replies} == {200}

        async def probed_anew() -> bool:
            return lacks.probes > 1

        await until(probed_anew)


async def test_the_answer_of_the_last_worker_is_forwarded_if_all_lack_it() -> None:
    async with AsyncExitStack() as stack:
        workers = [Lacking("404 Not Found", VLLM) for _ in range(2)]
        routed = await lacking(stack, *workers)
        reply = await routed.call("/v1/completions", GENERATION)
        assert (reply.status, reply.body) == (404, VLLM)
        assert [worker.requests for worker in workers] == [1, 1]


async def test_a_404_that_names_no_model_is_forwarded_and_costs_the_worker_nothing() -> None:
    async with AsyncExitStack() as stack:
        workers = [Lacking("404 Not Found", b'{"detail": "Not Found"}') for _ in range(2)]
        routed = await lacking(stack, *workers)
        reply = await routed.call("/v1/completions", GENERATION)
        assert (reply.status, reply.body) == (404, b'{"detail": "Not Found"}')
        assert sum(worker.requests for worker in workers) == 1
        for worker in workers:
            worker.status = ""
        later = [await routed.call("/v1/completions", GENERATION) for _ in range(8)]
        assert {reply.status for reply in later} == {200}
        assert [worker.requests for worker in workers] in ([4, 5], [5, 4])


async def test_an_invalid_request_is_not_tried_elsewhere() -> None:
    async with AsyncExitStack() as stack:
        workers = [Lacking("400 Bad Request", b'{"error": "LoRA adapter"}') for _ in range(2)]
        routed = await lacking(stack, *workers)
        assert (await routed.call("/v1/completions", GENERATION)).status == 400
        assert sum(worker.requests for worker in workers) == 1


async def test_a_request_about_a_stored_object_is_sent_once() -> None:
    async with AsyncExitStack() as stack:
        workers = [Lacking("404 Not Found", VLLM) for _ in range(2)]
        routed = await lacking(stack, *workers)
        body = {"model": "poet", "input": "x", "previous_response_id": "resp_none"}
        assert (await routed.call("/v1/responses", body)).status == 404
        assert sum(worker.requests for worker in workers) == 1


async def test_a_404_through_the_picker_leads_later_requests_elsewhere() -> None:
    async with AsyncExitStack() as stack:
        workers: dict[str, Lacking] = {}
        for _ in range(2):
            listing = Lacking()
            worker = await stack.enter_async_context(scripted_worker(listing.answer))
            worker.answers_discovery = False
            workers[worker.url] = listing
        side, port = await stack.enter_async_context(picker(*workers, fleet=SELDOM, policy={"name": "round_robin"}))
        channel = await stack.enter_async_context(channel_to(port))
        routed = PickerUnderTest(side, channel, [])

        async def answered(status: int) -> str:
            stream, chosen = await routed.routed(body=json.dumps(GENERATION).encode())
            await stream.answer_head(status, ends=True)
            await stream.receive()
            await stream.finish()
            return f"http://{chosen}"

        assert {await answered(200) for _ in range(2)} == set(workers)
        for listing in workers.values():
            listing.answers_probes.clear()
        lacking = await answered(404)
        assert lacking not in {await answered(200) for _ in range(6)}
        await until(lambda: workers[lacking].probes >= 2)
        for listing in workers.values():
            listing.answers_probes.set()
        await until(lambda: answered(200), lambda chosen: chosen == lacking)  # it lists the adapter


NO_ROUTE = b'{"detail":"Not Found"}'
COUNT = "/v1/messages/count_tokens"
COUNTED = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


def without(*paths: str, error: bytes = NO_ROUTE, status: str = "404 Not Found") -> Script:
    """A worker without some paths."""

    async def script(exchange: Exchange) -> None:
        lacks = exchange.target in paths
        await exchange.answer(error if lacks else b"{}", status if lacks else "200 OK")

    return script


def asked(worker: ScriptedWorker, path: str) -> int:
    return sum(exchange.target == path for exchange in worker.exchanges)


@pytest.mark.parametrize(
    ("path", "status", "error"),
    [
        (COUNT, "404 Not Found", NO_ROUTE),
        ("/v1/rerank", "404 Not Found", b""),
        ("/v1/responses/compact", "405 Method Not Allowed", b'{"detail":"Method Not Allowed"}'),
        ("/v1/audio/translations", "404 Not Found", NO_ROUTE),
    ],
)
async def test_a_worker_without_a_route_receives_all_others_and_such_requests_go_elsewhere(
    path: str, status: str, error: bytes
) -> None:
    async with (
        scripted_worker(without(path, error=error, status=status)) as lacks,
        scripted_worker() as has,
        router(lacks.url, has.url, fleet=SELDOM, policy={"name": "round_robin"}) as routed,
    ):
        form = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n--x--\r\n'
        body = form if "audio" in path else COUNTED
        headers = {"content-type": "multipart/form-data; boundary=x"} if "audio" in path else None
        replies = [await routed.call(path, body, headers=headers) for _ in range(8)]
        assert {(reply.status, reply.worker) for reply in replies} == {(200, has.url)}
        assert asked(lacks, path) == 1
        chats = [await routed.call("/v1/completions", {"model": "m", "prompt": "x"}) for _ in range(8)]
        assert sorted(reply.worker for reply in chats) == sorted([lacks.url, has.url] * 4)


async def test_the_404_of_one_worker_is_forwarded_if_all_lack_the_route() -> None:
    async with (
        scripted_worker(without(COUNT)) as first,
        scripted_worker(without(COUNT)) as second,
        router(first.url, second.url, fleet=SELDOM) as routed,
    ):
        for number in range(1, 4):
            reply = await routed.call(COUNT, COUNTED)
            assert (reply.status, reply.body) == (404, NO_ROUTE)
            assert asked(first, COUNT) + asked(second, COUNT) == number + 1  # the first request tries both


async def test_a_route_is_tried_again_after_a_restart() -> None:
    async with (
        scripted_worker(without(COUNT)) as first,
        scripted_worker() as second,
        router(first.url, second.url, fleet=QUICK, policy={"name": "round_robin"}) as routed,
    ):
        await until(lambda: routed.call(COUNT, COUNTED), lambda _: asked(first, COUNT) == 1)
        await first.stop()

        async def states() -> set[str]:
            return {each["state"] for each in await routed.workers()}

        await until(states, lambda found: "down" in found)
        first.script = Exchange.answer
        await first.start()
        await until(states, lambda found: "down" not in found)
        await until(lambda: routed.call(COUNT, COUNTED), lambda reply: reply.worker == first.url)


async def test_a_route_that_is_missing_through_the_picker_leads_later_requests_elsewhere() -> None:
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(scripted_worker()) for _ in range(2)]
        urls = [worker.url for worker in workers]
        side, port = await stack.enter_async_context(picker(*urls, fleet=SELDOM, policy={"name": "round_robin"}))
        channel = await stack.enter_async_context(channel_to(port))
        routed = PickerUnderTest(side, channel, [])

        async def answered(path: str, status: int) -> str:
            stream, chosen = await routed.routed(path=path, body=json.dumps(COUNTED).encode())
            await stream.answer_head(status, ends=True)
            await stream.receive()
            await stream.finish()
            return chosen

        lacking = await answered(COUNT, 404)
        assert lacking not in {await answered(COUNT, 200) for _ in range(6)}
        assert lacking in {await answered("/v1/rerank", 200) for _ in range(6)}
        assert lacking in {await answered("/v1/chat/completions", 200) for _ in range(6)}


def resolving(known: set[str], sent: list[str]) -> Script:
    """A worker that loads adapters at their first request, as vLLM's resolvers do, unless they begin with `no`."""

    async def script(exchange: Exchange) -> None:
        if exchange.target == "/v1/models":
            models = [{"id": "m"}, *({"id": name, "parent": "m"} for name in sorted(known))]
            await exchange.answer(json.dumps({"data": models}).encode())
        elif exchange.target == "/v1/completions":
            name = json.loads(exchange.body)["model"]
            sent.append(name)
            if name.startswith("no"):
                await exchange.answer(b'{"error": {"param": "model"}}', "404 Not Found")
                return
            known.add(name)
            await exchange.answer()
        else:
            await exchange.answer(status="404 Not Found")

    return script


async def test_unknown_names_are_forwarded_if_the_setting_allows_it() -> None:
    known: list[set[str]] = [set(), set()]
    sent: list[list[str]] = [[], []]
    async with AsyncExitStack() as stack:
        urls = []
        for each in range(2):
            worker = await stack.enter_async_context(scripted_worker(resolving(known[each], sent[each])))
            worker.answers_discovery = False
            urls.append(worker.url)
        refusing = await stack.enter_async_context(router(*urls, fleet=SELDOM))
        assert (await refusing.call("/v1/completions", GENERATION)).status == 404
        assert sent == [[], []]
        routed = await stack.enter_async_context(router(*urls, fleet=SELDOM, proxy={"forward_unknown_models": True}))
        first = await routed.call("/v1/completions", GENERATION)
        assert first.status == 200

        async def listed() -> bool:
            return "poet" in {model["id"] for model in (await routed.call("/v1/models")).json()["data"]}

        await until(listed)
        later = [await routed.call("/v1/completions", GENERATION) for _ in range(6)]
        assert {(reply.status, reply.worker) for reply in later} == {(200, first.worker)}
        assert (await routed.call("/v1/completions", GENERATION | {"model": "none"})).status == 404
        assert sum(names.count("none") for names in sent) == 2
        assert await routed.metric("kvrouter_requests_total", model="none") == 0


async def test_a_tenant_may_not_use_unknown_names_beside_its_own() -> None:
    known: set[str] = set()
    sent: list[str] = []
    tenants = {"named": {"a": {"keys": [hashed_key("k")], "models": ["m"]}}}
    proxy = {"forward_unknown_models": True}
    async with scripted_worker(resolving(known, sent)) as worker:
        worker.answers_discovery = False
        async with router(worker.url, fleet=QUICK, server={"token": "t"}, tenants=tenants, proxy=proxy) as routed:
            reply = await routed.call("/v1/completions", GENERATION, headers={"authorization": "Bearer k"})
            assert (reply.status, sent) == (403, [])


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
