"""Which bytes go where: held against plain numpy indexing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.kv_transfer import KVArgs, Rank, Topology
from worker.kv_transfer.layout import Layout, kv_writes, layout_of, mismatch

HEADS, PAGE, HEAD_BYTES, PAGES = 4, 2, 3, 6


def arena(layout: str, tp: int, rank: int, base: int) -> Layout:
    """One layer; addresses count from `base`, as if all memory were one array."""
    item = PAGE * (HEADS // tp) * HEAD_BYTES
    return layout_of(
        KVArgs(
            kv_data_ptrs=[base, base + PAGES * item],
            kv_data_lens=[PAGES * item] * 2,
            kv_item_lens=[item] * 2,
            page_size=PAGE,
            kv_cache_dtype="int8",
            total_kv_head_num=HEADS,
            kv_layout=layout,  # type: ignore[arg-type]
        ),
        Topology(tp=tp),
        Rank(tp=rank),
    )


@given(st.sampled_from(["NHD", "HND"]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.data())
def test_writes_copy_shared_heads_only(layout: str, ours: int, theirs: int, data: st.DataObject) -> None:
    source = arena(layout, ours, data.draw(st.integers(0, ours - 1)), 0)
    target = arena(layout, theirs, data.draw(st.integers(0, theirs - 1)), 0)
    count = data.draw(st.integers(1, PAGES))
    pages = data.draw(st.permutations(range(PAGES)))[:count], data.draw(st.permutations(range(PAGES)))[:count]
    shared = sorted(set(source.heads) & set(target.heads))
    if not shared:
        return
    here = np.random.default_rng(1).integers(1, 256, sum(b.length for b in source.kv), dtype=np.uint8)
    there = np.zeros(sum(b.length for b in target.kv), np.uint8)
    writes = kv_writes(source, target, np.array(pages[0]), np.array(pages[1]))
    for start, end, length in zip(*(part.astype(int) for part in writes), strict=True):
        assert not there[end : end + length].any()  # nothing is written twice
        there[end : end + length] = here[start : start + length]

    def view(memory: np.ndarray, side: Layout) -> np.ndarray:
        """[part, page, token, head, byte]"""
        heads = len(side.heads)
        if layout == "NHD":
            return memory.reshape(2, PAGES, PAGE, heads, HEAD_BYTES)
        return memory.reshape(2, PAGES, heads, PAGE, HEAD_BYTES).transpose(0, 1, 3, 2, 4)

    wanted = np.zeros_like(view(there, target))
    for head in shared:
        from_head, to_head = head - source.heads.start, head - target.heads.start
        wanted[:, pages[1], :, to_head] = view(here, source)[:, pages[0], :, from_head]
    assert (view(there, target) == wanted).all()


def test_equal_heads_are_copied_in_whole_runs() -> None:
    writes = kv_writes(arena("NHD", 1, 0, 0), arena("NHD", 1, 0, 1000), np.array([0, 1, 3]), np.array([2, 3, 5]))
    assert writes.lengths.tolist() == [48, 24] * 2


@pytest.mark.parametrize(
    ("sources", "targets", "reason"),
    [
        ([0], [6], "page 6 does not exist: there are 6"),
        ([-1], [0], "page -1 does not exist"),
        ([], [], "empty"),
        ([0, 1], [0], "2 pages and dst_pages 1"),
    ],
)
def test_invalid_pages_raise_errors(sources: list[int], targets: list[int], reason: str) -> None:
    layout = arena("NHD", 1, 0, 0)
    with pytest.raises(ValueError, match=reason):
        kv_writes(layout, layout, np.array(sources, np.int64), np.array(targets, np.int64))


def test_contradicting_layouts_raise_errors() -> None:
    good = {"kv_data_ptrs": [0, 64], "kv_data_lens": [64, 64], "kv_item_lens": [8, 8]}
    rest = {"page_size": 2, "kv_cache_dtype": "int8", "total_kv_head_num": 2}
    for change, reason in (
        ({"kv_data_lens": [64]}, "kv_data_ptrs, kv_data_lens and kv_item_lens have 2, 1 and 2 entries"),
        ({"kv_item_lens": [7, 7]}, "not a multiple of 2 heads"),
        ({"kv_data_lens": [4, 4]}, "has no item of 8"),
        ({"kv_data_ptrs": [0], "kv_data_lens": [64], "kv_item_lens": [8]}, "needs K and V for each layer"),
        ({"page_size": 0}, "page_size"),
        ({"kv_layout": "XYZ"}, "kv_layout"),
    ):
        with pytest.raises(ValueError, match=reason):
            layout_of(KVArgs(**{**good, **rest, **change}), Topology(), Rank())  # type: ignore[arg-type]


def test_aux_buffers_must_be_equal() -> None:
    plain = arena("NHD", 1, 0, 0)
    with_aux = layout_of(
        KVArgs(
            kv_data_ptrs=[0, 144],
            kv_data_lens=[144, 144],
            kv_item_lens=[24, 24],
            page_size=PAGE,
            kv_cache_dtype="int8",
            total_kv_head_num=HEADS,
            aux_data_ptrs=[500],
            aux_data_lens=[64],
            aux_item_lens=[8],
        ),
        Topology(),
        Rank(),
    )
    assert mismatch(plain, plain) is None
    assert mismatch(plain, with_aux) == "aux buffers differ: prefill has items of [] bytes, decode [8]"
