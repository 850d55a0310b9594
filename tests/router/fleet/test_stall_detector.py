"""Slow answers and hung workers in virtual time: no worker that answers its probes is ejected for a long answer.

docs/operations.md has the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from manual_clock import Clock

from indexer import Target
from router.fleet.circuit import CircuitLimits
from router.fleet.discovery import Engine, ServedModel, WorkerDescription
from router.fleet.engine_metrics import EngineMetrics
from router.fleet.health import Attempt, Health, Outcome
from router.fleet.stall_detector import StallDetector
from router.fleet.worker import EngineState, Worker
from router.settings import FleetSettings, WorkerSettings

OUTPUTS = (1, 10, 100, 1000, 4000)
SECONDS_PER_TOKEN = (0.002, 0.1)
USUAL_TOKENS = 33
BLOCK = 16
TARGET = Target("http://w0", 0, "m")


@dataclass
class Played:
    """Two workers in virtual time, of which the first computes answers.

    - `events`: whether it reports an event for each block that it fills.
    - `metrics`: None if it has none; else whether their counters rise during an answer.
    """

    clock: Clock
    detector: StallDetector
    workers: list[Worker]
    reported: SimpleNamespace
    events: bool
    metrics: bool | None
    computed: int = 0
    moved: int = 0

    def begin(self, tokens: int | None, streamed: bool) -> Attempt:
        """Send a request with a limit of its answer; None: without one."""
        attempt = self.workers[0].health.begin(100, streamed=streamed)
        attempt.most_tokens = tokens

        def give_up() -> bool:
            self.moved += 1
            return True

        attempt.give_up = give_up
        return attempt

    def answer(self, tokens: int, seconds: float, streamed: bool, limited: bool) -> None:
        """Compute an answer, which the detector watches."""
        attempt = self.begin(tokens if limited else None, streamed)
        begun, written = self.clock.now, 0
        while written < tokens:
            elapsed = self.clock.now - begun
            self.clock.now += min(max(0.25, elapsed / 10), (tokens - written) * seconds)
            before, written = written, min(tokens, round((self.clock.now - begun) / seconds))
            if streamed:
                attempt.heard()
                attempt.give_up = None
            if self.events and before // BLOCK < written // BLOCK:
                self.reported.received_at = self.clock.now
            self.computed += (written - before) * (self.metrics is True)
            self.scrape()
            self.detector.eject_stalled(self.workers)
        self.computed += tokens * (self.metrics is False)
        attempt.heard()
        attempt.answered(tokens)
        attempt.end(Outcome.SUCCEEDED)

    def scrape(self) -> None:
        """Answer a scrape: with 404 if there are no metrics."""
        metrics = self.workers[0].metrics
        metrics.scrape_began()
        metrics.scrape_answered()
        metrics.read("" if self.metrics is None else f"vllm:generation_tokens_total {self.computed}\n", {})

    @property
    def ejected(self) -> int:
        return sum(not worker.health.circuit.closed for worker in self.workers)


@pytest.fixture
def played(request: pytest.FixtureRequest, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Played:
    events, metrics = request.param
    monkeypatch.setattr("router.fleet.stall_detector.time.time", clock)
    reported = SimpleNamespace(received_at=clock.now if events else None)
    indexer: Any = SimpleNamespace(report=lambda _: SimpleNamespace(stream=reported))
    workers = []
    for number in range(2):
        health = Health(CircuitLimits(), clock)
        worker = Worker(WorkerSettings(url=f"http://w{number}"), health=health, metrics=EngineMetrics(clock=clock))
        worker.describe(WorkerDescription(Engine.VLLM, {"m": ServedModel("m", "m")}))
        worker.problem = None
        workers.append(worker)
    workers[0].targets = {TARGET}
    return Played(clock, StallDetector(FleetSettings(), indexer), workers, reported, events, metrics)


@pytest.mark.parametrize("played", [*product((True, False), (None, True, False))], indirect=True)
def test_no_long_answer_ejects_its_worker_or_is_computed_twice(played: Played) -> None:
    for streamed, limited, seconds, tokens in product((True, False), (True, False), SECONDS_PER_TOKEN, OUTPUTS):
        played.workers[0].health.forget()
        for _ in range(40):
            played.answer(USUAL_TOKENS, seconds, streamed, limited)
        played.answer(tokens, seconds, streamed, limited)
        assert (played.ejected, played.moved) == (0, 0), (streamed, limited, seconds, tokens)


@pytest.mark.parametrize("scraped", [True, False])
@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("played", [*product((True, False), (True, False))], indirect=True)
def test_worker_that_answers_nothing_is_ejected_within_two_seconds(
    played: Played, streamed: bool, scraped: bool
) -> None:
    for _ in range(40):
        played.answer(USUAL_TOKENS, 0.002, streamed, limited=True)
    played.begin(USUAL_TOKENS, streamed)
    begun, (worker, _) = played.clock.now, played.workers
    if not scraped:
        worker.metrics = EngineMetrics(clock=played.clock)
    worker.metrics.scrape_began()
    while not played.ejected and played.clock.now < begun + 5:
        played.clock.now += 0.25
        if worker.probe_now.is_set() and worker.probe_began is None:
            worker.probe_began = played.clock.now
        played.detector.eject_stalled(played.workers)
    assert (played.ejected, played.moved) == (1, 1)
    assert played.clock.now - begun <= 2


def seconds_until_ejected(played: Played, late: float = 0.0) -> float:
    """Return the seconds until a worker that answers nothing from now on is ejected."""
    worker, begun = played.workers[0], played.clock.now
    worker.metrics.scrape_began()
    while not played.ejected and played.clock.now < begun + 60:
        played.clock.now += 0.25
        played.detector.ran_late(late)
        if worker.probe_now.is_set() and worker.probe_began is None:
            worker.probe_began = played.clock.now
        played.detector.eject_stalled(played.workers)
    return played.clock.now - begun


@pytest.mark.parametrize("played", [(False, True)], indirect=True)
def test_silence_counts_later_while_the_router_itself_is_late(played: Played) -> None:
    played.answer(1, 0.002, streamed=True, limited=True)
    played.begin(USUAL_TOKENS, streamed=True)
    assert 1 + 4 * 0.5 <= seconds_until_ejected(played, late=0.5) <= 4


@pytest.mark.parametrize("played", [(False, True)], indirect=True)
def test_silence_counts_later_if_answers_to_probes_are_slow(played: Played) -> None:
    played.answer(1, 0.002, streamed=True, limited=True)
    played.workers[0].answer_seconds.extend([2.0, 0.1])
    played.begin(USUAL_TOKENS, streamed=True)
    assert 3 <= seconds_until_ejected(played) <= 4


@pytest.mark.parametrize("played", [(False, True)], indirect=True)
@pytest.mark.parametrize(("seconds", "least", "most"), [(4.0, 6, 7), (60.0, 10, 11)])
def test_silence_counts_later_during_a_prompt_that_usually_takes_longer(
    played: Played, seconds: float, least: float, most: float
) -> None:
    for _ in range(20):
        attempt = played.begin(USUAL_TOKENS, streamed=True)
        played.clock.now += seconds
        attempt.heard()
        attempt.end(Outcome.SUCCEEDED)
    played.scrape()
    played.begin(USUAL_TOKENS, streamed=True)
    assert least <= seconds_until_ejected(played) <= most


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("played", [(False, None)], indirect=True)
@pytest.mark.parametrize("state", ["asleep", "paused", "down", "removed"])
def test_requests_on_a_worker_that_computes_no_more_are_moved(played: Played, state: str, streamed: bool) -> None:
    (worker, other), removed = played.workers, []
    for _ in range(40):
        played.answer(USUAL_TOKENS, 0.002, streamed, limited=True)
    played.begin(USUAL_TOKENS, streamed)
    match state:
        case "asleep":
            worker.asleep = True
        case "paused":
            worker.engine = EngineState(paused=True)
        case "down":
            worker.problem = "no answer"
        case "removed":
            played.workers, removed = [other], [worker]
            worker.probe_began = played.clock.now
            worker.metrics.scrape_began()
    for _ in range(8):
        played.clock.now += 0.25
        played.detector.eject_stalled(played.workers, removed)
    assert played.moved == 1


@pytest.mark.parametrize("played", [(False, None)], indirect=True)
def test_requests_of_a_sleeping_worker_stay_while_no_other_can_answer(played: Played) -> None:
    worker, other = played.workers
    played.begin(USUAL_TOKENS, streamed=True)
    worker.asleep = other.asleep = True
    played.clock.now += 5
    played.detector.eject_stalled(played.workers)
    assert played.moved == 0
