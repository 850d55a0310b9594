"""Models without workers: requests wait for the first, within bounds, and are counted meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

from router_under_test import RouterUnderTest, router, until

from simulator.worker import SimulatedWorkerSettings
from simulator.worker.serve import running

BODY = {"model": "simulated", "prompt": "x", "max_tokens": 2}
MODELS = {"simulated": {"aliases": ["small"]}}


def cold(seconds: float = 20, **more: Any) -> dict[str, Any]:
    return {"models": MODELS, "admission": {"cold_start_timeout": seconds, **more}}


async def demand(routed: RouterUnderTest) -> float:
    return await routed.metric("kvrouter_model_demand", model="simulated")


async def test_requests_wait_for_first_worker_of_model() -> None:
    async with router(**cold()) as routed:
        assert (await routed.call("/ready")).status == 200
        assert await demand(routed) == 0
        models = ("simulated", "small", "simulated")
        waiting = [asyncio.create_task(routed.call("/v1/completions", BODY | {"model": each})) for each in models]

        await until(lambda: demand(routed), lambda found: found == len(models))
        assert (await routed.health())["queue"] == {"no_worker": len(models)}
        async with running(SimulatedWorkerSettings()) as url:
            assert (await routed.call("/workers", {"url": url})).status == 201
            assert {reply.status for reply in await asyncio.gather(*waiting)} == {200}
            await routed.until_released()
            assert await demand(routed) == 0
            assert await routed.metric("kvrouter_admission_wait_seconds_count", reason="no_worker") == len(models)


async def test_request_waits_for_model_whose_workers_were_removed() -> None:
    async with router(admission={"cold_start_timeout": 20}) as routed:
        async with running(SimulatedWorkerSettings()) as url:
            await routed.call("/workers", {"url": url})

            await until(lambda: routed.call("/v1/completions", BODY), lambda reply: reply.status == 200)
        await routed.call(f"/workers?url={url}", method="DELETE")
        waiting = asyncio.create_task(routed.call("/v1/completions", BODY))

        await until(lambda: demand(routed), lambda found: found == 1)
        async with running(SimulatedWorkerSettings()) as url:
            await routed.call("/workers", {"url": url})
            assert (await waiting).status == 200


async def test_unknown_model_is_refused_at_once() -> None:
    async with router(**cold()) as routed:
        reply = await routed.call("/v1/completions", BODY | {"model": "made up"})
        assert reply.status == 503
        assert await routed.metric("kvrouter_requests_refused_total", status="503") == 1
        assert "made up" not in (await routed.call("/metrics")).body.decode()


async def test_cold_start_wait_times_out() -> None:
    async with router(**cold(0.2)) as routed:
        reply = await routed.call("/v1/completions", BODY)
        assert (reply.status, reply.error["code"]) == (503, "no_worker_available")
        assert await routed.metric("kvrouter_admission_refused_total", reason="no_worker") == 1
        deadline = await routed.call("/v1/completions", BODY, headers={"x-request-timeout": "0.05"})
        assert deadline.status == 504


async def test_number_of_cold_start_waits_is_bounded() -> None:
    async with router(**cold(queue=4)) as routed:
        waiting = [asyncio.create_task(routed.call("/v1/completions", BODY)) for _ in range(2)]

        await until(lambda: demand(routed), lambda found: found == 2)
        assert (await routed.call("/v1/completions", BODY)).status == 503
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

        await until(lambda: demand(routed), lambda found: found == 0)


async def test_requests_are_refused_at_once_without_cold_start_timeout() -> None:
    async with router(models=MODELS) as routed:
        assert (await routed.call("/ready")).status == 503
        assert (await routed.call("/v1/completions", BODY)).status == 503
