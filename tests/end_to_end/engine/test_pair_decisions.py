"""Real prefill and decode vLLMs: the least cost of each request's pair, and its first token as predicted.

`make test-engine-pd` runs these tests. KV is transferred between processes over NIXL (loopback, host memory). One
request is sent at a time, because engines on shared cores slow each other down. Other processes do so as well: each
request waits for a free core, and its time counts only if a core is still free after the answer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any
from urllib.request import Request, urlopen

import pytest

from engine.conversations import VOCABULARY
from engine.installation import Installation
from engine.pairs import asked, pair_worker, router_before
from engine.processes import wait_for
from engine.servers import BLOCK_SIZE, MODEL, RouterProcess, VllmWorker, running
from engine.web import post_json

pytestmark = pytest.mark.engine_pd

COMPLETIONS = "/v1/completions"
WARM_UP = 24
MEASURED = 32
ENOUGH = 20
NEAR = 0.25  # of the measured time
PATIENCE = 60.0  # seconds until a core is free
# The relative change of a cost within milliseconds: the counted sessions of a prefix and the fleet's idle time decay.
DECAY = 1e-4


@pytest.fixture(scope="module")
def fleet(installation: Installation, logs: Path) -> Iterator[dict[str, list[VllmWorker]]]:
    """Two prefill and two decode workers with a slow prefill, by role."""
    found = {
        role: [pair_worker(f"{role}{number}", installation, logs, model="small") for number in range(2)]
        for role in ("prefill", "decode")
    }
    with running(*found["prefill"], *found["decode"]):
        yield found


@dataclass(frozen=True)
class Decided:
    """A request: what was explained before it was sent, which workers answered, at which cost, and after how long."""

    kind: str
    explained: dict[str, Any]
    prefill: str | None
    decode: str
    cost: float
    ttft: float
    undisturbed: bool

    @property
    def predicted(self) -> float:
        """The predicted seconds to the first token."""
        seconds: float = self.explained["disaggregation"]["predicted_ttft"]
        return seconds

    def __str__(self) -> str:
        pair = f"{(self.prefill or 'alone')[-5:]} {self.decode[-5:]}"
        times = f"{self.predicted:.3f} s predicted, {self.ttft:.3f} s measured, {self.predicted / self.ttft:.2f}"
        end = "" if self.undisturbed else ", disturbed"
        return f"{self.kind:9} {self.explained['tokens']:4} tokens, {pair}: {times}, cost {self.cost:g}{end}"


def words(random: Random, least: int, most: int) -> str:
    return " ".join(random.choices(VOCABULARY, k=random.randrange(least, most)))


def core_is_free() -> bool:
    """Return whether a thread that computes for 50 ms loses less than a tenth of the time to other threads."""
    begun = last = time.monotonic()
    lost = 0.0
    while last < begun + 0.05:
        now = time.monotonic()
        if now - last > 0.001:
            lost += now - last
        last = now
    return lost < 0.1 * (last - begun)


def decide(router: RouterProcess, kind: str, prompt: str) -> Decided:
    """Explain a prompt, send it to the idle fleet, and wait until its blocks are known."""
    body = asked(prompt, 8, stream=True)
    with suppress(TimeoutError):
        wait_for(core_is_free, PATIENCE, "a core is free")
    explained = post_json(f"{router.url}/explain", {"request": body, "path": COMPLETIONS})
    request = Request(router.url + COMPLETIONS, json.dumps(body).encode(), {"x-kvrouter-explain": "1"})
    request.add_header("Content-Type", "application/json")
    sent = time.monotonic()
    with urlopen(request, timeout=120) as response:
        response.readline()
        ttft = time.monotonic() - sent
        response.read()
        headers = response.headers
    undisturbed = core_is_free()  # now that both workers are idle
    costs = dict(pair.split("=") for pair in headers["x-kvrouter-explain"].split())
    assert costs["unit"] == explained["unit"]
    prefill, decode = headers["x-kvrouter-prefill-worker"], headers["x-kvrouter-worker"]
    blocks = (explained["tokens"] - 1) // BLOCK_SIZE * BLOCK_SIZE

    def known() -> bool:
        matches = post_json(f"{router.url}/match", {"model": MODEL, "prompt": prompt})["matches"]
        holders = {match["worker"] for match in matches if match["matched_tokens"] >= blocks}
        idle = not any(worker["requests_in_flight"] for worker in router.workers().values())
        return idle and holders >= {prefill or decode, decode}

    wait_for(known, 30, "the prompt's blocks are known")
    return Decided(kind, explained, prefill, decode, float(costs["total"]), ttft, undisturbed)


def check_cost(decided: Decided) -> None:
    """Assert that no worker alone and no pair of the explained ones costs less than the one that answered."""
    totals = {each["worker"]: each["total"] for each in decided.explained["candidates"]}
    verdict, least = decided.explained["disaggregation"], min(totals.values())
    assert totals[decided.explained["choice"]["worker"]] == pytest.approx(least, rel=DECAY)
    assert [totals[decided.decode], decided.cost] == pytest.approx([least, least], rel=DECAY)
    assert verdict["remote_prefill"] is (decided.prefill is not None)
    if decided.prefill is None:
        assert verdict["alone"] == pytest.approx(least, rel=DECAY)
        assert verdict["in_pair"] >= verdict["alone"]
        return
    pairs = {each["worker"]: sum(each["terms"].values()) for each in verdict["prefill_candidates"]}
    assert pairs[verdict["prefill"]["worker"]] == min(pairs.values()) == pytest.approx(least, rel=DECAY)
    assert verdict.get("alone", least) >= least * (1 - DECAY)
    if decided.decode == decided.explained["choice"]["worker"]:
        assert pairs[decided.prefill] == pytest.approx(least, rel=DECAY)


@pytest.mark.parametrize("decode_computes", [False, True])
def test_pair_has_least_cost_and_first_token_arrives_as_predicted(
    fleet: dict[str, list[VllmWorker]], logs: Path, tmp_path: Path, decode_computes: bool
) -> None:
    random, done = Random(int(decode_computes)), list[Decided]()

    def send(kind: str, prompt: str) -> None:
        done.append(decide(router, kind, prompt))
        print(done[-1], flush=True)

    with router_before(fleet["prefill"], fleet["decode"], logs, tmp_path, decode_computes, patience=60.0) as router:
        router.wait_until_compared()
        for number in range(WARM_UP):
            send("warm-up", f"{decode_computes} {number} {words(random, 100, 600)}")
        earlier = [f"{decode_computes} {number}: {words(random, 200, 300)}" for number in range(4)]
        for prompt in earlier:
            send("first", prompt)
        for number in range(MEASURED // 2):
            send("fresh", f"{decode_computes} {number}/ {words(random, 100, 600)}")
            send("extended", f"{earlier[number % 4]} {words(random, 100, 400)}")
            send("repeated", earlier[number % 4])
    for each in done:
        check_cost(each)
    # Engines compute little of a repeated prompt, so its first token depends on much that is not predicted.
    long = [each for each in done if each.kind in ("fresh", "extended")]
    ratios = sorted(each.predicted / each.ttft for each in long if each.undisturbed)
    print(f"{len(ratios)} of {len(long)} predicted / measured:", *(f"{ratio:.2f}" for ratio in ratios))
    assert len(ratios) >= ENOUGH, "the machine is too busy for this test"
    assert sum(abs(ratio - 1) <= NEAR for ratio in ratios) >= 0.9 * len(ratios)
