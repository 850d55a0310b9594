"""Queries by token ids and by hashes that clients compute."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from engine_publisher import Publisher
from hypothesis import given
from hypothesis import strategies as st
from index_client import Client
from xxhash import xxh3_64_intdigest

from http_api.errors import RequestError
from http_api.routes import decode_body
from indexer import Indexer, Registration, Target
from indexer.api.bodies import QueryBody
from indexer.api.questions import _read_packed_query
from indexer.hashing import Namespace, namespace_hash
from indexer.index import MatchQuery
from indexer.native import CORES
from kvevents import BlockStored, EventSource

TARGET = Target("w", 0, "m")
TOKENS = [1, 2, 3, 4, 5, 6]


@pytest.fixture
def served(client: Client, indexer: Indexer, publisher: Publisher, caught_up: Callable[..., None]) -> Client:
    """Client of an index in which TARGET holds the first two of three blocks."""
    indexer.register(Registration(TARGET, EventSource(0, publisher.endpoint, publisher.replay_endpoint), "vLLM", 2))
    publisher.publish(BlockStored([1, 2], None, TOKENS[:4], 2, medium="CPU_PINNED"))
    caught_up(TARGET, 0)
    return client


def chain() -> list[int]:
    hashes, previous = [], namespace_hash(Namespace("m", "default", None, None, 2))
    for first in range(0, len(TOKENS), 2):
        block = b"".join(token.to_bytes(4, "little") for token in TOKENS[first : first + 2])
        previous = xxh3_64_intdigest(block, previous)
        hashes.append(previous)
    return hashes


def test_hashes_match_like_their_tokens(served: Client) -> None:
    answer = served.post("/query_by_hash", {"model": "m", "block_hashes": chain()})
    assert answer == served.post("/query", {"model": "m", "token_ids": TOKENS})
    assert answer == (200, {"default": {"w": {"longest_matched": 4, "GPU": 0, "CPU": 4, "DISK": 0, "DP": {"0": 4}}}})
    assert served.post("/query_by_hash", {"model": "m", "block_hashes": []})[1]["default"]["w"]["longest_matched"] == 0


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"block_hashes": [-1]}, 400, "block_hashes"),
        ({"block_hashes": [2**64]}, 400, "block_hashes"),
        ({"block_hashes": ["1"]}, 400, "block_hashes"),
        ({}, 400, "block_hashes"),
        ({"block_hashes": [1], "model": "other"}, 404, "model"),
        ({"block_hashes": [1], "block_size": 0}, 400, "block_size"),
    ],
)
def test_invalid_hash_query_names_the_field(served: Client, fields: dict[str, object], status: int, param: str) -> None:
    found, answer = served.post("/query_by_hash", {"model": "m"} | fields)
    assert (found, answer["error"]["param"]) == (status, param)


def test_block_size_is_required_if_ambiguous(served: Client, indexer: Indexer, publisher: Publisher) -> None:
    source = EventSource(0, publisher.endpoint)
    indexer.register(Registration(Target("other", 0, "m"), source, "vLLM", 32))
    status, answer = served.post("/query_by_hash", {"model": "m", "block_hashes": chain()})
    assert (status, answer["error"]["param"]) == (400, "block_size")
    body = {"model": "m", "block_hashes": chain(), "block_size": 2}
    assert served.post("/query_by_hash", body)[1]["default"]["w"]["longest_matched"] == 4


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

    read = _read_packed_query(body, _native.packed_numbers)
    return None if read is None else read[1]


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
