"""Simulated prefill and decode workers, alone and behind a router, which transfer real KV bytes."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import random
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from itertools import count
from typing import Any

import pytest
from router_under_test import RouterUnderTest, router, until
from simulated_pairs import MODEL, STYLES, Pairs, new_session, routed, simulated_pairs
from simulated_workers import FAST

from kvrouter.processes import KvrouterProcess
from simulator.worker import SimulatedWorkerSettings
from simulator.worker.cache import CachedSequence
from simulator.worker.kv_transfer import nixl
from simulator.worker.kv_transfer.memory import KvMemory
from simulator.worker.serve import running

BLOCK = 16
HANDED_OVER = {
    "do_remote_prefill": True,
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_block_ids": [1],
    "remote_host": "127.0.0.1",
    "remote_port": 1,
}
numbers = count(1)


@pytest.fixture(scope="module", params=STYLES)
async def pairs(request: pytest.FixtureRequest) -> AsyncIterator[Pairs]:
    async with simulated_pairs(request.param) as made:
        yield made


@pytest.fixture(scope="module")
async def front(pairs: Pairs) -> AsyncIterator[RouterUnderTest]:
    async with routed(pairs) as made:
        yield made


@pytest.fixture(scope="module")
async def plain() -> AsyncIterator[str]:
    """A worker that computes prompts and answers alike."""
    async with running(SimulatedWorkerSettings(**FAST)) as url:
        yield url


@pytest.fixture(scope="module")
async def sglang() -> AsyncIterator[Pairs]:
    async with simulated_pairs("sglang", dp_size=2, kv_events=None, transfer_timeout_s=2) as made:
        yield made


@pytest.fixture(scope="module")
async def vllm() -> AsyncIterator[Pairs]:
    async with simulated_pairs("nixl", decodes=2) as made:
        yield made


def fresh(tokens: int) -> list[int]:
    """A prompt that no other begins with."""
    number = next(numbers)
    return [300 + number, *(300 + (number * place) % 1000 for place in range(1, tokens))]


def a_room() -> int:
    return random.randrange(2**62) * 2


async def prefill_params(vllm: Pairs, prompt: list[int]) -> dict[str, Any]:
    """Compute a prompt on the vLLM prefill worker, and return its transfer params."""
    asked = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}
    status, answer = await vllm.ask(vllm.prefills[0], prompt=prompt, max_tokens=1, kv_transfer_params=asked)
    assert status == 200
    params: dict[str, Any] = answer["kv_transfer_params"]
    return params


# Behind a router


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_messages_and_responses_are_handed_over(
    pairs: Pairs, front: RouterUnderTest, path: str, streamed: bool
) -> None:
    text = f"{next(numbers)} " * 100
    given: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "max_tokens": 4}
    if path == "/v1/responses":
        given = {"input": text, "max_output_tokens": 4}
    before = await pairs.metric("simulated:kv_bytes_received_total", *pairs.decodes)
    reply = await front.call(path, {"model": MODEL, "stream": streamed, **given})
    assert (reply.status, reply.worker) == (200, pairs.decodes[0])
    assert reply.headers["x-kvrouter-prefill-worker"] == pairs.prefills[0]
    assert await pairs.metric("simulated:kv_bytes_received_total", *pairs.decodes) > before
    await pairs.until_nothing_is_left()


@pytest.mark.parametrize("stream", [False, True])
async def test_pair_answers_like_single_worker(pairs: Pairs, front: RouterUnderTest, plain: str, stream: bool) -> None:
    prompt, length = fresh(333), 12
    status, alone = await pairs.ask(plain, prompt=prompt, max_tokens=length)
    assert status == 200
    moved = await pairs.metric("simulated:kv_bytes_received_total")

    answered = await front.openai.completions.with_raw_response.create(
        model=MODEL, prompt=prompt, max_tokens=length, stream=stream
    )
    assert answered.headers["x-kvrouter-prefill-worker"] == pairs.prefills[0]
    assert answered.headers["x-kvrouter-worker"] == pairs.decodes[0]
    got: Any = answered.parse()
    text = "".join([chunk.choices[0].text async for chunk in got]) if stream else got.choices[0].text
    assert text == alone["choices"][0]["text"]
    assert await pairs.metric("simulated:kv_bytes_received_total") - moved == -(-333 // BLOCK) * BLOCK * 64
    assert await pairs.metric("simulated:kv_pages_wrong_total") == 0
    await pairs.until_nothing_is_left()


async def test_blocks_of_decode_worker_are_not_transferred_again(pairs: Pairs, front: RouterUnderTest) -> None:
    prompt = fresh(100 * BLOCK)

    async def ask(tokens: list[int]) -> Any:
        reply = await front.call("/v1/completions", {"model": MODEL, "prompt": tokens, "max_tokens": 4})
        assert reply.status == 200, reply.body
        return reply

    async def held() -> bool:
        answer = (await front.call("/match", {"model": MODEL, "prompt": prompt})).json()
        return {match["matched_tokens"] for match in answer["matches"]} == {99 * BLOCK}

    assert (await ask(prompt)).cached == 0
    await until(held)
    assert {
        match["worker"] for match in (await front.call("/match", {"model": MODEL, "prompt": prompt})).json()["matches"]
    } == {*pairs.prefills, *pairs.decodes}
    moved = await pairs.metric("simulated:kv_bytes_received_total")
    longer = await ask([*prompt, *fresh(2400)])
    assert longer.headers["x-kvrouter-prefill-worker"] == pairs.prefills[0]
    assert longer.cached == 100 * BLOCK
    assert await pairs.metric("simulated:kv_bytes_received_total") - moved == 150 * BLOCK * 64


async def test_batch_is_answered_like_single_worker(pairs: Pairs, front: RouterUnderTest, plain: str) -> None:
    body = {"model": MODEL, "prompt": [fresh(50), fresh(5), fresh(70)], "max_tokens": 6}
    _, alone = await pairs.ask(plain, **body)
    reply = await front.call("/v1/completions", body)
    assert reply.status == 200, reply.body
    assert [choice["text"] for choice in reply.json()["choices"]] == [choice["text"] for choice in alone["choices"]]
    await pairs.until_nothing_is_left()


@pytest.mark.parametrize("field", ["n", "best_of"])
async def test_several_choices_hold_no_blocks(vllm: Pairs, field: str) -> None:
    """A prefill worker leases blocks for one choice, so that blocks of other choices would never be fetched."""
    async with routed(vllm) as front:
        reply = await front.call("/v1/completions", {"model": MODEL, "prompt": fresh(50), "max_tokens": 4, field: 2})
        assert reply.status == 200, reply.body
        assert "x-kvrouter-prefill-worker" not in reply.headers or field == "best_of"
        await vllm.until_nothing_is_left(seconds=5)


@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), [(1, 2), (2, 1), (2, 3)])
async def test_pairs_with_unequal_ranks_use_every_rank(prefill_ranks: int, decode_ranks: int, plain: str) -> None:
    """Each of the two requests names a rank of its own worker."""
    ranks = {"prefill": {"dp_size": prefill_ranks}, "decode": {"dp_size": decode_ranks}}
    async with simulated_pairs("nixl", **ranks) as made, routed(made) as front:
        used: set[str | None] = set()

        async def asked() -> bool:
            body = {"model": MODEL, "prompt": fresh(40), "max_tokens": 4}
            _, alone = await made.ask(plain, **body)
            reply = await front.call("/v1/completions", body, headers={"x-data-parallel-rank": "7"})
            assert reply.status == 200, reply.body
            assert reply.json()["choices"][0]["text"] == alone["choices"][0]["text"]
            assert reply.headers["x-kvrouter-prefill-worker"] == made.prefills[0]
            used.add(reply.headers.get("x-kvrouter-dp-rank"))
            held = [rank["blocks"]["gpu"] for worker in await front.workers() for rank in worker["ranks"]]
            return len(used) == decode_ranks and all(held)  # None, where there is one

        await until(asked)  # which of equal ranks gets a request is chance


async def test_prefill_worker_serves_alone_without_decode_workers(plain: str) -> None:
    async with AsyncExitStack() as stack:
        settings = SimulatedWorkerSettings(**FAST, disaggregation="nixl", role="prefill")
        prefill = await stack.enter_async_context(running(settings))
        options = ["simulate", "--disaggregation=nixl", "--role=decode", "--step-ms=2"]
        process = stack.enter_context(KvrouterProcess(options))
        decode = await asyncio.to_thread(process.wait_until_listening)
        session = await stack.enter_async_context(new_session())
        made = Pairs("nixl", [prefill], [decode], session)
        front = await stack.enter_async_context(routed(made))
        endless = {"model": MODEL, "prompt": fresh(40), "max_tokens": 20_000, "ignore_eos": True, "stream": True}
        async with front.request("/v1/completions", endless) as stream:
            assert stream.headers["x-kvrouter-prefill-worker"] == prefill
            await stream.content.readline()
            process.send_signal(signal.SIGKILL)
            await asyncio.to_thread(process.wait, 60)
        for _ in range(3):
            body = {"model": MODEL, "prompt": fresh(40), "max_tokens": 4}
            _, alone = await made.ask(plain, **body)
            reply = await front.call("/v1/completions", body)
            assert (reply.status, reply.worker) == (200, prefill)
            assert reply.json()["choices"][0]["text"] == alone["choices"][0]["text"]
        await front.until_released()


async def test_disconnect_before_response_releases_everything(pairs: Pairs) -> None:
    async with simulated_pairs(pairs.style, prefill={"prefill_s_per_token": 0.01}) as slow, routed(slow) as front:
        asking = asyncio.create_task(
            front.call("/v1/completions", {"model": MODEL, "prompt": fresh(3000), "max_tokens": 4})
        )

        await until(lambda: slow.metric("vllm:num_requests_running", *slow.prefills), lambda value: value == 1)
        asking.cancel()
        await slow.until_nothing_is_left()
        await front.until_released()


async def test_disconnect_during_stream_releases_everything(pairs: Pairs, front: RouterUnderTest) -> None:
    body = {"model": MODEL, "prompt": fresh(40), "max_tokens": 20_000, "ignore_eos": True, "stream": True}
    async with front.request("/v1/completions", body) as response:
        assert response.status == 200
        await response.content.readline()
    await pairs.until_nothing_is_left()
    await front.until_released()


# SGLang's way, without a router


async def test_sglang_worker_describes_its_role(sglang: Pairs) -> None:
    for url, role in ((sglang.prefills[0], "prefill"), (sglang.decodes[0], "decode")):
        async with sglang.session.get(f"{url}/server_info") as response:
            info = await response.json()
        assert (info["disaggregation_mode"], info["dp_size"], info["page_size"]) == (role, 2, BLOCK)
        async with sglang.session.get(f"{url}/kv_event_sources") as response:
            assert response.status == 404  # it is no vLLM


async def test_sglang_worker_without_role_serves_alone() -> None:
    settings = SimulatedWorkerSettings(**FAST, disaggregation="sglang")
    async with running(settings) as url, router(url) as front:
        reply = await front.call("/v1/completions", {"model": MODEL, "prompt": fresh(40), "max_tokens": 2})
        assert reply.status == 200
        assert "x-kvrouter-prefill-worker" not in reply.headers
        (worker,) = await front.workers()
        assert worker["role"] == "both"

        await until(
            front.workers, lambda found: [rank["state"] for worker in found for rank in worker["ranks"]] == ["live"]
        )  # its events, in SGLang's dialect


@pytest.mark.parametrize(
    "settings",
    [
        {"role": "prefill"},
        {"role": "neither", "disaggregation": "nixl"},
        {"disaggregation": "mooncake"},
        {"transfer_timeout_s": 0},
        {"bootstrap_port": 65536},
        {"disaggregation": "sglang", "dp_size": 2},  # the ports of its event streams would be unknown
    ],
)
def test_conflicting_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="|".join(settings) + "|kv_events"):
        SimulatedWorkerSettings(**settings)


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"bootstrap_room": None}, "bootstrap_room"),
        ({"bootstrap_host": None}, "bootstrap_host"),
        ({"bootstrap_room": [2, 4]}, "bootstrap_room"),
        ({"bootstrap_room": 2**63}, "bootstrap_room"),
        ({"routed_dp_rank": 7}, "routed_dp_rank"),
        ({"n": 2}, "n"),
    ],
)
async def test_decode_request_needs_bootstrap_fields(sglang: Pairs, changed: dict[str, Any], field: str) -> None:
    status, answer = await sglang.ask(sglang.decodes[0], prompt=[1, 2, 3], **await sglang.room(a_room()) | changed)
    assert (status, answer["error"]["param"].partition(".")[0]) == (400, field)
    await sglang.until_nothing_is_left()


async def test_room_must_match_prefill_rank(sglang: Pairs) -> None:
    status, answer = await sglang.ask(sglang.prefills[0], prompt=[1, 2, 3], **await sglang.room(4), routed_dp_rank=1)
    assert (status, answer["error"]["param"]) == (400, "routed_dp_rank")

    body = {"prompt": fresh(40), "max_tokens": 3, **await sglang.room(a_room() + 1)}
    prefill, decode = await asyncio.gather(
        sglang.ask(sglang.prefills[0], **body, routed_dp_rank=1),
        sglang.ask(sglang.decodes[0], **body, routed_dp_rank=0, disagg_prefill_dp_rank=1),
    )
    assert (prefill[0], decode[0]) == (200, 200)
    assert prefill[1]["usage"]["completion_tokens"] == 1  # the rest is the decode worker's


async def test_missing_kv_times_out(sglang: Pairs) -> None:
    status, answer = await sglang.ask(sglang.decodes[0], prompt=fresh(40), stream=True, **await sglang.room(a_room()))
    assert status == 500
    assert "timed out" in answer["error"]["message"]
    await sglang.until_nothing_is_left()


async def test_abort_frees_both_workers(sglang: Pairs) -> None:
    for url in (sglang.decodes[0], sglang.prefills[0]):
        body = {"prompt": fresh(40), **await sglang.room(a_room()), "rid": "mine"}
        asking = asyncio.create_task(sglang.ask(url, **body))

        await until(lambda: sglang.metric("simulated:kv_rooms"), lambda value: value == 1)
        async with sglang.session.post(f"{url}/abort_request", json={"rid": "mine"}) as response:
            assert response.status == 200
        assert (await asking)[0] >= 500
        await sglang.until_nothing_is_left()


async def test_corrupted_kv_is_500(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    compute = KvMemory.compute

    def with_a_bad_byte(memory: KvMemory, sequence: CachedSequence, start: int, end: int) -> None:
        compute(memory, sequence, start, end)
        flip(memory, sequence.blocks[2])

    monkeypatch.setattr(KvMemory, "compute", with_a_bad_byte)
    async with simulated_pairs("sglang") as pairs:
        body = {"prompt": fresh(4 * BLOCK), "max_tokens": 3, "stream": True, **await pairs.room(a_room())}
        with caplog.at_level(logging.WARNING):
            (prefill, _), (decode, answer) = await asyncio.gather(
                pairs.ask(pairs.prefills[0], **body | {"stream": False}), pairs.ask(pairs.decodes[0], **body)
            )
        assert (prefill, decode) == (200, 500)
        assert "1 of 4 KV pages" in answer["error"]["message"]
        assert "1 of 4 KV pages" in caplog.text
        assert await pairs.metric("simulated:kv_pages_wrong_total") == 1
        await pairs.until_nothing_is_left()


def flip(memory: KvMemory, page: int) -> None:
    """Change one byte of a page, in memory itself."""
    args = memory.args()
    address = args.kv_data_ptrs[3] + page * args.kv_item_lens[3] + 5
    byte = ctypes.c_uint8.from_address(address)
    byte.value ^= 1


# vLLM's way, without a router


async def test_leased_blocks_are_kept_until_pulled(vllm: Pairs) -> None:
    prompt = fresh(100)
    params = await prefill_params(vllm, prompt)
    assert len(params["remote_block_ids"]) == 7
    assert await vllm.metric("vllm:kv_cache_usage_perc", *vllm.prefills) > 0
    body = {"prompt": prompt, "max_tokens": 3}

    status, answer = await vllm.ask(vllm.decodes[0], **body, kv_transfer_params=params | {"remote_block_ids": [1]})
    assert (status, "block_ids" in answer["error"]["message"]) == (500, True)
    status, answer = await vllm.ask(vllm.decodes[1], **body, kv_transfer_params=params)  # another decode worker may
    assert status == 200
    await vllm.until_nothing_is_left()
    status, _ = await vllm.ask(vllm.decodes[0], **body, kv_transfer_params=params)
    assert status == 500  # the blocks are released


async def test_unused_lease_expires(vllm: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "LEASE_S", 0.2)
    await prefill_params(vllm, fresh(100))
    await vllm.until_nothing_is_left()


async def test_pair_workers_answer_alone(vllm: Pairs, plain: str) -> None:
    body = {"prompt": fresh(60), "max_tokens": 5}
    answers = [await vllm.ask(url, **body) for url in (plain, vllm.prefills[0], vllm.decodes[0])]
    assert {status for status, _ in answers} == {200}
    assert len({answer["choices"][0]["text"] for _, answer in answers}) == 1
    assert answers[1][1]["kv_transfer_params"] is None


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"remote_port": "x"}, "kv_transfer_params.remote_port"),
        ({"remote_engine_id": None}, "kv_transfer_params.remote_engine_id"),
        ({"do_remote_decode": True}, "kv_transfer_params.do_remote_decode"),
    ],
)
async def test_invalid_transfer_params_are_refused(vllm: Pairs, changed: dict[str, Any], field: str) -> None:
    status, answer = await vllm.ask(vllm.decodes[0], prompt=[1, 2], kv_transfer_params=HANDED_OVER | changed)
    assert (status, answer["error"]["param"]) == (400, field)


async def test_missing_prefill_worker_is_500(vllm: Pairs) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        gone = {"remote_port": listening.getsockname()[1]}
    status, answer = await vllm.ask(vllm.decodes[0], prompt=fresh(20), kv_transfer_params=HANDED_OVER | gone)
    assert (status, "kv_pull" in answer["error"]["message"]) == (500, True)
