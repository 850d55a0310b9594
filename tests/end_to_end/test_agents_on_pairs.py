"""Messages and responses, which agents send, through prefill and decode workers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from scripted_pairs import HANDED_OVER, Fleet, fleet, prefill, stream
from scripted_worker import Exchange, Script, ScriptedWorker, scripted_worker

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
WORDS = " ".join(f"word{number}" for number in range(200))
MESSAGE: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": WORDS}]}
RESPONSE: dict[str, Any] = {"model": "m", "input": WORDS, "store": False}
ASKED = [(MESSAGES, MESSAGE), (RESPONSES, RESPONSE)]
NO_ROOM = b"Invalid request: Disaggregated request received without bootstrap room id. req.rid='1'"
ANNOUNCED = (
    b'event: message_start\ndata: {"type": "message_start", "message": {}}\n\n'
    b'event: error\ndata: {"type": "error", "error": {"type": "invalid_request_error", "message": "%b"}}\n\n' % NO_ROOM
)


def sent_to(worker: ScriptedWorker, path: str) -> list[Exchange]:
    return [exchange for exchange in worker.exchanges if exchange.target == path]


@pytest.mark.parametrize(("path", "body"), ASKED)
@pytest.mark.parametrize("streamed", [False, True])
async def test_vllms_workers_hand_over_messages_and_responses(path: str, body: dict[str, Any], streamed: bool) -> None:
    async with fleet("nixl", [prefill], [stream]) as both:
        asked = body | {"stream": streamed}
        reply = await both.routed.call(path, asked)
        assert (reply.status, reply.worker) == (200, both.decodes[0].url)
        assert reply.headers["x-kvrouter-prefill-worker"] == both.prefills[0].url
        (first,), (second,) = (sent_to(worker, path) for worker in (both.prefills[0], both.decodes[0]))
        assert json.loads(first.body)["kv_transfer_params"]["do_remote_decode"] is True
        assert json.loads(second.body) == asked | {"kv_transfer_params": json.loads(HANDED_OVER)}
        await both.nothing_is_left()


async def meeting(both: Fleet, path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return where each worker of a pair of SGLang reads the room of its last request: in the body or in headers."""
    found = []
    for worker in (both.prefills[0], both.decodes[0]):
        last = sent_to(worker, path)[-1]
        headers = {name.removeprefix("x-override-").replace("-", "_"): value.decode() for name, value in last.headers}
        found.append(headers if path == MESSAGES else json.loads(last.body))
    return found[0], found[1]


@pytest.mark.parametrize(("path", "body"), ASKED)
@pytest.mark.parametrize("streamed", [False, True])
async def test_sglangs_workers_meet_for_messages_and_responses(path: str, body: dict[str, Any], streamed: bool) -> None:
    waits = asyncio.Event()

    async def prefill_waits(exchange: Exchange) -> None:
        await waits.wait()
        await exchange.answer(b"{}")

    async def decode(exchange: Exchange) -> None:
        waits.set()
        await stream(exchange)

    async with fleet("sglang", [prefill_waits], [decode]) as both:
        reply = await both.routed.call(path, body | {"stream": streamed})
        assert (reply.status, reply.worker) == (200, both.decodes[0].url)
        first, second = await meeting(both, path)
        for name in ("bootstrap_host", "bootstrap_port", "bootstrap_room"):
            assert str(first[name]) == str(second[name])
        assert 0 <= int(first["bootstrap_room"]) < 2**63
        await both.nothing_is_left()


def without_room(streamed: bool) -> Script:
    """A worker of a pair of SGLang that reads no room of messages, because header overrides are off."""

    async def script(exchange: Exchange) -> None:
        if exchange.target != MESSAGES:
            await stream(exchange)
        elif streamed:
            await exchange.begin_chunks()
            await exchange.chunk(ANNOUNCED)
            await exchange.chunk(b"")
        else:
            error = {"type": "error", "error": {"type": "invalid_request_error", "message": NO_ROOM.decode()}}
            await exchange.answer(json.dumps(error).encode(), "400 Bad Request")

    return script


@pytest.mark.parametrize("streamed", [False, True])
async def test_message_that_sglangs_pair_refuses_is_refused_with_the_remedy(streamed: bool) -> None:
    async with fleet("sglang", [without_room(streamed)], [without_room(streamed)]) as both:
        for _ in range(3):
            reply = await both.routed.call(MESSAGES, MESSAGE | {"stream": streamed})
            assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")
            assert "SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES=1" in reply.error["message"]
        assert len(sent_to(both.prefills[0], MESSAGES)) == len(sent_to(both.decodes[0], MESSAGES)) == 1
        assert (await both.routed.call("/v1/completions", {"model": "m", "prompt": [1], "stream": True})).status == 200
        await both.nothing_is_left()


@pytest.mark.parametrize("streamed", [False, True])
async def test_message_that_a_pair_refuses_is_sent_to_a_worker_that_computes_it_whole(streamed: bool) -> None:
    async with (
        scripted_worker() as whole,
        fleet("sglang", [without_room(streamed)], [without_room(streamed)], wholes=(whole.url,)) as both,
    ):
        replies = [await both.routed.call(MESSAGES, MESSAGE | {"stream": streamed}) for _ in range(4)]
        assert {(reply.status, reply.worker) for reply in replies[1:]} == {(200, whole.url)}
        assert replies[0].status == 200
        assert len(sent_to(both.decodes[0], MESSAGES)) <= 1
        await both.nothing_is_left()


NEXT_TURN = {"model": "m", "input": "x", "previous_response_id": "resp_1"}


async def test_response_that_continues_a_stored_one_is_computed_by_the_worker_that_can() -> None:
    async with fleet("nixl", [prefill], [stream]) as both:
        reply = await both.routed.call(RESPONSES, NEXT_TURN)
        assert (reply.status, reply.worker) == (200, both.decodes[0].url)
        assert json.loads(both.decodes[0].last.body) == NEXT_TURN
        assert both.prefills[0].exchanges == []
    async with fleet("sglang", [prefill], [stream]) as both:
        reply = await both.routed.call(RESPONSES, NEXT_TURN)
        assert (reply.status, reply.error["code"]) == (400, "not_disaggregated")
        assert "send the whole input" in reply.error["message"]
        assert both.decodes[0].exchanges == []


@pytest.mark.parametrize(("path", "body"), ASKED)
async def test_engine_that_hands_over_no_messages_computes_them_whole(path: str, body: dict[str, Any]) -> None:
    async with scripted_worker() as whole, fleet("trtllm", [prefill], [stream], wholes=(whole.url,)) as both:
        assert {(await both.routed.call(path, body)).worker for _ in range(4)} == {whole.url}
    async with fleet("trtllm", [prefill], [stream]) as both:
        assert (await both.routed.call(path, body)).worker == both.decodes[0].url
        assert both.prefills[0].exchanges == []


async def test_counting_tokens_needs_no_prefill_worker() -> None:
    async with fleet("sglang", [prefill], [stream]) as both:
        assert (await both.routed.call(f"{MESSAGES}/count_tokens", MESSAGE)).worker == both.decodes[0].url
