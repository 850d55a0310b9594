"""Every prefix that an engine stored in its present life, whether it still holds it or not.

What an index matches beyond that cannot be in the engine's cache: a ghost. Kept apart from the index on purpose, and as
simple as can be: a set of chained digests.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b

from kvevents import AllBlocksCleared, BlockStored, EngineHash, EventBatch
from kvevents.identity import identity_of


class StoredPrefixes:
    """What one DP rank stored since it started, or was cleared."""

    def __init__(self) -> None:
        self._digests: dict[EngineHash, bytes] = {}  # by block; the digest is of the whole prefix
        self._stored: set[bytes] = set()
        self._adapters: set[str] = set()

    def restart(self) -> None:
        """The engine restarted."""
        self._digests.clear()
        self._stored.clear()

    def apply(self, batch: EventBatch) -> None:
        """Take in a batch. Blocks whose tokens or parent are not known are left out, as nothing can match them."""
        for event in batch.events:
            if isinstance(event, BlockStored) and event.kv_cache_spec_kind in (None, "full_attention"):
                self._store(event)
            elif isinstance(event, AllBlocksCleared) and event.medium is None:
                self.restart()

    def longest(self, tokens: list[int], adapter: str | None, cache_salt: str | None, block_size: int) -> int:
        """How many leading tokens of a sequence were stored, in full blocks."""
        digest = _root(adapter, cache_salt)
        for start in range(0, len(tokens) - block_size + 1, block_size):
            digest = _chained(digest, tokens[start : start + block_size], None)
            if digest not in self._stored:
                return start
        return len(tokens) // block_size * block_size

    def _store(self, event: BlockStored) -> None:
        size = event.block_size
        if not size or len(event.token_ids) != size * len(event.block_hashes):
            return
        try:
            adapter, salt, keys = identity_of(event, self._adapters)
        except ValueError:
            return
        if adapter is not None:
            self._adapters.add(adapter)
        parent = event.parent_block_hash
        digest = _root(adapter, salt) if parent is None else self._digests.get(parent)
        if digest is None:
            return
        for number, name in enumerate(event.block_hashes):
            tokens = event.token_ids[number * size : (number + 1) * size]
            digest = _chained(digest, tokens, keys[number] if keys else None)
            self._digests[name] = digest
            self._stored.add(digest)


def _root(adapter: str | None, cache_salt: str | None) -> bytes:
    return repr((adapter, cache_salt)).encode()


def _chained(parent: bytes, tokens: list[int], key: bytes | None) -> bytes:
    return blake2b(parent + array("Q", tokens).tobytes() + (key or b""), digest_size=16).digest()
