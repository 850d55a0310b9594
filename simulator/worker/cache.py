"""A paged prefix cache: the blocks that an engine keeps of the prompts it has computed.

Blocks have `block_size` tokens. A full block has a hash of its parent's hash and its tokens. The first block's hash
also covers the adapter and the cache salt. The block can be found by its hash until its memory is needed:

    in use     referenced by running sequences, never evicted
    free       unreferenced; evicted from the front of the free list
      cached   free, but still found; freed last block first, so that a sequence loses its end first

As in vLLM, two sequences that compute the same block at the same time hold two copies with one hash.
"""

from __future__ import annotations

import secrets
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from kvevents import AllBlocksCleared, BlockRemoved, BlockStored, Event

MEDIUM = "GPU"


@dataclass(slots=True, eq=False)
class CachedSequence:
    """The tokens of one request and the blocks that hold them. `tokens` only grows."""

    tokens: list[int]
    adapter: str | None = None
    cache_salt: str | None = None
    blocks: list[int] = field(default_factory=list)  # indices of the blocks in use, in order
    hashes: list[int] = field(default_factory=list)  # hashes of the full blocks that were needed so far
    num_stored: int = 0  # number of `blocks` that can be found by their hash

    def extra_keys(self, block: int) -> list[Any] | None:
        """Return the keys of a block's identity other than its tokens and its parent."""
        keys = [self.adapter] if self.adapter else []
        if self.cache_salt and block == 0:
            keys.append(self.cache_salt)
        return keys or None


@dataclass(slots=True)
class _Block:
    references: int = 0
    hash: int | None = None


class PagedPrefixCache:
    """A cache of `num_blocks` blocks of `block_size` tokens, shared by the sequences of one DP rank."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._blocks = [_Block() for _ in range(num_blocks)]
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._by_hash: dict[int, list[int]] = {}
        self._events: list[Event] = []
        # random, as in engines, so that hashes have no meaning outside of this cache
        self._root = secrets.token_bytes(8)

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def usage(self) -> float:
        """The share of blocks in use by running sequences, 0 to 1."""
        return 1 - len(self._free) / len(self._blocks)

    def hit(self, sequence: CachedSequence) -> int:
        """Return the number of cached leading tokens, in full blocks. At least one token remains to be computed."""
        return self._matched_blocks(sequence) * self.block_size

    def allocate(self, sequence: CachedSequence, num_tokens: int, must_fit: int = 0) -> bool:
        """Allocate the blocks for a sequence's first `num_tokens` tokens, from its cached prefix on.

        If they do not fit, or its first `must_fit` tokens would not, change nothing and return False.
        """
        shared = self._matched_blocks(sequence) if not sequence.blocks else 0
        found = [self._by_hash[block_hash][0] for block_hash in sequence.hashes[:shared]]
        held = len(sequence.blocks) + shared
        new = -(-num_tokens // self.block_size) - held
        needed = max(new, -(-must_fit // self.block_size) - held)
        if needed > len(self._free) - sum(index in self._free for index in found):
            return False
        for index in found:
            self._free.pop(index, None)
            self._blocks[index].references += 1
        sequence.blocks += found
        sequence.num_stored += shared
        self._take_free(sequence, new)
        return True

    def store(self, sequence: CachedSequence, num_tokens: int) -> None:
        """Make the full blocks of a sequence's first `num_tokens` tokens findable."""
        first, end = sequence.num_stored, num_tokens // self.block_size
        if end <= first:
            return
        self._hash_up_to(sequence, end)
        for index, block_hash in zip(sequence.blocks[first:end], sequence.hashes[first:end], strict=True):
            self._blocks[index].hash = block_hash
            self._by_hash.setdefault(block_hash, []).append(index)
        sequence.num_stored = end
        self._events.append(self.stored_event(sequence, first, end, MEDIUM))

    def stored_event(self, sequence: CachedSequence, first: int, end: int, medium: str) -> BlockStored:
        """Return the event that reports a sequence's blocks from `first` to `end`, whose hashes are known."""
        extra_keys = [sequence.extra_keys(block) for block in range(first, end)]
        return BlockStored(
            block_hashes=list(sequence.hashes[first:end]),
            parent_block_hash=sequence.hashes[first - 1] if first else None,
            token_ids=sequence.tokens[first * self.block_size : end * self.block_size],
            block_size=self.block_size,
            medium=medium,
            lora_name=sequence.adapter,
            extra_keys=extra_keys if any(extra_keys) else None,
        )

    def hashes(self, sequence: CachedSequence, num_blocks: int) -> list[int]:
        """Return the hashes of a sequence's first full blocks."""
        self._hash_up_to(sequence, num_blocks)
        return sequence.hashes[: max(num_blocks, 0)]

    def free(self, sequence: CachedSequence) -> None:
        """Free a sequence's blocks. Cached ones stay findable until their memory is needed."""
        for index in reversed(sequence.blocks):
            block = self._blocks[index]
            block.references -= 1
            if block.references == 0:
                self._free[index] = None
                if block.hash is None:
                    self._free.move_to_end(index, last=False)
        sequence.blocks = []
        sequence.num_stored = 0

    def reset(self) -> bool:
        """Drop everything cached. Return False, without a change, while any block is in use."""
        if len(self._free) < len(self._blocks):
            return False
        for block in self._blocks:
            block.hash = None
        self._by_hash.clear()
        self._events.append(AllBlocksCleared())
        return True

    def take_events(self) -> list[Event]:
        """Return the events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def check_integrity(self, running: Sequence[CachedSequence]) -> None:
        """Check consistency, given every sequence that holds blocks. Raises AssertionError."""
        references = [0] * len(self._blocks)
        for sequence in running:
            for position, index in enumerate(sequence.blocks):
                references[index] += 1
                stored = position < sequence.num_stored
                assert self._blocks[index].hash == (sequence.hashes[position] if stored else None)
        assert references == [block.references for block in self._blocks]
        assert set(self._free) == {index for index, count in enumerate(references) if count == 0}
        by_hash: dict[int, set[int]] = {}
        for index, block in enumerate(self._blocks):
            if block.hash is not None:
                by_hash.setdefault(block.hash, set()).add(index)
        assert by_hash == {block_hash: set(copies) for block_hash, copies in self._by_hash.items()}
        assert sum(len(copies) for copies in self._by_hash.values()) == sum(len(copies) for copies in by_hash.values())

    def _matched_blocks(self, sequence: CachedSequence) -> int:
        limit = (len(sequence.tokens) - 1) // self.block_size
        for block in range(limit):
            self._hash_up_to(sequence, block + 1)
            if sequence.hashes[block] not in self._by_hash:
                return block
        return max(limit, 0)

    def _hash_up_to(self, sequence: CachedSequence, num_blocks: int) -> None:
        for block in range(len(sequence.hashes), num_blocks):
            parent = sequence.hashes[-1].to_bytes(8, "big") if block else self._chain_root(sequence)
            tokens = array("I", sequence.tokens[block * self.block_size : (block + 1) * self.block_size])
            digest = blake2b(parent + tokens.tobytes(), digest_size=8).digest()
            sequence.hashes.append(int.from_bytes(digest, "big"))

    def _chain_root(self, sequence: CachedSequence) -> bytes:
        keys = [b"" if key is None else b"+" + key.encode() for key in (sequence.adapter, sequence.cache_salt)]
        return self._root + b"".join(blake2b(key, digest_size=16).digest() for key in keys)

    def _take_free(self, sequence: CachedSequence, count: int) -> None:
        removed = []
        for _ in range(count):
            index, _ = self._free.popitem(last=False)
            block = self._blocks[index]
            if block.hash is not None:
                copies = self._by_hash[block.hash]
                copies.remove(index)
                if not copies:
                    del self._by_hash[block.hash]
                removed.append(block.hash)
                block.hash = None
            block.references = 1
            sequence.blocks.append(index)
        if removed:
            self._events.append(BlockRemoved(block_hashes=list(removed), medium=MEDIUM))
