"""Workers that are killed and hang under load: real processes, and a small form of `make bench-chaos`."""

from __future__ import annotations

from benchmarks.chaos.faults import HANG, KILL
from benchmarks.chaos.run import Plan, run_chaos

SMALL = Plan(workers=3, streams=24, seconds=3.0, tokens=10, step_ms=50.0)


async def test_faults_lose_no_waiting_request_and_release_all_load() -> None:
    result = await run_chaos(SMALL, [HANG, KILL])
    for phase in result.phases:
        assert len(phase.streams) > SMALL.streams
        assert [stream.problem for stream in phase.lost] == []
    undisturbed, hung, killed = result.phases
    assert undisturbed.broken == hung.broken == []
    assert len(killed.broken) <= SMALL.streams  # those that had begun on it
    assert hung.noticed is not None
    assert hung.noticed < 4
    assert result.left_over == 0
