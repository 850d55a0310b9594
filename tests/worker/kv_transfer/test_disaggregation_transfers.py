"""Prompts go from prefill ranks to decode ranks, in two processes, byte for byte, and nothing else changes."""

from __future__ import annotations

import itertools
import random
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from rank_process import Model, RankProcess, processes
from site_of_ranks import Site

from worker.kv_transfer import Topology

ENGINES = ("tcp", "shm")
ROOMS = itertools.count(100)


@pytest.fixture(scope="module")
def pair() -> Iterator[list[RankProcess]]:
    with processes(2) as pair:
        yield pair


@pytest.fixture(scope="module", params=ENGINES)
def standing_site(request: pytest.FixtureRequest) -> Iterator[Site]:
    with processes(2) as own:
        site = Site(own, request.param)
        yield site
        site.close()


@pytest.fixture
def site(standing_site: Site) -> Iterator[Site]:
    """One that the tests share; each must leave nothing behind."""
    standing_site.decode.call("wipe", 0)
    yield standing_site
    assert standing_site.left() == []


def test_pages_are_transferred_in_one_or_many_chunks(site: Site) -> None:
    rng = np.random.default_rng(1)
    source, target = rng.permutation(64)[:40].tolist(), rng.permutation(64)[:40].tolist()
    site.transfer(next(ROOMS), list(range(8, 48)), list(range(3, 43)), [40])
    site.transfer(next(ROOMS), source, target, [40])
    site.transfer(next(ROOMS), source, target, [1, 30, 9])
    site.transfer(next(ROOMS), [63], [0], [1])
    site.transfer(next(ROOMS), source[:10], target[:10], [10, 0])  # an empty last chunk


def test_concurrent_rooms_are_transferred(site: Site) -> None:
    rooms = [next(ROOMS) for _ in range(8)]
    pages = {room: np.arange(8 * number, 8 * number + 8).tolist() for number, room in enumerate(rooms)}
    for number, room in enumerate(rooms):
        site.decode.call("receive", 0, site.address, room, pages[room][::-1], aux=number)
    for number, room in enumerate(reversed(rooms)):
        site.prefill.call("send", 0, site.address, room, pages[room], [3, 5], aux=number)
    for room in rooms:
        assert site.decode.call("wait", 0, room) == ("Success", "", True)
        assert site.prefill.call("wait", 0, room) == ("Success", "", True)
        assert site.decode.call("matches", 0, room, pages[room][::-1])


def test_cached_prefix_is_not_sent(site: Site) -> None:
    room = next(ROOMS)
    site.decode.call("receive", 0, site.address, room, [7, 9, 11], aux=1, prefix=3 * site.model.page_size)
    site.prefill.call("send", 0, site.address, room, [20, 21, 22, 23, 24, 25], [2, 4])
    assert site.decode.call("wait", 0, room) == ("Success", "", True)
    assert site.decode.call("check", 0, room, [7, 9, 11], aux=1, skipped=3) == []


def test_full_prefix_hit_transfers_only_aux_items(site: Site) -> None:
    room = next(ROOMS)
    site.decode.call("receive", 0, site.address, room, [], aux=1, prefix=4 * site.model.page_size)
    site.prefill.call("send", 0, site.address, room, [20, 21, 22, 23], [2, 2])
    assert site.decode.call("wait", 0, room) == ("Success", "", True)
    assert site.decode.call("check", 0, room, [], aux=1) == []


def test_aux_items_are_sent_with_last_chunk(site: Site) -> None:
    room = next(ROOMS)
    site.decode.call("receive", 0, site.address, room, [1, 2], aux=6)
    site.prefill.call("wipe", 0)
    site.prefill.call("open_sender", 0, site.address, room)
    assert site.prefill.call("attempt", 0, room, "init", 2, 3) == ""
    assert site.prefill.call("attempt", 0, room, "send", [1]) == ""
    assert site.prefill.call("wait_state", 0, room, "Transferring")
    site.prefill.call("fill_aux", 0, room, 3)  # the first token is known only now
    assert site.prefill.call("attempt", 0, room, "send", [2]) == ""
    assert site.decode.call("wait", 0, room) == ("Success", "", True)
    assert not [wrong for wrong in site.decode.call("check", 0, room, [1, 2], aux=6) if "aux" in wrong]


def test_transfer_without_aux_buffers_or_pages_succeeds(site: Site) -> None:
    room = next(ROOMS)
    site.decode.call("receive", 0, site.address, room, [], aux=None)
    site.prefill.call("send", 0, site.address, room, [], [0], aux=None)
    assert site.decode.call("wait", 0, room) == ("Success", "", True)
    assert site.prefill.call("wait", 0, room) == ("Success", "", True)


TOPOLOGIES = {
    "TP 2 to 1": (Topology(tp=2), Topology()),
    "TP 1 to 2": (Topology(), Topology(tp=2)),
    "TP 4 to 2": (Topology(tp=4), Topology(tp=2)),
    "CP 2": (Topology(cp=2), Topology()),
    "PP 2 to 1": (Topology(pp=2), Topology()),
    "PP 2, TP 2 to 1": (Topology(pp=2, tp=2), Topology(pp=2)),
}


@pytest.mark.parametrize("engine", ["tcp", pytest.param("shm", marks=pytest.mark.transfer)])
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_different_parallelism_is_mapped(pair: list[RankProcess], engine: str, name: str) -> None:
    site = Site(pair, engine, None, *TOPOLOGIES[name])
    site.transfer(next(ROOMS), [5, 6, 7, 20, 33, 40, 41], [9, 10, 11, 12, 1, 0, 63], [4, 3])
    site.close()


@pytest.mark.parametrize(("layout", "heads"), [("HND", 4), ("MLA", 1), ("NHD", 2), ("HND", 1)])
def test_shared_heads_and_layouts_are_transferred(pair: list[RankProcess], layout: str, heads: int) -> None:
    """With MLA, or fewer heads than ranks, several prefill ranks hold the same bytes and one of them sends."""
    model = Model(layout=layout, heads=heads)
    for prefill, decode in ((4, 2), (2, 4)):
        site = Site(pair, "tcp", model, Topology(tp=prefill), Topology(tp=decode))
        site.transfer(next(ROOMS), [5, 6, 7, 20], [9, 10, 12, 1], [3, 1])
        site.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_dp_rank_is_room_modulo_size_or_given(pair: list[RankProcess], engine: str) -> None:
    """The first room makes connections to group 0; the next one must not end there because of that."""
    site = Site(pair, engine, None, Topology(dp=2, tp=2))
    site.transfer(1_000_000, [1, 2, 3], [4, 5, 6], [3])
    site.transfer(1_000_001, [1, 2, 3], [4, 5, 6], [3])
    site.transfer(1_000_002, [1, 2, 3], [4, 5, 6], [3], dp=1)
    site.close()


def test_ranks_connect_over_ipv6(pair: list[RankProcess]) -> None:
    site = Site(pair, "tcp", host="::1")
    assert site.prefill.call("endpoint", 0).startswith("tcp://[::1]:")
    site.transfer(next(ROOMS), [1, 2], [3, 4])
    site.close()


def test_closed_rank_leaves_no_descriptor(pair: list[RankProcess]) -> None:
    counts = []
    for _ in range(3):
        site = Site(pair, "tcp")
        site.transfer(next(ROOMS), [1, 2], [3, 4], [2])
        site.close()
        counts.append([process.call("descriptors") for process in pair])
    assert counts[1] == counts[2]


@pytest.mark.transfer
@pytest.mark.parametrize(("engine", "library"), [("mooncake", "mooncake.engine"), ("nixl", "nixl")])
def test_rdma_libraries_transfer_pages(pair: list[RankProcess], engine: str, library: str) -> None:
    pytest.importorskip(library, exc_type=ImportError)  # it may lack a library of the system
    site = Site(pair, engine, None, Topology(tp=2), Topology())
    rng = np.random.default_rng(1)
    source, target = rng.permutation(64)[:40].tolist(), rng.permutation(64)[:40].tolist()
    site.transfer(next(ROOMS), source, target, [1, 30, 9])
    site.transfer(next(ROOMS), source, target, [40, 0])
    room = next(ROOMS)
    site.decode.call("receive", 0, site.address, room, target, timeout_s=0.3)
    assert site.decode.call("wait", 0, room)[::2] == ("Failed", True)
    site.close()


def test_documented_example_runs() -> None:
    text = (Path(__file__).parents[3] / "docs" / "disaggregation.md").read_text()
    example = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    before = set(threading.enumerate())
    exec(example, {"__name__": "example"})
    assert set(threading.enumerate()) <= before


MODEL = Model(head_bytes=1024, pages=64)  # 16 KiB a page: aborts find writes under way
ROOMS_AT_ONCE = 7
PAGES = 8
REUSED = 0x77


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
