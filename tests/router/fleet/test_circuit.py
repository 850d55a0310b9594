"""The circuit breaker, step by step and under any order of events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from manual_clock import Clock

from router.fleet.circuit import Circuit, CircuitLimits, CircuitState

LIMITS = CircuitLimits(failures=3, backoff=1.0, longest_backoff=8.0)


@pytest.fixture
def circuit(clock: Clock) -> Circuit:
    return Circuit(LIMITS, clock)


@pytest.fixture
def opened(circuit: Circuit) -> Circuit:
    circuit.open("a reason")
    return circuit


def test_failures_in_a_row_open_the_circuit(circuit: Circuit) -> None:
    for _ in range(2):
        circuit.failed(circuit.begin(), "status 500")
    assert circuit.state is CircuitState.CLOSED
    circuit.failed(circuit.begin(), "status 502")
    assert (circuit.state, circuit.allows, circuit.reason) == (CircuitState.OPEN, False, "status 502")


def test_success_between_failures_keeps_the_circuit_closed(circuit: Circuit) -> None:
    for _ in range(5):
        circuit.failed(circuit.begin(), "x")
        circuit.failed(circuit.begin(), "x")
        circuit.succeeded(circuit.begin())
    assert circuit.state is CircuitState.CLOSED


def test_half_open_circuit_allows_one_request_at_a_time(opened: Circuit, clock: Clock) -> None:
    clock.now += 0.9
    assert not opened.allows
    clock.now += 0.1
    assert (opened.state, opened.allows) == (CircuitState.HALF_OPEN, True)
    trial = opened.begin()
    assert not opened.allows
    opened.ended(trial)  # its client disconnected
    assert opened.allows
    opened.succeeded(opened.begin())
    assert (opened.state, opened.reason) == (CircuitState.CLOSED, None)


def test_each_failure_when_half_open_doubles_the_backoff_up_to_the_longest(opened: Circuit, clock: Clock) -> None:
    for backoff in (1, 2, 4, 8, 8):
        clock.now += backoff - 0.01
        assert opened.state is CircuitState.OPEN
        clock.now += 0.01
        opened.failed(opened.begin(), "again")
    clock.now += 8
    opened.succeeded(opened.begin())
    opened.open("later")
    clock.now += 1
    assert opened.allows


def test_ends_of_requests_from_before_the_opening_are_ignored(circuit: Circuit, clock: Clock) -> None:
    old = [circuit.begin() for _ in range(3)]
    circuit.open("it hangs")
    circuit.succeeded(old[0])
    assert circuit.state is CircuitState.OPEN
    clock.now += 1
    circuit.failed(old[1], "late")
    circuit.ended(old[2])
    assert circuit.state is CircuitState.HALF_OPEN


def test_success_of_a_request_during_the_backoff_closes_the_circuit(opened: Circuit) -> None:
    """Requests are sent to ejected workers if every worker is ejected."""
    opened.succeeded(opened.begin())
    assert opened.state is CircuitState.CLOSED


class CircuitMachine(RuleBasedStateMachine):
    """Requests that begin when the circuit allows it, and end in any order with any outcome."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.circuit = Circuit(LIMITS, self.clock)
        self.running: list[int] = []
        self.trials: set[int] = set()

    @rule(seconds=st.floats(0, 20))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds

    @precondition(lambda self: self.circuit.allows)
    @rule()
    def begin(self) -> None:
        half_open = self.circuit.state is CircuitState.HALF_OPEN
        number = self.circuit.begin()
        self.running.append(number)
        if half_open:
            self.trials.add(number)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), how=st.sampled_from(("succeeded", "failed", "ended")))
    def end(self, data: st.DataObject, how: str) -> None:
        number = data.draw(st.sampled_from(self.running))
        self.running.remove(number)
        self.trials.discard(number)
        if how == "failed":
            self.circuit.failed(number, "x")
        else:
            getattr(self.circuit, how)(number)
        if self.circuit.state is not CircuitState.HALF_OPEN:
            self.trials.clear()  # The half-open request has ended, or belongs to an earlier opening.

    @rule()
    def open(self) -> None:
        self.circuit.open("x")
        self.trials.clear()
        assert not self.circuit.allows

    @invariant()
    def at_most_one_trial(self) -> None:
        assert len(self.trials) <= 1

    @invariant()
    def a_reason_unless_closed(self) -> None:
        assert (self.circuit.reason is None) == (self.circuit.state is CircuitState.CLOSED)

    @invariant()
    def never_stuck(self) -> None:
        """Assert that a circuit allows requests after its backoff, when its requests have ended."""
        if not self.running and self.circuit.state is not CircuitState.OPEN:
            assert self.circuit.allows


TestCircuitMachine = CircuitMachine.TestCase


@given(st.integers(0, 200))
def test_backoff_is_bounded_for_any_number_of_openings(openings: int) -> None:
    clock = Clock()
    circuit = Circuit(LIMITS, clock)
    for _ in range(openings):
        circuit.open("x")
    clock.now += LIMITS.longest_backoff
    assert circuit.allows
