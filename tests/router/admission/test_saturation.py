"""Saturation by stage and cause, for metrics, autoscaling and findings."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from benchmarks.make_routing import BLOCK, MODEL, make_fleet, make_routing
from indexer import Indexer, Target
from indexer.hashing import PackedPrompt
from router.admission.admission import Admission
from router.admission.saturation import Saturation
from router.admission.ticket import Ticket
from router.apis.requests import RoutedRequest
from router.fleet.discovery import Engine, ServedModel, WorkerDescription
from router.fleet.fleet import Fleet
from router.observability.advice import ADVICE, advised
from router.routing.build import Routing
from router.settings import Settings, WorkerSettings

CAPACITY = 2000


def full_worker(indexer: Indexer, requests: int | str | None = "auto") -> tuple[Fleet, Routing, Admission, Saturation]:
    """Return a router before one worker, whose KV cache holds 2,000 tokens and which has one slot."""
    settings = Settings.model_validate({"admission": {"requests": requests}})
    description = WorkerDescription(
        Engine.VLLM, {MODEL: ServedModel(MODEL, MODEL)}, block_size=BLOCK, capacity=CAPACITY // BLOCK
    )
    fleet = make_fleet([WorkerSettings.model_validate({"url": "http://w:1"})], indexer, description=description)
    routing = make_routing(fleet, indexer, settings)
    admission = Admission(routing.selector, routing.placement, settings.admission, late_binding=True)
    return fleet, routing, admission, Saturation(fleet, routing.state.load, admission)


def scrape(fleet: Fleet, running: int, waiting: int, usage: float = 0.0) -> None:
    worker = fleet.workers[0]
    gauges = f"vllm:num_requests_running {running}\nvllm:num_requests_waiting {waiting}\n"
    worker.metrics.read(f"{gauges}vllm:kv_cache_usage_perc {usage}\n", {0: running + waiting})
    for on_scrape in fleet.on_scrape:
        on_scrape(worker)


def prompt(tokens: int) -> RoutedRequest:
    return RoutedRequest(MODEL, streamed=True, max_tokens=100).tokenized([PackedPrompt.of(list(range(tokens)))])


async def test_saturation_names_the_cause_and_the_spare_memory(indexer: Indexer) -> None:
    fleet, routing, admission, saturation = full_worker(indexer)
    routing.state.load.of("http://w:1", 0)
    scrape(fleet, 0, 0)
    assignment = admission.place(prompt(800), (), Ticket(tokens=800))
    assert assignment is not None
    (stage,) = saturation.stages()
    memory = int(0.95 * (CAPACITY // BLOCK) * BLOCK)
    assert (stage.model, stage.stage, stage.cause) == (MODEL, "both", "memory")
    assert stage.causes["memory"] == 900 / memory
    assert stage.spare_tokens == memory - 900
    assert saturation.report() == [
        {"model": MODEL, "stage": "both", "cause": "memory", "share": round(900 / memory, 2)}
    ]
    registry = CollectorRegistry()
    registry.register(saturation)
    text = generate_latest(registry).decode()
    assert f'kvrouter_spare_tokens{{model="{MODEL}",stage="both"}} {memory - 900}.0' in text
    assert f'kvrouter_saturation{{cause="prefill",model="{MODEL}",stage="both"}}' in text


async def test_without_a_computed_limit_the_engine_and_the_own_limit_say_how_full_a_stage_is(indexer: Indexer) -> None:
    fleet, routing, admission, saturation = full_worker(indexer, requests=4)
    assert admission.place(prompt(800), (), Ticket(tokens=800)) is not None
    routing.state.load.of("http://w:1", 0)
    scrape(fleet, 1, 0, usage=0.19)
    (stage,) = saturation.stages()
    assert stage.causes["memory"] == pytest.approx(0.2, abs=0.01)
    assert stage.causes["slots"] == 0.25


async def test_finding_says_what_is_full_while_requests_wait(indexer: Indexer) -> None:
    fleet, _, admission, saturation = full_worker(indexer)
    assert admission.place(prompt(800), (), Ticket(tokens=800)) is not None
    for _ in range(3):
        scrape(fleet, 1, 1)
    assert saturation.findings() == []
    assert admission.place(prompt(900), (), Ticket(tokens=900)) is not None  # it waits in the engine
    asked, ticket = prompt(700), Ticket(tokens=700)
    assert admission.place(asked, (), ticket) is None
    waiting = asyncio.ensure_future(admission.wait(asked, (), ticket))
    await asyncio.sleep(0)
    (finding,) = saturation.findings()
    assert finding == {"finding": "saturated", "model": MODEL, "detail": "both: 100% of memory in use; 1 requests wait"}
    assert advised([finding])[0]["severity"] == ADVICE["saturated"].severity
    waiting.cancel()


async def test_memory_of_models_with_a_window_is_no_limit(indexer: Indexer, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, routing, _, saturation = full_worker(indexer)
    routing.state.load.of("http://w:1", 0)
    fleet.workers[0].targets = {Target("http://w:1", 0, MODEL)}
    monkeypatch.setattr(routing.state.indexer, "window", lambda _: 128)
    scrape(fleet, 0, 0)
    assert set(saturation.stages()[0].causes) == {"prefill"}
