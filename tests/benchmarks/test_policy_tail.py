"""The waits of the slowest requests: their parts, and the first choice for each request."""

from __future__ import annotations

from random import Random
from time import monotonic

import pytest

from benchmarks.policy.grid import Cell
from benchmarks.policy.tail import (
    TAIL_SIDES,
    FirstChoice,
    WatchedSimulation,
    compare_tails,
    first_choice,
    play,
    tail_cells,
)
from benchmarks.policy.workloads import CONVERSATION
from indexer import Target
from router.load.target_load import LoadTable, ReservedLoad
from router.policies import Candidate, Decision, Request
from router.policies.rates import Rates
from router.prediction.learned import Learned
from simulator.fleet.engine import LLAMA_70B
from simulator.fleet.fleet import FleetSpec
from simulator.fleet.trace import BLOCK_TOKENS, TracedRequest

BUSY = Cell(CONVERSATION, LLAMA_70B, 2, 100_000, 1.8, seconds=40.0)
OURS, AT_ONCE, _, LEAST_TTFT = TAIL_SIDES[:4]
TARGET = Target("a", 0, "m")


def request(arrival: float, first_block: int, blocks: int) -> TracedRequest:
    ids = tuple(range(first_block, first_block + blocks))
    return TracedRequest(arrival, blocks * BLOCK_TOKENS + 100, 5, ids, ids, str(first_block))


def test_parts_of_a_wait_add_up_to_the_ttft() -> None:
    requests = BUSY.requests(0)
    held, at_once = play(BUSY, requests, OURS, 0), play(BUSY, requests, AT_ONCE, 0)
    for run in (held, at_once):
        assert all(wait.prefill > 0 and wait.behind > -1e-6 for wait in run.slowest)
        assert min(wait.ttft for wait in run.slowest) == pytest.approx(run.measures.ttft_p99, abs=1e-6)
    assert max(wait.held for wait in held.slowest) > 0
    assert all(wait.held < 1e-6 for wait in at_once.slowest)
    assert 0 < held.met < 1


def test_busy_choice_is_needless_if_an_idle_worker_holds_as_much() -> None:
    def chosen(first: Candidate, *others: Candidate) -> FirstChoice:
        return first_choice(Decision(first, [first, *others], lambda _: {}))

    busy, holder = Candidate(TARGET, pending=9000), Candidate(TARGET, pending=9000, overlap=100)
    idle, other = Candidate(TARGET, pending=100), Candidate(TARGET, pending=8193)
    assert chosen(idle, busy) == FirstChoice(busy=False, needless=False)
    assert chosen(busy, idle) == FirstChoice(busy=True, needless=True)
    assert chosen(busy, other) == FirstChoice(busy=True, needless=False)
    assert chosen(holder, idle) == FirstChoice(busy=True, needless=False)


def test_first_choice_of_every_request_is_recorded() -> None:
    requests = [request(0.1 * number, 100 * number, 40) for number in range(8)]
    watched = WatchedSimulation(FleetSpec(LLAMA_70B, 2, 100_000), OURS, Random(0))
    watched.run(requests)
    choices = [watched.first[id(asked)] for asked in requests]
    assert choices[0] == FirstChoice(busy=False, needless=False)
    assert FirstChoice(busy=True, needless=False) in choices


def test_mooncakes_rule_chooses_the_least_ttft() -> None:
    crowded = Candidate(Target("a", 0, "m"), requests=30, pending=100, context=500_000)
    waiting = Candidate(Target("b", 0, "m"), requests=1, pending=200)
    learned, load = Learned(Rates(), monotonic, 0.1, 0.5), LoadTable(lambda: 0.0)
    for name, seconds in (("a", 0.1), ("b", 0.2)):
        ReservedLoad(load.of(name, 0), 100, 100, prefill_seconds=seconds)
    policies = [side.make_policy(Random(0), learned, load) for side in (LEAST_TTFT, OURS)]
    choices = [policy.choose([crowded, waiting], Request(1000)).chosen for policy in policies]
    assert choices == [crowded, waiting]


def test_table_of_a_cell_has_every_side(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = Cell(CONVERSATION, LLAMA_70B, 2, 200_000, 0.3, seconds=30.0)
    monkeypatch.setattr("benchmarks.policy.tail.tail_cells", lambda *_: [tiny])
    shown: list[str] = []
    table = compare_tails(None, False, 1, shown.append)
    assert shown == [f"{table}\n"]
    assert [line.split("|")[1].strip() for line in table.splitlines()[2:]] == [side.name for side in TAIL_SIDES]


def test_generated_cells_are_sessions_tools_and_conversations() -> None:
    assert [cell.workload_name for cell in tail_cells(None, False)] == ["loop", "tool", "tool", "conversation"]
