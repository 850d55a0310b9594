"""A `/query` body whose token ids the native core packs has the same result as one that is decoded completely."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from http_api.errors import RequestError
from http_api.routes import decode_body
from indexer.api.bodies import QueryBody
from indexer.api.questions import _read_packed_query
from indexer.index import MatchQuery
from indexer.native import CORES

pytestmark = pytest.mark.skipif("native" not in CORES, reason="the native core was not built")

SOUND = b'{"model":"m","token_ids":[1, 2,4294967295],"cache_salt":"["}'
ODD = [
    b'{"model":"m","token_ids":"[1,2]"}',
    b'{"model":"m","token_ids":{"a":[1]}}',
    b'{"model":"m","other":[0,1],"token_ids":null}',
    b'{"model":"m","other":[0,1],"token_ids":5}',
    b'{"model":"m[1]","token_ids":0}',
    b'{"model":"]","token_ids":"["}',
    b'{"model":["m"],"token_ids":[1]}',
    b'{"model":"m","token_ids":[[1]]}',
    b'{"model":"m","token_ids":[1]}]',
    b"[1,2]",
    b"[]",
]
parts = st.sampled_from(
    [
        b'{"model":"m",',
        b'"token_ids":',
        b"[1,2]",
        b"[]",
        b"[",
        b"]",
        b",",
        b"}",
        b'"',
        b'"a":',
        b"[9]",
        b" ",
        b"{",
        b"1",
    ]
)


def packed(body: bytes) -> MatchQuery | None:
    from indexer import _native

    return _read_packed_query(body, _native.packed_numbers)


def is_read_alike(body: bytes) -> bool:
    """Return whether a body is read without decoding its token ids, and check the result if so."""
    read = packed(body)
    if read is None:
        return False
    whole = decode_body(body, QueryBody)
    assert read.token_ids.tokens == b"".join(token.to_bytes(4, "little") for token in whole.token_ids)
    assert (read.model, read.tenant) == (whole.model, whole.tenant_id)
    assert (read.adapter, read.cache_salt) == (whole.lora_name, whole.cache_salt)
    return True


def test_token_ids_are_packed_without_decoding() -> None:
    assert is_read_alike(SOUND)


@pytest.mark.parametrize("body", ODD)
def test_other_lists_are_not_packed(body: bytes) -> None:
    assert packed(body) is None
    with pytest.raises(RequestError):
        decode_body(body, QueryBody)


@given(st.lists(parts, max_size=8).map(b"".join))
def test_packed_queries_equal_decoded_ones(rest: bytes) -> None:
    is_read_alike(b'{"model":"m","token_ids":[1,2]' + rest)
    is_read_alike(b'{"model":"m",' + rest)
