"""Simulated encode workers behind a router: the hits of their caches beside round robin."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

from router_under_test import QUICK, router

from kvrouter.tools.demo.encoders import Fleet, by_round_robin, by_router, make_chats
from simulator.worker import SimulatedWorkerSettings
from simulator.worker.serve import running

CHATS = 24
QUICK_WORKER: dict[str, Any] = {"base_step_s": 0.0, "prefill_s_per_token": 0.0, "kv_events": None}


async def test_encode_workers_hit_more_than_in_turn() -> None:
    encode = SimulatedWorkerSettings(role="encode", encode_s_per_item=0.001, **QUICK_WORKER)
    async with AsyncExitStack() as stack:
        encoders = [await stack.enter_async_context(running(encode)) for _ in range(3)]
        workers = [await stack.enter_async_context(running(SimulatedWorkerSettings(**QUICK_WORKER)))]
        known = [{"url": url, "role": "encode"} for url in encoders] + [{"url": url} for url in workers]
        fleet = Fleet(encoders, workers)
        in_turn = await fleet.play(by_round_robin(encoders, workers), make_chats(CHATS, "in turn", 1))
        routed = await stack.enter_async_context(router(workers=known, fleet=QUICK, policy={"name": "round_robin"}))
        hashed = await fleet.play(by_router(routed.url), make_chats(CHATS, "hashed", 1))
        assert (in_turn.failures, hashed.failures) == ([], [])
        assert hashed.hit_rate > in_turn.hit_rate
        # Every item was encoded by an encode worker, and no worker encoded any itself.
        assert (hashed.workers["encoded"], hashed.workers["received"]) == (0, hashed.encoders.total())
