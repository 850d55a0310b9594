"""The sources of a prompt, the loads in flight, and learned rates of loads."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from manual_clock import Clock

from indexer import MatchQuery, PoolHoldings, Target
from router.cache_state.target_cache import TargetCaches
from router.load.target_load import TargetLoad
from router.policies.rates import Rates, RateTable
from router.policies.records import Source
from router.routing.sources import LoadRates, SourceFinder, SourceLoads
from simulator.fleet.sources import SimulatedPeers

PROMPT = MatchQuery("m", list(range(1000)))
TARGETS = [Target(name, 0, "m") for name in "abc"]
RANKS: Any = [SimpleNamespace(target=target, row=row, load=TargetLoad()) for row, target in enumerate(TARGETS)]
COMPUTED = 4e-5


class OnePool:
    """A pool from which all targets but `stranger` load."""

    def __init__(self, stranger: Target | None = None) -> None:
        self._stranger = stranger

    def pooled(self, query: MatchQuery, reach: int) -> list[PoolHoldings]:
        assert query is PROMPT
        assert reach >= 800
        return [PoolHoldings("pool", 100, ((0, 600), (800, 1000)))]

    def has_pool(self, target: Target) -> bool:
        return target != self._stranger

    def loads_from(self, target: Target, holdings: PoolHoldings) -> bool:
        assert holdings.pool == "pool"
        return target != self._stranger


class HostTiers:
    """Peers whose host tiers hold these tokens, in blocks of 100. `unable`: the target that cannot pull."""

    per_source = 1
    least_tokens = 300

    def __init__(self, *held: int, unable: Target | None = None) -> None:
        self._held = held
        self._unable = unable

    def holders(self, query: MatchQuery, own: Sequence[tuple[Target, int]]) -> list[tuple[Target, int, int]]:
        assert query is PROMPT
        assert [target for target, _ in own] == TARGETS
        return [(target, held, 100) for target, held in zip(TARGETS, self._held, strict=True)]

    def may_pull(self, target: Target) -> bool:
        return target != self._unable


def finder(
    pools: OnePool | None,
    pulls: bool,
    share: float = 0.5,
    price: float | None = None,
    peers: HostTiers | None = None,
    start: float = 1e-9,
) -> SourceFinder:
    prices = None if price is None else {"pool": price}
    among = peers or (SimulatedPeers(lambda _: []) if pulls else None)
    computing, caches = RateTable(Rates(token=COMPUTED)), TargetCaches()
    for rank in RANKS:
        rank.cache = caches.of(rank.target)
    return SourceFinder(pools, among, computing, caches, prices, rates=LoadRates((start, share * COMPUTED)))


def tokens(found: dict[int, Source]) -> dict[int, int]:
    return {row: source.tokens for row, source in found.items()}


def test_target_loads_what_follows_its_own_tokens_in_the_pool() -> None:
    found = finder(OnePool(), pulls=False).find(PROMPT, RANKS, array("I", [0, 500, 800]))
    assert tokens(found) == {0: 600, 1: 100, 2: 199}  # the last token is always computed
    assert found[0].price == pytest.approx(0.5)
    found = finder(OnePool(TARGETS[0]), pulls=False, price=0.2).find(PROMPT, RANKS, array("I", [0, 500, 800]))
    assert tokens(found) == {1: 100, 2: 199}
    assert (found[1].price, found[1].start) == (pytest.approx(0.2), 0)
    assert found[1].load_seconds == pytest.approx(0.2 * COMPUTED * 100)
    found = finder(OnePool(), pulls=False, start=100 * COMPUTED).find(PROMPT, RANKS, array("I", [0, 500, 800]))
    assert [found[row].load for row in range(3)] == pytest.approx([100 + 300, 100, 199])


def test_target_pulls_from_the_longest_prefix_with_the_fewest_loads_and_never_from_itself() -> None:
    found = finder(None, pulls=True)
    found.loads.reserve(RANKS[0].cache, Source("peers", 100, 0.1))
    sources = found.find(PROMPT, RANKS, array("I", [900, 900, 200]))
    assert tokens(sources) == {2: 700}
    assert sources[2].peer == TARGETS[1]


def test_peer_is_chosen_by_its_host_tier_and_its_loads() -> None:
    own = array("I", [950, 850, 100])
    found = finder(None, pulls=True, share=0.1, peers=HostTiers(900, 850, 100))
    found.loads.reserve(RANKS[0].cache, Source("pool", 50, 0.1))
    (source,) = found.find(PROMPT, RANKS, own).values()
    assert (source.peer, source.tokens) == (TARGETS[1], 750)  # within a block of the longest, with fewer loads
    release = found.loads.reserve(RANKS[2].cache, source)
    (source,) = found.find(PROMPT, RANKS, own).values()
    assert (source.peer, source.tokens) == (TARGETS[0], 800)  # one pull from each is allowed
    found.loads.reserve(RANKS[2].cache, source)
    assert found.find(PROMPT, RANKS, own) == {}
    release()
    (source,) = found.find(PROMPT, RANKS, own).values()
    assert source.peer == TARGETS[1]


@pytest.mark.parametrize(
    ("peers", "pulls", "own"),
    [
        (HostTiers(900, 0, 0), True, 601),  # too few tokens
        (HostTiers(900, 0, 0, unable=TARGETS[2]), True, 0),
        (HostTiers(900, 0, 0), False, 0),
        (HostTiers(0, 0, 900), True, 0),  # from itself
    ],
)
def test_nothing_is_pulled(peers: HostTiers, pulls: bool, own: int) -> None:
    assert finder(None, pulls=True, peers=peers).find(PROMPT, RANKS, array("I", [950, 950, own]), (), pulls) == {}


def test_target_is_not_credited_where_computing_is_faster() -> None:
    found = finder(OnePool(), pulls=True, share=1.1).find(PROMPT, RANKS, array("I", [0, 900, 0]))
    assert tokens(found) == {0: 600, 1: 99, 2: 600}  # the engine loads them nevertheless
    assert [source.saved for source in found.values()] == [0, 0, 0]
    assert finder(None, pulls=True, share=1.1).find(PROMPT, RANKS, array("I", [0, 900, 0])) == {}


def test_worker_that_computes_faster_than_it_pulls_pulls_nothing() -> None:
    found = finder(None, pulls=True, share=0.9)
    own = array("I", [900, 0, 0])
    assert tokens(found.find(PROMPT, RANKS, own)) == {1: 900, 2: 900}
    for second in range(30):
        computed = 20_000 * COMPUTED / 4  # four times as fast
        found.computing.prefill_seen("b", "m", 20_000, 0, 0, 0, computed + 3 * 0.01, float(second))
        found.computing.prefill_seen("c", "m", 20_000, 0, 0, 0, 20 * computed, float(second))
    assert tokens(found.find(PROMPT, RANKS, own)) == {2: 900}
    RANKS[1].load.context = 2_000_000  # its step reads the context of the requests in flight
    assert tokens(found.find(PROMPT, RANKS, own)) == {1: 900, 2: 900}
    RANKS[1].load.context = 0


def test_cheaper_source_wins() -> None:
    both = finder(OnePool(), pulls=True)
    sources = both.find(PROMPT, RANKS, array("I", [0, 900, 0]))
    assert sources[0].name == "peers"
    for _ in range(100):
        both.rates.seen("peers", 5000, 5000 * COMPUTED)
        both.rates.seen("peers", 500, 500 * COMPUTED)
    assert both.find(PROMPT, RANKS, array("I", [0, 900, 0]))[0].name == "pool"


def test_load_is_reserved_at_both_ends_and_released_once() -> None:
    caches = TargetCaches()
    loads, target = SourceLoads(caches), caches.of(TARGETS[0])
    release = loads.reserve(target, Source("peers", 700, 0.1, peer=TARGETS[1]))
    other = loads.reserve(target, Source("pool", 50, 0.1))
    assert [loads.of(target) for target in (*TARGETS, None)] == [750, 700, 0, 0]
    release()
    release()
    assert [loads.of(target) for target in TARGETS] == [50, 0, 0]
    other()
    assert loads.of(TARGETS[0]) == 0


def test_start_and_rate_of_loads_are_learned_by_source() -> None:
    clock = Clock()
    rates = LoadRates((0.005, 1e-5), clock)
    assert rates.of("pool") == (0.005, 1e-5)
    for number in range(300):
        clock.now += 1
        loaded = (500, 3000, 20_000)[number % 3]
        rates.seen("pool", loaded, 0.04 + 3e-5 * loaded + 0.1, computing=0.1)
        rates.seen("pool", 100, 2.4, computing=2.0)  # an error of computing
    start, token = rates.of("pool")
    assert start == pytest.approx(0.04, rel=0.1)
    assert token == pytest.approx(3e-5, rel=0.1)
    rates.seen("pool", 10_000, 20.0)  # a stall
    start, token = rates.of("pool")
    assert start + 10_000 * token == pytest.approx(0.34, rel=0.1)
    assert rates.of("peers") == (0.005, 1e-5)
    clock.now += 601
    assert rates.of("pool") == (0.005, 1e-5)
    rates.seen("pool", 10_000, 0.105)
    assert rates.of("pool") == (pytest.approx(0.005), pytest.approx(1e-5))
