"""The price of moving tokens between a prefill and a decode worker, learned from the times of both requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from manual_clock import Clock

from indexer import Target
from router.load.target_load import ReservedLoad, TargetLoad
from router.policies.rates import Rates, RateTable
from router.routing.disaggregation.transfers import TransferTimes

PREFILL, OTHER, DECODE = (Target(f"http://{name}:1", 0, "m") for name in ("p", "q", "d"))
TOKENS = 1000
STEP = 1.5 * Rates().step


class Decode:
    """A decode worker as the transfers see it."""

    def __init__(self) -> None:
        self.target = DECODE
        self.load = TargetLoad()
        self.waiting = 0
        self.worker: Any = SimpleNamespace(metrics=SimpleNamespace(get=lambda _: SimpleNamespace(waiting=self.waiting)))


@pytest.fixture
def times(clock: Clock) -> TransferTimes:
    return TransferTimes(RateTable(Rates(), clock), clock)


def transfer(
    times: TransferTimes, clock: Clock, decode: Any, seconds: float, tokens: int = TOKENS, streamed: bool = True
) -> None:
    watched = times.watch(PREFILL, decode, tokens, streamed)
    watched.begin()
    clock.now += seconds + STEP
    watched.end()


def price(times: TransferTimes) -> float:
    return times.seconds(PREFILL, DECODE, TOKENS)


def test_price_is_learned_for_each_pair(times: TransferTimes, clock: Clock) -> None:
    decode, guessed = Decode(), times.seconds(PREFILL, DECODE, TOKENS)
    for _ in range(10):
        transfer(times, clock, decode, 0.2)
    assert price(times) == pytest.approx(0.2, rel=0.1)
    assert times.seconds(OTHER, DECODE, TOKENS) == guessed
    assert times.seconds(PREFILL, DECODE, 0) == 0.0
    times.forget(PREFILL.worker)
    assert price(times) == guessed


def test_first_transfer_of_a_pair_is_not_learned(times: TransferTimes, clock: Clock) -> None:
    """Engines connect to each other in it, which they do once."""
    decode, guessed = Decode(), price(times)
    transfer(times, clock, decode, 0.0, tokens=0)  # connects nothing
    transfer(times, clock, decode, 2.0)
    assert price(times) == guessed
    transfer(times, clock, decode, 0.04)
    assert guessed < price(times) < 0.05
    times.forget(DECODE.worker)
    transfer(times, clock, decode, 2.0)
    assert price(times) == guessed


@pytest.mark.parametrize("because", ["not streamed", "computes", "waits", "moves nothing", "did not begin"])
def test_time_that_is_not_the_transfer_is_not_learned(times: TransferTimes, clock: Clock, because: str) -> None:
    decode = Decode()
    transfer(times, clock, decode, 0.04)
    guessed = price(times)
    if because == "computes":
        ReservedLoad(decode.load, 500, 500)
    decode.waiting = int(because == "waits")
    for _ in range(5):
        if because == "did not begin":
            watched = times.watch(PREFILL, decode, TOKENS, True)  # type: ignore[arg-type]
            clock.now += 5.0
            watched.end()
        else:
            tokens = 0 if because == "moves nothing" else TOKENS
            transfer(times, clock, decode, 5.0, tokens, streamed=because != "not streamed")
    assert price(times) == guessed
