"""Header blocks that are remembered mean what they would mean if they were decoded again."""

from __future__ import annotations

import hpack
from hypothesis import given
from hypothesis import strategies as st

from router.picker.http2.headers import HeaderDecoder, leaves_table, literal

_NAMES = st.sampled_from([":path", ":method", "a", "te", "content-type", "x-long-name", "cookie", "authorization"])
_HEADERS = st.lists(st.tuples(_NAMES, st.text("ab0é", max_size=200), st.booleans()), max_size=8)


@given(st.lists(st.tuples(_HEADERS, st.booleans(), st.sampled_from([None, None, 0, 64, 4096])), max_size=20))
def test_decoded_blocks_equal_those_of_hpack(blocks: list) -> None:
    encoder, other, ours = hpack.Encoder(), hpack.Decoder(), HeaderDecoder()
    for headers, huffman, size in blocks:
        if size is not None:
            encoder.header_table_size = size
        sensitive = [
            hpack.NeverIndexedHeaderTuple(name, value) if secret else (name, value) for name, value, secret in headers
        ]
        for _ in range(2):
            block = encoder.encode(sensitive, huffman=huffman)
            assert ours.decode(block).headers == [(bytes(n), bytes(v)) for n, v in other.decode(block, raw=True)]


@given(_HEADERS)
def test_block_without_table_change_is_cached(headers: list) -> None:
    decoder = hpack.Decoder()
    encoder = hpack.Encoder()
    for _ in range(2):
        block = encoder.encode([(name, value) for name, value, _ in headers])
        before = list(decoder.header_table.dynamic_entries)
        decoder.decode(block)
        if leaves_table(block):
            assert list(decoder.header_table.dynamic_entries) == before


@given(st.binary(min_size=1, max_size=126), st.binary(max_size=126))
def test_literals_are_decoded_unchanged(name: bytes, value: bytes) -> None:
    [found] = hpack.Decoder().decode(literal(name, value), raw=True)
    assert (bytes(found[0]), bytes(found[1])) == (name, value)
