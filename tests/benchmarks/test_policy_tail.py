"""The analysis of the slowest requests: the parts of their wait, and their first choice."""

from __future__ import annotations

from random import Random

import pytest

from benchmarks.policy.grid import Cell
from benchmarks.policy.tail import TAIL_SIDES, FirstChoice, WatchedFleet, compare_tails, play, tail_cells
from benchmarks.policy.workloads import CONVERSATION
from indexer import Target
from router.policies import Candidate, Decision, Request
from simulator.fleet.profiles import LLAMA_70B
from simulator.fleet.trace import BLOCK_TOKENS, TracedRequest

BUSY = Cell(CONVERSATION, LLAMA_70B, 2, 100_000, 1.8, seconds=40.0)
OURS, AT_ONCE, _, LEAST_TTFT = TAIL_SIDES[:4]


def request(arrival: float, first_block: int, blocks: int) -> TracedRequest:
    ids = tuple(range(first_block, first_block + blocks))
    return TracedRequest(arrival, blocks * BLOCK_TOKENS + 100, 5, ids, ids, str(first_block))


def test_parts_of_a_wait_add_up_to_ttft() -> None:
    requests = BUSY.requests(0)
    held, at_once = play(BUSY, requests, OURS, 0), play(BUSY, requests, AT_ONCE, 0)
    for run in (held, at_once):
        assert all(wait.prefill > 0 and wait.behind > -1e-6 for wait in run.slowest)
        assert min(wait.ttft for wait in run.slowest) == pytest.approx(run.measures.ttft_p99, abs=1e-6)
    assert max(wait.held for wait in held.slowest) > 0
    assert all(wait.held == 0 for wait in at_once.slowest)
    assert 0 < held.in_time < 1


def test_busy_choice_is_needless_if_an_idle_worker_holds_as_much() -> None:
    def first(candidates: list[Candidate], _: Request) -> Decision:
        return Decision(candidates[0], candidates, lambda _: {})

    fleet = WatchedFleet(LLAMA_70B, 2, 100_000, first, False, Random(0))
    free, other, same = requests = [request(0.0, 0, 40), request(0.1, 100, 40), request(0.2, 0, 40)]
    fleet.run(requests)
    choices = [fleet.first[id(asked)] for asked in (free, other, same)]
    assert choices == [FirstChoice(False, False), FirstChoice(True, True), FirstChoice(True, False)]


def test_mooncake_side_minimizes_ttft() -> None:
    crowded = Candidate(Target("a", 0, "m"), requests=30, pending=100, context=500_000)
    waiting = Candidate(Target("b", 0, "m"), requests=1, pending=200)
    choices = [side.policy_for(Random(0))([crowded, waiting], Request(1000)).chosen for side in (LEAST_TTFT, OURS)]
    assert choices == [crowded, waiting]


def test_table_has_a_row_per_side(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = Cell(CONVERSATION, LLAMA_70B, 2, 200_000, 0.3, seconds=30.0)
    monkeypatch.setattr("benchmarks.policy.tail.tail_cells", lambda *_: [tiny])
    shown: list[str] = []
    table = compare_tails(None, False, 1, shown.append)
    assert shown == [f"{table}\n"]
    assert [line.split("|")[1].strip() for line in table.splitlines()[2:]] == [side.name for side in TAIL_SIDES]


def test_tail_cells_cover_sessions_tools_and_conversations() -> None:
    assert [cell.workload_name for cell in tail_cells(None, False)] == ["loop", "tool", "tool", "conversation"]
