"""Loads of simulated engines from host tiers, a shared pool and peers."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from kvevents import BlockRemoved, BlockStored
from router.apis.requests import RoutedRequest
from simulator.fleet.block_cache import BlockCache
from simulator.fleet.engine import LLAMA_70B, Engine, Progress
from simulator.fleet.fleet import FleetSpec, Outcome, Simulation
from simulator.fleet.simulated_router import OURS, SimulatedRouter
from simulator.fleet.sources import SourceSpec, WorkerSources, sources_of
from simulator.fleet.trace import BLOCK_TOKENS, TracedRequest
from simulator.fleet.workers import events_of

BLOCKS = tuple(range(20))
POOL = SourceSpec(pool_tokens=50_000, pool_rate=100_000.0, link_rate=50_000.0, latency=0.5)


def request(arrival: float = 0.0, blocks: tuple[int, ...] = BLOCKS) -> TracedRequest:
    return TracedRequest(arrival, len(blocks) * BLOCK_TOKENS + 100, 2, blocks, blocks, "s")


def engines(spec: SourceSpec, kv_tokens: int = 30_000) -> list[Engine]:
    made = [Engine(LLAMA_70B, kv_tokens) for _ in range(3)]
    for engine, sources in zip(made, sources_of(spec, [engine.cache for engine in made], BLOCK_TOKENS), strict=True):
        engine.sources = sources
    return made


def answer(engine: Engine, now: float, peer: WorkerSources | None = None) -> tuple[float, int, int, list[Progress]]:
    """Return the seconds until the first byte of a request, its cached and loaded tokens, and what happened."""
    engine.submit(request(), now, peer)
    seen = list[Progress]()
    begun = 0.0
    while not seen or not seen[-1].ended:
        at = engine.next_event
        seen.append(engine.advance())
        if seen[-1].begun:
            begun = at
    return begun - now, seen[-1].ended[0].cached, seen[-1].ended[0].loaded, seen


def test_worker_loads_from_the_pool_what_another_stored() -> None:
    first, second, _ = engines(POOL)
    computed, *counts, _ = answer(first, 0.0)
    assert counts == [0, 0]
    loaded, *counts, _ = answer(second, 10.0)
    assert counts == [len(BLOCKS) * BLOCK_TOKENS] * 2
    assert loaded == pytest.approx(0.5 + len(BLOCKS) * BLOCK_TOKENS / 50_000, abs=0.05)
    own, *counts, _ = answer(second, 20.0)
    assert counts == [len(BLOCKS) * BLOCK_TOKENS, 0]
    assert own < computed


def test_loads_of_all_workers_share_the_pools_bandwidth() -> None:
    sources = sources_of(
        SourceSpec(pool_tokens=50_000, pool_rate=10_000.0, link_rate=50_000.0, latency=0.0), [BlockCache(9)] * 2, 512
    )
    sources[0].store(BLOCKS)
    alone = sources[0].load(BLOCKS, None, 0.0)
    behind = sources[1].load(BLOCKS, None, 0.0)
    assert (alone.blocks, alone.outside) == (20, 20)
    assert alone.ready == pytest.approx(20 * 512 / 10_000)
    assert behind.ready == pytest.approx(2 * alone.ready)


def test_loads_of_one_worker_do_not_hold_the_pool_up_for_others() -> None:
    spec = SourceSpec(pool_tokens=50_000, pool_rate=100_000.0, link_rate=10_000.0, latency=0.0)
    sources = sources_of(spec, [BlockCache(9)] * 2, 512)
    sources[0].store(BLOCKS)
    ready = [sources[0].load(BLOCKS, None, 0.0).ready for _ in range(3)]
    assert ready == pytest.approx([number * 20 * 512 / 10_000 for number in (1, 2, 3)])
    assert sources[1].load(BLOCKS, None, 0.0).ready == pytest.approx(ready[0])


def test_pull_needs_a_named_peer_and_waits_for_both_ends() -> None:
    first, second, third = engines(SourceSpec(link_rate=50_000.0, pulls=True, latency=0.0))
    answer(first, 0.0)
    assert answer(second, 10.0)[1:3] == (0, 0)
    _, cached, loaded, _ = answer(third, 20.0, first.sources)
    assert cached == loaded == len(BLOCKS) * BLOCK_TOKENS
    assert first.sources is not None
    assert second.sources is not None
    second.sources.load((99,), first.sources, 20.0)
    one, other = (each.load(BLOCKS, first.sources, 30.0) for each in (second.sources, second.sources))
    assert other.ready - 30.0 == pytest.approx(2 * (one.ready - 30.0))


def test_host_tier_keeps_what_the_device_evicts_and_reports_it() -> None:
    engine = engines(SourceSpec(host_tokens=len(BLOCKS) * BLOCK_TOKENS), kv_tokens=22 * BLOCK_TOKENS)[0]
    seen = answer(engine, 0.0)[3]
    stored = [
        event for each in seen for event in events_of(each, BLOCK_TOKENS).events if isinstance(event, BlockStored)
    ]
    assert [hash for event in stored if event.medium == "CPU" for hash in event.block_hashes] == list(BLOCKS)
    engine.submit(request(5.0, tuple(range(100, 110))), 5.0)
    removed = [event for _ in range(5) for event in events_of(engine.advance(), BLOCK_TOKENS).events]
    media = {event.medium for event in removed if isinstance(event, BlockRemoved)}
    assert media == {None, "CPU"}
    cached, loaded = answer(engine, 20.0)[1:3]
    assert 0 < cached < len(BLOCKS) * BLOCK_TOKENS
    assert loaded == 0


class LoadsAtArrivals(Simulation):
    """A run that records the most loads in flight, as the router counts them when requests arrive."""

    most = 0

    def arriving(self, outcome: Outcome, prompt: RoutedRequest, router: SimulatedRouter) -> None:  # noqa: ARG002
        self.most = max(self.most, loads_of(router))


def loads_of(router: SimulatedRouter) -> int:
    load = router.state.load
    return sum(load.of(worker.url, 0).loads for worker in router.workers.workers)


def test_router_counts_loads_in_flight_until_the_first_byte() -> None:
    requests = [request(0.2 * number, tuple(range(number % 5, 40))) for number in range(60)]
    run = LoadsAtArrivals(FleetSpec(LLAMA_70B, 3, 40_000, sources=POOL), replace(OURS, sources=True), Random(0))
    assert any(each.loaded for each in run.run(requests))
    assert run.most > 0
    assert loads_of(run.routers[0]) == 0


def test_request_is_answered_once_beside_loads() -> None:
    requests = [request(0.2 * number, tuple(range(number % 5, 40))) for number in range(60)]
    outcomes = Simulation(FleetSpec(LLAMA_70B, 3, 40_000, sources=POOL), OURS, Random(0)).run(requests)
    assert all(each.sent <= each.begun <= each.ended for each in outcomes)
    assert sum(each.loaded for each in outcomes) > 0
