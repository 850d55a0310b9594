"""Peers to pull from: their addresses, the workers that may be one, and the pause after failures."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import pytest
from manual_clock import Clock

from indexer import Match, MatchQuery, Target
from kvevents import Tier
from router.cache_state.target_audit import Basis, PredictionErrors, TargetAudit
from router.cache_state.target_cache import TargetCaches
from router.fleet.discovery import Engine, ServedModel, WorkerDescription
from router.fleet.worker import Worker
from router.routing.pulls import PullEndpoint, PullResult, Pulls
from router.settings import PullProtocol, PullSettings, WorkerSettings

P2P, SIDECAR = PullProtocol
QUERY = MatchQuery("m", list(range(3000)))


class Index:
    """Host tiers with 2000 tokens of each prompt."""

    def __init__(self, *targets: Target) -> None:
        self._targets = targets

    def held_in(self, query: MatchQuery, tier: Tier) -> list[Match]:
        assert (query, tier) == (QUERY, Tier.CPU)
        return [Match(target, 2000, {}) for target in self._targets]

    def block_size(self, target: Target) -> int:
        assert target in self._targets
        return 16

    def targets(self, model: str, tenant: str) -> Collection[Target]:
        assert (model, tenant) == ("m", "default")
        return self._targets


def worker(url: str = "http://10.0.0.1:8000", ranks: int = 1, engine: Engine = Engine.VLLM, **settings: Any) -> Worker:
    made = Worker(WorkerSettings.model_validate({"url": url} | settings))
    made.describe(WorkerDescription(engine, {"m": ServedModel("m", "m")}, ranks=tuple(range(ranks))))
    made.problem = None
    return made


def pulls(*workers: Worker, protocol: PullProtocol = P2P, **options: Any) -> Pulls:
    by_url = {each.url: each for each in workers}
    targets = [each.target(dp_rank, "m") for each in workers for dp_rank in each.ranks()]
    return Pulls(
        PullSettings(protocol=protocol), Index(*targets), by_url.get, options.pop("caches", TargetCaches()), **options
    )


@pytest.mark.parametrize(
    ("known", "dp_rank", "protocol", "host", "port"),
    [
        (worker(), 0, P2P, "10.0.0.1", 5710),
        (worker(ranks=4), 3, P2P, "10.0.0.1", 5713),
        (worker(pull_host="10.9.0.1", pull_port=6000, ranks=2), 1, P2P, "10.9.0.1", 6001),
        (worker("https://pod.example"), 0, SIDECAR, "pod.example", 443),
    ],
)
def test_address_of_a_peer(known: Worker, dp_rank: int, protocol: PullProtocol, host: str, port: int) -> None:
    assert pulls(known, protocol=protocol).endpoint(known.target(dp_rank, "m")) == PullEndpoint(protocol, host, port)


def test_rank_without_a_port_is_no_peer() -> None:
    known = worker(pull_port=65_534, ranks=3)
    addresses = [pulls(known, protocol=P2P).endpoint(known.target(rank, "m")) for rank in range(3)]
    assert [address.port if address else None for address in addresses] == [65_534, 65_535, None]


def test_body_with_an_ipv6_peer_keeps_other_parameters() -> None:
    given = b'{"a": 1.50, "kv_transfer_params": {"b": [ ]}}'
    body = PullEndpoint(P2P, "fd00::1", 5710).body(given)
    assert body.startswith(b'{"a": 1.50, "kv_transfer_params": {"b":[ ],"remote_kv_source":{"kv_request_id":"')
    source = json.loads(body)["kv_transfer_params"]["remote_kv_source"]
    assert (source["remote_host"], source["remote_port"]) == ("[fd00::1]", 5710)
    assert PullEndpoint(P2P, "h", 1).body(b'{"kv_transfer_params": 7}') == b'{"kv_transfer_params": 7}'
    assert PullEndpoint(SIDECAR, "fd00::1", 1).headers == [(b"x-kv-cache-source-host-port", b"[fd00::1]:1")]


def test_workers_that_cannot_be_pulled_from() -> None:
    down, asleep, ejected, sglang, distrusted, two, fine = (
        worker(
            f"http://10.0.0.{number}:8000",
            ranks=1 + (number == 6),
            engine=Engine.SGLANG if number == 4 else Engine.VLLM,
        )
        for number in range(1, 8)
    )
    down.problem = "no answer"
    asleep.asleep = True
    ejected.health.circuit.open("status 503")
    every = (down, asleep, ejected, sglang, distrusted, two, fine)
    caches = TargetCaches()
    errors = [PredictionErrors(1) for _ in range(6)]
    caches.of(distrusted.target(0, "m")).audit = TargetAudit(*errors, basis=Basis.SENT_PREFIXES)
    found = pulls(*every, caches=caches).holders(QUERY, ())
    assert found == [(target, 2000, 16) for target in (two.target(0, "m"), two.target(1, "m"), fine.target(0, "m"))]
    found = pulls(*every, protocol=SIDECAR, caches=caches).holders(QUERY, ())
    assert [target.worker for target, _, _ in found] == [sglang.url, fine.url]


def test_every_target_shows_what_it_can_pull_beside_its_own() -> None:
    workers = [worker(f"http://10.0.0.{number}:8000") for number in range(1, 5)]
    workers[3].describe(WorkerDescription(Engine.SGLANG, {"m": ServedModel("m", "m")}))
    first, second, third, _ = (each.target(0, "m") for each in workers)
    among = pulls(*workers)
    assert among.pullable(QUERY, {first: 500, second: 1500}) == {first: 1500, third: 2000}
    alone = pulls(workers[0])
    assert alone.pullable(QUERY, {}) == {}, "no target pulls from itself"


def test_failures_in_a_row_pause_both_ends() -> None:
    one, other, clock = worker(), worker("http://10.0.0.2:8000"), Clock()
    target, peer = one.target(0, "m"), other.target(0, "m")
    among = pulls(one, other, clock=clock)
    seen: list[tuple[PullResult, int]] = []
    among.on_ended.append(lambda result, tokens: seen.append((result, tokens)))
    for result in (PullResult.FAILED, PullResult.FAILED, PullResult.PULLED, PullResult.UNKNOWN):
        among.ended(target, peer, 2000, result)
    assert seen[-2:] == [(PullResult.PULLED, 2000), (PullResult.UNKNOWN, 2000)]
    for _ in range(3):
        assert among.may_pull(target)
        assert among.endpoint(peer) is not None
        among.ended(target, peer, 2000, PullResult.FAILED)
    assert not among.may_pull(target)
    assert among.endpoint(peer) is None
    clock.now += 61
    assert among.may_pull(target)
    assert among.endpoint(peer) is not None


def test_pulls_of_a_removed_worker_leave_nothing() -> None:
    one, other = worker(), worker("http://10.0.0.2:8000")
    caches = TargetCaches()
    among = pulls(one, caches=caches)
    among.ended(one.target(0, "m"), other.target(0, "m"), 2000, PullResult.FAILED)
    assert [(cache.target, cache.failed_pulls) for cache in caches] == [(one.target(0, "m"), 1)]
