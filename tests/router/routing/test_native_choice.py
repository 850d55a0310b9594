"""The choice in one native call is the choice that is made step by step."""

from __future__ import annotations

from array import array
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.make_routing import MODEL, make_fleet, make_routing
from indexer import Indexer, Registration, Target, core_name
from indexer.hashing import PackedPrompt
from kvevents import BlockStored, EventBatch
from router.apis.requests import RoutedRequest
from router.cache_state.in_flight_prefixes import prompt_hashes
from router.fleet.discovery import Engine, ServedModel, WorkerDescription
from router.load.load_messages import SHARED_STRIDE
from router.policies import KvAware, policy_named
from router.routing.assignment import Assignment
from router.routing.candidates import CandidateFinder, CandidateSet
from router.routing.ranks import NO_LIMITS, TargetCapacity
from router.routing.target_directory import TargetDirectory
from router.settings import FleetSettings, PolicySettings, WorkerSettings
from router.sharing import PeerLoad

WORKERS = 5
SEGMENT = 512
MEDIA = (None, "CPU_PINNED", "DISK")

STEPS = 40

Prompt = tuple[list[int], int, int]


def some_prompt(random: Random) -> Prompt:
    """Return a prompt that often begins as others do, so that sessions fork."""
    return random.choice(([], [0], [0], [0, 1], [0, 1, 0], [1])), random.randrange(1, 60), random.randrange(3)


def some_step(random: Random) -> tuple[Any, ...]:
    """Return something that happens to the fleet."""
    worker, prompt = random.randrange(WORKERS), some_prompt(random)
    return random.choice(
        (
            ("store", worker, prompt, random.choice(MEDIA)),
            ("clear", worker),
            *[("place", prompt)] * 3,
            ("end", random.randrange(9), random.random() < 0.2),
            ("sent", worker, prompt),
            ("peer", worker, prompt),
            ("wait", random.choice((1.0, 3.0))),
            ("forget", worker),
        )
    )


def packed(prompt: Prompt) -> PackedPrompt:
    segments, tail, which = prompt
    tokens = [segment * SEGMENT + each for segment in segments for each in range(SEGMENT)]
    return PackedPrompt.of(array("I", tokens + [9000 + 100 * which + each for each in range(tail)]))


class Fixture:
    """A router, and two searches for candidates in its state: in one call, and step by step."""

    def __init__(self, indexer: Indexer, near: float) -> None:
        self.indexer, self.now = indexer, 0.0
        fleet = make_fleet(
            [WorkerSettings.model_validate({"url": f"http://w{number}:1"}) for number in range(WORKERS)],
            indexer,
            FleetSettings(metrics_interval=600.0),
        )
        for number, worker in enumerate(fleet.workers):
            size = 32 if number == 1 else 16
            worker.describe(WorkerDescription(Engine.VLLM, {MODEL: ServedModel(MODEL, MODEL)}, block_size=size))
            worker.problem = None
            indexer.register(Registration(Target(worker.url, 0, MODEL), None, "vLLM", size))
        policy = policy_named(PolicySettings(near=near), Random(1))
        assert isinstance(policy.choose, KvAware)
        self.random, self.fleet = policy.choose.random, fleet
        self.peer_load = PeerLoad(600.0, 2.0, lambda: self.now)
        self.routing = make_routing(
            fleet, indexer, policy=policy, peer_load=self.peer_load, linger=2.0, clock=lambda: self.now
        )
        state = self.routing.state
        capacity = TargetCapacity(state.load, state.learned.outputs, state.running)
        finders = [
            CandidateFinder(state, TargetDirectory(fleet, state.load, state.audit.caches), capacity, Random(1))
            for _ in range(2)
        ]
        self.native, self.in_steps = finders
        assert self.native.native is not None
        self.in_steps.native = None
        self.in_flight: list[Assignment] = []

    def step(self, step: tuple[Any, ...]) -> None:
        self.now += 0.1
        state = self.routing.state
        match step:
            case "store", worker, prompt, medium:
                size = 32 if worker == 1 else 16
                tokens = list(packed(prompt))
                blocks = len(tokens) // size
                hashes: list[int | bytes] = [
                    hash((size, *tokens[: (block + 1) * size])) & 0x7FFFFFFF for block in range(blocks)
                ]
                stored = BlockStored(hashes, None, tokens[: blocks * size], size, medium=medium)
                self.indexer.index.apply(self.target(worker), EventBatch(0.0, [stored], 0))
            case "clear", worker:
                self.indexer.clear(self.target(worker))
            case "place", prompt:
                request = RoutedRequest(MODEL, streamed=True).tokenized([packed(prompt)])
                self.in_flight.append(self.routing.placement.place(request))
            case "end", number, failed if self.in_flight:
                assignment = self.in_flight.pop(number % len(self.in_flight))
                assignment.attempt.failed = failed
                assignment.release()
            case "wait", seconds:  # prompts that ended are released by the next choice
                self.now += seconds
            case "forget", worker:
                for prefixes in (state.in_flight_prefixes, self.peer_load.prompts):
                    prefixes.forget(self.target(worker))
                state.sent_prefixes.forget(state.audit.caches.of(self.target(worker)))
            case "sent", worker, prompt:
                cache = state.audit.caches.of(self.target(worker))
                state.sent_prefixes.remember(cache, prompt_hashes(MODEL, None, None, packed(prompt)), None)
            case "peer", worker, prompt:
                shared = prompt_hashes(MODEL, None, None, packed(prompt))[SHARED_STRIDE - 1 :: SHARED_STRIDE]
                if shared:
                    self.peer_load.prompts.hold(self.target(worker), shared)

    def target(self, worker: int) -> Target:
        return Target(f"http://w{worker}:1", 0, MODEL)

    def ask(self, prompt: PackedPrompt, excluded: set[int]) -> None:
        """Let both choose, and compare."""
        closed = [self.fleet.workers[number] for number in excluded]
        results = []
        for finder in (self.native, self.in_steps):
            request = RoutedRequest(MODEL, streamed=True).tokenized([PackedPrompt(prompt.tokens)])
            results.append((request, finder.find(request, closed, NO_LIMITS, self.now)))
        (request, native), (_, in_steps) = results
        assert native.lowest is not None
        assert in_steps.lowest is None
        assert described(native) == described(in_steps)
        before = self.random.getstate()
        one = native.cheapest(request.tokens)
        self.random.setstate(before)
        other = in_steps.cheapest(request.tokens)
        assert one is not None
        assert other is not None
        assert one.rank.row == other.rank.row
        assert (one.overlap, one.by_events, one.best_overlap) == (other.overlap, other.by_events, other.best_overlap)
        assert one.decision.summary() == other.decision.summary()


def described(found: CandidateSet) -> tuple[object, ...]:
    overlaps, shared = found.overlaps, found.shared
    parts = None if shared is None else (list(shared.depths), list(shared.others))
    return list(overlaps.tokens), overlaps.transfers, overlaps.by_events, list(found.hashes.values()), parts


@pytest.mark.skipif(core_name() != "native", reason="there is no native call")
@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from([0.0, 0.1]))
def test_choice_in_one_call_equals_the_choice_in_steps(seed: int, near: float) -> None:
    random, indexer = Random(seed), Indexer()
    try:
        fixture = Fixture(indexer, near)
        for _ in range(STEPS):
            fixture.step(some_step(random))
            excluded = random.sample(range(WORKERS), random.choice((0, 0, 1, 2)))
            fixture.ask(packed(some_prompt(random)), set(excluded))
    finally:
        indexer.stop()
