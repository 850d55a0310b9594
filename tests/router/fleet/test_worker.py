"""Warm-up of workers, the workers that a request may be sent to, and workers of several sources."""

from __future__ import annotations

from random import Random

import pytest
from manual_clock import Clock

from router.fleet.circuit import CircuitLimits
from router.fleet.health import Health
from router.fleet.worker import Worker, WorkerState, choosable
from router.fleet.worker_sources import WorkerSources
from router.settings import WorkerSettings


def worker(clock: Clock, warming: float | None = None) -> Worker:
    made = Worker(
        WorkerSettings.model_validate({"url": "http://w"}), health=Health(CircuitLimits(), clock), slow_start=10
    )
    made.problem = None
    made.warming_since = None if warming is None else clock.now - warming
    return made


@pytest.mark.parametrize(("seconds", "share"), [(0.0, 0.1), (2.0, 0.2), (5.0, 0.5), (10.0, 1.0), (60.0, 1.0)])
def test_share_grows_during_warm_up(clock: Clock, seconds: float, share: float) -> None:
    new, old = worker(clock, warming=seconds), worker(clock)
    assert new.share == pytest.approx(share)
    assert new.state is (WorkerState.WARMING if share < 1 else WorkerState.READY)
    random = Random(1)
    chosen = sum(new in choosable([new, old], random) for _ in range(1000))
    assert chosen == pytest.approx(1000 * share, abs=50)


def test_all_workers_are_choosable_when_all_warm_up(clock: Clock) -> None:
    new = [worker(clock, warming=0), worker(clock, warming=0)]
    assert all(choosable(new, Random(seed)) for seed in range(50))


def test_ejected_workers_are_choosable_when_no_others_exist(clock: Clock) -> None:
    good, bad = worker(clock), worker(clock)
    bad.health.circuit.open("it hangs")
    assert bad.state is WorkerState.EJECTED
    assert list(choosable([good, bad], Random())) == [good]
    assert list(choosable([bad], Random())) == [bad]


def test_half_open_worker_is_choosable_after_an_answered_scrape(clock: Clock) -> None:
    good, bad = worker(clock), worker(clock)
    bad.metrics.scrape_answered()
    bad.metrics.scrape_began()
    bad.health.circuit.open("it hangs")
    clock.now += 60
    assert bad.state is WorkerState.HALF_OPEN
    assert list(choosable([good, bad], Random())) == [good]
    bad.metrics.scrape_answered()
    assert list(choosable([good, bad], Random())) == [good, bad]


def named(host: str, name: str | None = None) -> WorkerSettings:
    return WorkerSettings.model_validate({"url": f"http://{host}:1", "name": name})


def test_first_source_of_a_url_counts_and_duplicate_names_are_replaced_by_urls() -> None:
    sources = WorkerSources([named("a", "configured")])
    sources.assign("kubernetes", [named("a", "pod"), named("b", "pod")])
    assert {url: (each.name, each.source) for url, each in sources.merged().items()} == {
        "http://a:1": ("configured", "config"),
        "http://b:1": ("pod", "kubernetes"),
    }
    sources = WorkerSources([named("a", "gpu")])
    sources.assign("api", [named("b", "gpu")])
    assert [each.name for each in sources.merged().values()] == ["gpu", "http://b:1"]


def test_only_hosts_of_added_workers_are_untrusted() -> None:
    sources = WorkerSources([named("a")])
    sources.assign("api", [named("a"), named("b"), named("c")])
    sources.assign("kubernetes", [named("c")])
    assert [host for host in "abcd" if sources.is_untrusted_host(host)] == ["b"]
