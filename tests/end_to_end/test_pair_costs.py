"""The pair that a request gets has the least cost that `/explain` shows for the prompt beforehand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import Any

import pytest
from router_under_test import RouterUnderTest, until
from simulated_pairs import MODEL, Pairs, routed, simulated_pairs

COMPLETIONS = "/v1/completions"
BLOCK = 16
SECONDS_PER_TOKEN = 5e-5
numbers = count(1)


@pytest.fixture(scope="module")
async def pairs() -> AsyncIterator[Pairs]:
    """Two prefill and two decode workers whose prompts take time."""
    speed = {"prefill_s_per_token": SECONDS_PER_TOKEN, "base_step_s": 0.002}
    async with simulated_pairs("nixl", prefills=2, decodes=2, **speed) as made:
        yield made


@pytest.fixture
async def always(pairs: Pairs) -> AsyncIterator[RouterUnderTest]:
    """A router that has learned nothing, and whose decode workers compute no prompts."""
    async with routed(pairs) as made:
        yield made


@pytest.fixture
async def free(pairs: Pairs) -> AsyncIterator[RouterUnderTest]:
    """A router that has learned nothing, and whose decode workers compute prompts where that costs less."""
    async with routed(pairs, disaggregation={"decode_computes": True}) as made:
        yield made


def fresh(tokens: int) -> list[int]:
    """A prompt that no other begins with."""
    number = next(numbers)
    return [300 + number, *(300 + (number * place) % 1000 for place in range(1, tokens))]


async def explained(front: RouterUnderTest, prompt: list[int]) -> dict[str, Any]:
    request = {"model": MODEL, "prompt": prompt, "max_tokens": 4}
    answer: dict[str, Any] = (await front.call("/explain", {"path": COMPLETIONS, "request": request})).json()
    return answer


async def decided(front: RouterUnderTest, prompt: list[int], stream: bool = True) -> dict[str, Any]:
    """Explain a prompt, send it, and return what was explained. Both must be of the least cost."""
    before = await explained(front, prompt)
    totals = {each["worker"]: each["total"] for each in before["candidates"]}
    least = min(totals.values())
    verdict = before["disaggregation"]
    assert totals[before["choice"]["worker"]] == pytest.approx(least)
    forecasts = {each["worker"]: each["forecast"]["ttft"]["expected"] for each in before["candidates"]}
    assert forecasts[before["choice"]["worker"]] == pytest.approx(verdict["predicted_ttft"], rel=1e-3)
    pairs = {each["worker"]: sum(each["terms"].values()) for each in verdict.get("prefill_candidates", ())}
    if verdict["remote_prefill"]:
        assert min(pairs.values()) == pairs[verdict["prefill"]["worker"]] == pytest.approx(least)
        assert verdict.get("alone", least + 1) > least
    else:
        assert verdict["alone"] == pytest.approx(least)
        assert verdict["in_pair"] >= least

    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "stream": stream}
    reply = await front.call(COMPLETIONS, body, headers={"x-kvrouter-explain": "1"})
    assert reply.status == 200, reply.body
    sent = dict(pair.split("=") for pair in reply.headers["x-kvrouter-explain"].split())
    assert sent["unit"] == before["unit"]
    # Events of the request before may arrive between the two, so that a cache is fuller.
    assert float(sent["total"]) == pytest.approx(least, rel=0.03)
    assert totals[reply.worker] == pytest.approx(least, rel=1e-3)
    prefill = reply.headers.get("x-kvrouter-prefill-worker")
    assert (prefill is not None) == verdict["remote_prefill"]
    if prefill is not None and reply.worker == before["choice"]["worker"]:
        assert pairs[prefill] == pytest.approx(least, rel=1e-3)
    await front.until_released()
    return before


async def hold(front: RouterUnderTest, worker: str, prompt: list[int], pairs: Pairs) -> None:
    """Compute a prompt on one worker, unseen by the router, and wait until its events are known."""
    assert (await pairs.ask(worker, prompt=prompt, max_tokens=1))[0] == 200

    async def held() -> int:
        matches = (await front.call("/match", {"model": MODEL, "prompt": prompt})).json()["matches"]
        return int({each["worker"]: each["matched_tokens"] for each in matches}.get(worker, 0))

    await until(held, lambda tokens: tokens >= (len(prompt) - 1) // BLOCK * BLOCK)


@asynccontextmanager
async def in_flight(front: RouterUnderTest, prompt: list[int], role: str) -> AsyncIterator[dict[str, Any]]:
    """A stream that does not end by itself. Yields the worker of a role that computes its prompt or decodes."""
    endless = {"model": MODEL, "prompt": prompt, "max_tokens": 20_000, "ignore_eos": True, "stream": True}
    asking = asyncio.create_task(front.call(COMPLETIONS, endless))
    busy: list[dict[str, Any]] = []

    async def known() -> list[dict[str, Any]]:
        field = "pending" if role == "prefill" else "requests"
        found = [each for each in await front.workers() if each["role"] == role]
        return [each for each in found if any(rank["load"][field] for rank in each["ranks"])]

    await until(known, lambda found: busy.extend(found) or found)
    try:
        yield busy[0]
    finally:
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking


async def test_pair_of_least_cost_is_chosen_if_nothing_is_cached(always: RouterUnderTest) -> None:
    for tokens in (10, 700, 6000):
        before = await decided(always, fresh(tokens), stream=False)  # from which no transfer is learned
        assert before["disaggregation"]["remote_prefill"]


async def test_worker_with_the_prefix_is_chosen(always: RouterUnderTest, pairs: Pairs) -> None:
    for worker in (*pairs.prefills, *pairs.decodes):
        prefix = fresh(2000)
        await hold(always, worker, prefix, pairs)
        before = await decided(always, [*prefix, *fresh(300)], stream=False)
        verdict = before["disaggregation"]
        assert verdict["remote_prefill"]
        assert worker in (verdict["prefill"]["worker"], before["choice"]["worker"])


@pytest.mark.parametrize("stream", [True, False])
async def test_pairs_of_least_cost_are_chosen_while_transfers_are_learned(
    always: RouterUnderTest, stream: bool
) -> None:
    """An answer that is not streamed arrives at its end, and does not show the duration of its transfer."""
    prices = set[float]()
    for number in range(6):
        tokens = 400 * (1 + number % 4)
        prefix = fresh(tokens)
        first = await decided(always, prefix, stream)
        await decided(always, [*prefix, *fresh(200)], stream)
        moves = [each["terms"]["move"] for each in first["disaggregation"]["prefill_candidates"]]
        prices.update(round(move - 0.25 * tokens) for move in moves)
    # The first guess is 5 ms, and 10 µs for each token. A computed token takes 40 µs.
    assert (prices == {125}) is not stream


async def test_decode_worker_that_holds_most_computes_the_rest(free: RouterUnderTest, pairs: Pairs) -> None:
    prefix = fresh(4000)
    await hold(free, pairs.decodes[1], prefix, pairs)
    before = await decided(free, [*prefix, *fresh(40)])
    assert before["choice"]["worker"] == pairs.decodes[1]
    assert before["disaggregation"]["reason"] == "it costs less alone"


async def test_pair_is_chosen_if_prompts_would_delay_answers(free: RouterUnderTest) -> None:
    async with in_flight(free, fresh(40), "decode"), in_flight(free, fresh(40), "decode"):
        before = await explained(free, fresh(3000))
        costs = [each["total"] for each in before["candidates"]]
        assert before["disaggregation"]["remote_prefill"]
        assert before["disaggregation"]["in_pair"] == pytest.approx(min(costs))
        assert before["disaggregation"]["alone"] > min(costs)
    await free.until_released()


async def test_idle_prefill_worker_is_chosen_beside_a_busy_one(always: RouterUnderTest) -> None:
    async with in_flight(always, fresh(30_000), "prefill") as busy:
        for tokens in (500, 3000):
            before = await explained(always, fresh(tokens))
            verdict = before["disaggregation"]
            pairs = {each["worker"]: sum(each["terms"].values()) for each in verdict["prefill_candidates"]}
            assert verdict["prefill"]["worker"] != busy["worker"]
            assert pairs[verdict["prefill"]["worker"]] == min(pairs.values()) < pairs[busy["worker"]]
            reply = await always.call(COMPLETIONS, {"model": MODEL, "prompt": fresh(tokens), "max_tokens": 4})
            assert reply.headers["x-kvrouter-prefill-worker"] != busy["worker"]
    await always.until_released()
