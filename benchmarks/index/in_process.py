"""Our index called directly: the cost of a block and of a match, beside the C calls that they need."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from statistics import median
from typing import Any

import msgspec
from xxhash import xxh3_64_intdigest

from benchmarks.index.workload import BLOCK_SIZE, Workload
from indexer import Target, make_index
from indexer.hashing import TOKEN_BYTES, Namespace, PackedPrompt, pack_tokens
from kvevents import BlockStored, decode_batch

_MODEL = "model"
_NAMESPACE = Namespace(_MODEL, "default", None, None, BLOCK_SIZE)


@dataclass(slots=True)
class Cost:
    """The seconds of a call to the index; and of decoding, packing of tokens and hashing alone."""

    index: float = 0.0
    decode: float = 0.0
    pack: float = 0.0
    chain: float = 0.0

    def __truediv__(self, count: int) -> Cost:
        return Cost(*(getattr(self, field.name) / count for field in fields(self)))


def apply_cost(workload: Workload) -> Cost:
    """Return the cost of a block when one worker's stream is applied to an empty index."""
    (worker,) = workload.worker_ids
    index, target = make_index(), Target(str(worker), 0, _MODEL)
    index.add(target)
    cost = Cost()
    clock = time.perf_counter
    for payload in workload.batches(worker):
        start = clock()
        index.apply_payload(target, payload)
        applied = clock()
        batch = decode_batch(payload)
        cost.index += applied - start
        cost.decode += clock() - applied
        tokens = [event.token_ids for event in batch.events if isinstance(event, BlockStored)]
        start = clock()
        packed = [pack_tokens(ids) for ids in tokens]
        cost.pack += clock() - start
        for blocks in map(_blocks, packed):
            start = clock()
            _chain(blocks)
            cost.chain += clock() - start
    return cost / workload.blocks


def match_cost(workload: Workload, tokens: int, repeats: int) -> Cost:
    """Return the cost of `Index.match` of a prompt that a worker holds. Decoding is that of a query's JSON."""
    index = make_index()
    for worker in workload.worker_ids:
        target = Target(str(worker), 0, _MODEL)
        index.add(target)
        for payload in workload.batches(worker):
            index.apply_payload(target, payload)
    prompt = workload.prompt(workload.first_worker, 0)[:tokens]
    packed = pack_tokens(prompt)
    (match,) = index.match(_NAMESPACE, PackedPrompt(packed))
    assert match.matched_tokens == tokens
    body, decoder = msgspec.json.encode(prompt), msgspec.json.Decoder(list[int])
    blocks = _blocks(packed)
    return Cost(
        _median_seconds(lambda: index.match(_NAMESPACE, PackedPrompt(packed)), repeats),
        _median_seconds(lambda: decoder.decode(body), repeats),
        _median_seconds(lambda: pack_tokens(prompt), repeats),
        _median_seconds(lambda: _chain(blocks), repeats),
    )


def _blocks(packed: bytes) -> list[bytes]:
    step = BLOCK_SIZE * TOKEN_BYTES
    return [packed[start : start + step] for start in range(0, len(packed), step)]


def _chain(blocks: list[bytes]) -> None:
    previous = 0
    for block in blocks:
        previous = xxh3_64_intdigest(block, previous)


def _median_seconds(call: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return median(times)
