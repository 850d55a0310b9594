"""Rooms that succeed, time out and are aborted at any moment, on pages that are reused as soon as they may be."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from rank_process import Model, RankProcess, processes
from site_of_ranks import Site

MODEL = Model(head_bytes=1024, pages=64)  # 16 KiB a page: aborts find writes under way
ROOMS_AT_ONCE = 7
PAGES = 8
REUSED = 0x77


@pytest.fixture(scope="module")
def pair() -> Iterator[list[RankProcess]]:
    with processes(2) as pair:
        yield pair


@pytest.mark.parametrize(
    ("engine", "rounds"),
    [
        ("tcp", 10),
        ("shm", 10),
        pytest.param("tcp", 150, marks=pytest.mark.transfer),
        pytest.param("shm", 150, marks=pytest.mark.transfer),
    ],
)
def test_pages_have_bytes_of_last_owner_under_churn(pair: list[RankProcess], engine: str, rounds: int) -> None:
    site = Site(pair, engine, MODEL)
    site.transfer(10**6, [1], [1])  # a decode rank that is not connected to the prefill cannot report an abort
    rng = random.Random(rounds)
    site.decode.call("wipe", 0)
    ends: set[str] = set()
    for number in range(rounds):
        pages = rng.sample(range(MODEL.pages), MODEL.pages)
        rooms = {1000 * number + index: pages[PAGES * index : PAGES * (index + 1)] for index in range(ROOMS_AT_ONCE)}
        for room, mine in rooms.items():
            timeout = rng.choice([0.003, 0.01, 20.0, 20.0])
            site.decode.call("receive", 0, site.address, room, mine, aux=None, timeout_s=timeout)
        for room, mine in rooms.items():
            chunks = rng.choice([[PAGES], [1, PAGES - 1], [PAGES, 0]])
            site.prefill.call("send", 0, site.address, room, mine, chunks, aux=None)
            if rng.random() < 0.3:
                rng.choice(pair).call("abort", 0, room)
        for room, mine in rooms.items():
            state, _, reusable = site.decode.call("wait", 0, room)
            ends.add(state)
            assert reusable
            assert site.prefill.call("wait", 0, room)[0] in ("Success", "Failed")
            if state == "Failed":
                site.decode.call("wipe", 0, REUSED, mine)
        for room, mine in rooms.items():
            if site.decode.call("state", 0, room)[0] == "Success":
                assert site.decode.call("matches", 0, room, mine)
            else:
                assert site.decode.call("stale_bytes", 0, REUSED, mine) == 0
    assert ends == {"Success", "Failed"}
    site.close()
