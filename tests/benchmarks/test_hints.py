"""The simulation of agents' hints: the reported hints, and their effect."""

from __future__ import annotations

from itertools import pairwise

from benchmarks.policy.grid import Cell
from benchmarks.policy.hints import Ground, hinted, play
from benchmarks.policy.workloads import AGENT, SINGLE
from router.apis.sessions import AgentHints
from simulator.fleet.engine import LLAMA_70B

GROUND = Ground(tuple(Cell(workload, LLAMA_70B, 2, 100_000, 0.2, 150.0) for workload in (AGENT, SINGLE)))


def test_only_the_last_request_of_a_session_is_final() -> None:
    requests = hinted(GROUND.requests(0), 0.0)
    assert [request.arrival for request in requests] == sorted(request.arrival for request in requests)
    sessions: dict[str, list[AgentHints]] = {}
    for request in requests:
        assert request.hints is not None
        sessions.setdefault(request.session, []).append(request.hints)
    for hints in sessions.values():
        assert hints[-1] == AgentHints(final=True)
        assert all(each.returns and each.next_call is not None for each in hints[:-1])
    assert {len(hints) for name, hints in sessions.items() if name.startswith("1-")} == {1}
    assert max(map(len, sessions.values())) > 4


def test_reported_pause_ends_when_the_next_request_arrives() -> None:
    requests = [request for request in hinted(GROUND.requests(0), 0.0) if request.session == "0-1"]
    for request, following in pairwise(requests):
        assert request.hints is not None
        assert request.hints.next_call is not None
        answered = request.arrival + 0.02 * request.output_tokens
        assert abs(answered + request.hints.next_call - following.arrival) < 1e-6


def test_hints_change_decisions_and_runs_repeat() -> None:
    requests = GROUND.requests(0)
    without, with_hints, again = (play(GROUND, each, 0) for each in (requests, hinted(requests), hinted(requests)))
    assert with_hints == again != without


def test_hints_change_nothing_if_nothing_is_evicted() -> None:
    ground = Ground((Cell(AGENT, LLAMA_70B, 2, 4_000_000, 0.2, 60.0),))
    requests = ground.requests(0)
    assert play(ground, hinted(requests), 0) == play(ground, requests, 0)
