"""Workers that fail, hang and recover, as clients see it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from email.utils import formatdate
from itertools import cycle

import pytest
from router_under_test import RouterUnderTest, router, until
from scripted_worker import Exchange, Script, ScriptedWorker, scripted_worker, scripted_workers

PATH = "/v1/completions"
BODY = b'{"model": "m", "prompt": "x", "max_tokens": 1, "stream": true}'
TURNS = {"policy": {"name": "round_robin"}}
QUICK_STALL = {"probe_interval": 0.2, "metrics_interval": 0.1, "stall_seconds": 0.3}


async def stream(exchange: Exchange) -> None:
    await exchange.begin_chunks()
    await exchange.chunk(b"data: 1\n\n")
    await exchange.chunk(b"")


async def head_then_hang_up(exchange: Exchange) -> None:
    await exchange.begin_chunks()
    await exchange.hang_up()


async def head_then_nothing(exchange: Exchange) -> None:
    await exchange.begin_chunks()
    await exchange.until_closed()


async def overloaded(exchange: Exchange) -> None:
    await exchange.answer(b"too much", "503 Service Unavailable")


async def broken(exchange: Exchange) -> None:
    await exchange.answer(b"a bug", "500 Internal Server Error")


async def state(routed: RouterUnderTest, worker: ScriptedWorker) -> str:
    return next(str(known["state"]) for known in await routed.workers() if known["worker"] == worker.url)


async def test_stream_without_events_is_retried_on_another_worker() -> None:
    async with (
        scripted_worker(head_then_hang_up) as bad,
        scripted_worker(stream) as good,
        router(bad.url, good.url, **TURNS) as routed,
    ):
        reply = await routed.call(PATH, BODY)
        assert (reply.status, reply.worker, reply.body) == (200, good.url, b"data: 1\n\n")
        assert reply.headers["x-kvrouter-attempts"] == "2"
        await routed.until_released()


async def test_overloaded_worker_is_retried_elsewhere_and_ejected() -> None:
    async with (
        scripted_worker(overloaded) as bad,
        scripted_worker(stream) as good,
        router(bad.url, good.url, **TURNS, constants={"backoff": 300}) as routed,
    ):
        replies = [await routed.call(PATH, BODY) for _ in range(8)]
        assert {(reply.status, reply.worker) for reply in replies} == {(200, good.url)}
        assert len(bad.exchanges) == 3
        assert await state(routed, bad) == "ejected"


def refusing(status: int, headers: bytes = b"") -> Script:
    async def refuse(exchange: Exchange) -> None:
        await exchange.answer(b"refused", f"{status} Refused", headers)

    return refuse


@pytest.mark.parametrize(
    ("status", "statuses", "elsewhere"),
    [
        (429, [], True),
        (502, [], True),
        (503, [], True),
        *[(status, [], False) for status in (408, 500, 504, 501)],
        *[(status, [408, 500, 504], True) for status in (408, 500, 504)],
    ],
)
async def test_statuses_that_are_retried_elsewhere(status: int, statuses: list[int], elsewhere: bool) -> None:
    async with (
        scripted_worker(refusing(status)) as bad,
        scripted_worker(stream) as good,
        router(bad.url, good.url, **TURNS, proxy={"retry_statuses": statuses}) as routed,
    ):
        replies = [await routed.call(PATH, BODY) for _ in range(2)]
        assert sorted(reply.status for reply in replies) == ([200, 200] if elsewhere else [200, status])
        assert bad.exchanges


QUEUE_FULL = (
    b'data: {"error": {"object": "error", "message": "The request queue is full.", "type": "SERVICE_UNAVAILABLE", '
    b'"param": null, "code": 503}}\n\n'
)
ROLE = b'data: {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}\n\n'


def begins_with(*pieces: bytes) -> Script:
    """Return a script that begins a stream with these pieces, each in a chunk, and ends it."""

    async def answer(exchange: Exchange) -> None:
        await exchange.begin_chunks()
        for piece in pieces:
            await exchange.chunk(piece)
        await exchange.chunk(b"data: [DONE]\n\n")
        await exchange.chunk(b"")

    return answer


@pytest.mark.parametrize(
    "pieces",
    [
        (QUEUE_FULL,),
        (QUEUE_FULL[:20], QUEUE_FULL[20:]),
        (b": processing\n\n", QUEUE_FULL),
        (ROLE, QUEUE_FULL),
        (ROLE + QUEUE_FULL,),
        (b'event: message_start\ndata: {"type": "message_start"}\n\n', b"event: error\n" + QUEUE_FULL),
        (QUEUE_FULL.replace(b"503", b"429"),),
        (b'data: {"type": "error", "error": {"type": "overloaded_error", "message": "full"}}\n\n',),
    ],
)
async def test_stream_that_begins_with_an_error_is_retried_elsewhere_like_a_status(pieces: tuple[bytes, ...]) -> None:
    async with (
        scripted_worker(begins_with(*pieces)) as full,
        scripted_worker(stream) as idle,
        router(full.url, idle.url, **TURNS, constants={"backoff": 300}) as routed,
    ):
        replies = [await routed.call(PATH, BODY) for _ in range(8)]
        assert {(reply.status, reply.worker, reply.body) for reply in replies} == {(200, idle.url, b"data: 1\n\n")}
        assert full.exchanges
        # Only requests in flight make a refusal one of a full worker. This one answers nothing else.
        assert await state(routed, full) == ("ready" if b"429" in b"".join(pieces) else "ejected")
        await routed.until_released()


@pytest.mark.parametrize(
    "pieces",
    [
        (QUEUE_FULL.replace(b"503", b"400"),),
        (QUEUE_FULL.replace(b"503", b"500"),),
        (b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n', QUEUE_FULL),
        (ROLE, b": processing\n\n"),
    ],
)
async def test_other_streams_are_forwarded_as_they_are(pieces: tuple[bytes, ...]) -> None:
    async with (
        scripted_worker(begins_with(*pieces)) as first,
        scripted_worker(begins_with(*pieces)) as second,
        router(first.url, second.url, **TURNS) as routed,
    ):
        replies = [await routed.call(PATH, BODY) for _ in range(2)]
        whole = b"".join(pieces) + b"data: [DONE]\n\n"
        assert [(reply.status, reply.body) for reply in replies] == [(200, whole)] * 2
        assert len(first.exchanges) + len(second.exchanges) == 2
        await routed.until_released()


async def test_error_of_every_worker_in_its_stream_is_forwarded() -> None:
    async with scripted_worker(begins_with(QUEUE_FULL)) as full, router(full.url) as routed:
        reply = await routed.call(PATH, BODY)
        assert (reply.status, reply.body) == (200, QUEUE_FULL + b"data: [DONE]\n\n")


async def test_request_that_two_workers_answer_with_500_is_not_sent_to_a_third() -> None:
    async with (
        scripted_workers(broken, broken, broken) as workers,
        router(*[worker.url for worker in workers], **TURNS, proxy={"retry_statuses": [500]}) as routed,
    ):
        reply = await routed.call(PATH, BODY)
        assert (reply.status, sum(len(worker.exchanges) for worker in workers)) == (500, 2)


async def test_429_of_all_workers_is_returned_with_retry_after_and_ends_all_questions() -> None:
    async with (
        scripted_workers(*[refusing(429, b"retry-after: 7\r\n")] * 2) as workers,
        router(*[worker.url for worker in workers], **TURNS, admission={"timeout": 0.1}) as routed,
    ):
        replies = [await routed.call(PATH, BODY) for _ in range(3)]
        assert (replies[0].status, replies[0].body, replies[0].headers["retry-after"]) == (429, b"refused", "7")
        assert [(each.status, each.error["code"]) for each in replies[1:]] == [(429, "queue_timeout")] * 2
        # Both are paused after the first request, which is tried at each. Later ones are not sent.
        assert len(workers[0].exchanges) + len(workers[1].exchanges) == 2


async def test_no_retry_goes_to_a_paused_worker() -> None:
    async with (
        scripted_worker(refusing(429, b"retry-after: 30\r\n")) as paused,
        scripted_worker(Exchange.answer) as other,
        router(paused.url, other.url, **TURNS) as routed,
    ):
        await until(lambda: routed.call(PATH, BODY), lambda _: paused.exchanges)
        for failing, status in ((overloaded, 503), (refusing(429), 429), (ends_as_uvicorn, 500)):
            other.script = failing
            asked = len(paused.exchanges)
            assert (await routed.call(PATH, BODY)).status == status
            assert len(paused.exchanges) == asked
            other.script = Exchange.answer
            await until(lambda: routed.call(PATH, BODY), lambda reply: reply.worker == other.url)


async def test_retries_of_429_count_against_the_retry_budget() -> None:
    async with (
        scripted_worker(refusing(429)) as bad,
        scripted_worker(stream) as good,
        router(bad.url, good.url, **TURNS, proxy={"retry_share": 0}, constants={"retry_minimum": 1}) as routed,
    ):
        statuses = Counter([(await routed.call(PATH, BODY)).status for _ in range(6)])
        assert statuses[429] == len(bad.exchanges) - 1 > 0


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("dated", [False, True])
async def test_worker_that_sends_retry_after_is_paused_that_long(status: int, dated: bool) -> None:
    refused_at = 0.0

    async def refuse(exchange: Exchange) -> None:
        nonlocal refused_at
        refused_at = time.monotonic()
        after = formatdate(time.time() + 3, usegmt=True) if dated else "2"
        await exchange.answer(b"refused", f"{status} Refused", f"retry-after: {after}\r\n".encode())

    async with (
        scripted_worker(refuse) as bad,
        scripted_worker(stream) as good,
        router(bad.url, good.url, **TURNS) as routed,
    ):
        assert [(await routed.call(PATH, BODY)).status for _ in range(4)] == [200] * 4
        assert len(bad.exchanges) == 1
        bad.script = stream
        await until(lambda: routed.call(PATH, BODY), lambda reply: reply.worker == bad.url)
        assert time.monotonic() - refused_at >= 1.5


async def test_503_of_only_worker_is_returned() -> None:
    async with scripted_worker(overloaded) as worker, router(worker.url) as routed:
        for _ in range(6):  # it is still used
            reply = await routed.call(PATH, BODY)
            assert (reply.status, reply.body) == (503, b"too much")


async def test_worker_is_ejected_for_its_500s_if_another_worker_answers_the_last_of_them() -> None:
    async with (
        scripted_worker(broken) as bad,
        scripted_worker(stream) as good,
        router(bad.url, good.url, **TURNS, constants={"backoff": 300}) as routed,
    ):
        statuses = Counter([(await routed.call(PATH, BODY)).status for _ in range(12)])
        assert statuses == {500: 2, 200: 10}
        assert len(bad.exchanges) == 3


@pytest.mark.parametrize("at_once", [6, 60])
@pytest.mark.parametrize("good_share", [0, 3])
async def test_requests_that_every_worker_answers_with_500_eject_nobody(at_once: int, good_share: int) -> None:
    async def judges(exchange: Exchange) -> None:
        await (broken if b"bad" in exchange.body else stream)(exchange)

    async with (
        scripted_workers(judges, judges) as workers,
        router(*[worker.url for worker in workers], constants={"backoff": 300}) as routed,
    ):

        async def ask(number: int) -> int:
            prompt = "good" if good_share and number % good_share == 0 else "bad"
            return (await routed.call(PATH, {"model": "m", "prompt": prompt, "stream": True})).status

        statuses = Counter[int]()
        for first in range(0, 60, at_once):
            statuses.update(await asyncio.gather(*[ask(number) for number in range(first, first + at_once)]))
        good = len(range(0, 60, good_share)) if good_share else 0
        assert statuses == ({500: 60 - good, 200: good} if good else {500: 60})
        assert {each["state"] for each in await routed.workers()} == {"ready"}
        assert sum(len(worker.exchanges) for worker in workers) < 100


async def ends_as_uvicorn(exchange: Exchange) -> None:
    headers = b"content-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
    await exchange.answer(b"Internal Server Error", "500 Internal Server Error", headers)


async def ends_after_its_head(exchange: Exchange) -> None:
    await exchange.send(b"HTTP/1.1 500 Internal Server Error\r\nconnection: close\r\ncontent-length: 2\r\n\r\n")
    await asyncio.sleep(0.02)
    await exchange.send(b"{}")


async def ends_after_its_answer(exchange: Exchange) -> None:
    await broken(exchange)
    await asyncio.sleep(0.02)
    await exchange.hang_up()


@pytest.mark.parametrize("ends", [ends_as_uvicorn, ends_after_its_head, ends_after_its_answer])
async def test_500_of_worker_that_closes_its_connection_is_retried_elsewhere(ends: Script) -> None:
    async with (
        scripted_worker(ends) as ending,
        scripted_worker(stream) as good,
        router(ending.url, good.url, **TURNS) as routed,
    ):
        replies = [await routed.call(PATH, BODY) for _ in range(2)]
        assert {(reply.status, reply.worker) for reply in replies} == {(200, good.url)}
        assert ending.exchanges
        await routed.until_released()


async def test_500_of_removed_worker_is_retried_elsewhere() -> None:
    removed = asyncio.Event()

    async def ends(exchange: Exchange) -> None:
        await removed.wait()
        await broken(exchange)

    async with (
        scripted_worker(ends) as ending,
        scripted_worker(stream) as good,
        router(good.url, **TURNS, fleet={"slow_start": 0}) as routed,
    ):
        await routed.call("/workers", {"url": ending.url})
        await routed.until_up(2)
        asking = [asyncio.create_task(routed.call(PATH, BODY)) for _ in range(2)]
        await until(lambda: ending.exchanges)
        await routed.call(f"/workers?url={ending.url}", method="DELETE")
        removed.set()
        assert [(reply.status, reply.worker) for reply in await asyncio.gather(*asking)] == [(200, good.url)] * 2


async def hangs_up(exchange: Exchange) -> None:
    await exchange.hang_up()


@pytest.mark.parametrize("end", [broken, hangs_up])
async def test_request_survives_the_end_of_every_worker_of_a_rollout(end: Script) -> None:
    """More workers than `proxy.attempts` are removed and end, each with the request."""
    removed = [asyncio.Event() for _ in range(4)]

    def script(number: int) -> Script:
        async def ends(exchange: Exchange) -> None:
            await removed[number].wait()
            await end(exchange)

        return ends

    async with (
        scripted_workers(*map(script, range(4))) as old,
        scripted_worker(stream) as new,
        router(**TURNS, fleet={"slow_start": 0}) as routed,
    ):
        await routed.call("/workers", {"url": old[0].url})
        await routed.until_up()
        asking = asyncio.create_task(routed.call(PATH, BODY))
        for worker, following, event in zip(old, [*old[1:], new], removed, strict=True):
            await until(lambda worker=worker: worker.exchanges)
            await routed.call("/workers", {"url": following.url})
            await routed.until_up(2)
            await routed.call(f"/workers?url={worker.url}", method="DELETE")
            event.set()
        reply = await asking
        assert (reply.status, reply.worker) == (200, new.url)
        await routed.until_released()


async def test_request_that_ends_two_workers_with_500_is_not_sent_to_a_third() -> None:
    async with (
        scripted_workers(*[ends_as_uvicorn] * 3) as workers,
        router(*[worker.url for worker in workers], **TURNS) as routed,
    ):
        reply = await routed.call(PATH, BODY)
        assert (reply.status, reply.body) == (500, b"Internal Server Error")
        assert sum(len(worker.exchanges) for worker in workers) == 2


async def test_recovered_worker_is_used_again() -> None:
    async with (
        scripted_worker(broken) as bad,
        scripted_worker(stream) as good,
        router(bad.url, good.url, **TURNS, constants={"backoff": 0.1}) as routed,
    ):
        while await state(routed, bad) != "ejected":
            await routed.call(PATH, BODY)
        bad.script = stream

        await until(lambda: routed.call(PATH, BODY), lambda reply: reply.worker == bad.url)
        assert await state(routed, bad) == "ready"


@pytest.mark.parametrize("hang", [Exchange.until_closed, head_then_nothing])
async def test_hanging_worker_is_ejected_and_requests_are_retried(hang: object) -> None:
    async with (
        scripted_worker(stream) as hung,
        scripted_worker(stream) as one,
        scripted_worker(stream) as two,
        router(hung.url, one.url, two.url, **TURNS, fleet=QUICK_STALL, constants={"backoff": 300}) as routed,
    ):
        for _ in range(6):
            await routed.call(PATH, BODY)
        hung.script = hang  # type: ignore[assignment]
        replies = await asyncio.gather(*(routed.call(PATH, BODY) for _ in range(12)))
        assert {reply.status for reply in replies} == {200}
        assert hung.url not in {reply.worker for reply in replies}
        assert await state(routed, hung) == "ejected"
        await routed.until_released()


async def test_last_worker_is_never_ejected() -> None:
    finish = asyncio.Event()

    async def late(exchange: Exchange) -> None:
        await finish.wait()
        await stream(exchange)

    async with scripted_worker(stream) as worker, router(worker.url, fleet=QUICK_STALL) as routed:
        await routed.call(PATH, BODY)
        worker.script = late
        waiting = asyncio.create_task(routed.call(PATH, BODY))
        await asyncio.sleep(1.2)  # four times the silence that makes a worker hung
        assert await state(routed, worker) == "ready"
        finish.set()
        assert (await waiting).status == 200


async def test_request_that_hangs_workers_is_retried_once() -> None:
    async def hang(exchange: Exchange) -> None:
        await exchange.until_closed()

    async with (
        scripted_worker(stream) as one,
        scripted_worker(stream) as two,
        scripted_worker(stream) as three,
        router(one.url, two.url, three.url, **TURNS, fleet=QUICK_STALL, proxy={"idle_timeout": 2}) as routed,
    ):
        for _ in range(6):
            await routed.call(PATH, BODY)
        workers = (one, two, three)
        for worker in workers:
            worker.script = hang
        before = sum(len(worker.exchanges) for worker in workers)
        assert (await routed.call(PATH, BODY)).status == 504
        assert sum(len(worker.exchanges) for worker in workers) - before == 2


async def test_retries_stop_when_budget_is_spent() -> None:
    async with (
        scripted_worker(overloaded) as bad,
        scripted_worker(stream) as good,
        router(bad.url, good.url, **TURNS, proxy={"retry_share": 0}, constants={"retry_minimum": 1}) as routed,
    ):
        assert (await routed.call(PATH, BODY)).status == 200

        await until(lambda: routed.call(PATH, BODY), lambda reply: reply.status == 503)


async def test_requests_of_other_routers_count_as_load() -> None:
    metrics = b'vllm:num_requests_running{engine="0"} 7.0\n'
    async with (
        scripted_worker(stream) as busy,
        scripted_worker(stream) as idle,
        router(busy.url, idle.url, policy={"name": "least_loaded"}, fleet={"metrics_interval": 0.1}) as routed,
    ):
        busy.metrics = metrics

        await routed.until_metric(7, "kvrouter_requests_of_others", worker=busy.url)
        assert {(await routed.call(PATH, BODY)).worker for _ in range(8)} == {idle.url}


async def test_restarted_worker_is_warming() -> None:
    async with scripted_worker(stream) as worker, router(worker.url, constants={"retry_interval": 0.1}) as routed:
        assert await state(routed, worker) == "ready"
        await worker.stop()
        await routed.call(PATH, BODY)

        await routed.until_metric(1, "kvrouter_worker_state", worker=worker.url, state="down")
        await asyncio.sleep(0.3)  # for a probe to fail
        await worker.start()

        await until(lambda: state(routed, worker), lambda found: found == "warming")


async def test_hanging_rank_is_ejected_alone() -> None:
    """Requests of the hanging rank stay, and new requests are sent to the other rank of the worker."""

    async def one_rank_hangs(exchange: Exchange) -> None:
        await (Exchange.until_closed if exchange.header("x-data-parallel-rank") == [b"1"] else stream)(exchange)

    async with scripted_worker(stream) as worker:
        streams = [{"dp_rank": rank, "endpoint": "tcp://127.0.0.1:1"} for rank in range(2)]
        ranked = {"url": worker.url, "streams": streams}
        async with router(workers=[ranked], **TURNS, fleet=QUICK_STALL, constants={"backoff": 300}) as routed:
            for _ in range(4):
                assert (await routed.call(PATH, BODY)).status == 200
            worker.script = one_rank_hangs
            stuck = asyncio.create_task(routed.call(PATH, BODY)), asyncio.create_task(routed.call(PATH, BODY))

            async def found() -> bool:
                findings = await routed.findings()
                return any((each["finding"], each.get("dp_rank")) == ("rank_ejected", 1) for each in findings)

            await until(found)
            replies = [await routed.call(PATH, BODY) for _ in range(4)]
            assert {(reply.status, reply.headers["x-kvrouter-dp-rank"]) for reply in replies} == {(200, "0")}
            assert await state(routed, worker) == "ready"
            for task in stuck:
                task.cancel()
            await asyncio.gather(*stuck, return_exceptions=True)


turns = cycle((broken, stream))


async def fails_every_other(exchange: Exchange) -> None:
    await next(turns)(exchange)


async def slow(exchange: Exchange) -> None:
    await asyncio.sleep(0.8)
    await stream(exchange)


@pytest.mark.parametrize(
    # One after another, the failures never come three in a row: that would be another reason.
    ("script", "reason", "at_once"),
    [(fails_every_other, "of its requests fail", 1), (slow, "first bytes take", 16)],
)
async def test_outlier_worker_is_ejected(script: Script, reason: str, at_once: int) -> None:
    async with (
        scripted_workers(script, *[stream] * 3) as workers,
        router(*[each.url for each in workers], **TURNS, fleet={"slow_start": 0}, constants={"backoff": 300}) as routed,
    ):
        worse = workers[0]

        async def ejected_after_more() -> bool:
            for _ in range(16 // at_once):
                await asyncio.gather(*(routed.call(PATH, BODY) for _ in range(at_once)))
            return await state(routed, worse) == "ejected"

        await until(ejected_after_more)
        found = await routed.findings()
        found = [finding for finding in found if finding["finding"] != "prompts_by_text"]
        assert [(each["finding"], each["worker"]) for each in found] == [("worker_ejected", worse.url)]
        assert reason in found[0]["detail"]
        replies = [await routed.call(PATH, BODY) for _ in range(8)]
        assert {(reply.status, reply.worker == worse.url) for reply in replies} == {(200, False)}
