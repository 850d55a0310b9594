"""A real router locations by columns just as its policy would with a record of every candidate, whatever happens."""

from __future__ import annotations

import time
from array import array
from itertools import count
from random import Random

import pytest

from benchmarks.make_routing import BLOCK, MODEL, make_fleet, make_routing
from indexer import Indexer, Registration, Target
from indexer.hashing import PackedPrompt
from kvevents import BlockStored, EventBatch
from router.apis.agent_hints import AgentHints
from router.apis.identities import Identity
from router.apis.requests import RoutedRequest
from router.cache_state.in_flight_prefixes import CHUNK_TOKENS
from router.fleet.discovery import Engine, ServedModel, WorkerDescription
from router.fleet.worker import Worker
from router.load.load_messages import Kind, Message, RankLoad
from router.policies import KvAware, Request, policy_named
from router.programs import Call
from router.routing.assignment import Assignment
from router.routing.ranks import NO_LIMITS, Limits
from router.settings import AdmissionSettings, FleetSettings, PolicySettings, Settings, WorkerSettings
from router.sharing import PeerLoad

WORKERS = 150
CAPACITY = 4096  # tokens of a worker's cache
LIMITS = Limits(requests=3, tokens=600)
COMPUTED = Limits(computed=True)
SETTINGS = Settings(admission=AdmissionSettings(requests="auto"))


class Fixture:
    """A router over workers that are never asked anything, and a formula with the same random numbers."""

    def __init__(self, indexer: Indexer) -> None:
        workers = [
            WorkerSettings.model_validate({"url": f"http://w{number}:1", "weight": 2 if number % 7 == 0 else 1})
            for number in range(WORKERS)
        ]
        self.indexer = indexer
        # Nothing of what was scraped gets too old while the test runs: columns would learn that a moment later.
        self.fleet = make_fleet(workers, indexer, FleetSettings(metrics_interval=600.0))
        for number, worker in enumerate(self.fleet.workers):
            ranks = (0, 1) if number % 5 == 0 else (0,)
            models = {MODEL: ServedModel(MODEL, MODEL)}
            worker.describe(
                WorkerDescription(Engine.VLLM, models, block_size=BLOCK, ranks=ranks, capacity=CAPACITY // BLOCK)
            )
            worker.problem, worker.slow_start = None, 1000.0
            for rank in ranks:
                indexer.register(Registration(Target(worker.url, rank, MODEL), None, "vLLM", BLOCK))
        policy = policy_named(PolicySettings(), Random(1))
        assert isinstance(policy.choose, KvAware)
        self.policy = policy.choose
        self.formula = policy_named(PolicySettings(), Random(0)).choose
        self.peer_load = PeerLoad(600.0, 2.0)
        self.routing = make_routing(self.fleet, indexer, SETTINGS, policy=policy, peer_load=self.peer_load)
        self.loads, self.learned = self.routing.state.load, self.routing.state.learned

    def session(self, name: str, target: Target, tokens: int) -> Call:
        """Charge a session of a number of tokens to a target."""
        gate = self.routing.state.gate
        call = gate.sessions.call(("", MODEL, None, name), tokens, False)
        assert call is not None
        call.returns = True
        chunks = range(tokens // CHUNK_TOKENS)
        gate.sent(call, target, array("Q", [hash((name, chunk)) % 2**64 for chunk in chunks]))
        return call

    def choose_as_the_formula_does(self, prompt: RoutedRequest, excluded: list[Worker], limits: Limits) -> None:
        """Let both choose, and compare."""
        assert isinstance(self.formula, KvAware)
        self.formula.random.setstate(self.policy.random.getstate())
        selection = self.routing.selector.choose(prompt, excluded, limits)
        if selection is None:
            assert not self.routing.selector.any_has_capacity(prompt, excluded, limits)
            return
        candidates = selection.decision.candidates
        assert selection.decision.count == len(candidates)
        assert self.formula(candidates, Request(prompt.tokens)).chosen is selection.decision.chosen
        assert selection.rank.target == selection.decision.chosen.target
        for candidate in candidates:
            worker, rank = self.fleet.find(candidate.target.worker), candidate.target.dp_rank
            assert worker not in excluded
            assert self.has_capacity(worker, rank, limits, prompt)
            load, peers = self.loads.of(worker.url, rank), self.peer_load.of(worker.url, rank)
            weight = worker.settings.weight
            engine = worker.metrics.get(rank)
            assert candidate.requests == round((load.requests + peers.requests + engine.unseen) / weight)
            assert candidate.pending == round((load.pending + peers.pending) / weight)
            assert candidate.context == round((load.context + peers.context) / weight)
        self._check_workers({candidate.target for candidate in candidates}, prompt, excluded, limits)
        assert selection.best_overlap == max(candidate.overlap for candidate in candidates)

    def has_capacity(self, worker: Worker, dp_rank: int, limits: Limits, prompt: RoutedRequest) -> bool:
        """Return whether a DP rank may receive a prompt, by a comparison of each amount."""
        load, peers = self.loads.of(worker.url, dp_rank), self.peer_load.of(worker.url, dp_rank)
        requests = load.requests + peers.requests + worker.metrics.get(dp_rank).unseen
        if limits.computed and requests:
            slots, memory = load.limit.slots, load.limit.memory
            output = int(self.learned.outputs.expected(MODEL, None, None))
            if slots is not None and requests > slots:
                return False
            # No answer has begun, so that all of them grow to their expected length.
            needed = load.unshared + load.shared + peers.context + load.requests * output + prompt.tokens + output
            if memory is not None and needed > memory:
                (hashes,) = self.routing.selector.choose(prompt).hashes
                shared = self.routing.state.running.overlaps(hashes).get(worker.target(dp_rank, MODEL), 0)
                return needed - shared <= memory
        weight = worker.settings.weight
        if limits.requests is not None and requests / weight >= limits.requests:
            return False
        context = (load.context + peers.context) / weight
        return limits.tokens is None or not requests or context + prompt.tokens <= limits.tokens

    def _check_workers(
        self, targets: set[Target], prompt: RoutedRequest, excluded: list[Worker], limits: Limits
    ) -> None:
        """Targets with trust, warm-up and capacity are candidates. Untrusted targets are used only without them."""
        closed = [each for each in self.fleet.workers if each.health.circuit.closed and each not in excluded]
        for worker in self.fleet.workers:
            for rank in worker.ranks():
                if closed and not worker.trusted:
                    assert worker.target(rank, MODEL) not in targets
                hangs = any(not health.circuit.closed for health in worker.health.ranks.values())
                if worker in closed and worker.warming_since is None and not hangs:
                    capable = self.has_capacity(worker, rank, limits, prompt)
                    assert (worker.target(rank, MODEL) in targets) is capable


def prompt_of(random: Random) -> RoutedRequest:
    shared = random.choice((0, 2, 5)) * BLOCK
    packed = PackedPrompt.of(array("I", [*range(shared), *random.choices(range(1000, 9000), k=random.choice((1, 40)))]))
    return RoutedRequest(MODEL, streamed=True).tokenized([packed])


def step(fixture: Fixture, random: Random, in_flight: list[Assignment], number: int) -> None:
    """Something happens to the fleet."""
    worker = random.choice(fixture.fleet.workers)
    match random.choice(
        ("place", "place", "end", "first byte", "circuit", "rank", "scrape", "peer", "store", "warm", "session")
    ):
        case "place":
            in_flight.append(fixture.routing.placement.place(prompt_of(random)))
        case "end" if in_flight:
            in_flight.pop(random.randrange(len(in_flight))).release()
        case "first byte" if in_flight:
            random.choice(in_flight).first_byte()
        case "circuit":
            circuit = worker.health.circuit
            if circuit.closed:
                circuit.open("it fails")
            else:
                circuit.succeeded(circuit.begin())
        case "rank" if worker.health.ranks:
            random.choice(list(worker.health.ranks.values())).circuit.open("it hangs")
        case "scrape":
            running, queue, used = random.randrange(4), random.randrange(2), random.random()
            sample = f'vllm:num_requests_running{{engine="0"}} {running}\n'
            sample += (
                f'vllm:num_requests_waiting{{engine="0"}} {queue}\nvllm:kv_cache_usage_perc{{engine="0"}} {used}\n'
            )
            worker.metrics.read(sample, {})
            for on_scrape in fixture.fleet.on_scrape:
                on_scrape(worker)
        case "peer":
            load = RankLoad(worker.url, 0, random.randrange(3), 40, 50, 1, 0, 0.0)
            fixture.peer_load.apply(Message("peer", number, Kind.NEWS, [load]))
        case "store":
            blocks = random.randrange(1, 5)
            stored = BlockStored(list(range(blocks)), None, list(range(blocks * BLOCK)), BLOCK, medium="CPU_PINNED")
            fixture.indexer.index.apply(Target(worker.url, 0, MODEL), EventBatch(0.0, [stored], 0))
        case "warm":
            worker.warming_since = None if worker.warming_since is not None else worker.health.clock() - 500
            fixture.fleet.drain(worker, False)
            worker.health.forget()
        case "session":
            fixture.session(str(random.randrange(40)), worker.target(0, MODEL), random.randrange(1, CAPACITY))()


def test_selection_by_columns_equals_the_formula(indexer: Indexer) -> None:
    fixture, random, in_flight = Fixture(indexer), Random(5), list[Assignment]()
    for number in range(300):
        step(fixture, random, in_flight, number)
        excluded = random.sample(fixture.fleet.workers, random.choice((0, 0, 1, 3)))
        limits = random.choice((NO_LIMITS, COMPUTED, LIMITS))
        fixture.choose_as_the_formula_does(prompt_of(random), excluded, limits)
    assert len(in_flight) > 10


@pytest.mark.derives
def test_wanted_tokens_raise_the_eviction_cost(indexer: Indexer, monkeypatch: pytest.MonkeyPatch) -> None:
    fixture = Fixture(indexer)
    pressure, sessions = fixture.learned.pressure, fixture.routing.state.gate.sessions
    later = count(1)  # all rows are read again after each second
    monkeypatch.setattr(pressure, "price", lambda: 0.5)
    monkeypatch.setattr(pressure, "full", lambda target: target.worker != "http://w3:1")
    prompt = RoutedRequest(MODEL, streamed=True, identity=Identity("agent"), hints=AgentHints(final=False))
    prompt = prompt.tokenized([PackedPrompt.of(array("I", range(512)))])

    def evictions() -> dict[str, float]:
        selection = fixture.routing.selector.choose(prompt, now=time.monotonic() + next(later))
        return {each.target.worker: each.eviction for each in selection.decision.candidates}

    assert set(evictions().values()) == {0.0, 0.5}
    kept = fixture.routing.placement.place(prompt)
    assert kept.target.worker == "http://w3:1"  # it evicts nothing
    assert sessions.returning(kept.target) == prompt.tokens
    fixture.session("other", Target("http://w4:1", 0, MODEL), CAPACITY // 2)
    after = evictions()
    assert after["http://w4:1"] > 0.9 > 0.5 > after["http://w6:1"] > 0.4 > after["http://w3:1"] == 0.0
    kept.attempt.heard()
    kept.release()
    assert sessions.returning(kept.target) == prompt.tokens
    prompt.hints = AgentHints(final=True)
    fixture.routing.placement.place(prompt)
    assert sessions.returning(kept.target) == 0
