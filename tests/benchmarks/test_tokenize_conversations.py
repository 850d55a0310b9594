"""Ports, hints and conversations of benchmarks."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from itertools import pairwise

import msgspec
import pytest

from benchmarks import ports
from benchmarks.policy.grid import Cell
from benchmarks.policy.hints import Ground, hinted, play
from benchmarks.policy.workloads import AGENT, SINGLE
from benchmarks.tokenize.measure import bodies
from router.apis.agent_hints import AgentHints
from simulator.fleet.engine import LLAMA_70B


def test_every_turn_extends_the_previous_one() -> None:
    turns = [msgspec.json.decode(body)["messages"] for body in bodies(1, 20_000)]
    assert len(turns) > 3
    for before, after in pairwise(turns):
        assert after[: len(before)] == before
        assert [message["role"] for message in after[len(before) :]] == ["assistant", "user"]
    assert len(msgspec.json.encode(turns[-1])) > 19_000


def test_conversations_share_no_messages() -> None:
    one, other = (
        {message["content"] for body in bodies(seed, 9_000) for message in _messages(body)} for seed in (1, 2)
    )
    assert not one & other
    assert bodies(1, 9_000) == bodies(1, 9_000)


def _messages(body: bytes) -> list[dict[str, str]]:
    messages: list[dict[str, str]] = msgspec.json.decode(body)["messages"]
    return messages


def test_ports_are_free_consecutive_and_unique(monkeypatch: pytest.MonkeyPatch) -> None:
    first = ports.free_port()
    monkeypatch.setattr(ports, "_FIRST", first)
    monkeypatch.setattr(ports, "_COUNT", 200)
    with ExitStack() as stack:
        taken = {first}
        for _ in range(100):
            port = ports.free_port()
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
            assert port not in taken
            taken.add(port)
        monkeypatch.setattr(ports, "_given", set())
        row = ports.free_ports(2)
    assert row == range(row[0], row[0] + 2)
    assert taken.isdisjoint(set(row) - {first})


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
