"""A choice by columns is the choice that the formula makes candidate by candidate, ties and all."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from math import inf
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.policy.rivals.others import Lmetric
from indexer import Target
from indexer.native import CORE_VARIABLE, CORES
from router.policies import Candidate, CostColumns, KvWeights, LinearPolicy, Request, kv_aware
from router.policies.linear import choose, highest, holders
from router.policies.plain import LeastLoaded
from router.policies.records import Source
from router.policies.shared_tokens import SharedTokens

POLICIES: dict[str, Callable[[Random], LinearPolicy]] = {
    "kv_aware": lambda random: kv_aware(KvWeights(), random),
    "kv_aware, near": lambda random: kv_aware(KvWeights(near=0.05), random),
    "kv_aware, loading dearer than computing": lambda random: kv_aware(KvWeights(disk_token=9.0), random),
    "lmetric": Lmetric,
    "lmetric, own": lambda random: Lmetric(random, own=True),
    "least_loaded": LeastLoaded,
}
TOKENS = 1000

# Few values, so that costs are often equal.
loads = st.tuples(
    st.sampled_from([0, 0, 1, 7]),  # requests
    st.sampled_from([0, 0, 100, 900]),  # pending
    st.sampled_from([0, 0, 2000]),  # context
    st.sampled_from([0.0, 0.0, 0.5]),  # eviction
)
held = st.tuples(
    st.sampled_from([0, 1, 16, 500, 999]),  # overlap
    st.sampled_from([0, 0, 1]),  # of it in CPU memory
    st.sampled_from([0, 0, 16]),  # and on disk
)


def candidate(row: int, load: tuple[int, int, int, float]) -> Candidate:
    requests, pending, context, eviction = load
    return Candidate(Target(str(row), 0, "m"), requests=requests, pending=pending, context=context, eviction=eviction)


def columns_of(policy: LinearPolicy, records: list[Candidate]) -> CostColumns:
    columns = CostColumns(len(records))
    for row, record in enumerate(records):
        columns.fixed[row], columns.per_token[row], columns.shares[row] = policy.line(record)
    return columns


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("core", CORES)
@settings(max_examples=40)
@given(data=st.data(), seed=st.integers())
def test_choice_by_columns_equals_the_formula(core: str, name: str, data: Any, seed: int) -> None:
    rows = data.draw(st.sampled_from([1, 2, 5, 64, 129]))
    few = data.draw(st.lists(loads, min_size=1, max_size=8))
    random = Random(seed)
    policy, formula = POLICIES[name](Random(seed)), POLICIES[name](Random(seed))
    records = [candidate(row, random.choice(few)) for row in range(rows)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CORE_VARIABLE, core)
        columns = columns_of(policy, records)
    row_numbers = st.integers(0, rows - 1)
    for row, load in data.draw(st.lists(st.tuples(row_numbers, loads), max_size=6)):
        records[row] = candidate(row, load)
        columns.fixed[row], columns.per_token[row], columns.shares[row] = policy.line(records[row])
    holders = data.draw(st.dictionaries(row_numbers, held, max_size=8))
    if data.draw(st.booleans()):  # all of them hold something
        holders = {row: random.choice([*holders.values(), (16, 0, 0)]) for row in range(rows)}
    excluded = data.draw(st.sets(row_numbers, max_size=8))
    for row, (overlap, cpu, disk) in holders.items():
        records[row] = records[row].copy()
        records[row].overlap, records[row].cpu, records[row].disk = overlap, min(cpu, overlap), min(disk, overlap)
    overlaps = array("I", [record.overlap for record in records])
    transfers = {row: (records[row].cpu, records[row].disk) for row in holders if records[row].cpu or records[row].disk}

    with_sources = data.draw(st.dictionaries(row_numbers, st.tuples(st.integers(1, 5000), st.floats(0, 2)), max_size=8))
    sources = {}
    for row, (tokens, price) in with_sources.items():
        peer = None if tokens % 2 else records[0].target
        records[row] = sources[row] = records[row].copy()
        records[row].source = Source("s", tokens, price, waiting=tokens // 3, peer=peer, start=tokens / 7)

    shared = data.draw(st.sampled_from([None, SharedTokens(array("I", [200, 700]), array("d", [0.9, 0.5]))]))
    request = Request(TOKENS, shared=shared)

    chosen = policy.cheapest_row(columns, request, overlaps, transfers, excluded, sources)

    left = [record for row, record in enumerate(records) if row not in excluded]
    if not left:
        assert chosen is None
    else:
        assert chosen is not None
        assert records[chosen] is formula(left, request).chosen
        assert policy.random.random() == formula.random.random()  # both have asked as often


finite = st.floats(-1e9, 1e9, allow_subnormal=False)
counts = st.integers(0, 2**31)


@given(
    rows=st.lists(st.tuples(finite, finite, counts, st.sampled_from([0.0, 0.5, 1.0])), max_size=70),
    tokens=counts,
    least=st.integers(0, 16),
    near=st.sampled_from([0.0, 0.0, 0.1]),
    replaced=st.dictionaries(st.integers(0, 69), st.one_of(finite, st.just(inf)), max_size=70),
    shared=st.sampled_from([([], []), ([100, 2**31], [0.9, 0.25])]),
)
@pytest.mark.skipif("native" not in CORES, reason="the native core was not built")
def test_native_choice_equals_the_python_choice(
    rows: list[tuple[float, float, int, float]],
    tokens: int,
    least: int,
    near: float,
    replaced: dict[int, float],
    shared: tuple[list[int], list[float]],
) -> None:
    from indexer import _native

    fixed, per_token, shares = (array("d", [row[place] for row in rows]) for place in (0, 1, 3))
    held = array("I", [row[2] for row in rows])
    depths, others = array("I", shared[0]), array("d", shared[1])
    known = {row: cost for row, cost in replaced.items() if row < len(rows)}
    ours, theirs = (
        chosen(fixed, per_token, shares, held, tokens, least, depths, others, known, near)
        for chosen in (choose, _native.choose)
    )
    assert ours == theirs
    assert highest(held) == _native.highest(held)
    assert holders(held, tokens) == _native.holders(held, tokens)


@pytest.mark.skipif("native" not in CORES, reason="the native core was not built")
def test_short_column_and_unknown_row_are_refused() -> None:
    from indexer import _native

    two, three, held, none = array("d", [0.0] * 2), array("d", [0.0] * 3), array("I", [0] * 3), array("I")
    with pytest.raises(ValueError, match="too short"):
        _native.choose(two, three, three, held, 1, 1, none, two, {}, 0.0)
    with pytest.raises(IndexError):
        _native.choose(three, three, three, held, 1, 1, none, two, {3: 0.0}, 0.0)
