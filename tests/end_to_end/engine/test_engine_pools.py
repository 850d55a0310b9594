"""Two real vLLMs on one Mooncake pool: the router predicts what each answer finds on its device and in the pool."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any
from urllib.request import Request, urlopen

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from engine.installation import Installation
from engine.pools import CLIENT_TTL, PoolMaster, pool_worker
from engine.processes import wait_for
from engine.servers import MODEL, RouterProcess, VllmWorker, running
from engine.web import post_json

pytestmark = pytest.mark.engine_pools

REQUESTS = int(os.environ.get("POOL_REQUESTS") or 300)
EXACT = 0.98
PAUSE = 0.5  # seconds from an answer to the next request, in which engines store and report
INTERVAL = 0.3
MEMORY = 8 * 2**20
PATIENCE = 60.0


@pytest.fixture(scope="module")
def master(installation: Installation, logs: Path) -> Iterator[PoolMaster]:
    installation.install_pool()
    master = PoolMaster(installation, logs)
    with running(master):
        yield master


@pytest.fixture(scope="module")
def sharing(master: PoolMaster, installation: Installation, logs: Path) -> Iterator[list[VllmWorker]]:
    """Two workers on the pool."""
    workers = [pool_worker(f"pooled{number}", installation, logs, master) for number in range(2)]
    with running(*workers):
        yield workers


@dataclass(frozen=True)
class Answer:
    """The predicted and the reported cached tokens of an answer."""

    number: int
    worker: int
    salted: bool
    own: int
    loadable: int
    cached: int
    tokens: int

    @property
    def exact(self) -> bool:
        return self.own + self.loadable == self.cached


class Traffic:
    """Prompts that share beginnings and continue earlier ones, on workers at random."""

    def __init__(self, router: RouterProcess, workers: list[VllmWorker]) -> None:
        self._router = router
        self._workers = workers
        self._random = Random(1)
        self._prompts = [self._tokens(self._random.randint(100, 400)) for _ in range(8)]
        self.answers: list[Answer] = []

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randint(10, 900) for _ in range(count)]

    def send(self) -> None:
        """Send the next request, and wait until what it stored is reported."""
        random = self._random
        place = random.randrange(len(self._prompts))
        prompt = self._prompts[place] + self._tokens(random.randint(20, 150))
        if random.random() < 0.7:
            self._prompts[place] = prompt if len(prompt) < 1200 else self._tokens(random.randint(100, 400))
        worker, salted = random.randrange(len(self._workers)), random.random() < 0.15
        body: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "temperature": 0}
        if salted:
            body["cache_salt"] = f"salt {place % 2}"
        headers = {"Content-Type": "application/json", "x-smg-target-worker": self._workers[worker].url}
        request = Request(f"{self._router.url}/v1/completions", json.dumps(body).encode(), headers, method="POST")
        with urlopen(request, timeout=PATIENCE) as response:
            own = int(response.headers["x-kvrouter-overlap-tokens"])
            loadable = int(response.headers["x-kvrouter-loadable-tokens"] or 0)
            usage = json.loads(response.read())["usage"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        number = len(self.answers)
        answer = Answer(number, worker, salted, own, loadable, cached, usage["prompt_tokens"])
        self.answers.append(answer)
        if not answer.exact:
            print(f"\n{answer}")
        time.sleep(PAUSE)


def metric(router: RouterProcess, name: str) -> float:
    """Return the sum of a metric's samples."""
    with urlopen(f"{router.url}/metrics", timeout=10) as response:
        families = list(text_string_to_metric_families(response.read().decode()))
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)


def until_known(router: RouterProcess) -> None:
    """Wait until the content of the pool is known, and stays so for some checks."""
    time.sleep(6 * INTERVAL)
    wait_for(lambda: metric(router, "kvrouter_pool_known") == 1, PATIENCE, "the pool's content is known")


def test_cached_tokens_are_predicted_through_losses_and_restarts(
    master: PoolMaster, sharing: list[VllmWorker], logs: Path
) -> None:
    pool = {"name": "store", "type": "mooncake", "master": master.url, "events": master.events}
    config = logs / "pools.yaml"
    settings = {"pools": [pool | {"interval": INTERVAL, "memory": MEMORY}], "proxy": {"client_routing": True}}
    config.write_text(yaml.safe_dump(settings))
    with RouterProcess(sharing, logs, "--config", str(config), patience=PATIENCE) as router:
        until_known(router)
        traffic = Traffic(router, sharing)
        evicted = 0.0
        for number in range(REQUESTS):
            if number == REQUESTS // 5:
                post_json(f"{sharing[0].url}/reset_prefix_cache")
                time.sleep(PAUSE)
            elif number == 2 * REQUESTS // 5:
                sharing[1].kill()
                wait_for(lambda: master.segments() == 1, 4 * CLIENT_TTL + PATIENCE, "the pool lost a segment")
                sharing[1].start()
                sharing[1].wait_until_ready()
                wait_for(lambda: len(up(router)) == 2, PATIENCE, "the router uses both workers")
                until_known(router)
            elif number == 3 * REQUESTS // 5:
                evicted = evictions(master)
                master.stop()
                master.start()
                master.wait_until_ready()
                wait_for(lambda: master.segments() == 2, PATIENCE, "both workers share their segments again")
                until_known(router)
            elif number == 4 * REQUESTS // 5:
                router.reset_caches()
                time.sleep(PAUSE)
            traffic.send()
        evicted += evictions(master)
        answers, findings = traffic.answers, router.health()["findings"]
        memory = metric(router, "kvrouter_pool_memory_bytes")
    wrong = [answer for answer in answers if not answer.exact]
    loaded = sum(answer.cached > answer.own for answer in answers)
    print(f"\n{len(answers) - len(wrong)} of {len(answers)} exact, {loaded} with loads, {evicted:.0f} objects evicted")
    print(f"findings: {findings}; memory of the pool's tables: {memory / 2**20:.1f} MiB")
    assert len(wrong) <= (1 - EXACT) * len(answers)
    assert loaded > len(answers) / 10
    assert evicted > 0
    assert memory < 2 * MEMORY
    assert [found for found in findings if found["finding"] in ("drift", "unexplained_pool", "pool_not_loaded")] == []


def up(router: RouterProcess) -> list[str]:
    """Return the URLs of the workers that receive requests."""
    return [url for url, worker in router.workers().items() if worker["state"] == "ready"]


def evictions(master: PoolMaster) -> float:
    """Return the number of objects that the master has evicted since its start."""
    families = text_string_to_metric_families(master.asked("/metrics"))
    names = {"master_evicted_key_count", "master_evicted_key_count_total"}
    return sum(sample.value for family in families for sample in family.samples if sample.name in names)
