"""Workers that refuse requests because they are full: the requests wait for their turn, and no worker is ejected."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from itertools import chain
from typing import Any

import pytest
from router_under_test import QUICK, RouterUnderTest, router, until
from scripted_worker import Exchange, ScriptedWorker, scripted_worker, scripted_workers
from simulated_workers import simulated_workers

PATH = "/v1/completions"
BODY = b'{"model": "m", "prompt": "Hello", "stream": true}'
METRICS = b'vllm:num_requests_running{engine="0"} %d.0\nvllm:generation_tokens_total{engine="0"} %d.0\n'
QUEUE_FULL = b'data: {"error": {"message": "The request queue is full.", "code": 503}}\n\n'
FLEET: dict[str, Any] = {"fleet": {**QUICK, "slow_start": 0}, "constants": {"backoff": 30}}
NO_RETRIES = {"proxy": {"retry_share": 0}, "constants": {"backoff": 30, "retry_minimum": 0}}


class OneSlot:
    """The script of a worker that computes one request at a time, until `free`, and refuses all others.

    - `refusal`: the status line and the headers of a refusal; None: an error in the first event of a stream.
    - `refused`: the number of refusals.
    """

    def __init__(self, refusal: str | None = "503 Full", headers: bytes = b"") -> None:
        self.refused = 0
        self.answered: list[bytes] = []
        self._free: asyncio.Event | None = None
        self._refusal = refusal
        self._headers = headers

    async def __call__(self, exchange: Exchange) -> None:
        if self._free is not None:
            self.refused += 1
            if self._refusal is not None:
                await exchange.answer(b"full", self._refusal, self._headers)
                return
            await self._stream(exchange, QUEUE_FULL)
            return
        self._free = asyncio.Event()
        await self._free.wait()
        self._free = None
        self.answered.append(exchange.body)
        await self._stream(exchange, b"data: 1\n\n")

    def free(self) -> None:
        """Answer the request that is computed."""
        assert self._free is not None
        self._free.set()

    @property
    def computes(self) -> bool:
        return self._free is not None

    async def _stream(self, exchange: Exchange, event: bytes) -> None:
        await exchange.begin_chunks()
        await exchange.chunk(event)
        await exchange.chunk(b"")


def ask(routed: RouterUnderTest, number: int, **fields: Any) -> asyncio.Task[Any]:
    return asyncio.create_task(
        routed.call(PATH, {"model": "m", "prompt": f"number {number}", "stream": True, **fields})
    )


async def state(routed: RouterUnderTest, worker: ScriptedWorker) -> str:
    return next(str(known["state"]) for known in await routed.workers() if known["worker"] == worker.url)


async def test_more_requests_than_a_fleet_takes_are_all_answered_and_no_worker_is_ejected() -> None:
    slots: dict[str, Any] = {"max_num_seqs": 2, "max_waiting": 2, "base_step_s": 0.005}
    async with simulated_workers(2, **slots) as urls, router(*urls) as routed:
        await routed.until_live()
        body = {"model": "simulated", "prompt": "Hello", "max_tokens": 4}

        async def client() -> list[int]:
            return [(await routed.call(PATH, body)).status for _ in range(5)]

        statuses = Counter(chain.from_iterable(await asyncio.gather(*[client() for _ in range(20)])))
        assert statuses == {200: 100}
        assert {each["state"] for each in await routed.workers()} == {"ready"}
        assert await routed.metric("kvrouter_requests_retried_total") == 0
        assert 0 < await routed.metric("kvrouter_worker_full_total") < 150
        await routed.until_released()


@pytest.mark.parametrize("refusal", ["503 Service Unavailable", "429 Too Many Requests", None])
async def test_refusal_of_a_full_worker_costs_one_question_and_no_place_in_the_queue(refusal: str | None) -> None:
    slot = OneSlot(refusal)
    settings: dict[str, Any] = FLEET | NO_RETRIES
    async with scripted_worker(slot) as worker, router(worker.url, **settings) as routed:
        asked = [ask(routed, 0)]
        await until(lambda: slot.computes)
        asked.append(ask(routed, 1))
        await until(lambda: slot.refused == 1)
        for number in (2, 3):
            asked.append(ask(routed, number))
            await routed.until_queued(number)
        assert slot.refused == 1, "a full worker is asked once"
        for count in range(4):
            await until(lambda: slot.computes)
            slot.free()
            await until(lambda: len(slot.answered), lambda answered, count=count: answered == count + 1)
        replies = await asyncio.gather(*asked)
        assert [(reply.status, reply.body) for reply in replies] == [(200, b"data: 1\n\n")] * 4
        assert all(b"number %d" % number in body for number, body in enumerate(slot.answered)), "out of order"
        assert all("x-kvrouter-attempts" not in reply.headers for reply in replies)
        assert await state(routed, worker) == "ready"
        await routed.until_released()


async def test_worker_that_answers_503_to_everything_is_ejected_although_many_requests_are_in_flight() -> None:
    async def refuse(exchange: Exchange) -> None:
        await exchange.answer(b"broken", "503 Service Unavailable")

    async with (
        scripted_workers(refuse, Exchange.answer) as (bad, good),
        router(bad.url, good.url, **FLEET) as routed,
    ):

        async def client() -> list[int]:
            return [(await routed.call(PATH, BODY)).status for _ in range(8)]

        statuses = set(chain.from_iterable(await asyncio.gather(*[client() for _ in range(10)])))
        assert statuses == {200}
        assert await state(routed, bad) == "ejected"
        assert len(bad.exchanges) < 40
        await routed.until_released()


async def test_worker_that_is_full_of_requests_of_others_is_asked_again_and_not_ejected() -> None:
    slot = OneSlot()
    async with scripted_worker(slot) as worker:
        worker.metrics = METRICS % (1, 0)
        async with router(worker.url, **FLEET | {"fleet": {**FLEET["fleet"], "metrics_interval": 0.1}}) as routed:
            await routed.until_metric(1, "kvrouter_requests_of_others")
            other = asyncio.create_task(routed.session.post(f"{worker.url}{PATH}", data=b"number 0").__aenter__())
            await until(lambda: slot.computes)
            asked = ask(routed, 1)
            tokens = 0
            while slot.refused < 4:  # more than the failures that eject a worker
                assert not asked.done()
                tokens += 1
                worker.metrics = METRICS % (1, tokens)
                await asyncio.sleep(0.02)
            assert await state(routed, worker) == "ready"
            slot.free()
            (await other).close()
            await until(lambda: slot.computes)
            slot.free()
            assert (await asked).status == 200


async def test_nobody_asks_before_retry_after_although_requests_end() -> None:
    slot = OneSlot(headers=b"retry-after: 2\r\n")
    async with scripted_worker(slot) as worker, router(worker.url, **FLEET) as routed:
        first = ask(routed, 0)
        await until(lambda: slot.computes)
        second = ask(routed, 1)
        await until(lambda: slot.refused)
        refused_at = time.monotonic()
        slot.free()
        assert (await first).status == 200
        await until(lambda: slot.computes)
        assert time.monotonic() - refused_at >= 1.5
        slot.free()
        assert (await second).status == 200


async def test_request_waits_for_a_full_worker_and_is_not_sent_to_an_ejected_one() -> None:
    slot = OneSlot()

    async def fail(exchange: Exchange) -> None:
        await exchange.answer(b"a bug", "500 Internal Server Error")

    async with scripted_workers(fail, Exchange.answer) as (bad, full), router(bad.url, full.url, **FLEET) as routed:
        while await state(routed, bad) != "ejected":
            await routed.call(PATH, BODY)
        asked, full.script = len(bad.exchanges), slot
        first = ask(routed, 0)
        await until(lambda: slot.computes)
        second = ask(routed, 1)
        await routed.until_queued(1)
        slot.free()
        assert (await first).status == 200
        await until(lambda: slot.computes)
        slot.free()
        assert (await second).status == 200
        assert (slot.refused, len(bad.exchanges)) == (1, asked)


async def test_full_prefill_worker_of_a_pair_is_asked_again_with_the_request() -> None:
    handed_over = b'{"choices": [], "kv_transfer_params": {"remote_block_ids": [1]}}'
    gate = asyncio.Event()
    refused = 0
    computing = False

    async def prefill(exchange: Exchange) -> None:
        nonlocal refused, computing
        if computing:
            refused += 1
            await exchange.answer(b"full", "503 Service Unavailable")
            return
        computing = True
        await gate.wait()
        computing = False
        await exchange.answer(handed_over)

    async def decode(exchange: Exchange) -> None:
        await exchange.begin_chunks()
        await exchange.chunk(b"data: 1\n\n")
        await exchange.chunk(b"")

    async with scripted_workers(prefill, decode) as (first, second):
        for worker in (first, second):
            worker.metrics = METRICS % (0, 0)
        workers = [{"url": first.url, "role": "prefill"}, {"url": second.url, "role": "decode"}]
        pairs = {"backend": "nixl", "decode_computes": False}
        settings: dict[str, Any] = FLEET | NO_RETRIES
        async with router(workers=workers, disaggregation=pairs, **settings) as routed:
            asked = [ask(routed, number, max_tokens=4) for number in range(3)]
            await until(lambda: refused >= 1)
            await routed.until_queued(2)
            assert not second.exchanges
            gate.set()
            assert [(await each).status for each in asked] == [200] * 3
            assert {each["state"] for each in await routed.workers()} == {"ready"}
            await routed.until_released()
