"""The host tier of an engine: copies of its blocks in host memory, from which other workers pull.

As in vLLM's offloading with the tier `p2p`, every computed block is copied here. A request that names a peer first
copies the peer's blocks of its prompt. Blocks that are here are loaded and not computed. A pull that fails is no error.

The wire is not vLLM's: one JSON line has a prompt, and one line answers with the number of its blocks.
"""

from __future__ import annotations

import asyncio
from asyncio import StreamReader, StreamWriter
from collections import OrderedDict
from contextlib import suppress
from typing import Any

import msgspec

from kvevents import BlockRemoved, Event
from simulator.worker.cache import CachedSequence, PagedPrefixCache

MEDIUM = "CPU"
_LONGEST_LINE = 2**24  # bytes
_TIMEOUT_S = 5.0


class _Prompt(msgspec.Struct):
    tokens: list[int]
    adapter: str | None = None
    cache_salt: str | None = None


class _Source(msgspec.Struct):
    """The field `remote_kv_source` of a request. All its parts are needed."""

    kv_request_id: str
    remote_host: str
    remote_port: int


class HostTier:
    """Copies of at most `num_blocks` blocks of a cache. The least recently computed or pulled are evicted first."""

    def __init__(self, cache: PagedPrefixCache, num_blocks: int, seconds_per_token: float) -> None:
        self._cache = cache
        self._num_blocks = num_blocks
        self._seconds_per_token = seconds_per_token
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._events: list[Event] = []

    def hit(self, sequence: CachedSequence) -> int:
        """Return the number of leading tokens that are here, in full blocks. The last token is not counted."""
        blocks = 0
        for block_hash in self._cache.hashes(sequence, (len(sequence.tokens) - 1) // self._cache.block_size):
            if block_hash not in self._blocks:
                break
            blocks += 1
        return blocks * self._cache.block_size

    def store(self, sequence: CachedSequence, start: int, end: int) -> None:
        """Copy the full blocks of a sequence's tokens from `start` to `end`."""
        first, last = start // self._cache.block_size, end // self._cache.block_size
        hashes = self._cache.hashes(sequence, last)
        for block in range(first, last):
            if hashes[block] not in self._blocks:
                self._events.append(self._cache.stored_event(sequence, block, block + 1, MEDIUM))
        for block_hash in reversed(hashes[first:last]):  # so that a sequence loses its end first
            self._blocks[block_hash] = None
            self._blocks.move_to_end(block_hash)
        if (excess := len(self._blocks) - self._num_blocks) > 0:
            removed = [self._blocks.popitem(last=False)[0] for _ in range(excess)]
            self._events.append(BlockRemoved(block_hashes=list(removed), medium=MEDIUM))

    def clear(self) -> None:
        """Drop all blocks. The event that reports the cleared cache reports this, too."""
        self._blocks.clear()

    def take_events(self) -> list[Event]:
        """Return the events since the last call, in order."""
        events, self._events = self._events, []
        return events

    async def serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Answer one peer's question with the number of tokens that it can pull."""
        with suppress(ConnectionError, asyncio.IncompleteReadError, ValueError):
            asked = msgspec.json.decode(await reader.readline(), type=_Prompt)
            held = self.hit(CachedSequence(asked.tokens, asked.adapter, asked.cache_salt))
            writer.write(b"%d\n" % held)
            await writer.drain()
        writer.close()

    async def pull(self, given: Any, sequence: CachedSequence) -> None:
        """Copy the blocks of a sequence that a peer holds. `given`: a request's `remote_kv_source`."""
        with suppress(OSError, ValueError, TimeoutError):
            source = msgspec.convert(given, _Source)
            async with asyncio.timeout(_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(source.remote_host, source.remote_port)
                try:
                    prompt = _Prompt(sequence.tokens, sequence.adapter, sequence.cache_salt)
                    writer.write(msgspec.json.encode(prompt) + b"\n")
                    held = int(await reader.readline())
                finally:
                    writer.close()
                await asyncio.sleep(max(held - self.hit(sequence), 0) * self._seconds_per_token)
            self.store(sequence, 0, held)


async def listen(tiers: list[HostTier], host: str, port: int) -> list[asyncio.Server]:
    """Serve the tiers of a worker's DP ranks, at `port` and the ports after it. Raises OSError."""
    servers: list[asyncio.Server] = []
    for rank, tier in enumerate(tiers):
        servers.append(await asyncio.start_server(tier.serve, host, port + rank, limit=_LONGEST_LINE))
    return servers
