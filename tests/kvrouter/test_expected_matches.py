"""Requests that were recorded with a stream: what is read of them, whatever a client had sent."""

from __future__ import annotations

import pytest

from kvrouter.tools.replay.expected_matches import AnsweredRequest


@pytest.mark.parametrize(
    ("sent", "rank"), [("0", 0), ("12", 12), ("x", None), ("-1", None), ("\xb2", None), ("", None)]
)
def test_rank_of_a_request_is_a_whole_number(sent: str, rank: int | None) -> None:
    assert AnsweredRequest(0.0, [], 0, headers={"X-Data-Parallel-Rank": sent}).dp_rank == rank


def test_rank_of_any_length_is_read() -> None:
    assert AnsweredRequest(0.0, [], 0, headers={"x-data-parallel-rank": "9" * 5000}).dp_rank is not None
