"""The figures and tables of the policy benchmark, and its cells."""

from __future__ import annotations

from math import ceil, inf
from random import Random

from benchmarks.policy.decisions import candidates
from benchmarks.policy.grid import full_grid, quick_grid
from benchmarks.policy.measures import Measures, in_time, measured
from benchmarks.policy.report import CellResult, markdown, verdict
from benchmarks.policy.sides import OURS_AT_ONCE
from kvrouter.tools.traces.results import percentile
from simulator.fleet.fleet import Outcome
from simulator.fleet.simulated_router import OURS
from simulator.fleet.trace import BLOCK_TOKENS, TracedRequest


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
    for grid in (list(full_grid()), list(quick_grid())):
        assert len({cell.name for cell in grid}) == len(grid)


def test_decision_cost_is_measured_with_the_given_number_of_candidates() -> None:
    among = candidates(64, Random(0))
    assert len({candidate.target for candidate in among}) == 64
    assert 0 < sum(candidate.overlap > 0 for candidate in among) < ceil(64 / 2)
