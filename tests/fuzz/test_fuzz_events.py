"""Damaged and lying event payloads: both cores say the same of them, hold no more than they may, and stay sound."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest
from budget import damaged, examples

from indexer import Index, Target
from indexer.hashing import Namespace, PackedPrompt
from indexer.indexer import make_index
from indexer.native import CORE_VARIABLE, CORES
from kvevents import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    MalformedBatchError,
    WireForm,
    decode_batch,
    encode_batch,
)

FEW = 1500
LIFE = 300  # payloads to one index
MOST_BLOCKS, ORPHANS = 200, 20
TARGETS = [Target("a", 0, "m"), Target("b", 1, "m", "acme")]
ODD: list[Any] = [None, -1, 2**63, 2**64 - 1, 1.5, float("nan"), float("inf"), "x", b"x", [], {}, [[[[]]]], 10**6]


def event(random: Random) -> Event:
    match random.randrange(8):
        case 0:
            return BlockRemoved(random.choices(range(40), k=random.randrange(4)), random.choice(["GPU", "CPU", None]))
        case 1 if random.random() < 0.1:
            return AllBlocksCleared()
    size = random.choice([2] * 8 + [1, 0, 2**40])
    names = random.choices(range(40), k=random.randrange(5))
    return BlockStored(
        list(names),
        random.choice([None, None, *range(40)]),
        random.choices([1, 2], k=len(names) * min(size, 4) + (random.random() < 0.02)),
        size,
        medium=random.choice(["GPU", "GPU", "CPU", None, "?"]),
        group_idx=random.choice([None, None, None, 0, 1, 9]),
        kv_cache_spec_kind=random.choice([None, None, "sliding_window", "mamba"]),
        kv_cache_spec_sliding_window=random.choice([None, 2, 4, 2**63]),
        lora_name=random.choice([None, None, None, "sql"]),
    )


def payload(random: Random) -> bytes:
    batch = [event(random) for _ in range(random.randrange(5))]
    engine_time = random.choice([1.0] * 8 + [float("nan"), float("inf"), 1e308, -1.0])
    encoded = encode_batch(EventBatch(engine_time, batch, 0), random.choice(list(WireForm)))
    if random.random() < 0.2:
        raw = msgspec.msgpack.decode(encoded, strict=False)
        if isinstance(raw, list) and len(raw) > 1 and isinstance(raw[1], list) and raw[1]:
            odd = random.choice(raw[1])
            if isinstance(odd, list) and odd:
                odd[random.randrange(len(odd))] = random.choice(ODD)
            elif isinstance(odd, dict) and odd:
                odd[random.choice(list(odd))] = random.choice(ODD)
        encoded = msgspec.msgpack.encode(raw)
    return damaged(random, encoded) if random.random() < 0.3 else encoded


def applied(index: Index, target: Target, data: bytes) -> tuple[Any, ...]:
    try:
        outcome = index.apply_payload(target, data)
    except MalformedBatchError as error:
        return (str(error),)
    return sorted(each.reason for each in outcome.rejected), outcome.cleared


def decoded(data: bytes) -> bool:
    try:
        decode_batch(data)
    except MalformedBatchError:
        return False
    return True


def make_core_index(core: str) -> Index:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CORE_VARIABLE, core)
        index = make_index(orphan_blocks=ORPHANS, most_blocks=MOST_BLOCKS)
    for target in TARGETS:
        index.add(target)
    return index


def test_cores_agree_on_any_payload() -> None:
    indexes: list[Index] = []
    batches = 0
    for count, random in enumerate(examples(FEW)):
        if count % LIFE == 0:
            indexes = [make_core_index(core) for core in CORES]
        target, data = random.choice(TARGETS), payload(random)
        outcomes = [applied(index, target, data) for index in indexes]
        assert all(each == outcomes[0] for each in outcomes), data
        batches += len(outcomes[0]) == 2
        assert decoded(data) == (len(outcomes[0]) == 2), data
        if count % 10 == 0:
            check(random, indexes)
    assert batches


def check(random: Random, indexes: list[Index]) -> None:
    """The indexes are sound and bounded, and say the same."""
    namespace, prompt = Namespace("m", "default", None, None, 2), PackedPrompt.of(random.choices([1, 2], k=12))
    reports = []
    for index in indexes:
        index.check_integrity()
        statuses = [index.status(target) for target in TARGETS]
        assert all(status is not None and sum(status.blocks.values()) <= MOST_BLOCKS for status in statuses)
        found = index.match(namespace, prompt)
        reports.append((statuses, sorted((each.target, each.matched_tokens, each.tiers) for each in found)))
    assert all(each == reports[0] for each in reports), reports
