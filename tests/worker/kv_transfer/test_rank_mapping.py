"""Whatever the parallelism of both sides, a decode rank gets every head of every page of every layer exactly once."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.kv_transfer import Rank, RankMapping, Topology, map_ranks, target_dp_group
from worker.kv_transfer.ranks import head_range, page_share

sizes = st.sampled_from([1, 2, 4, 8])


@st.composite
def sides(draw: st.DrawFn) -> tuple[Topology, Topology, int, int]:
    """Decode, prefill, KV heads in all, the prefill's DP rank."""
    pp = draw(st.sampled_from([1, 2, 3]))
    prefill = Topology(draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 3])), draw(sizes), pp)
    decode = Topology(draw(st.sampled_from([1, 2])), 1, draw(sizes), draw(st.sampled_from([1, pp])))
    return decode, prefill, draw(sizes), draw(st.integers(0, prefill.dp - 1))


def layers_of(topology: Topology, pp: int) -> range:
    each = 6 // topology.pp
    return range(pp * each, (pp + 1) * each)


def ranks_of(topology: Topology) -> list[Rank]:
    return [Rank(*place) for place in itertools.product(*map(range, topology))]


@given(sides(), st.integers(0, 40))
def test_each_decode_rank_receives_everything_once(case: tuple[Topology, Topology, int, int], pages: int) -> None:
    decode, prefill, heads, dp = case
    for rank in ranks_of(decode):
        got: Counter[tuple[int, int, int]] = Counter()
        mapping = map_ranks(decode, rank, prefill, dp, heads)
        mine = head_range(heads, decode.tp, rank.tp)
        for source in mapping.sources:
            assert source.rank in ranks_of(prefill)
            if not source.dummy:
                theirs = set(head_range(heads, prefill.tp, source.rank.tp)) & set(mine)
                shared_layers = set(layers_of(prefill, source.rank.pp)) & set(layers_of(decode, rank.pp))
                got.update(itertools.product(theirs, page_share(pages, prefill.cp, source.rank.cp), shared_layers))
        assert got == Counter(itertools.product(mine, range(pages), layers_of(decode, rank.pp)))


@given(sides())
def test_required_numbers_of_ranks_are_counted(case: tuple[Topology, Topology, int, int]) -> None:
    """Each prefill rank of the DP group is requested by the announced number of decode ranks."""
    decode, prefill, heads, dp = case
    told: Counter[Rank] = Counter()
    expected: dict[Rank, int] = {}
    for rank in ranks_of(decode._replace(dp=1)):
        mapping = map_ranks(decode, rank, prefill, dp, heads)
        assert mapping.required_responses == len({s.rank for s in mapping.sources if not s.dummy})
        assert sum(source.sends_aux for source in mapping.sources) == 1
        assert not any(source.dummy and source.sends_aux for source in mapping.sources)
        for source in mapping.sources:
            told[source.rank] += 1
            expected[source.rank] = mapping.required_dst_info_num
    assert told == expected
    assert set(told) == {rank for rank in ranks_of(prefill) if rank.dp == dp}


def names(mapping: RankMapping) -> list[tuple[int, bool]]:
    return [(source.rank.tp, source.dummy) for source in mapping.sources]


def test_mapping_equals_engine_examples() -> None:
    assert names(map_ranks(Topology(tp=4), Rank(tp=3), Topology(tp=4), 0, 8)) == [(3, False)]
    wider = map_ranks(Topology(tp=4), Rank(tp=3), Topology(tp=2), 0, 8)
    assert (names(wider), wider.required_dst_info_num, wider.required_responses) == ([(1, False)], 2, 1)
    narrower = map_ranks(Topology(tp=2), Rank(tp=1), Topology(tp=4), 0, 8)
    assert (names(narrower), narrower.required_dst_info_num) == ([(2, False), (3, False)], 1)
    assert narrower.required_responses == 2
    mla = map_ranks(Topology(tp=2), Rank(tp=1), Topology(tp=4), 0, 1)
    assert (names(mla), mla.required_responses) == ([(2, False), (3, True)], 1)
    many = map_ranks(Topology(), Rank(), Topology(cp=2, pp=3), 0, 8)
    assert many.required_responses == 6
    assert [source.rank for source in many.sources if source.sends_aux] == [Rank(cp=0, pp=2)]


def test_dp_group_is_room_modulo_size() -> None:
    assert [target_dp_group(room, 3) for room in (0, 1, 2, 3, 2**63 - 1)] == [0, 1, 2, 0, 1]


@pytest.mark.parametrize(
    ("decode", "prefill", "dp", "heads", "reason"),
    [
        (Topology(tp=3), Topology(tp=2), 0, 6, "decode has TP 3 and prefill TP 2"),
        (Topology(cp=2), Topology(), 0, 1, "decode has CP 2"),
        (Topology(pp=2), Topology(pp=4), 0, 1, "decode has PP 2 and prefill PP 4"),
        (Topology(), Topology(dp=2), 2, 1, "prefill DP rank 2 does not exist: the prefill has DP 2"),
        (Topology(tp=4), Topology(), 0, 6, "6 KV heads can't be split over TP 4"),
    ],
)
def test_incompatible_sizes_raise_errors(decode: Topology, prefill: Topology, dp: int, heads: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        map_ranks(decode, Rank(), prefill, dp, heads)
