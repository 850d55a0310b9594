"""Which workers compute and answer a prompt, where there are some for each."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from indexer import Target
from indexer.targets import WorkerNames
from router.policies import Candidate, Request
from router.policies.records import Source
from router.routing.assignment import Disaggregation
from router.routing.disaggregation.selection import decode_policy, disaggregate, prefill_policy
from router.settings import DisaggregationSettings

SETTINGS = DisaggregationSettings(skip_tokens=2048, skip_ratio=0.7, saturated_tokens=50_000)


def worker(name: str, **told: Any) -> Candidate:
    return Candidate(Target(f"http://{name}", 0, "m"), **{"kv_usage": 0.1, **told})


def decided(decode: Candidate, *prefills: Candidate, tokens: int = 10_000, alone: bool = True) -> Disaggregation:
    return disaggregate(decode, list(prefills), Request(tokens), prefill_policy(Random(1)), SETTINGS, alone)


def test_decode_uses_the_least_load_and_overlap_breaks_ties() -> None:
    busy = worker("busy", requests=2, overlap=9000)
    idle, warm = worker("idle", requests=1, context=900), worker("warm", requests=1, context=900, overlap=5000)
    choose = decode_policy(Random(1))
    assert choose([busy, idle, warm], Request(10_000)).chosen is warm
    assert choose([busy, idle], Request(10_000)).chosen is idle
    assert choose([worker("full", requests=1, context=9000), idle], Request(10)).chosen is idle
    costs = choose([busy, idle, warm], Request(10_000)).costs
    assert all(
        amount >= 0 for cost in costs for amount in cost.terms.values()
    )  # they are counted, and counters only rise


def test_prefill_uses_the_earliest_end_and_without_prefill_workers_decode_computes() -> None:
    queued, cold = worker("queued", pending=8000, overlap=9000), worker("cold")
    found = decided(worker("d"), queued, cold)
    assert found.prefill.chosen is queued  # 8000 + 1000 against 10000
    assert found.as_json(WorkerNames())["prefill"] == {"worker": "http://queued", "dp_rank": 0}
    found = decided(worker("d", waiting=3))
    assert (found.prefill, found.reason) == (None, "no prefill worker is left")


@pytest.mark.parametrize(
    ("decode", "tokens", "remote"),
    [
        ({"overlap": 9000}, 10_000, False),  # 1000 uncached, a tenth
        ({"overlap": 9000, "disk": 9000}, 10_000, False),  # cached is cached, in whatever tier
        ({"overlap": 0}, 1000, True),  # few, but all of the prompt
        ({"overlap": 400}, 1000, False),
        ({"overlap": 7000}, 10_000, True),  # too many
        ({"overlap": 9000, "pending": 4000}, 10_000, True),  # it computes another's
        ({"overlap": 9000, "waiting": 1}, 10_000, True),
        ({"overlap": 9000, "kv_usage": None}, 10_000, True),  # its free capacity is unknown
    ],
)
def test_short_prefill_runs_on_the_decode_worker(decode: dict[str, Any], tokens: int, remote: bool) -> None:
    found = decided(worker("d", **decode), worker("p"), tokens=tokens)
    assert (found.prefill is not None) is remote
    assert found.inputs["uncached"] == tokens - decode["overlap"]


def test_loaded_tokens_count_at_their_price() -> None:
    near, far = Source("pool", 9000, 0.05), Source("pool", 9000, 0.5)
    found = decided(worker("d", source=near), worker("p"))
    assert (found.prefill, found.inputs["uncached"]) == (None, 1000 + 450)
    assert decided(worker("d", source=far), worker("p")).prefill is not None
    slow, quick, cold = worker("slow", source=far), worker("quick", source=near), worker("cold", overlap=5000)
    assert decode_policy(Random(1))([slow, quick, cold], Request(10_000)).chosen is quick
    assert decode_policy(Random(1))([slow, cold], Request(10_000)).chosen is cold
    assert prefill_policy(Random(1))([slow, quick, cold], Request(10_000)).chosen is quick


def test_saturated_prefill_workers_are_spared_while_decode_is_free() -> None:
    full = worker("p", pending=60_000)
    assert decided(worker("d"), full).prefill is None
    assert decided(worker("d"), full, worker("q")).prefill is not None
    assert decided(worker("d", waiting=1), full).prefill is not None
    assert decided(worker("d"), full, alone=False).prefill is not None
