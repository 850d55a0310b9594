"""The cost of answers on a target: the context that they read, and the wait for the memory that others release."""

from __future__ import annotations

import pytest

from benchmarks.make_routing import BLOCK, MODEL, make_fleet, make_routing
from indexer import Indexer
from router.apis.requests import RoutedRequest
from router.fleet.discovery import Engine, ServedModel, WorkerDescription
from router.policies.rates import Rates
from router.routing.load_view import context_token, memory_wait
from router.settings import WorkerSettings

RATES = Rates(step=0.01, token=4e-5, context_token=2e-8)
CAPACITY = 100_000


def wait(used: float, requests: int = 0, pending: int = 0, context: int = 0) -> float:
    return memory_wait(RATES, 400.0, requests, pending, context, used, CAPACITY)


def test_context_is_read_in_every_step_of_an_answer() -> None:
    assert context_token(RATES, Rates(), 400.0) == pytest.approx(400 * 2e-8 / 4e-5)


def test_prompts_between_tokens_do_not_raise_the_price_of_context() -> None:
    busy = Rates(token=4e-5, context_token=3e-7)
    assert context_token(busy, Rates(token=4e-5, context_token=3e-8), 400.0) == pytest.approx(400 * 3e-8 / 4e-5)


def test_nothing_waits_while_prompts_and_answers_have_room() -> None:
    assert wait(0.9, requests=20, pending=5000) == 0.0


def test_missing_memory_is_awaited_for_its_part_of_an_answer() -> None:
    step = 0.01 + 4e-5 * 20 + 2e-8 * 90_000
    lacking = 0.98 + (9000 + 21 * 200) / CAPACITY - 1
    assert wait(0.98, requests=20, pending=9000, context=90_000) == pytest.approx(
        lacking / 0.98 * 400 * step / RATES.token
    )


def test_each_prompt_before_it_adds_to_the_wait() -> None:
    waits = [wait(1.0, requests=20, pending=pending) for pending in (0, 10_000, 20_000)]
    assert waits[0] < waits[1] < waits[2]


@pytest.mark.parametrize(
    ("reported", "waiting"),
    [
        ({"full": 1.0, "free": 0.2, "other": 0.2}, {"full"}),
        ({"full": 1.0, "free": 0.2}, {"full", "other"}),  # a silent engine may be as full as the fullest
        ({"free": 0.2}, set()),
    ],
)
def test_prompts_avoid_full_memory(reported: dict[str, float], waiting: set[str]) -> None:
    indexer = Indexer()
    try:
        served = WorkerDescription(Engine.VLLM, {MODEL: ServedModel(MODEL, MODEL)}, block_size=BLOCK, capacity=6250)
        names = ("full", "free", "other")
        workers = [WorkerSettings.model_validate({"url": f"http://{name}:1"}) for name in names]
        fleet = make_fleet(workers, indexer, description=served)
        routing = make_routing(fleet, indexer)
        for name, worker in zip(names, fleet.workers, strict=True):
            if name in reported:
                worker.metrics.read(f"vllm:kv_cache_usage_perc {reported[name]}\n", {})
                routing.selector.scraped(worker)
        selection = routing.selector.choose(RoutedRequest(MODEL, streamed=True).estimated(1000))
        assert selection is not None
        waits = dict(zip(names, [each.memory for each in selection.decision.candidates], strict=True))
        assert {name for name, tokens in waits.items() if tokens > 0} == waiting
        assert len({waits[name] for name in waiting}) <= 1
        assert selection.worker.url not in {f"http://{name}:1" for name in waiting}
    finally:
        indexer.stop()
