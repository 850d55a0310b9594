"""Sorting and scrolling of the terminal screen of `kvrouter top`."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from kvrouter.tools.top.feed import Fleet
from kvrouter.tools.top.screen import COLUMNS, View, ordered, screen


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
    fleet.take({"ranks": ranks, "gone": [], "totals": {"up": 100, "workers": 100}, "series": [], "requests": []})
    console = Console(width=160, height=40, record=True, file=StringIO())
    view = View("w")
    for _ in range(200):
        view.press("j")
    console.print(screen(fleet, view, 40))
    text = console.export_text()
    assert len(text.splitlines()) <= 40
    assert "w99" in text
    assert "w10 " not in text
    fleet.take({"ranks": {}, "gone": list(ranks), "totals": {}, "series": [], "requests": []})
    assert fleet.ranks == {}
