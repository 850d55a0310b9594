"""Requests that name their worker, DP rank, session or id (`proxy.client_routing`), and the names of other routers."""

from __future__ import annotations

from hashlib import sha256

import pytest
from router_under_test import router
from scripted_worker import Exchange, scripted_worker, scripted_workers

PATH = "/v1/completions"
BODY = {"model": "m", "prompt": "x"}
KEY = "sk-team-key-of-tenant"
SERVER = {"token": "a-token-of-the-operator"}
FOLLOWED = {"client_routing": True}
TURNS = {"policy": {"name": "round_robin"}}


async def served(exchange: Exchange) -> None:
    await exchange.answer(b'{"choices": []}')


async def test_client_names_its_worker_by_index_url_or_name() -> None:
    async with scripted_workers(served, served, served) as workers:
        urls = [worker.url for worker in workers]
        async with router(*urls, **TURNS, proxy=FOLLOWED) as routed:
            listed = [each["worker"] for each in await routed.workers()]
            for named, url in ((str(listed.index(urls[1])), urls[1]), (urls[2], urls[2])):
                replies = [await routed.call(PATH, BODY, headers={"x-smg-target-worker": named}) for _ in range(4)]
                assert {(reply.status, reply.worker) for reply in replies} == {(200, url)}
            for unknown in ("3", "-1", "http://127.0.0.1:1"):
                reply = await routed.call(PATH, BODY, headers={"x-smg-target-worker": unknown})
                assert (reply.status, reply.error["param"]) == (503, "x-smg-target-worker")
        assert all(exchange.header("x-smg-target-worker") == [] for each in workers for exchange in each.exchanges)


async def test_request_for_one_worker_goes_to_no_other_when_that_one_fails() -> None:
    async def overloaded(exchange: Exchange) -> None:
        await exchange.answer(b"too much", "503 Service Unavailable")

    async with (
        scripted_workers(overloaded, served) as (bad, good),
        router(bad.url, good.url, proxy=FOLLOWED) as routed,
    ):
        reply = await routed.call(PATH, BODY, headers={"x-smg-target-worker": bad.url})
        assert (reply.status, reply.body, good.exchanges) == (503, b"too much", [])


async def test_client_names_its_dp_rank() -> None:
    async with scripted_worker(served) as worker:
        streams = [{"dp_rank": rank, "endpoint": f"tcp://127.0.0.1:{rank + 1}"} for rank in range(3)]
        async with router(
            workers=[{"url": worker.url, "streams": streams}], **TURNS, constants={"catch_up": 0}, proxy=FOLLOWED
        ) as routed:
            for rank in ("2", "2", "0"):
                reply = await routed.call(PATH, BODY, headers={"x-data-parallel-rank": rank})
                assert (reply.status, reply.headers["x-kvrouter-dp-rank"]) == (200, rank)
                assert worker.last.header("x-data-parallel-rank") == [rank.encode()]
            for unknown in ("3", "-1", "x"):
                reply = await routed.call(PATH, BODY, headers={"x-data-parallel-rank": unknown})
                assert (reply.status, reply.error["param"]) == (400, "x-data-parallel-rank")


async def test_routing_key_is_the_session() -> None:
    policy = {"name": "session_affinity"}
    async with (
        scripted_workers(*[served] * 4) as workers,
        router(*[worker.url for worker in workers], policy=policy, proxy=FOLLOWED) as routed,
    ):
        headers = {"x-smg-routing-key": "one"}
        replies = [await routed.call(PATH, {**BODY, "user": f"u{n}"}, headers=headers) for n in range(12)]
        assert len({reply.worker for reply in replies}) == 1


@pytest.mark.parametrize(
    ("headers", "id_"),
    [
        ({"x-correlation-id": "mine"}, "mine"),
        ({"x-correlation-id": "mine", "x-request-id": "own"}, "own"),
    ],
)
async def test_correlation_id_is_the_id_of_a_request_without_one(headers: dict[str, str], id_: str) -> None:
    async with scripted_worker(served) as worker, router(worker.url, proxy=FOLLOWED) as routed:
        reply = await routed.call(PATH, BODY, headers=headers)
        assert (reply.headers["x-request-id"], worker.last.header("x-request-id")) == (id_, [id_.encode()])
        assert (await routed.call(PATH, BODY, headers={"x-correlation-id": "a b"})).headers["x-request-id"] != "a b"


HEADERS = {"x-smg-target-worker": "0", "x-smg-routing-key": "one", "x-correlation-id": "mine"}


async def test_headers_are_not_followed_without_the_setting() -> None:
    async with scripted_workers(served, served) as workers:
        async with router(*[worker.url for worker in workers], **TURNS) as routed:
            replies = [await routed.call(PATH, BODY, headers=HEADERS) for _ in range(4)]
        assert {reply.worker for reply in replies} == {worker.url for worker in workers}
        assert "mine" not in {reply.headers["x-request-id"] for reply in replies}


async def test_headers_of_tenants_are_never_followed() -> None:
    tenants = {"isolate": False, "named": {"team": {"keys": [sha256(KEY.encode()).hexdigest()]}}}
    allowed = {"client_routing": True, "engine_fields": "strip"}
    key = {"authorization": f"Bearer {KEY}"}
    settings = {**TURNS, "server": SERVER, "tenants": tenants, "proxy": allowed}
    async with scripted_workers(served, served) as workers:
        async with router(*[worker.url for worker in workers], **settings) as routed:
            replies = [await routed.call(PATH, BODY, headers=HEADERS | key) for _ in range(4)]
        assert {(reply.status, reply.worker) for reply in replies} == {(200, worker.url) for worker in workers}
        assert "mine" not in {reply.headers["x-request-id"] for reply in replies}


async def test_names_of_other_routers_are_aliases() -> None:
    async with scripted_worker(served) as worker, router(worker.url) as routed:
        assert (await routed.call("/liveness")).json().keys() == (await routed.call("/health")).json().keys()
        assert (await routed.call("/readiness")).json() == {"status": "ready"}
        (answer,) = (await routed.call("/flush_cache", method="POST")).json()["workers"]
        assert (answer["url"], answer["status"]) == (worker.url, 200)
        assert worker.last.target == "/reset_prefix_cache"


@pytest.mark.parametrize("path", ["/nonexistent", "/v2/chat/completions"])
@pytest.mark.parametrize("server", [{}, SERVER])
async def test_unknown_paths_are_404(path: str, server: dict[str, str]) -> None:
    async with scripted_worker(served) as worker, router(worker.url, server=server) as routed:
        for method in ("GET", "POST"):
            reply = await routed.call(path, method=method)
            assert (reply.status, reply.error["type"]) == (404, "not_found_error")
        assert worker.exchanges == []
