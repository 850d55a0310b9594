"""Real Envoy in front of workers, with the picker behind it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from envoy_under_test import envoy, filters, listed_workers, processing
from picker_under_test import picker
from router_under_test import RouterUnderTest, router, until
from scripted_worker import Exchange, scripted_worker, scripted_workers
from simulated_workers import simulated_workers
from test_forwarded_tokens import AUTO, Engine, reasons, with_ids
from test_forwarded_tokens import MODEL as SIMULATED

from router.auth import hashed_key
from router.settings.endpoint_picker import read_picker_config
from router.tokens.local_tokenizer import LocalTokenizer

pytest.importorskip("envoy", reason="make test-envoy installs it", exc_type=ImportError)

pytestmark = pytest.mark.envoy

MODEL, SCRIPTED = "simulated", "m"
PATH = "/v1/completions"


@dataclass
class Picked:
    """`through`: the Envoy; `picker`: the HTTP side of what it asks."""

    through: RouterUnderTest
    picker: RouterUnderTest
    port: int


@asynccontextmanager
async def picked(folder: Path, *workers: str, change: Any = lambda _: None, **sections: Any) -> AsyncIterator[Picked]:
    async with picker(*workers, **sections) as (side, port), envoy(port, folder, change) as through:
        yield Picked(through, side, port)


def text(number: int, words: int = 200) -> str:
    return f"{number} begins. " + " ".join(f"word {number} {place}" for place in range(words))


def body(**fields: Any) -> dict[str, Any]:
    return {"model": SCRIPTED, "prompt": "some words", **fields}


@pytest.fixture(scope="module")
async def workers() -> AsyncIterator[list[str]]:
    async with simulated_workers(3) as urls:
        yield urls


@pytest.fixture(scope="module")
async def served(workers: list[str], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Picked]:
    folder = tmp_path_factory.mktemp("envoy")
    async with picked(folder, *workers, picker={"read_usage": 1.0}) as found:

        async def observed() -> bool:
            """Only from then on the picker waits for what is shown of an answer."""
            await found.through.call(PATH, body(model=MODEL, max_tokens=2, stream=True))
            return await found.picker.metric("kvrouter_time_to_first_byte_seconds_count") > 0

        await until(observed)
        yield found


# What clients get


async def test_openai_client_receives_chat(served: Picked, workers: list[str]) -> None:
    answer = await served.through.openai.chat.completions.with_raw_response.create(
        model=MODEL, messages=[{"role": "user", "content": "hello"}], max_tokens=5
    )
    assert answer.parse().usage.completion_tokens == 5  # type: ignore[union-attr]
    assert answer.headers["x-kvrouter-worker"] in workers
    await served.picker.until_released()


async def test_openai_client_receives_streamed_chat(served: Picked) -> None:
    stream = await served.through.openai.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=20,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 20
    assert len(chunks) > 10
    await served.picker.until_released()


async def test_stream_is_forwarded_without_buffering(tmp_path: Path) -> None:
    released = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.begin_chunks()
        await exchange.chunk(b"data: 1\n\n")
        await released.wait()
        await exchange.chunk(b"data: [DONE]\n\n")
        await exchange.chunk(b"")

    async with scripted_worker(script) as worker, picked(tmp_path, worker.url) as found:
        async with found.through.request(PATH, body(stream=True)) as response:
            assert await asyncio.wait_for(response.content.readuntil(b"\n\n"), 60) == b"data: 1\n\n"
            assert await found.picker.requests_in_flight() == 1
            released.set()
            assert await response.read() == b"data: [DONE]\n\n"
        await found.picker.until_released()


async def test_models_of_all_workers_are_listed(served: Picked) -> None:
    assert [model.id async for model in served.through.openai.models.list()] == [MODEL]
    with pytest.raises(openai.NotFoundError):
        await served.through.openai.models.retrieve("other")


async def test_request_id_is_kept_and_returned(served: Picked) -> None:
    reply = await served.through.call(PATH, body(model=MODEL), headers={"x-request-id": "mine-1"})
    assert reply.headers.getall("x-request-id") == ["mine-1"]


@pytest.mark.parametrize("stream", [False, True])
async def test_picker_routes_prefixes_like_serve(workers: list[str], served: Picked, stream: bool) -> None:
    async with router(*workers) as serve:
        await serve.until_live()
        for number in range(8):
            words = text(1000 * stream + number)
            first = await serve.call(PATH, {"model": MODEL, "prompt": words, "max_tokens": 2})
            await until(lambda worker=first.worker, words=words: _held(served.picker, words, worker))  # type: ignore[misc]
            again = {"model": MODEL, "prompt": words + " more", "max_tokens": 2, "stream": stream}
            through = await served.through.call(PATH, again)
            direct = await serve.call(PATH, again)
            assert through.worker == first.worker == direct.worker
            assert through.overlap == direct.overlap > 100


async def _held(router: RouterUnderTest, words: str, worker: str) -> bool:
    answer = (await router.call("/match", {"model": MODEL, "prompt": words})).json()
    return any(match["worker"] == worker and match["matched_tokens"] > 100 for match in answer["matches"])


@pytest.mark.parametrize("stream", [False, True])
async def test_usage_is_audited(served: Picked, stream: bool) -> None:
    before = await served.picker.metric("kvrouter_audit_answers_total")
    asked = {"model": MODEL, "prompt": text(7 + stream), "max_tokens": 4, "stream": stream}
    if stream:
        asked["stream_options"] = {"include_usage": True}
    assert (await served.through.call(PATH, asked)).status == 200
    await until(lambda: served.picker.metric("kvrouter_audit_answers_total"), lambda value: value > before)


async def test_first_bytes_are_measured(served: Picked) -> None:
    before = await served.picker.metric("kvrouter_time_to_first_byte_seconds_count")
    await served.through.call(PATH, {"model": MODEL, "prompt": "x", "max_tokens": 4, "stream": True})
    await until(lambda: served.picker.metric("kvrouter_time_to_first_byte_seconds_count"), lambda value: value > before)


# Bodies


@pytest.mark.parametrize("mode", ["FULL_DUPLEX_STREAMED", "BUFFERED"])
async def test_huge_body_arrives_unchanged(tmp_path: Path, mode: str) -> None:
    def change(found: Any) -> None:
        processing(found)["processing_mode"]["request_body_mode"] = mode
        if mode == "BUFFERED":
            found["static_resources"]["listeners"][0]["per_connection_buffer_limit_bytes"] = 2**25

    async with scripted_worker() as worker, picked(tmp_path, worker.url, change=change) as found:
        sent = json.dumps(body(prompt="word " * (9 * 2**20 // 5))).encode()
        headers = {"content-type": "application/json"}
        async with found.through.session.post(
            found.through.url + PATH, data=BytesIO(sent), headers=headers
        ) as response:
            assert response.status == 200
        assert worker.last.body == sent
        await found.picker.until_released()


@pytest.mark.parametrize("mode", ["FULL_DUPLEX_STREAMED", "BUFFERED"])
async def test_token_ids_are_added_to_forwarded_body(tmp_path: Path, mode: str) -> None:
    """The second prompt is longer than a part of a body. Envoy's buffer needs space for the ids of whole bodies."""

    def change(found: Any) -> None:
        processing(found)["processing_mode"]["request_body_mode"] = mode
        limit = 2**25 if mode == "BUFFERED" else 2**17
        found["static_resources"]["listeners"][0]["per_connection_buffer_limit_bytes"] = limit

    engine = Engine(LocalTokenizer.load(str(SIMULATED)))
    async with scripted_worker(engine.script) as worker:
        worker.answers_discovery = False
        async with picked(tmp_path, worker.url, change=change, **AUTO) as found:
            await until(lambda: reasons(found.picker), lambda told: told == [""])
            for words in (5, 30_000):
                sent = json.dumps({"model": SCRIPTED, "messages": [{"role": "user", "content": "some " * words}]})
                reply = await found.through.call("/v1/chat/completions", sent.encode())
                assert reply.status == 200, reply.body
                assert engine.chats[-1] == with_ids(engine, sent.encode())
            await found.picker.until_released()


async def test_body_above_limit_is_refused(tmp_path: Path) -> None:
    async with scripted_worker() as worker, picked(tmp_path, worker.url, server={"max_body_bytes": 10**6}) as found:
        large = json.dumps(body(prompt="word " * 400_000)).encode()
        headers = {"content-type": "application/json"}

        async def in_parts() -> AsyncIterator[bytes]:
            for start in range(0, len(large), 10**5):
                yield large[start : start + 10**5]

        for sent in (BytesIO(large), in_parts()):
            async with found.through.session.post(found.through.url + PATH, data=sent, headers=headers) as response:
                assert response.status == 413
                assert "max_body_bytes" in (await response.json())["error"]["message"]
        assert worker.exchanges == []
        assert await found.picker.requests_in_flight() == 0


# Refusals


async def test_invalid_body_gets_openai_error(served: Picked) -> None:
    reply = await served.through.call(PATH, b"{nothing")
    assert reply.status == 400
    assert reply.error["type"] == "invalid_request_error"
    assert reply.headers["content-type"] == "application/json"


async def test_unknown_model_is_404(served: Picked) -> None:
    reply = await served.through.call(PATH, body(model="other"))
    assert (reply.status, reply.error["code"]) == (404, "model_not_found")


async def test_empty_pool_is_503(tmp_path: Path) -> None:
    async with picked(tmp_path) as found:
        reply = await found.through.call(PATH, body())
        assert (reply.status, reply.error["code"]) == (503, "no_worker_available")


async def test_full_queue_is_429_and_waiting_request_is_served(tmp_path: Path) -> None:
    released = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await released.wait()
        await exchange.answer()

    def quick(found: Any) -> None:
        processing(found)["message_timeout"] = "1s"  # less than the wait

    limits = {"requests": 1, "queue": 1, "late_binding": False}
    async with (
        scripted_worker(script) as worker,
        picked(tmp_path, worker.url, change=quick, admission=limits) as found,
    ):
        first = asyncio.create_task(found.through.call(PATH, body()))
        await until(lambda: len(worker.exchanges) == 1)
        second = asyncio.create_task(found.through.call(PATH, body()))
        await found.picker.until_queued(1)
        third = await found.through.call(PATH, body())
        assert (third.status, third.error["code"]) == (429, "queue_full")
        assert int(third.headers["retry-after"]) >= 1
        await asyncio.sleep(1.5)
        released.set()
        assert [(await first).status, (await second).status] == [200, 200]
        await found.picker.until_released()


async def test_deadline_ends_request_and_stream(tmp_path: Path) -> None:
    async def script(exchange: Exchange) -> None:
        if json.loads(exchange.body).get("stream"):
            await exchange.begin_chunks()
            await exchange.chunk(b"data: 1\n\n")
        await asyncio.sleep(20)

    async with scripted_worker(script) as worker, picked(tmp_path, worker.url) as found:
        reply = await found.through.call(PATH, body(), headers={"x-request-timeout": "0.5"})
        assert (reply.status, reply.error["code"]) == (504, "deadline_exceeded")
        with pytest.raises(aiohttp.ClientPayloadError):
            await found.through.call(PATH, body(stream=True), headers={"x-request-timeout": "0.5"})
        await found.picker.until_released()


async def test_tenant_keys_are_checked_and_removed(tmp_path: Path) -> None:
    tenants = {"named": {"a": {"keys": [hashed_key("secret")], "requests_per_second": 0.01}}}
    async with (
        scripted_worker() as worker,
        picked(tmp_path, worker.url, server={"token": "admin"}, tenants=tenants) as found,
    ):
        assert (await found.through.call(PATH, body())).status == 401
        assert (await found.through.call("/metrics")).status == 404
        key = {"authorization": "Bearer secret"}
        assert (await found.through.call(PATH, body(), headers=key)).status == 200
        assert "authorization" not in dict(worker.last.headers)
        assert (await found.through.call(PATH, body(), headers=key)).status == 429


# Disconnects and failures


async def test_disconnect_during_stream_releases_load(tmp_path: Path) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.begin_chunks()
        while True:
            await exchange.chunk(b"data: 1\n\n")
            await asyncio.sleep(0.01)

    async with scripted_worker(script) as worker, picked(tmp_path, worker.url, picker={"read_usage": 1.0}) as found:
        async with found.through.request(PATH, body(stream=True)) as response:
            await response.content.readuntil(b"\n\n")
            assert await found.picker.requests_in_flight() == 1
        await found.picker.until_released()
        assert await found.picker.metric("kvrouter_requests_abandoned_total") == 1


async def test_burst_with_disconnects_releases_all_load(served: Picked) -> None:
    async def ask(number: int) -> None:
        asked = {"model": MODEL, "prompt": text(5000 + number), "max_tokens": 200, "stream": number % 4 > 0}
        async with found.request(PATH, asked) as response:
            assert response.status == 200
            if number % 2:
                await response.content.readany()
            else:
                assert (await response.read()).endswith((b"[DONE]\n\n", b"}"))

    found = served.through
    await asyncio.gather(*(ask(number) for number in range(80)))
    await served.picker.until_released()


async def test_disconnect_before_response_releases_load(tmp_path: Path) -> None:
    async def script(_: Exchange) -> None:
        await asyncio.sleep(20)

    async with scripted_worker(script) as worker, picked(tmp_path, worker.url) as found:
        asked = asyncio.create_task(found.through.call(PATH, body()))
        await until(lambda: len(worker.exchanges) == 1)
        asked.cancel()
        await found.picker.until_released()


async def test_unreachable_worker_receives_no_more_requests(tmp_path: Path) -> None:
    fleet = {"probe_interval": 60.0, "metrics_interval": 60.0}
    async with (
        scripted_worker() as dead,
        scripted_worker() as alive,
        picked(tmp_path, dead.url, alive.url, fleet=fleet, policy={"name": "round_robin"}) as found,
    ):
        await dead.stop()
        replies = [await found.through.call(PATH, body()) for _ in range(4)]
        refused = [reply for reply in replies if reply.status == 503]
        assert refused
        assert refused[0].error["code"] == "no_worker_available"
        await found.picker.until_metric(0, "kvrouter_worker_up", worker=dead.url)
        for _ in range(10):
            assert (await found.through.call(PATH, body())).worker == alive.url
        await found.picker.until_released()


async def test_killed_envoy_releases_load(tmp_path: Path) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.begin_chunks()
        await exchange.chunk(b"data: 1\n\n")
        await asyncio.sleep(20)

    async with scripted_worker(script) as worker, picker(worker.url) as (side, port):
        async with envoy(port, tmp_path) as through:
            response = await through.request(PATH, body(stream=True))
            await response.content.readuntil(b"\n\n")
            assert await side.requests_in_flight() == 1
        await side.until_released()
        response.close()


async def test_envoy_without_picker_answers_503(tmp_path: Path) -> None:
    async with scripted_worker() as worker:
        async with picker(worker.url) as (_, port):
            pass
        async with envoy(port, tmp_path) as through:
            assert (await through.call(PATH, body())).status == 503
            assert worker.exchanges == []


async def test_destination_headers_of_clients_are_ignored(tmp_path: Path) -> None:
    async with scripted_worker() as worker, picked(tmp_path, worker.url) as found:
        for header in ("x-gateway-destination-endpoint", "x-gateway-destination-endpoint-subset"):
            assert (await found.through.call(PATH, body(), headers={header: "127.0.0.1:1"})).status == 200


async def test_subset_of_gateway_limits_choice(tmp_path: Path) -> None:
    async with scripted_workers(*[Exchange.answer] * 3) as each:
        allowed = each[1]
        subset = {"x-gateway-destination-endpoint-subset": [allowed.url.removeprefix("http://")]}

        def with_subset(found: Any) -> None:
            filters(found)  # the manager's list is put before
            manager = found["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
            manager["http_filters"].insert(
                0,
                {
                    "name": "envoy.filters.http.set_metadata",
                    "typed_config": {
                        "@type": "type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config",
                        "metadata": [{"metadata_namespace": "envoy.lb.subset_hint", "value": subset}],
                    },
                },
            )
            asks = manager["http_filters"][2]["typed_config"]
            asks["metadata_options"]["forwarding_namespaces"] = {"untyped": ["envoy.lb.subset_hint"]}

        async with picked(tmp_path, *(worker.url for worker in each), change=with_subset) as found:
            for _ in range(6):
                assert (await found.through.call(PATH, body())).worker == allowed.url


async def test_load_moves_to_fallback_tried_by_envoy(tmp_path: Path) -> None:
    released = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.begin_chunks()
        await exchange.chunk(b"data: 1\n\n")
        await released.wait()
        await exchange.chunk(b"")

    fleet = {"probe_interval": 60.0, "metrics_interval": 60.0}
    async with scripted_worker(script) as dead, scripted_worker(script) as alive:
        ports = [worker.url.rpartition(":")[2] for worker in (dead, alive)]
        change = listed_workers(ports)
        async with picked(
            tmp_path,
            dead.url,
            alive.url,
            change=change,
            fleet=fleet,
            picker={"fallbacks": 1},
            policy={"name": "round_robin"},
        ) as found:
            await dead.stop()
            for _ in range(2):  # one of the two is meant for the dead one
                released.clear()
                async with found.through.request(PATH, body(stream=True)) as response:
                    assert response.status == 200
                    await response.content.readuntil(b"\n\n")
                    assert await found.picker.metric("kvrouter_requests_in_flight", worker=dead.url) == 0
                    assert await found.picker.metric("kvrouter_requests_in_flight", worker=alive.url) == 1
                    released.set()
                    await response.read()
            await found.picker.until_released()
            assert await found.picker.metric("kvrouter_requests_retried_total", worker=dead.url) >= 1


async def test_headers_and_configuration_of_llm_d_count(tmp_path: Path) -> None:
    released = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await released.wait()
        await exchange.answer()

    file = tmp_path / "epp.yaml"
    file.write_text(
        "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nfeatureGates: [flowControl]\n"
        "plugins: [{type: queue-scorer}, {type: prefix-cache-scorer}]\nflowControl: {maxRequests: 1}\n"
    )
    sections = read_picker_config(file).sections
    sections["admission"]["requests"] = 1
    sections["picker"] = {"objectives": {"batch": -1}}
    async with scripted_worker(script) as worker, picked(tmp_path, worker.url, **sections) as found:
        rewrite = {"x-llm-d-model-name-rewrite": SCRIPTED}
        first = asyncio.create_task(found.through.call(PATH, body(model="named by the client"), headers=rewrite))
        await until(lambda: len(worker.exchanges) == 1)
        assert json.loads(worker.exchanges[0].body)["model"] == SCRIPTED
        assert worker.exchanges[0].header("x-llm-d-model-name-rewrite") == []
        sheddable = {"x-llm-d-inference-objective": "batch", "x-llm-d-inference-fairness-id": "flow"}
        second = await found.through.call(PATH, body(), headers=sheddable)
        assert (second.status, second.headers["x-llm-d-request-dropped-reason"]) == (429, "rejected-saturated")
        released.set()
        assert (await first).status == 200
