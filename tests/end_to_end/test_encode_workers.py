"""Media items on encode workers: what each worker receives, byte by byte, and what their failures lead to."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from router_under_test import QUICK, Reply, RouterUnderTest, router, until
from scripted_worker import Exchange, Script, ScriptedWorker, scripted_workers

import simulator.worker
from router.apis.endpoints import read_request
from router.apis.messages import media_parts
from router.apis.requests import ChatPrompt
from router.auth import hashed_key
from router.tokens.local_tokenizer import LocalTokenizer
from router.tokens.model_files import ModelFiles

PATH = "/v1/chat/completions"
ENCODERS, WORKERS = 3, 2
PER_REQUEST, PER_ENCODER = 4, 2
STEADY = {**QUICK, "slow_start": 0, "failures": 1000}  # no failure of one test affects the next
IMAGE = b'{ "type":"image_url", "image_url":{"url":"data:image/png;base64,aGVsbG8"} }'
TEXT = b'{"type":"text","text":"What is this?"}'
# What a chat with the item of `IMAGE` is sent with: the parameters of `encoded`, merged.
MERGED = b',"ec_transfer_params":{"hash-0":{ "peer_port":5e1 ,"size_bytes": 0}}'
LONG_TEXT = b'{"type":"text","text":"%b"}' % (b"What is this? " * 20)


def image(number: int) -> bytes:
    return b'{"type":"image_url","image_url":{"url":"http://images.example/%d.png"}}' % number


def chat(*parts: bytes, more: bytes = b"") -> bytes:
    return b'{"model": "m", "messages": [{"role": "user", "content": [%b]}]%b}' % (b", ".join(parts), more)


def to_encoder(part: bytes, more: bytes = b"") -> bytes:
    return b'{"model":"m","messages":[{"role":"user","content":[%b]}],"max_tokens":1,"stream":false%b}' % (part, more)


def params(number: int) -> bytes:
    """Return the parameters of an answer, in a form that no JSON library writes."""
    return b'{"hash-%d" : { "peer_port":5e1 ,"size_bytes": %d}}' % (number, number)


async def encoded(exchange: Exchange) -> None:
    """Answer as an encode worker, by the number in the item's URL."""
    number = int(exchange.body.partition(b".png")[0].rpartition(b"/")[2] or 0) if b".png" in exchange.body else 0
    await exchange.answer(b'{"choices": [], "ec_transfer_params": %b}' % params(number))


async def answered(exchange: Exchange) -> None:
    await exchange.answer(b'{"choices": [], "kv_transfer_params": {"remote_block_ids": [1]}}')


async def unavailable(exchange: Exchange) -> None:
    await exchange.answer(b"busy", "503 Service Unavailable")


async def refused(exchange: Exchange) -> None:
    await exchange.answer(b"no image", "400 Bad Request")


async def broken(exchange: Exchange) -> None:
    await exchange.send(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{")
    await exchange.hang_up()


class Fleet:
    """Encode workers, other workers, and routers in front of them.

    - `routed`: the settings of most tests.
    - `pairs`: a prefill and a decode worker.
    - `sidecars`: workers whose sidecars send the items.
    - `dependent`: workers without an encoder.
    """

    routed: RouterUnderTest
    pairs: RouterUnderTest
    sidecars: RouterUnderTest
    dependent: RouterUnderTest

    def __init__(self, encoders: list[ScriptedWorker], workers: list[ScriptedWorker]) -> None:
        self.encoders = encoders
        self.workers = workers

    def reset(self) -> None:
        for each, script in (
            *((each, encoded) for each in self.encoders),
            *((each, answered) for each in self.workers),
        ):
            each.script, each.exchanges = script, []

    def encode(self, script: Script) -> None:
        for each in self.encoders:
            each.script = script

    def items(self) -> list[bytes]:
        """Return the bodies that encode workers received, in no order."""
        return sorted(each.body for encoder in self.encoders for each in encoder.exchanges)

    @property
    def chats(self) -> list[Exchange]:
        return [each for worker in self.workers for each in worker.exchanges]

    async def ask(
        self, *parts: bytes, routed: RouterUnderTest | None = None, more: bytes = b"", **options: Any
    ) -> Reply:
        return await (routed or self.routed).call(PATH, chat(*parts, more=more), **options)


@pytest.fixture(scope="module")
async def running_fleet() -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        encoders = await stack.enter_async_context(scripted_workers(*[encoded] * ENCODERS))
        workers = await stack.enter_async_context(scripted_workers(*[answered] * WORKERS))
        fleet = Fleet(encoders, workers)
        known: list[dict[str, Any]] = [{"url": each.url, "role": "encode"} for each in encoders]
        integrated = [*known, *({"url": each.url} for each in workers)]
        split = [{"url": each.url, "role": role} for each, role in zip(workers, ("prefill", "decode"), strict=True)]
        constants = {"encoded_at_once": PER_REQUEST, "items_of_encoder": PER_ENCODER}

        async def started(workers: list[dict[str, Any]], **sections: Any) -> RouterUnderTest:
            return await stack.enter_async_context(
                router(workers=workers, **({"constants": constants, "fleet": STEADY} | sections))
            )

        fleet.routed = await started(integrated, policy={"name": "round_robin"})
        forced = {"backend": "nixl", "decode_computes": False}
        fleet.pairs = await started([*known, *split], disaggregation=forced)
        fleet.sidecars = await started(integrated, disaggregation={"backend": "sidecar"})
        fleet.dependent = await started(integrated, encoding={"workers_encode": False}, proxy={"engine_fields": "pass"})
        yield fleet


@pytest.fixture
async def fleet(running_fleet: Fleet) -> AsyncIterator[Fleet]:
    fleet = running_fleet
    fleet.reset()
    yield fleet
    fleet.reset()
    for routed in (fleet.routed, fleet.pairs, fleet.sidecars, fleet.dependent):
        await routed.until_up(ENCODERS + WORKERS)


async def test_chat_carries_what_encode_worker_answered(fleet: Fleet) -> None:
    body = chat(TEXT, IMAGE, more=b', "mm_processor_kwargs": {"max_pixels":  9}, "max_tokens": 7')
    reply = await fleet.routed.call(PATH, body)
    assert reply.status == 200
    assert fleet.items() == [to_encoder(IMAGE, b',"mm_processor_kwargs":{"max_pixels":  9}')]
    (received,) = fleet.chats
    assert received.body == body[:-1] + MERGED + b"}"
    (encoder,) = [each for each in fleet.encoders if each.exchanges]
    assert reply.headers["x-kvrouter-encode-workers"] == encoder.url
    (request_id,) = received.header("x-request-id")
    assert encoder.last.header("x-request-id") == [request_id + b"-encode-0"]
    await fleet.routed.until_released()


async def test_text_skips_the_stage(fleet: Fleet) -> None:
    body = chat(TEXT)
    reply = await fleet.routed.call(PATH, body)
    assert (reply.status, fleet.items(), fleet.chats[0].body) == (200, [], body)
    assert "x-kvrouter-encode-workers" not in reply.headers
    words = chat(b'{"type":"text","text":"the type \\"image_url\\""}')
    assert (await fleet.routed.call(PATH, words)).status == 200
    assert (fleet.items(), fleet.chats[-1].body in (body, words)) == ([], True)


async def test_large_item_is_sent_as_it_is(fleet: Fleet) -> None:
    large = IMAGE.replace(b"aGVsbG8", b"aGVs" * 200_000)
    body = chat(TEXT, large)
    assert (await fleet.routed.call(PATH, body)).status == 200
    assert fleet.items() == [to_encoder(large)]
    assert fleet.chats[0].body == body[:-1] + MERGED + b"}"


async def test_equal_items_are_encoded_once(fleet: Fleet) -> None:
    await fleet.ask(image(1), image(2), image(1), IMAGE, IMAGE)
    assert fleet.items() == sorted([to_encoder(image(1)), to_encoder(image(2)), to_encoder(IMAGE)])
    sent = json.loads(fleet.chats[0].body)["ec_transfer_params"]
    assert sorted(sent) == ["hash-0", "hash-1", "hash-2"]


async def test_item_returns_to_the_encode_worker_that_had_it(fleet: Fleet) -> None:
    places = []
    for _ in range(2):
        for number in range(36):
            await fleet.ask(image(number))
        places.append([[each.body for each in encoder.exchanges] for encoder in fleet.encoders])
        fleet.reset()
    assert places[0] == places[1]
    assert all(places[0])  # each encode worker has a part of the items


async def test_items_are_encoded_side_by_side_within_their_bounds(fleet: Fleet) -> None:
    now, most, gate = 0, 0, asyncio.Event()
    at_once: dict[int, int] = {}

    async def held(exchange: Exchange) -> None:
        nonlocal now, most
        encoder = exchange.writer.get_extra_info("sockname")[1]
        now, at_once[encoder] = now + 1, at_once.get(encoder, 0) + 1
        most = max(most, now)
        assert at_once[encoder] <= PER_ENCODER
        await gate.wait()
        now, at_once[encoder] = now - 1, at_once[encoder] - 1
        await encoded(exchange)

    fleet.encode(held)
    asked = [asyncio.create_task(fleet.ask(*map(image, range(start, start + 9)))) for start in (0, 20)]
    await until(lambda: now > PER_ENCODER)
    gate.set()
    assert [reply.status for reply in await asyncio.gather(*asked)] == [200, 200]
    assert len(fleet.items()) == 18
    one = asyncio.create_task(fleet.ask(*map(image, range(40, 60))))
    most = 0
    assert (await one).status == 200
    assert most <= PER_REQUEST
    await fleet.routed.until_released()


@pytest.mark.parametrize("how", ["broken", "503", "stopped", "nonsense", "not UTF-8"])
async def test_another_encode_worker_takes_over(fleet: Fleet, how: str) -> None:
    failed: list[ScriptedWorker] = []

    async def first_fails(exchange: Exchange) -> None:
        (encoder,) = [each for each in fleet.encoders if exchange in each.exchanges]
        if failed:
            await encoded(exchange)
            return
        failed.append(encoder)
        if how == "503":
            await unavailable(exchange)
        elif how == "nonsense":
            await exchange.answer(b"not JSON")
        elif how == "not UTF-8":
            await exchange.answer(b'{"ec_transfer_params": {"hash-0": "\xff"}}')
        else:
            await broken(exchange)

    if how == "stopped":
        await fleet.ask(IMAGE)
        (stopped,) = [each for each in fleet.encoders if each.exchanges]
        fleet.reset()
        await stopped.stop()
        reply = await fleet.ask(IMAGE)
        assert stopped.exchanges == []
        await stopped.start()
    else:
        fleet.encode(first_fails)
        reply = await fleet.ask(IMAGE)
        assert len(fleet.items()) == 2
        assert reply.headers["x-kvrouter-encode-workers"] != failed[0].url
    assert reply.status == 200
    assert b'"hash-0"' in fleet.chats[-1].body
    await fleet.routed.until_released()


async def test_items_move_from_an_encode_worker_that_hangs(fleet: Fleet) -> None:
    async with scripted_workers(encoded, encoded) as encoders:  # the probes of other routers would hang too
        known = [{"url": fleet.workers[0].url}, *({"url": each.url, "role": "encode"} for each in encoders)]
        async with router(workers=known, fleet=STEADY | {"stall_seconds": 0.3}) as routed:
            await fleet.ask(IMAGE, routed=routed)
            (hung,) = [each for each in encoders if each.exchanges]
            hung.script, hung.answers_discovery = Exchange.until_closed, False
            reply = await fleet.ask(IMAGE, routed=routed)
    assert reply.status == 200
    assert reply.headers["x-kvrouter-encode-workers"] not in (hung.url, "")
    assert MERGED in fleet.chats[-1].body


async def test_item_breaks_at_most_two_encode_workers(fleet: Fleet) -> None:
    fleet.encode(broken)
    body = chat(IMAGE)
    assert (await fleet.routed.call(PATH, body)).status == 200
    assert (len(fleet.items()), fleet.chats[0].body) == (2, body)  # the worker encodes the item itself


async def test_refused_item_is_left_to_the_worker(fleet: Fleet) -> None:
    async def some(exchange: Exchange) -> None:
        await (refused if b"1.png" in exchange.body else encoded)(exchange)

    fleet.encode(some)
    assert (await fleet.ask(image(1), image(2))).status == 200
    assert len(fleet.items()) == 2
    assert list(json.loads(fleet.chats[0].body)["ec_transfer_params"]) == ["hash-2"]


async def test_workers_without_an_encoder_depend_on_encode_workers(fleet: Fleet) -> None:
    fleet.encode(unavailable)
    reply = await fleet.ask(IMAGE, routed=fleet.dependent)
    assert (reply.status, reply.error["code"]) == (503, "no_worker_available")
    assert "encode worker" in reply.error["message"]
    fleet.encode(refused)
    reply = await fleet.ask(IMAGE, routed=fleet.dependent)
    assert (reply.status, reply.error["param"]) == (400, "messages")
    assert "no image" in reply.error["message"]
    assert fleet.chats == []
    assert (await fleet.ask(TEXT, routed=fleet.dependent)).status == 200
    await fleet.dependent.until_released()


async def test_retried_chat_is_not_encoded_again(fleet: Fleet) -> None:
    first: list[Exchange] = []

    async def busy_first(exchange: Exchange) -> None:
        first.append(exchange)
        await (unavailable if len(first) == 1 else answered)(exchange)

    for worker in fleet.workers:
        worker.script = busy_first
    reply = await fleet.ask(IMAGE)
    assert (reply.status, reply.headers["x-kvrouter-attempts"], len(fleet.items())) == (200, "2", 1)
    assert first[0].body == first[1].body


async def test_client_that_leaves_stops_encoding(fleet: Fleet) -> None:
    closed = 0

    async def silent(exchange: Exchange) -> None:
        nonlocal closed
        await exchange.until_closed()
        closed += 1

    fleet.encode(silent)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3), fleet.routed.request(PATH, chat(image(1), image(2))):
            pass
    await until(lambda: closed == 2)
    await fleet.routed.until_released()
    assert fleet.chats == []
    states = {worker["url"]: worker["requests_in_flight"] for worker in await fleet.routed.workers()}
    assert set(states.values()) == {0}


async def test_deadline_covers_encoding(fleet: Fleet) -> None:
    fleet.encode(Exchange.until_closed)
    reply = await fleet.ask(IMAGE, headers={"x-request-timeout": "0.1"})
    assert reply.status == 504
    await fleet.routed.until_released()


async def test_prefill_worker_alone_receives_the_answers(fleet: Fleet) -> None:
    reply = await fleet.ask(IMAGE, routed=fleet.pairs)
    assert reply.status == 200
    prefill, decode = (worker.last for worker in fleet.workers)
    assert MERGED in prefill.body
    assert json.loads(prefill.body)["max_tokens"] == 1
    assert decode.body == chat(IMAGE)[:-1] + b',"kv_transfer_params":{"remote_block_ids": [1]}}'
    await fleet.pairs.until_released()


async def test_sidecar_is_told_the_encode_workers(fleet: Fleet) -> None:
    reply = await fleet.ask(image(1), TEXT, image(2), routed=fleet.sidecars)
    assert (reply.status, fleet.items()) == (200, [])
    (hosts,) = fleet.chats[0].header("x-encoder-hosts-ports")
    places = [encoder.url.removeprefix("http://").encode() for encoder in fleet.encoders]
    assert len(hosts.split(b",")) == 2
    assert set(hosts.split(b",")) <= set(places)
    assert (await fleet.ask(TEXT, routed=fleet.sidecars)).status == 200
    assert all(not chat.header("x-encoder-hosts-ports") for chat in fleet.chats if b"image" not in chat.body)
    await fleet.sidecars.until_released()


@pytest.mark.parametrize("backend", ["auto", "sidecar"])
async def test_item_for_an_encode_worker_is_a_request_of_its_tenant_under_its_own_name(
    fleet: Fleet, backend: str
) -> None:
    workers = [{"url": each.url, "role": "encode"} for each in fleet.encoders] + [{"url": fleet.workers[0].url}]
    tenants = {"isolate": True, "named": {"a": {"keys": [hashed_key("k")], "requests_per_second": 4}}}
    headers = {"authorization": "Bearer k"}
    sections = {"disaggregation": {"backend": backend}, "server": {"token": "t"}, "fleet": STEADY}
    async with router(workers=workers, tenants=tenants, **sections) as limited:
        await limited.until_up(len(workers))
        items = [image(each) for each in range(35)] + [image(35)[:-1] + b',"uuid":"u"}']
        assert (await fleet.ask(TEXT, routed=limited, headers=headers)).status == 200
        assert (await fleet.ask(TEXT, *items, items[0], routed=limited, headers=headers)).status == 200
        named = [body for body in (fleet.chats[-1].body, *fleet.items()) if b"uuid" in body]
        assert len(named) == (1 if backend == "sidecar" else 2)
        assert len({re.findall(rb'"uuid":"([0-9a-f]{64})"', body)[0] for body in named}) == 1
        late = await fleet.ask(TEXT, routed=limited, headers=headers)
    assert late.status == 429
    assert 5 <= int(late.headers["retry-after"]) <= 9  # 4 - 2 - 36 requests are left, and 4 more come each second


async def test_encode_workers_are_shown_and_drained_as_such(fleet: Fleet) -> None:
    workers = {worker["url"]: worker for worker in await fleet.routed.workers()}
    assert {workers[encoder.url]["role"] for encoder in fleet.encoders} == {"encode"}
    health = await fleet.routed.health()
    assert (health["workers_up"], health["workers_up_by_role"]) == (5, {"encode": 3, "both": 2})
    assert await fleet.routed.metric("kvrouter_model_workers", model="m") == WORKERS
    for encoder in fleet.encoders:
        await fleet.routed.call("/workers/drain", {"url": encoder.url})
    body = chat(IMAGE)
    assert (await fleet.routed.call(PATH, body)).status == 200
    assert (fleet.items(), fleet.chats[0].body) == ([], body)
    states = [worker["state"] for worker in await fleet.routed.workers() if worker["role"] == "encode"]
    assert states == ["drained"] * ENCODERS
    for encoder in fleet.encoders:
        await fleet.routed.call("/workers/undrain", {"url": encoder.url})


async def test_metrics_count_items(fleet: Fleet) -> None:
    before = await fleet.routed.metric("kvrouter_media_items_total", result="encoded")
    stages = await fleet.routed.metric("kvrouter_encode_seconds_count", model="m")
    await fleet.ask(image(1), image(2))
    assert await fleet.routed.metric("kvrouter_media_items_total", result="encoded") == before + 2
    assert await fleet.routed.metric("kvrouter_encode_seconds_count", model="m") == stages + 1
    assert await fleet.routed.metric("kvrouter_encode_requests_total", status="200") >= 2


async def test_params_of_clients_are_dropped_unless_they_may_send_them(fleet: Fleet) -> None:
    own = b', "ec_transfer_params": {"own": {"a":  1}, "hash-0": {}}'
    await fleet.ask(IMAGE, more=own)
    assert list(json.loads(fleet.chats[0].body)["ec_transfer_params"]) == ["hash-0"]
    await fleet.ask(IMAGE, more=own, routed=fleet.dependent)
    sent = b'"ec_transfer_params": {"own":{"a":  1},"hash-0":{ "peer_port":5e1 ,"size_bytes": 0}}'
    assert any(sent in each.body for each in fleet.chats)


async def test_fleet_of_encode_workers_alone_serves_nothing(fleet: Fleet) -> None:
    known = [{"url": each.url, "role": "encode"} for each in fleet.encoders]
    async with router(workers=known) as routed:
        await routed.until_up(ENCODERS)
        health = await routed.health()
        assert health["status"] == "no worker answers"
        assert (await routed.call("/ready")).status == 503
        assert (await routed.call("/v1/models")).json()["data"] == []
        assert (await routed.call(PATH, chat(TEXT))).status in (404, 503)
        assert fleet.items() == []


SEES_IMAGES = (
    "{% for m in messages %}<|im_start|>{% for p in m.content %}"
    "{% if p.type == 'image' %}<|endoftext|>{% else %}{{ p.text }}{% endif %}{% endfor %}<|im_end|>{% endfor %}"
)
PLACEHOLDER, IMAGE_TOKENS = 0, 64


def seeing(model: Path) -> Script:
    """Return the script of an engine that renders chats by a model, with a run of tokens for each image."""
    tokenizer = LocalTokenizer(ModelFiles.read(model))

    async def script(exchange: Exchange) -> None:
        if exchange.target == "/v1/models":
            await exchange.answer(b'{"data": [{"id": "m"}]}')
        elif exchange.target == PATH:
            await answered(exchange)
        elif exchange.target != f"{PATH}/render":
            await exchange.answer(status="404 Not Found")
        else:
            chat = read_request("POST", PATH, [], exchange.body).prompt
            assert isinstance(chat, ChatPrompt)
            urls = iter([part["image_url"]["url"] for part, _ in media_parts(chat.messages)])
            tokens, places, hashes = list[int](), list[dict[str, int]](), list[str]()
            for token in tokenizer.tokenize(chat)[0]:
                if token == PLACEHOLDER:
                    hashes.append(next(urls))
                    places.append({"offset": len(tokens), "length": IMAGE_TOKENS})
                    tokens += [token] * IMAGE_TOKENS
                else:
                    tokens.append(token)
            features = {"mm_hashes": {"image": hashes}, "mm_placeholders": {"image": places}}
            await exchange.answer(json.dumps({"token_ids": tokens, "features": features}).encode())

    return script


async def test_items_that_the_worker_has_cached_are_not_encoded(fleet: Fleet, tmp_path: Path) -> None:
    for each in Path(simulator.worker.__file__).with_name("model").glob("*.json"):
        (tmp_path / each.name).write_bytes(each.read_bytes())
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": SEES_IMAGES}))
    async with scripted_workers(seeing(tmp_path)) as [worker]:
        worker.answers_discovery = False
        known = [{"url": worker.url}, *({"url": each.url, "role": "encode"} for each in fleet.encoders)]
        settings: dict[str, Any] = {"workers": known, "fleet": STEADY, "models": {"m": {"tokenizer": str(tmp_path)}}}
        async with router(**settings) as routed:
            await routed.until_tokenizers_are_tried()
            assert (await fleet.ask(image(1), LONG_TEXT, routed=routed)).status == 200
            assert (await fleet.ask(image(1), LONG_TEXT, image(2), routed=routed)).overlap > IMAGE_TOKENS
            assert fleet.items() == [to_encoder(image(1)), to_encoder(image(2))]
            assert await routed.metric("kvrouter_media_items_total", result="cached") == 1
