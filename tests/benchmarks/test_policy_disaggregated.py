"""The benchmark of prefill and decode workers: its grounds, its goals, and its tables."""

from __future__ import annotations

import gzip
from dataclasses import replace
from math import inf
from pathlib import Path

import msgspec
import pytest

from benchmarks.policy.disaggregated import SIDES, Ground, grounds, holds_sessions, measured, play, with_goals
from benchmarks.policy.saturation import find_saturation
from benchmarks.policy.sessions import CHATS
from router.policies.rates import prefill_seconds
from simulator.fleet.engine import LLAMA_70B
from simulator.fleet.fleet import Outcome
from simulator.fleet.trace import TracedRequest

GROUND = Ground(CHATS, 1, 1, 0.05, 1.0, 30.0)


def trace_file(folder: Path, *, sessions: bool) -> Path:
    path = folder / "trace.jsonl.gz"
    lines = [{"session_id": "s", "input_length": 1000, "output_length": 10, "hash_ids": [1, 2]}]
    if sessions:
        lines += [{**lines[0], "delay": 100.0}] * 3
    else:
        lines = [{**lines[0], "timestamp": 1000.0 * number, "hash_ids": [number, -number]} for number in range(1, 301)]
    path.write_bytes(gzip.compress(b"\n".join(map(msgspec.json.encode, lines)) + b"\n"))
    return path


def test_seeds_replay_other_windows_of_a_trace_at_the_load(tmp_path: Path) -> None:
    ground = Ground(trace_file(tmp_path, sessions=False), 1, 1, 0.1, 1.0, 50.0)
    first, second = (ground.requests(1.0, seed) for seed in (0, 2))
    assert len(first) == len(second) == 100
    assert first[0].arrival == second[0].arrival == 0
    assert first[-1].arrival == pytest.approx(50.0, rel=0.02)
    assert first[0].blocks != second[0].blocks


def test_traces_of_sessions_are_recognized(tmp_path: Path) -> None:
    path = trace_file(tmp_path, sessions=True)
    assert holds_sessions(path)
    assert any(first.following for first in Ground(path, 1, 1, 0.1, 1.0, 100.0).requests(1.0, 0))
    assert not holds_sessions(trace_file(tmp_path, sessions=False))


def test_every_ratio_of_roles_is_played(tmp_path: Path) -> None:
    path = trace_file(tmp_path, sessions=True)
    roles = [(ground.prefill, ground.decode) for ground in grounds(path, quick=False)]
    assert roles == [(4, 4), (8, 8), (2, 6), (6, 2), (16, 48)]
    assert all(ground.fleet.prefill + ground.fleet.decode == ground.fleet.workers for ground in grounds(None, True))


def test_goal_allows_a_prompt_its_own_prefill() -> None:
    request = with_goals(TracedRequest(0.0, 60_000, 100, (), (), "s"))
    own = prefill_seconds(LLAMA_70B.rates, 60_000, 0, 0, 0)
    good = Outcome(request, begun=own + 1.9, ended=own + 1.9 + 99 * 0.049, worker=1, prefill=0, moved=500)
    run = measured([good, replace(good, begun=own + 2.1, ended=own + 3.0), replace(good, ended=own + 10.0, prefill=-1)])
    assert run.goodput == pytest.approx(1 / 3)
    assert (run.remote, run.moved) == (pytest.approx(2 / 3), 500)


def test_every_turn_has_goals_and_short_answers_none_for_each_token() -> None:
    last = TracedRequest(0.0, 2000, 8, (), (), "s")
    first = with_goals(TracedRequest(0.0, 1000, 9, (), (), "s", following=replace(last, following=last)))
    chain = [first]
    while (following := chain[-1].following) is not None:
        chain.append(following)
    assert [each.input_tokens for each in chain] == [1000, 2000, 2000]
    assert [each.slo and each.slo.tpot for each in chain] == [0.05, None, None]
    assert all(each.slo and each.slo.ttft and each.slo.ttft > 2.0 for each in chain)


def test_search_halves_its_lower_bound_until_that_meets_the_goals() -> None:
    assert find_saturation(lambda load: load <= 0.5, 0.1, 1.0) == pytest.approx(0.5, abs=1 / 32)
    assert find_saturation(lambda load: load <= 0.013, 0.1, 1.0) == pytest.approx(0.013, abs=0.1 / 32)
    with pytest.raises(ValueError, match="cannot serve this workload"):
        find_saturation(lambda _: False, 0.1, 1.0)


def test_saturation_is_the_load_at_which_a_tenth_misses_the_goals() -> None:
    saturation = GROUND.saturation()
    assert GROUND.below < saturation < GROUND.above
    assert play(GROUND, saturation / 2, "fewest requests", 0).goodput > 0.9
    assert play(GROUND, saturation / 2, "fewest requests", 0).times.ttft[2] < inf


@pytest.mark.parametrize("side", SIDES)
def test_run_depends_only_on_its_seed(side: str) -> None:
    assert play(GROUND, 0.3, side, 1) == play(GROUND, 0.3, side, 1)
