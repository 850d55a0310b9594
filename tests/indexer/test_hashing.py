"""Prefix hashes follow their definition, and namespaces never share a hash."""

from __future__ import annotations

import struct
from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from indexer.hashing import Namespace, PackedPrompt, extend_prefix_hashes, namespace_hash, pack_tokens

NAMESPACE = Namespace("llama", "default", None, None, 2)
token_ids = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def prefix_hashes(seed: int, tokens: list[int], block_size: int, keys: list[bytes | None] | None = None) -> list[int]:
    hashes: array[int] = array("Q")
    extend_prefix_hashes(hashes, seed, pack_tokens(tokens), block_size, len(tokens) // block_size, keys)
    return hashes.tolist()


@given(token_ids, st.integers(0, 2**64 - 1), st.integers(1, 5))
def test_block_hash_is_seeded_with_the_previous_one(tokens: list[int], seed: int, block_size: int) -> None:
    expected: list[int] = []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        seed_of_block = expected[-1] if expected else seed
        block = struct.pack(f"<{block_size}I", *tokens[start : start + block_size])
        expected.append(xxh3_64_intdigest(block, seed_of_block))
    assert prefix_hashes(seed, tokens, block_size) == expected


def test_extra_key_is_hashed_after_the_tokens() -> None:
    first = xxh3_64_intdigest(struct.pack("<2I", 1, 2) + b"image", 9)
    second = xxh3_64_intdigest(struct.pack("<2I", 3, 4), first)
    assert prefix_hashes(9, [1, 2, 3, 4], 2, [b"image", None]) == [first, second]


@given(token_ids, st.data())
def test_hashes_can_be_extended_in_steps(tokens: list[int], data: st.DataObject) -> None:
    packed = pack_tokens(tokens)
    hashes: array[int] = array("Q")
    for end in [*sorted(data.draw(st.lists(st.integers(0, len(tokens) // 2), max_size=4))), len(tokens) // 2]:
        extend_prefix_hashes(hashes, 7, packed, 2, end)
    assert hashes.tolist() == prefix_hashes(7, tokens, 2)


@given(token_ids, st.lists(st.integers(0, 20), max_size=4))
def test_prompt_hashes_are_those_of_its_blocks(tokens: list[int], ends: list[int]) -> None:
    prompt, blocks = PackedPrompt.of(tokens), len(tokens) // 2
    for end in (*ends, blocks):
        made = prompt.hashes(7, 2, min(end, blocks))
        assert made.tolist() == prefix_hashes(7, tokens, 2)[: len(made)]
    assert len(prompt.hashes(7, 2)) == blocks


def test_root_hash_is_the_hash_of_the_namespace() -> None:
    fields = ["secret", "llama", "acme", "sql", "salt", 16]
    namespace = Namespace("llama", "acme", "sql", "salt", 16)
    assert namespace_hash(namespace, "secret") == xxh3_64_intdigest(msgspec.msgpack.encode(fields))


def test_each_field_of_a_namespace_changes_the_root() -> None:
    others = [
        NAMESPACE._replace(model="qwen"),
        NAMESPACE._replace(tenant="acme"),
        NAMESPACE._replace(adapter="sql"),
        NAMESPACE._replace(cache_salt="sql"),
        NAMESPACE._replace(adapter=""),
        NAMESPACE._replace(block_size=4),
        NAMESPACE._replace(model="default", tenant="llama"),
    ]
    roots = {namespace_hash(namespace) for namespace in [NAMESPACE, *others]}
    assert len(roots) == 1 + len(others)


def test_secret_changes_each_hash() -> None:
    tokens = list(range(20))
    open_to_all = prefix_hashes(namespace_hash(NAMESPACE), tokens, 2)
    secret = prefix_hashes(namespace_hash(NAMESPACE, "secret"), tokens, 2)
    assert set(open_to_all).isdisjoint(secret)


def test_token_ids_are_packed_as_little_endian_u32() -> None:
    assert pack_tokens([1, 2**32 - 1]) == b"\1\0\0\0\xff\xff\xff\xff"


@pytest.mark.parametrize(("bad", "error"), [(-1, OverflowError), (2**32, OverflowError), ("1", TypeError)])
def test_invalid_token_ids_are_rejected(bad: int, error: type[Exception]) -> None:
    with pytest.raises(error):
        pack_tokens([1, bad])
