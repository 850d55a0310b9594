"""The cells in which the default is not first: what counts as ahead, and cells and routers by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.policy.behind import (
    GRID,
    RECORDED_GRID,
    SIDES,
    BehindRun,
    cell_named,
    compare_behind,
    nearest,
    side_for,
    summary,
    verdicts,
)
from benchmarks.policy.rivals import RIVALS

RUN = BehindRun(answer_p90=10.0, ttft_p90=1.0, tpot_p90=0.02, in_time=0.9, hits=0.9)


def runs(**answers: tuple[float, ...]) -> dict[str, list[BehindRun]]:
    return {name: [replace(RUN, answer_p90=answer) for answer in of_rule] for name, of_rule in answers.items()}


def found(cell: dict[str, list[BehindRun]]) -> list[tuple[str, str, float, bool]]:
    """Return what is ahead of the default, with rounded shares."""
    return [(measure, rule, round(share, 3), agree) for measure, rule, share, agree in verdicts(cell)]


def test_rule_is_ahead_if_it_is_better_in_all_seeds_and_by_more_than_two_percent() -> None:
    assert found(runs(kv_aware=(10, 10), a=(9.7, 9.7))) == [("answer p90", "a", 0.031, True)]
    assert found(runs(kv_aware=(10, 10), a=(9.9, 9.9))) == []
    assert found(runs(kv_aware=(10, 10), a=(9.0, 10.1))) == [("answer p90", "a", 0.047, False)]
    assert found(runs(kv_aware=(10, 10), a=(9.0, 10.1), b=(9.7, 9.7)))[0][1] == "b"
    assert found(runs(kv_aware=(10, 10), a=(5.0,))) == []  # played the first seed alone


def test_rule_with_more_requests_in_time_is_ahead() -> None:
    cell = {"kv_aware": [RUN], "a": [replace(RUN, in_time=0.93)]}
    assert found(cell) == [("in time", "a", 0.032, True)]
    assert "| in time |" in " ".join(summary({"agents@0.2": cell}).split())
    assert "is first" in summary({"agents@0.2": {"kv_aware": [RUN]}})


def test_nearest_rules_lead_in_any_measure() -> None:
    cell = runs(kv_aware=(10,), a=(12,), b=(9.5,), c=(11,))
    cell["late"] = [replace(RUN, answer_p90=30.0, ttft_p90=0.5)]
    assert nearest(cell, "kv_aware", 3) == ["late", "b", "a"]


def test_cells_of_the_grid_have_the_named_fleets() -> None:
    for name in GRID:
        assert cell_named(name).name == name
    pooled, large = cell_named("coding, pool 50@0.85"), cell_named("agents, 32 workers, unlike@0.7")
    assert pooled.fleet.sources is not None
    assert (large.fleet.workers, len(large.fleet.unlike)) == (32, 2)
    assert side_for("dynamo", pooled).sources
    assert not side_for("lmetric", pooled).sources
    assert not side_for("kv_aware, pool ignored", pooled).sources


@pytest.mark.parametrize("name", ["agents", "nothing@0.2", "agents, quick@0.2", RECORDED_GRID[0]])
def test_unknown_cell_is_an_error_that_names_it(name: str) -> None:
    with pytest.raises(ValueError, match=name.split("@")[0]):
        cell_named(name)


def test_unknown_router_is_an_error_that_lists_the_known_ones() -> None:
    assert {*RIVALS, "kv_aware", "cache_aware, sent"} <= SIDES.keys()
    with pytest.raises(ValueError, match="session_affinity"):
        compare_behind(None, ["agents@0.2"], ["nobody"], 1, print)
