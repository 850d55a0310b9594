"""KV bytes that depend on the tokens."""

from __future__ import annotations

import ctypes
import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from simulator.worker.cache import CachedSequence
from simulator.worker.disaggregation.memory import BUFFERS, FirstToken, KvMemory
from worker.disaggregation.transfer import open_engine

BLOCK, BLOCKS = 4, 16


def memory(model: str = "m") -> KvMemory:
    engine = open_engine("tcp", host="127.0.0.1")
    made = KvMemory(engine, BLOCKS, BLOCK, 2, model)
    engine.close()
    return made


SHARED = memory()


def sequence(tokens: list[int], adapter: str | None = None, seed: int = 0) -> CachedSequence:
    """Tokens in blocks that lie anywhere."""
    blocks = random.Random(seed).sample(range(BLOCKS), -(-len(tokens) // BLOCK))
    return CachedSequence(tokens, adapter, blocks=blocks)


@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=BLOCK * BLOCKS),
    cuts=st.lists(st.integers(0, BLOCK * BLOCKS), max_size=4),
    seed=st.integers(0, 100),
)
def test_kv_bytes_do_not_depend_on_chunks(tokens: list[int], cuts: list[int], seed: int) -> None:
    computed = sequence(tokens, seed=seed)
    ends = sorted({min(cut, len(tokens)) for cut in cuts} | {0, len(tokens)})
    for start, end in itertools.pairwise(ends):
        SHARED.compute(computed, start, end)
    assert SHARED.wrong_pages(computed, len(tokens)) == 0


def test_kv_bytes_depend_on_tokens_adapter_and_model() -> None:
    made, tokens = memory(), list(range(10))
    computed = sequence(tokens)
    made.compute(computed, 0, 10)
    other_first = CachedSequence([7, *tokens[1:]], blocks=computed.blocks)
    assert made.wrong_pages(other_first, 10) == 3  # and with it all that follow
    other_last = CachedSequence([*tokens[:-1], 7], blocks=computed.blocks)
    assert made.wrong_pages(other_last, 10) == 1
    assert made.wrong_pages(CachedSequence(tokens, "poet", blocks=computed.blocks), 10) == 3
    args, others = made.args(), memory("other")
    others.compute(computed, 0, 10)
    assert args.kv_data_ptrs != others.args().kv_data_ptrs
    assert page(others, 0, computed.blocks[0]) != page(made, 0, computed.blocks[0])


def test_wrong_byte_is_detected_and_spreads() -> None:
    made, computed = memory(), sequence(list(range(12)))
    made.compute(computed, 0, 8)
    for buffer in range(BUFFERS):
        for block in (0, 1):
            byte = page(made, buffer, computed.blocks[block])
            byte[-1] ^= 1
            assert made.wrong_pages(computed, 8) == 1
            byte[-1] ^= 1
    assert made.wrong_pages(computed, 8) == 0
    page(made, 2, computed.blocks[1])[-1] ^= 1
    made.compute(computed, 8, 12)  # from a wrong token
    assert made.wrong_pages(computed, 12) == 2


def test_first_token_is_read_as_written() -> None:
    made, first = memory(), FirstToken(2**63 - 1, 2**32 - 1, 5, 4)
    made.write_first_token(1, first)
    assert made.read_first_token(1) == first
    assert made.read_first_token(0) == FirstToken(0, 0, 0, 0)


def page(made: KvMemory, buffer: int, block: int) -> ctypes.Array[ctypes.c_uint8]:
    """A page's bytes, in memory itself."""
    args = made.args()
    size = args.kv_item_lens[buffer]
    return (ctypes.c_uint8 * size).from_address(args.kv_data_ptrs[buffer] + block * size)
