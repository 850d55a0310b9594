"""The sessions that asked for each prefix, and the price of a copy for each of them."""

from __future__ import annotations

from array import array

import pytest

from router.cache_state.prefix_demand import HORIZON, PrefixDemand
from router.policies.shared_tokens import SharedTokens

CHUNK, STRIDE = 16, 4
UNIT = CHUNK * STRIDE
SYSTEM = list(range(40))  # ten strides


def prompt(session: int, chunks: int) -> array[int]:
    return array("Q", [*SYSTEM, *range(1000 * session, 1000 * session + chunks)])


def read(hashes: array[int]) -> array[int]:
    return hashes[STRIDE - 1 :: STRIDE]


def route(demand: PrefixDemand, hashes: array[int], known: int) -> None:
    demand.routed(hashes, read(hashes), known, 0.0)


@pytest.fixture
def demand() -> PrefixDemand:
    demand = PrefixDemand(UNIT, remembered=64)
    route(demand, prompt(1, 8), 0)
    return demand


def test_sessions_that_fork_from_a_prefix_share_it(demand: PrefixDemand) -> None:
    assert demand.asked(read(prompt(9, 8)), 0, 0.0) == []
    for session in (2, 3):
        route(demand, prompt(session, 8), 10)
    assert demand.asked(read(prompt(9, 8)), 0, 0.0) == [(10 * UNIT, 3.0)]
    assert demand.asked(read(array("Q", range(5000, 5040))), 0, 0.0) == []
    ((_, later),) = demand.asked(read(prompt(9, 8)), 0, HORIZON)
    assert later == pytest.approx(1 + 2 / 2.71828, rel=0.01)


@pytest.mark.parametrize(("chunks", "known"), [(9, 12), (20, 12)])
def test_next_turn_is_no_new_session(demand: PrefixDemand, chunks: int, known: int) -> None:
    route(demand, prompt(1, chunks), known)
    assert demand.asked(read(prompt(1, chunks)), 0, 0.0) == []


@pytest.mark.parametrize("chunks", [0, 3])
def test_other_prompts_within_a_stride_of_the_prefix_are_new_sessions(demand: PrefixDemand, chunks: int) -> None:
    route(demand, prompt(2, chunks), 10)
    route(demand, prompt(3, chunks), 10)
    assert demand.asked(read(prompt(4, chunks)), 0, 0.0) == [(10 * UNIT, 3.0)]


def test_shared_part_ends_where_the_longest_holder_ends_within_a_stride(demand: PrefixDemand) -> None:
    route(demand, prompt(2, 8), 10)
    route(demand, prompt(2, 8)[:20], 5)
    for held, end in ((10 * UNIT - 1, 10 * UNIT), (10 * UNIT + 48, 10 * UNIT + 48), (11 * UNIT, 10 * UNIT)):
        assert demand.asked(read(prompt(9, 8)), held, 0.0) == [(5 * UNIT, 3.0), (end, 2.0)]


def test_memory_is_bounded() -> None:
    demand = PrefixDemand(CHUNK, remembered=3)
    for session in range(100):
        for hashes, known in ((prompt(session, 5), 0), (prompt(session, 9)[40:], 1)):
            demand.routed(hashes, hashes, known, 0.0)
    assert len(demand._ends) == len(demand.forks) == 3


@pytest.mark.parametrize(
    ("copies", "spare", "paid"),
    [(0, 1.0, 750), (1, 1.0, 500), (1, 0.5, 250), (3, 1.0, 0), (9, 1.0, 0)],
)
def test_sessions_of_a_copy_share_its_price_while_the_fleet_has_time(copies: int, spare: float, paid: int) -> None:
    shared = SharedTokens.paid([(1000, 4.0)], lambda _: copies, spare)
    assert (0 if shared is None else shared.after(0)) == paid


def test_only_tokens_that_a_target_does_not_hold_are_shared() -> None:
    shared = SharedTokens(array("I", [1000, 3000]), array("d", [0.75, 0.5]))
    assert [shared.after(held) for held in (0, 400, 2000, 3000, 9000)] == [1750, 1450, 500, 0, 0]
