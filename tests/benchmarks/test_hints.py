"""The simulation of agents' hints: what is announced, and that runs repeat."""

from __future__ import annotations

from benchmarks.policy.grid import Cell
from benchmarks.policy.hints import Ground, play
from benchmarks.policy.workloads import AGENT, SINGLE
from simulator.fleet.hinted_fleet import announced
from simulator.fleet.profiles import LLAMA_70B

GROUND = Ground(tuple(Cell(workload, LLAMA_70B, 2, 100_000, 0.2, 150.0) for workload in (AGENT, SINGLE)))


def test_last_request_of_a_session_announces_no_pause() -> None:
    requests = GROUND.requests(0)
    assert [request.arrival for request in requests] == sorted(request.arrival for request in requests)
    pauses = announced(requests, 0.0)
    sessions: dict[str, list[float | None]] = {}
    for request in requests:
        sessions.setdefault(request.session, []).append(pauses[id(request)])
    assert all(each[-1] is None and None not in each[:-1] for each in sessions.values())
    assert {len(each) for name, each in sessions.items() if name.startswith("1-")} == {1}
    assert max(map(len, sessions.values())) > 4


def test_hints_change_choices_and_runs_are_deterministic() -> None:
    requests = GROUND.requests(0)
    without, with_hints, again = (play(GROUND, requests, hints, 0) for hints in (False, True, True))
    assert with_hints == again != without


def test_hints_change_nothing_without_evictions() -> None:
    ground = Ground((Cell(AGENT, LLAMA_70B, 2, 4_000_000, 0.2, 60.0),))
    requests = ground.requests(0)
    assert play(ground, requests, True, 0) == play(ground, requests, False, 0)
