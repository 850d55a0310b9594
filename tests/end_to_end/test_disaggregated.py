"""Prefill and decode on different workers: the requests of both, and their failures."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest
from router_under_test import RouterUnderTest, router, until
from scripted_pairs import BODY, HANDED_OVER, PATH, Fleet, fleet, prefill, stream
from scripted_worker import Exchange, Script, scripted_worker


async def broken(exchange: Exchange) -> None:
    await exchange.answer(b"a bug", "500 Internal Server Error")


async def refused(exchange: Exchange) -> None:
    await exchange.answer(b'{"error": {"message": "too long"}}', "400 Bad Request")


async def silent(exchange: Exchange) -> None:
    await exchange.until_closed()


async def head_alone(exchange: Exchange) -> None:
    await exchange.begin_chunks()
    await exchange.until_closed()


async def one_event(exchange: Exchange) -> None:
    await exchange.begin_chunks()
    await exchange.chunk(b"data: 1\n\n")
    await exchange.until_closed()


async def test_sglang_workers_receive_request_at_once() -> None:
    waits = asyncio.Event()

    async def prefill_waits(exchange: Exchange) -> None:
        await waits.wait()  # for the decode worker, as engines do
        await exchange.answer(b"{}")

    async def decode(exchange: Exchange) -> None:
        waits.set()
        await stream(exchange)

    async with fleet("sglang", [prefill_waits], [decode]) as both:
        reply = await both.routed.call(PATH, BODY)
        assert (reply.status, reply.body, reply.worker) == (200, b"data: 1\n\n", both.decodes[0].url)
        assert reply.headers["x-kvrouter-prefill-worker"] == both.prefills[0].url
        (to_prefill,), (to_decode,) = both.sent()
        assert to_prefill == to_decode
        assert to_prefill["bootstrap_host"] == "127.0.0.1"
        assert to_prefill.items() >= json.loads(BODY).items()
        await both.nothing_is_left()


async def test_nixl_decode_receives_params_of_prefill() -> None:
    async with fleet("nixl", [prefill], [stream]) as both:
        reply = await both.routed.call(PATH, BODY)
        assert (reply.status, reply.body) == (200, b"data: 1\n\n")
        (to_prefill,), (to_decode,) = both.sent()
        assert (to_prefill["max_tokens"], to_prefill["stream"]) == (1, False)
        assert to_decode == json.loads(BODY) | {"kv_transfer_params": json.loads(HANDED_OVER)}
        assert HANDED_OVER in both.decodes[0].last.body
        await both.nothing_is_left()


async def test_mooncake_engine_id_is_queried_first() -> None:
    async def bootstrap(exchange: Exchange) -> None:
        await exchange.answer(b'{"0": {"engine_id": "e-1"}}')

    async with scripted_worker(bootstrap) as service, fleet("mooncake", [prefill], [stream]) as both:
        worker = both.prefills[0].url
        port = int(service.url.rpartition(":")[2])
        settings = [
            {"url": worker, "role": "prefill", "bootstrap_port": port},
            {"url": both.decodes[0].url, "role": "decode"},
        ]
        async with router(workers=settings, disaggregation={"backend": "mooncake", "decode_computes": False}) as routed:
            assert (await routed.call(PATH, BODY)).status == 200
            await routed.until_released()
        (to_prefill,), (to_decode,) = both.sent()
        assert service.last.target == "/query"
        params = to_decode["kv_transfer_params"]
        assert params["remote_engine_id"] == "e-1"
        assert params["transfer_id"] == to_prefill["kv_transfer_params"]["transfer_id"]
        assert both.prefills[0].last.header("x-data-parallel-rank") == [b"0"]


async def test_tensorrt_decodes_after_context_or_stops() -> None:
    answers = [
        {"choices": [{"finish_reason": "length", "disaggregated_params": {"opaque": 1}}], "prompt_token_ids": [5]},
        {"choices": [{"finish_reason": "stop", "text": "!"}]},
    ]

    async def context(exchange: Exchange) -> None:
        await exchange.answer(json.dumps(answers.pop(0)).encode())

    async with fleet("trtllm", [context], [stream]) as both:
        assert (await both.routed.call(PATH, BODY)).body == b"data: 1\n\n"
        stopped = await both.routed.call(PATH, BODY)
        assert b'"text":"!"' in stopped.body
        assert stopped.body.endswith(b"data: [DONE]\n\n")
        _, (to_decode,) = both.sent()
        assert to_decode["disaggregated_params"] == {"opaque": 1, "request_type": "generation_only"}
        await both.nothing_is_left()


async def test_sidecar_receives_prefill_address() -> None:
    async with fleet("sidecar", [silent], [stream]) as both:
        assert (await both.routed.call(PATH, BODY)).status == 200
        (address,) = both.decodes[0].last.header("x-prefiller-host-port")
        assert f"http://{address.decode()}" == both.prefills[0].url
        assert both.prefills[0].exchanges == []
        await both.nothing_is_left()


@pytest.mark.parametrize("backend", ["sglang", "nixl"])
async def test_failed_prefill_closes_decode_and_retries_on_another_pair(backend: str) -> None:
    async with fleet(backend, [broken, prefill], [stream]) as both:
        if backend == "sglang":
            both.decodes[0].script = decode_when_prefilled(both)
        replies = [await both.routed.call(PATH, BODY) for _ in range(4)]
        assert {(reply.status, reply.body) for reply in replies} == {(200, b"data: 1\n\n")}
        assert {reply.headers["x-kvrouter-prefill-worker"] for reply in replies} == {both.prefills[1].url}
        await both.nothing_is_left()


async def test_response_is_not_retried_after_its_head_was_sent() -> None:
    head_received = asyncio.Event()

    async def fails_late(exchange: Exchange) -> None:
        await head_received.wait()
        await exchange.answer(b"a bug", "500 Internal Server Error")

    async def json_head_alone(exchange: Exchange) -> None:
        await exchange.begin_chunks("application/json")
        await exchange.until_closed()

    async with fleet("sglang", [fails_late, fails_late], [json_head_alone, json_head_alone]) as both:
        async with both.routed.request(PATH, BODY) as response:
            assert response.status == 200
            head_received.set()
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()
        _, to_decodes = both.sent()
        assert len(to_decodes) == 1
        await both.nothing_is_left()


@pytest.mark.parametrize("backend", ["sglang", "nixl"])
async def test_refusal_of_prefill_is_returned(backend: str) -> None:
    async with fleet(backend, [refused], [head_alone]) as both:
        reply = await both.routed.call(PATH, BODY)
        assert (reply.status, reply.error["message"]) == (400, "too long")
        await both.nothing_is_left()


ERROR_EVENT = b'data: {"error": {"message": "too long", "code": 400}}\n\n'


async def error_event(exchange: Exchange) -> None:
    await exchange.begin_chunks()
    await exchange.chunk(ERROR_EVENT)
    await exchange.chunk(b"")


@pytest.mark.parametrize("backend", ["sglang", "nixl"])
@pytest.mark.parametrize("refusing", ["prefill", "decode", "decode stream", "both streams"])
async def test_a_refused_prompt_is_not_expected_to_be_cached_by_a_pair(backend: str, refusing: str) -> None:
    long = json.dumps(json.loads(BODY) | {"prompt": list(range(1000, 1400))}).encode()
    slow = waits_for_close if backend == "sglang" else prefill
    prefills = {"prefill": refused, "both streams": error_event if backend == "sglang" else prefill}
    decodes = {"decode": refused, "decode stream": error_event, "both streams": error_event}
    async with fleet(backend, [prefills.get(refusing, slow)], [decodes.get(refusing, head_alone)]) as both:
        reply = await both.routed.call(PATH, long)
        assert (reply.status, reply.body) in ((400, b'{"error": {"message": "too long"}}'), (200, ERROR_EVENT))
        await both.nothing_is_left()
        computed = {"prefill"} if backend == "nixl" and refusing != "prefill" else set()
        assert await predicted_cached(both, long) <= computed


async def waits_for_close(exchange: Exchange) -> None:
    if exchange.target == PATH:
        await exchange.until_closed()
    else:
        await exchange.answer()


async def predicted_cached(both: Fleet, body: bytes) -> set[str]:
    """Return the kinds of workers that are expected to have cached a part of the prompt."""
    explained = (await both.routed.call("/explain", {"path": PATH, "request": json.loads(body)})).json()
    uncached = [each["terms"]["prefill"] for each in explained["disaggregation"]["prefill_candidates"]]
    cached = {"decode": explained["candidates"][0]["overlap"], "prefill": explained["tokens"] - uncached[0]}
    return {kind for kind, tokens in cached.items() if tokens}


@pytest.mark.parametrize("backend", ["sglang", "nixl"])
async def test_pair_without_the_model_on_one_worker_is_replaced(backend: str) -> None:
    async def lacks(exchange: Exchange) -> None:
        await exchange.answer(b'{"error": {"message": "The model `m` does not exist."}}', "404 Not Found")

    async with fleet(backend, [lacks, prefill], [stream, lacks]) as both:
        if backend == "sglang":
            both.decodes[0].script = decode_when_prefilled(both)
        replies = [await both.routed.call(PATH, BODY) for _ in range(6)]
        assert {(reply.status, reply.worker) for reply in replies} == {(200, both.decodes[0].url)}
        assert {reply.headers["x-kvrouter-prefill-worker"] for reply in replies} == {both.prefills[1].url}
        await both.nothing_is_left()


@pytest.mark.parametrize("backend", ["sglang", "nixl"])
async def test_hanging_prefill_worker_is_skipped(backend: str) -> None:
    async with fleet(backend, [silent, prefill], [stream]) as both:
        both.prefills[0].answers_discovery = False
        if backend == "sglang":
            both.decodes[0].script = decode_when_prefilled(both)
        replies = [await both.routed.call(PATH, BODY) for _ in range(3)]
        assert {reply.status for reply in replies} == {200}
        assert {reply.headers["x-kvrouter-prefill-worker"] for reply in replies} == {both.prefills[1].url}
        await both.nothing_is_left()


def decode_when_prefilled(both: Fleet) -> Script:
    """Return a script that answers once the second prefill worker has received the request's room."""
    good = both.prefills[1]

    async def decode(exchange: Exchange) -> None:
        if exchange.target != PATH:
            await exchange.answer()
            return
        room = json.loads(exchange.body)["bootstrap_room"]
        await exchange.begin_chunks()
        left = asyncio.create_task(exchange.until_closed())
        while not any(
            each.target == PATH and room == json.loads(each.body)["bootstrap_room"] for each in good.exchanges
        ):
            await asyncio.sleep(0.01)
            if left.done():
                return
        left.cancel()
        await exchange.chunk(b"data: 1\n\n")
        await exchange.chunk(b"")

    return decode


@pytest.mark.parametrize("backend", ["sglang", "nixl"])
async def test_failed_decode_closes_prefill_and_retries_on_another(backend: str) -> None:
    async def hang_up(exchange: Exchange) -> None:
        await exchange.hang_up()

    async with fleet(backend, [prefill], [hang_up, hang_up]) as both:
        both.decodes[1].script = stream
        replies = [await both.routed.call(PATH, BODY) for _ in range(4)]
        assert {(reply.status, reply.worker) for reply in replies} == {(200, both.decodes[1].url)}
        await both.nothing_is_left()


def at_first(first: Script, then: Script) -> Script:
    """Return a script that runs `first` for the first request and `then` for the others."""
    scripts = [first]

    async def script(exchange: Exchange) -> None:
        if exchange.target != PATH:
            await exchange.answer()
        else:
            await (scripts.pop() if scripts else then)(exchange)

    return script


@pytest.mark.parametrize("backend", ["sglang", "nixl"])
async def test_decode_error_is_retried_on_another_decode_worker(backend: str) -> None:
    async with fleet(backend, [silent if backend == "sglang" else prefill], [broken, stream]) as both:
        replies = [await both.routed.call(PATH, BODY) for _ in range(4)]
        assert {(reply.status, reply.worker) for reply in replies} == {(200, both.decodes[1].url)}
        await both.nothing_is_left()


@pytest.mark.parametrize("backend", ["sglang", "nixl"])
async def test_error_of_only_decode_is_retried_with_another_prefill(backend: str) -> None:
    script = silent if backend == "sglang" else prefill
    async with fleet(backend, [script, script], [at_first(broken, stream)]) as both:
        reply = await both.routed.call(PATH, BODY)
        assert (reply.status, reply.headers["x-kvrouter-attempts"]) == (200, "2")
        await both.nothing_is_left()


async def test_error_of_only_pair_is_retried_without_prefill() -> None:
    """vLLM's decode worker answers 500 if its prefill worker dies before the KV is fetched."""
    async with fleet("nixl", [prefill], [at_first(broken, stream)]) as both:
        reply = await both.routed.call(PATH, BODY)
        assert (reply.status, reply.headers["x-kvrouter-attempts"]) == (200, "2")
        prefilled, decoded = both.sent()
        assert len(prefilled) == 1
        assert ["kv_transfer_params" in body for body in decoded] == [True, False]
        await both.nothing_is_left()


async def test_error_of_only_prefill_is_retried_with_another_decode() -> None:
    waiting = at_first(silent, stream)
    async with fleet("sglang", [at_first(broken, silent)], [waiting, waiting]) as both:
        reply = await both.routed.call(PATH, BODY)
        assert (reply.status, reply.headers["x-kvrouter-attempts"]) == (200, "2")
        assert all(decode.exchanges for decode in both.decodes)
        await both.nothing_is_left()


@pytest.mark.parametrize("backend", ["sglang", "nixl"])
async def test_disconnect_closes_both_requests(backend: str) -> None:
    left: list[str] = []

    def noted(name: str, script: Script) -> Script:
        async def run(exchange: Exchange) -> None:
            if exchange.target == PATH:
                await script(exchange)
                left.append(name)
            else:
                await exchange.answer()

        return run

    for decode in (head_alone, one_event):
        left.clear()
        expected = {"prefill"} if backend == "nixl" and decode is head_alone else {"prefill", "decode"}
        first = noted("prefill", silent if backend == "sglang" or decode is head_alone else prefill)
        async with fleet(backend, [first], [noted("decode", decode)]) as both:
            asked = asyncio.create_task(read_some(both.routed, decode is one_event))

            async def reached(workers: int = len(expected)) -> bool:
                return sum(bool(worker.exchanges) for worker in (*both.prefills, *both.decodes)) == workers

            await until(reached)
            if decode is one_event:
                await asked  # it has read one event, and leaves
            else:
                asked.cancel()
                await asyncio.gather(asked, return_exceptions=True)

            async def both_left(expected: set[str] = expected) -> bool:
                return set(left) >= expected

            await until(both_left)
            await both.nothing_is_left()
            if backend == "sglang":
                aborted = [e.target for worker in (*both.prefills, *both.decodes) for e in worker.exchanges]
                assert aborted.count("/abort_request") == 2


async def read_some(routed: RouterUnderTest, only_one: bool) -> None:
    async with routed.request(PATH, BODY) as response:
        if only_one:
            assert await response.content.readline() == b"data: 1\n"
        else:
            await response.read()


async def test_explain_shows_disaggregation_inputs() -> None:
    async with fleet("nixl", [prefill], [stream]) as both:
        explained = (await both.routed.call("/explain", {"path": PATH, "request": json.loads(BODY)})).json()
        assert explained["choice"]["worker"] == both.decodes[0].url
        assert explained["disaggregation"]["remote_prefill"] is True
        assert explained["disaggregation"]["prefill"]["worker"] == both.prefills[0].url
        assert {"tokens", "uncached"} <= explained["disaggregation"].keys()


async def test_metrics_show_the_load_of_each_role() -> None:
    waits = asyncio.Event()

    async def prefill_waits(exchange: Exchange) -> None:
        await waits.wait()
        await prefill(exchange)

    async with fleet("nixl", [prefill_waits], [stream]) as both:
        asked = asyncio.create_task(both.routed.call(PATH, BODY))

        async def queued() -> bool:
            return await both.routed.metric("kvrouter_prefill_tokens_in_flight") > 0

        await until(queued)
        text = (await both.routed.call("/metrics", method="GET")).body.decode()
        seconds = {
            role: float(line.split()[-1])
            for role in ("prefill", "decode")
            for line in text.splitlines()
            if line.startswith("kvrouter_role_prefill_seconds{") and f'role="{role}"' in line
        }
        assert seconds.keys() == {"prefill", "decode"}
        assert seconds["decode"] == 0
        waits.set()
        assert (await asked).status == 200


async def test_nixl_decodes_alone_and_sglang_refuses_without_prefill_workers() -> None:
    async with fleet("nixl", [prefill], [stream]) as both:
        await both.prefills[0].stop()

        async def down() -> bool:
            return any(each["state"] == "down" for each in await both.routed.workers())

        await until(down)
        assert (await both.routed.call(PATH, BODY)).status == 200
        assert both.decodes[0].last.body == BODY
    async with fleet("sglang", [prefill], [stream]) as both:
        await both.prefills[0].stop()
        await until(down)
        reply = await both.routed.call(PATH, BODY)
        assert (reply.status, reply.error["code"]) == (503, "no_worker_available")
        await both.nothing_is_left()


async def test_other_paths_are_sent_to_decode_workers() -> None:
    async with fleet("nixl", [prefill], [stream]) as both:
        assert (await both.routed.call("/v1/embeddings", b'{"model": "m", "input": "x"}')).status == 200
        assert both.prefills[0].exchanges == []
