"""Tables in terminals of every width, and the terminal screen of `kvrouter top`."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from kvrouter.fitting_table import FittingColumn, FittingTable
from kvrouter.tools.lookups import _explanation_table as explanation
from kvrouter.tools.top import COLUMNS, Fleet, View, ordered, screen

WORKERS = [f"http://llama-3-70b-decode-{number}.inference.svc.cluster.local:8000" for number in range(3)]


def shown(renderable: RenderableType, width: int) -> str:
    console = Console(width=width, file=StringIO(), record=True)
    console.print(renderable)
    return console.export_text()


@given(width=st.integers(4, 80), widths=st.lists(st.integers(1, 30), min_size=1, max_size=6))
def test_shown_cells_are_complete(width: int, widths: list[int]) -> None:
    columns = [FittingColumn(f"c{place}", ["x" * each], place) for place, each in enumerate(widths)]
    text = shown(FittingTable(columns, box=None), width)
    assert "…" not in text
    assert all(len(line.rstrip()) <= width for line in text.splitlines())
    # The one that matters most is always there, on several lines if need be.
    assert text.replace("\n", "").replace(" ", "").count("x") >= widths[-1]


def test_least_important_column_is_omitted_first() -> None:
    columns = [FittingColumn(name, ["x" * 10], matters) for name, matters in (("a", 2), ("b", 3), ("c", 1))]
    assert [name for name in "abc" if name in shown(FittingTable(columns, box=None), 30)] == ["a", "b"]
    assert [name for name in "abc" if name in shown(FittingTable(columns, box=None), 12)] == ["b"]


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_top_never_shortens_worker_names(width: int) -> None:
    rows = [
        {"worker": worker, "dp_rank": 0, "model": "m", "state": "ejected", "requests": 3, "pending": 0}
        | {"kv_usage": None, "stream": "connecting"}
        for worker in WORKERS
    ]
    fleet = Fleet()
    seen = {"number": 1, "tokens": 100, "overlap": 50, "best_overlap": 60, "worker": WORKERS[0], "dp_rank": 0}
    seen |= {"first_byte_ms": 12.0, "whole_ms": 50.0, "terms": {"prefill": 1234.5, "interference": 3.2}}
    ranks = {row["worker"]: row for row in rows}
    fleet.take({"ranks": ranks, "gone": [], "totals": {}, "series": [], "requests": [seen]})
    text = shown(screen(fleet, View(), 40), width)
    assert "…" not in text
    joined = "".join(line.strip() for line in text.splitlines())
    assert all(worker.removeprefix("http://") in joined for worker in WORKERS)
    assert ("interference=3.2" in text) is (width >= 200)


@pytest.mark.parametrize("width", [50, 80, 120])
def test_explain_never_shortens_worker_names(width: int) -> None:
    terms = {"pending": 0.0, "prefill": 4096.0, "interference": 12.25, "context": 3.5}
    prediction = {"ttft": {"expected": 0.25, "low": 0.125, "high": 0.5}}
    candidates: list[dict[str, Any]] = [
        {"worker": worker, "dp_rank": 0, "overlap": 12, "load": {"requests": 1}, "total": 4111.75, "terms": terms}
        | {"forecast": prediction}
        for worker in WORKERS
    ]
    choice = {"worker": WORKERS[0], "dp_rank": 0}
    answer = {"tokens": 9, "model": "m", "choice": choice, "candidates": candidates, "unit": "tokens"}
    text = shown(explanation(answer), width)
    assert "…" not in text
    joined = "".join(line.strip() for line in text.splitlines())
    assert all(worker in joined for worker in WORKERS)


def rank(number: int, **fields: Any) -> dict[str, Any]:
    row = {"worker": f"http://w{number}", "dp_rank": 0, "model": "m", "state": "ready", "requests": number}
    return row | {"pending": 0, "kv_usage": None} | fields


def test_worst_state_is_first_by_default() -> None:
    ranks = [rank(1), rank(2, state="down"), rank(3, state="warming")]
    view = View()
    assert [row["state"] for row in ordered(ranks, view)] == ["down", "warming", "ready"]
    view.press("r")
    assert [row["requests"] for row in ordered(ranks, view)] == [3, 2, 1]
    view.press("r")
    assert [row["requests"] for row in ordered(ranks, view)] == [1, 2, 3]


@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: str(column.title))
def test_every_column_sorts_known_and_unknown_values(column: Any) -> None:
    known = {"stream": "live", "held": {"gpu": 10}, "lag_ms": 3, "gaps": 0, "replays": 1, "lost": 0, "kv_usage": 0.5}
    ranks = [rank(1), rank(2, **known, prompt=10, predicted=5, hit=5, wrong=0.0)]
    assert len(ordered(ranks, View(column.key))) == 2


def test_screen_fits_and_scrolls() -> None:
    fleet = Fleet()
    ranks = {str(number): rank(number) for number in range(100)}
    stages = [
        {"model": "m", "stage": "prefill", "cause": "prefill", "share": 0.3},
        {"model": "m", "stage": "decode", "cause": "memory", "share": 0.87},
    ]
    totals = {"up": 100, "workers": 100, "saturation": stages}
    fleet.take({"ranks": ranks, "gone": [], "totals": totals, "series": [], "requests": []})
    console = Console(width=160, height=40, record=True, file=StringIO())
    view = View("w")
    for _ in range(200):
        view.press("j")
    console.print(screen(fleet, view, 40))
    text = console.export_text()
    assert len(text.splitlines()) <= 40
    assert "87% of memory, decode of m" in " ".join(text.split())
    assert "w99" in text
    assert "w10 " not in text
    fleet.take({"ranks": {}, "gone": list(ranks), "totals": {}, "series": [], "requests": []})
    assert fleet.ranks == {}
