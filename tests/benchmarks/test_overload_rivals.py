"""The rules by which other routers hold requests beyond saturation, against their sources."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from benchmarks.overload import rivals
from benchmarks.overload.rivals import InFlight, utilization
from benchmarks.policy.rivals import rival
from http_api.errors import RequestError
from router.admission.ticket import Ticket
from router.apis.requests import RoutedRequest
from router.fleet.engine_metrics import EngineView
from router.settings import Role
from simulator.fleet.engine import LLAMA_70B
from simulator.fleet.fleet import FleetSpec, Simulation
from simulator.fleet.simulated_router import Side, build_router
from simulator.fleet.trace import TracedRequest, prompt_of
from simulator.fleet.virtual_time import VirtualTimeLoop
from simulator.fleet.workers import MODEL, EventIndex, SimulatedWorkers

BLOCK = 100
LLM_D, _, VLLM_ROUTER = rivals.SIDES


class Held:
    """A rule before workers that report what a test says, in virtual time."""

    def __init__(self, side: Side, workers: int = 2) -> None:
        self.loop = VirtualTimeLoop()
        self.workers = SimulatedWorkers([Role.BOTH] * workers, 1000, BLOCK, self.loop.time)
        index = EventIndex(self.workers.registrations, True, self.loop.time)
        self.router = build_router(self.workers, index, side, Random(0), self.loop.time)
        self.sent: list[tuple[str, float]] = []
        self.refused: list[tuple[str, float, int]] = []
        self._tasks: list[asyncio.Task[None]] = []

    def report(self, *engines: tuple[int, float]) -> None:
        """Let the engines report their queues and the shares of their KV memory in use."""
        for worker, (queue, usage) in zip(self.workers.workers, engines, strict=True):
            gauges = f"vllm:num_requests_running 1\nvllm:num_requests_waiting {queue}\n"
            self.router.scraped(worker, f"{gauges}vllm:kv_cache_usage_perc {usage}\n")

    def ask(self, *names: str, priority: int = 0) -> None:
        for name in names:
            self._tasks.append(self.loop.create_task(self._ask(name, priority)))

    async def _ask(self, name: str, priority: int) -> None:
        prompt = RoutedRequest(MODEL, streamed=True).tokenized(
            [prompt_of(TracedRequest(0.0, BLOCK, 1, (), (), name), 0, BLOCK)]
        )
        ticket = Ticket(priority, tokens=BLOCK)
        try:
            if self.router.admission.place(prompt, (), ticket) is None:
                await self.router.admission.wait(prompt, (), ticket)
            self.sent.append((name, round(self.loop.time(), 3)))
        except RequestError as error:
            self.refused.append((name, self.loop.time(), error.status))

    def run(self, story: Coroutine[Any, Any, None]) -> None:
        self.loop.run_until_complete(story)
        for task in self._tasks:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
        self.loop.close()


@pytest.mark.parametrize(
    ("engines", "expected"),
    [
        ([(5, 0.0), (0, 0.0)], 0.5),
        ([(1, 0.8), (10, 0.4)], 1.5),
        ([(0, None), (0, 0.4)], 0.75),
    ],
    ids=["queue over 5", "the higher of queue and memory", "missing metrics are full"],
)
def test_llm_d_saturation_is_the_mean_of_the_workers(engines: list[tuple[int, float | None]], expected: float) -> None:
    views = [EngineView(queue=queue, kv_usage=usage) for queue, usage in engines]
    assert utilization(views) == pytest.approx(expected)


def test_llm_d_sends_the_highest_priority_first_and_one_request_a_millisecond() -> None:
    held = Held(LLM_D)

    async def story() -> None:
        held.report((4, 0.0), (5, 0.1))
        held.ask("at once")
        await asyncio.sleep(1)
        held.report((5, 0.0), (5, 0.1))
        held.ask("later", "last")
        held.ask("first", priority=-1)
        await asyncio.sleep(1)
        held.report((4, 0.0), (5, 0.1))
        await asyncio.sleep(1)

    held.run(story())
    assert held.sent == [("at once", 0.0), ("first", 2.0), ("later", 2.001), ("last", 2.002)]


def test_llm_d_refuses_what_waited_for_a_minute() -> None:
    held = Held(LLM_D)

    async def story() -> None:
        held.report((0, 0.8), (0, 0.8))
        held.ask("a")
        await asyncio.sleep(61)

    held.run(story())
    assert held.refused == [("a", 60.0, 429)]


def test_vllm_router_counts_requests_in_flight_and_100_wait_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rivals._IN_FLIGHT == 32_768
    monkeypatch.setattr(rivals, "_IN_FLIGHT", 3)
    monkeypatch.setattr(InFlight, "most", 2)
    held = Held(VLLM_ROUTER)

    async def story() -> None:
        held.ask("a", "b", "c", "waits")
        held.ask("waits too", "refused", priority=-1)
        await asyncio.sleep(61)

    held.run(story())
    assert [name for name, _ in held.sent] == ["a", "b", "c"]
    assert held.refused == [("refused", 0.0, 429), ("waits", 60.0, 408), ("waits too", 60.0, 408)]


def test_dynamo_sends_the_highest_priority_first() -> None:
    requests = [TracedRequest(0.01 * number, 5 * 8192, 1, (), (), str(number)) for number in range(8)]
    requests[-1] = replace(requests[-1], priority=-1)
    outcomes = Simulation(FleetSpec(LLAMA_70B, 1, 10_000_000), rival("dynamo"), Random(0)).run(requests)
    held = sorted((each for each in outcomes if each.sent > each.request.arrival + 0.001), key=lambda each: each.sent)
    assert [each.request.session for each in held] == ["7", "4", "5", "6"]
