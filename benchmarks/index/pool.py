"""The command `python -m benchmarks.index.pool`: the index of one large Mooncake Store, in its own process."""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from benchmarks.index.fleet import percentiles
from benchmarks.index.report import write_section
from benchmarks.index.workload import BLOCK_SIZE, random_tokens
from benchmarks.machine import INDEXER_CORE, description, pin, resident_bytes
from indexer import Indexer, MatchQuery, Registration, Target
from indexer.hashing import PackedPrompt, pack_tokens
from indexer.native import core_name
from indexer.pools.blocks import Change, make_pool_blocks
from indexer.pools.mooncake import MasterContent, MooncakeMaster
from indexer.pools.pool import PoolConfig, SharedPool
from kvevents import BlockStored, EventBatch, encode_batch

_TARGET = Target("http://10.0.0.1:8000", 0, "model")
_EVENTS = 64  # the most that a master sends at once
_PROMPT, _PROMPTS = 512, 200  # blocks of a prompt, and prompts that are matched
_MATCHES = 2000
_AT_ONCE = 1 << 14  # blocks that are stored or learned without events
_COUNTED = 1_000_000  # objects that events store
_MASK = 2**64 - 1
_HOW = """\
`make bench-pool` makes the index of one Mooncake Store of {objects:,} objects, in process. Objects of each block:
{parts}, with keys of {key} characters as vLLM writes them. The chain of all blocks is known. The last {events:,}
objects are from events of a master. So are as many again when the tables are full, so that the oldest blocks make
room. Then the index answers what the pool holds of prompts of {tokens:,} tokens: all of them, and nothing. The memory
is that of the whole process beyond its start.

Machine: {machine}, {core} core; load average {before:.1f} before, {after:.1f} after."""


class _Master:
    """The stream of a master that stores new blocks, each of `parts` objects."""

    def __init__(self, parts: int) -> None:
        self._parts = parts
        self._stored = 0
        self._seq = 0

    def keys(self, block: int) -> list[str]:
        """Return the keys of a block's objects."""
        digits = f"{name_of(block):016x}" * 4
        return [f"model@tp_rank:{rank}@pcp0@dcp0@pp_rank:0@group:0@{digits}" for rank in range(self._parts)]

    def changes(self, blocks: int) -> list[Change]:
        """Return the changes of further blocks, which no batch reports."""
        stored = range(self._stored, self._stored + blocks)
        self._stored += blocks
        names = [name_of(block) for block in stored]
        return [Change(name, rest_of(name), part, False, True) for name in names for part in range(self._parts)]

    def batches(self, blocks: int) -> Iterator[tuple[int, bytes]]:
        """Yield the number and the payload of each batch that stores further blocks."""
        events: list[dict[str, Any]] = []
        for _ in range(blocks):
            events += [_event(key) for key in self.keys(self._stored)]
            self._stored += 1
            while len(events) >= _EVENTS:
                yield self._batch(events[:_EVENTS])
                del events[:_EVENTS]
        if events:
            yield self._batch(events)

    def _batch(self, events: list[dict[str, Any]]) -> tuple[int, bytes]:
        self._seq += 1
        return self._seq, msgspec.msgpack.encode([1_800_000_000_000, events, 0])

    def last(self, blocks: int) -> list[int]:
        """Return the names of the blocks that were stored last."""
        return [name_of(block) for block in range(self._stored - blocks, self._stored)]


def rest_of(name: int) -> bytes:
    """Return the other bits of the hash of a block with a name."""
    return name.to_bytes(8, "big") * 3


def name_of(block: int) -> int:
    """Return the last 64 bits of a block's hash."""
    return (block + 1) * 0x9E3779B97F4A7C15 & _MASK


def _event(key: str) -> dict[str, Any]:
    """Return an event with the fields of Mooncake 0.3.14."""
    nothing = dict.fromkeys(("model_name", "block_size", "additional_salt", "lora_name", "group_id", "parent_hash"))
    return {
        "event_id": 1,
        "timestamp": 1_800_000_000_000,
        "event_type": "stored",
        "type": "BlockStored",
        **nothing,
        "tenant_id": "default",
        "backend_id": "pool-0",
        "medium": "cpu",
        "dp_rank": 0,
        "object_key": key,
        "seq_hashes": [],
        "block_hashes": [],
    }


def main(
    objects: Annotated[int, typer.Option(min=2 * _COUNTED, help="Objects of the pool.")] = 50_000_000,
    parts: Annotated[int, typer.Option(min=1, max=64, help="Objects of each block.")] = 1,
    markdown: Annotated[Path | None, typer.Option(help="Write section Pool of this file.")] = None,
) -> None:
    """Measure the index of a large pool."""
    load_before = os.getloadavg()[0]
    pin(INDEXER_CORE)
    blocks, empty = objects // parts, resident_bytes(os.getpid())
    pool = SharedPool(PoolConfig("pool"))
    pool.blocks, pool.unknown_because = make_pool_blocks(blocks), None
    indexer, master = Indexer(pools=[pool]), _Master(parts)
    indexer.register(Registration(_TARGET, None, "vLLM", BLOCK_SIZE))
    content = MasterContent(pool, MooncakeMaster("", ""), lambda _: b"")
    counted = _COUNTED // parts
    for start in range(0, blocks - counted, _AT_ONCE):
        pool.blocks.apply(master.changes(min(_AT_ONCE, blocks - counted - start)))
    for key in master.keys(0):
        pool.keys.change(key, on_disk=False, stored=True)  # the forms of keys, in their order
    _learn(pool, blocks)
    rows = [("events, one thread", _cost(content, master, counted, parts))]
    assert pool.blocks.sizes()[:2] == (blocks, blocks)
    held = resident_bytes(os.getpid()) - empty
    rows.append(("memory", f"{held / 1e9:.2f} GB, {held / objects:.0f} bytes an object, {held / blocks:.0f} a block"))
    rows.append(("events when it is full, one thread", _cost(content, master, counted, parts)))
    rows.append(("memory afterwards", f"{(resident_bytes(os.getpid()) - empty) / 1e9:.2f} GB"))
    assert pool.blocks.sizes()[:2] == (blocks, blocks)
    _compute(indexer, master.last(_PROMPT * _PROMPTS))
    rows += [(f"a match of a prompt that is {name}", _matches(indexer, name)) for name in ("there", "not there")]
    how = _HOW.format(
        objects=objects,
        parts=parts,
        key=len(master.keys(0)[0]),
        tokens=_PROMPT * BLOCK_SIZE,
        events=_COUNTED,
        machine=description(),
        core=core_name(),
        before=load_before,
        after=os.getloadavg()[0],
    )
    table = "\n".join(
        f"| {name} | {figure} |" for name, figure in [(f"{objects:,} objects", ""), ("---", "---"), *rows]
    )
    text = f"{how}\n\n{table}"
    print(text)
    if markdown is not None:
        write_section(markdown, "Pool", text)


def _cost(content: MasterContent, master: _Master, blocks: int, parts: int) -> str:
    """Apply the events of new blocks, and return the processor time of an event."""
    spent = 0
    for seq, payload in master.batches(blocks):
        begun = time.thread_time_ns()
        content.receive(seq, payload)
        spent += time.thread_time_ns() - begun
    each = spent / 1e3 / (blocks * parts)
    return f"{1e6 / each:,.0f} a second, {each:.2f} µs each"


def _learn(pool: SharedPool, blocks: int) -> None:
    """Let the pool know a place for each block, as events of workers do."""
    for start in range(0, blocks, _AT_ONCE):
        names = [name_of(block) for block in range(start, min(start + _AT_ONCE, blocks))]
        pool.blocks.learn(array("Q", [name ^ _MASK for name in names]), names)


def _compute(indexer: Indexer, names: list[int]) -> None:
    """Report prompts whose blocks have these names, as the worker that computed them does."""
    for number in range(_PROMPTS):
        hashes: list[Any] = names[number * _PROMPT : (number + 1) * _PROMPT]
        event = BlockStored(hashes, None, _tokens("there", number), BLOCK_SIZE, medium="GPU")
        indexer.index.apply_payload(_TARGET, encode_batch(EventBatch(0.0, [event], 0)))


def _tokens(name: str, number: int) -> list[int]:
    return random_tokens(f"{name} {number}", _PROMPT * BLOCK_SIZE)


def _matches(indexer: Indexer, name: str) -> str:
    """Return the times of matches of prompts of a name."""
    seconds = []
    for number in range(_MATCHES):
        packed = PackedPrompt(pack_tokens([*_tokens(name, number % _PROMPTS), 1]))
        query = MatchQuery(_TARGET.model, packed)
        begun = time.perf_counter()
        found = indexer.pooled(query)
        seconds.append(time.perf_counter() - begun)
        assert sum(holdings.loadable(0) for holdings in found) == (_PROMPT * BLOCK_SIZE if name == "there" else 0)
    return percentiles(seconds)


if __name__ == "__main__":
    typer.run(main)
