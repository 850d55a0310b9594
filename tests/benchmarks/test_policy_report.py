"""The report and the traces of policies."""

from __future__ import annotations

import gzip
from collections import Counter
from itertools import pairwise
from math import ceil, inf
from pathlib import Path
from random import Random

import pytest

from benchmarks.policy.decisions import candidates
from benchmarks.policy.grid import full_grid, quick_grid
from benchmarks.policy.light import (
    LIGHT_SIDES,
    generated_cell,
    growing_cell,
    in_turn_cell,
    light_cells,
    mean_at_the_start,
    play,
)
from benchmarks.policy.measures import Measures, in_time, measured
from benchmarks.policy.report import CellResult, markdown, verdict
from benchmarks.policy.sessions import AGENTS, HOT_PREFIX, generated, in_turn, recorded
from benchmarks.policy.sides import OURS_AT_ONCE
from benchmarks.policy.workloads import AGENT, CONVERSATION, TOOL, Workload, ideal_seconds, sessions
from kvrouter.tools.traces.results import percentile
from router.settings import PolicyName
from simulator.fleet.fleet import Outcome, Simulation
from simulator.fleet.simulated_router import OURS
from simulator.fleet.trace import BLOCK_TOKENS, TracedRequest, TraceLine, read_trace, requests_of


def request(arrival: float, blocks: tuple[int, ...], output: int) -> TracedRequest:
    return TracedRequest(arrival, len(blocks) * BLOCK_TOKENS, output, blocks, blocks, str(blocks[:1]))


def test_measures_leave_the_warm_up_out() -> None:
    slow, quick = (
        Outcome(request(arrival, (1,), output=11), arrival + wait, arrival + wait + 1, cached, 0)
        for arrival, wait, cached in ((0.0, 9.0, 0), (10.0, 1.0, 256))
    )
    assert measured([slow, quick]) == Measures(0.5, 1.0, 1.0, 1.0, 0.1, 0.1, 1 / 5)
    assert [percentile(range(100), share) for share in (0.5, 0.9, 0.99)] == [50, 90, 99]


def test_refused_request_has_an_infinite_ttft_and_no_tpot() -> None:
    answered = Outcome(request(10.0, (1,), output=11), 11.0, 12.0, 0, 0)
    refused = Outcome(request(10.0, (2,), output=11))
    figures = measured([answered, refused])
    assert (figures.ttft_p50, figures.tpot_p90, figures.goodput) == (inf, 0.1, 1 / 5)
    assert not in_time(refused, None, None)


def result(**ttft_p90: list[float]) -> CellResult:
    sides = {name.replace("_at_once", ", at once"): values for name, values in ttft_p90.items()}
    return CellResult(
        "cell", {name: [Measures(0.5, 0.1, p90, 1.0, 0.02, 0.03, 4.0) for p90 in p90s] for name, p90s in sides.items()}
    )


def test_cell_is_lost_to_a_peer_that_is_better_beyond_noise() -> None:
    ours = [1.0, 1.1, 1.2]
    lost = result(kv_aware=ours, kv_aware_at_once=ours, a=[0.8, 0.9, 1.3], b=[0.97, 1.09, 1.1], c=[2.0, 2.0, 2.0])
    assert lost.lost_to(OURS.name) == ["a"]
    assert "(lost)" in verdict([lost])
    even = result(kv_aware=ours, kv_aware_at_once=ours, b=[0.97, 1.09, 1.19])
    assert even.lost_to(OURS.name) == even.lost_to(OURS_AT_ONCE.name) == []
    assert "1.01" in verdict([even])


def test_tables_are_aligned() -> None:
    table = markdown([["a", "b"], ["long", "1.25"]])
    assert table.splitlines() == ["| a    |    b |", "| ---- | ---: |", "| long | 1.25 |"]
    assert len({len(line) for line in result(kv_aware=[1.0], kv_aware_at_once=[123.0]).table().splitlines()}) == 1


def test_cells_of_a_grid_have_unique_names() -> None:
    for grid in (list(full_grid()), list(quick_grid()), list(light_cells(None, quick=False))):
        assert len({cell.name for cell in grid}) == len(grid)


def test_decision_cost_is_measured_with_the_given_number_of_candidates() -> None:
    among = candidates(64, Random(0))
    assert len({candidate.target for candidate in among}) == 64
    assert 0 < sum(candidate.overlap > 0 for candidate in among) < ceil(64 / 2)


LINES = b"""\
{"timestamp": 0, "input_length": 1200, "output_length": 400, "hash_ids": [0, 1, 2]}
{"timestamp": 3000, "input_length": 1700, "output_length": 10, "hash_ids": [0, 1, 3, 4]}
"""


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_public_trace_format_is_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(LINES) if path.suffix == ".gz" else LINES)
    first, second = requests_of(read_trace(path).lines, speed=2.0)
    assert (first.arrival, second.arrival) == (0, 1.5)
    assert (first.input_tokens, first.output_tokens, first.blocks) == (1200, 400, (0, 1))
    assert first.session == second.session == "1"
    assert len(read_trace(path, limit=1).lines) == 1


def test_blocks_of_an_answer_are_those_of_the_next_turn() -> None:
    first, second = requests_of([TraceLine(0, 1200, 400, [0, 1, 2]), TraceLine(3000, 1700, 10, [0, 1, 3, 4])])
    assert first.finished == (0, 1, 3)
    assert second.finished == second.blocks == (0, 1, 3)


def test_last_answer_of_a_session_has_its_own_blocks() -> None:
    first, other = requests_of([TraceLine(0, 600, 1000, [0, 1]), TraceLine(1, 600, 1000, [2, 3])])
    assert len(first.finished) == len(other.finished) == 3
    assert first.finished[0] == 0
    assert not set(first.finished) & set(other.finished)


@pytest.mark.parametrize("workload", [CONVERSATION, AGENT, TOOL])
def test_generated_traces_match_their_workload(workload: Workload) -> None:
    lines = sessions(workload, 0.5, 400, Random(3))
    assert lines == sessions(workload, 0.5, 400, Random(3))
    assert lines != sessions(workload, 0.5, 400, Random(4))
    assert [line.timestamp for line in lines] == sorted(line.timestamp for line in lines)
    turns = Counter(line.session_id for line in lines)
    assert 0.4 * workload.turns < len(lines) / len(turns) <= 1.3 * workload.turns
    before: dict[int, int | None] = {}
    for line in lines:
        assert len(line.hash_ids) == -(-line.input_length // BLOCK_TOKENS)
        for parent, block in zip([None, *line.hash_ids], line.hash_ids, strict=False):
            assert before.setdefault(block, parent) == parent  # equal ids mean equal prefixes


def test_tool_workload_mixes_chats_and_calls_with_shared_prefixes() -> None:
    lines = sessions(TOOL, 1.0, 600, Random(1))
    starts = Counter(line.hash_ids[0] for line in lines)
    chats, *calls = ([line for line in lines if line.hash_ids[0] == start] for start in sorted(starts))
    shares = [len(each) / len(lines) for each in (chats, *calls)]
    assert shares == pytest.approx([0.45, 0.4, 0.15], abs=0.06)
    for each, system_tokens in zip(calls, (6144, 2560), strict=True):
        assert len({tuple(line.hash_ids[: system_tokens // BLOCK_TOKENS]) for line in each}) == 1
        assert len({line.session_id for line in each}) == len(each)


def test_hot_prefix_is_copied_in_its_first_seconds() -> None:
    least_loaded = next(side for side in LIGHT_SIDES if side.policy is PolicyName.LEAST_LOADED)
    ours, spread = (sum(mean_at_the_start(side, seed) for seed in range(3)) for side in (OURS, least_loaded))
    assert ours < 1.13 * spread


def test_ideal_seconds_count_a_prefix_once() -> None:
    lines = [TraceLine(0, 1024, 10, [0, 1]), TraceLine(1, 1536, 10, [0, 1, 2])]
    assert ideal_seconds(lines, token=1.0, output_token=10.0) == (1536 + 2 * 100) / 2


def turns_of(first: TracedRequest) -> list[TracedRequest]:
    turns = [first]
    while (following := turns[-1].following) is not None:
        turns.append(following)
    return turns


def test_sessions_with_one_hot_prefix_use_all_workers() -> None:
    cell = generated_cell(HOT_PREFIX, load=0.2, workers=4, seconds=20)
    outcomes = Simulation(cell.fleet, OURS, Random(0)).run(cell.requests(0), until=cell.seconds)
    requests = Counter(outcome.worker for outcome in outcomes)
    assert min(requests[worker] for worker in range(4)) > len(outcomes) / 8


def test_sessions_in_turn_hit_as_often_as_with_session_affinity() -> None:
    cell = in_turn_cell(0.95, workers=2)
    affinity = next(side for side in LIGHT_SIDES if side.policy is PolicyName.SESSION_AFFINITY)
    assert play(cell, OURS, 0).hits >= play(cell, affinity, 0).hits


@pytest.mark.parametrize("shared", [0, 64, 112])
def test_growing_sessions_by_turns_hit_as_often_as_with_session_affinity(shared: int) -> None:
    """The sessions fit into both caches. At first, they fit into one."""
    cell = growing_cell(shared)
    affinity = next(side for side in LIGHT_SIDES if side.policy is PolicyName.SESSION_AFFINITY)
    assert play(cell, OURS, 0).hits >= play(cell, affinity, 0).hits - 0.005


def test_generated_sessions_extend_their_prompts_and_share_system_prompts() -> None:
    firsts = generated(AGENTS, rate=1.0, seconds=100, block_tokens=256, random=Random(0))
    starts = {first.blocks[0] for first in firsts}
    assert len(starts) == AGENTS.prompts < len(firsts)
    for first in firsts:
        turns = turns_of(first)
        assert len(turns) <= 40
        for before, after in pairwise(turns):
            assert after.input_tokens > before.input_tokens + before.output_tokens
            assert after.blocks[: len(before.finished)] == before.finished


def test_sessions_in_turn_repeat_their_prompts() -> None:
    turns = turns_of(in_turn(sessions=3, rounds=2, tokens=1000, output=100, block_tokens=256))
    assert [turn.session for turn in turns] == ["0", "1", "2"] * 2
    assert turns[0].blocks == turns[3].blocks != turns[1].blocks


def test_sessions_in_turn_share_a_prefix_and_grow() -> None:
    turns = turns_of(in_turn(sessions=2, rounds=3, tokens=64, output=1, block_tokens=16, shared=32, more=32))
    assert [turn.input_tokens for turn in turns] == [64, 64, 96, 96, 128, 128]
    assert [len(turn.blocks) for turn in turns] == [4, 4, 6, 6, 8, 8]
    assert turns[0].blocks[:2] == turns[1].blocks[:2]
    assert not {*turns[0].blocks[2:]} & {*turns[1].blocks[2:]}
    assert turns[4].blocks[:4] == turns[0].blocks


def test_recorded_sessions_share_the_blocks_of_their_first_turns(tmp_path: Path) -> None:
    lines = [
        f'{{"session_id":"{session}","input_length":{600 if number == 0 else 50},"output_length":9,'
        f'"hash_ids":[{7 if number == 0 else 8}],"delay":2000}}\n'
        for session in "ab"
        for number in range(2)
    ]
    path = tmp_path / "sessions.jsonl.gz"
    path.write_bytes(gzip.compress("".join(lines).encode()))
    firsts = recorded(path, load=1.0, workers=1, seconds=100, random=Random(0))
    assert {first.blocks[0] for first in firsts} == {7}
    whole = next(first for first in firsts if first.following is not None)
    assert (whole.input_tokens, turns_of(whole)[1].input_tokens, whole.pause) == (600, 659, 2.0)
