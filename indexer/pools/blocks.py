"""The blocks of one shared pool: the prefix of each engine hash, and the objects that are stored.

A pool names its objects by the engines' hashes, without tokens. The chain maps prefix hashes to engine hashes. It
is learned from events about the workers' own memory, because these have the whole identity of a block. A block may
consist of several objects, its parts: one for each rank, cache group, or keys and values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from struct import Struct
from threading import Lock
from typing import Final, NamedTuple

from indexer.native import native_core
from kvevents import AllBlocksCleared, BlockStored, EngineHash, Event

MOST_PARTS: Final = 64
_CHANGE: Final = Struct("=Q24sBBB5x")
REST_BYTES: Final = 24
_NO_REST: Final = bytes(REST_BYTES)
_HASH_MASK: Final = 2**64 - 1
# The most memory of a block in the tables of each implementation, with its share of hash slots.
_NATIVE_BYTES: Final = 104
_PYTHON_BYTES: Final = 450


class Change(NamedTuple):
    """An object that was stored or removed.

    - `name`: engine hash of its block, 64 bits.
    - `rest`: the other bits of the engine hash, REST_BYTES long. Blocks with one name and two of these do not count.
    - `part`: which part of the block it is, below MOST_PARTS.
    - `on_disk`: whether it is on disk; a part counts once, in memory or on disk.
    """

    name: int
    rest: bytes
    part: int
    on_disk: bool
    stored: bool


class StoredBlock(NamedTuple):
    """A block as a pool reported it.

    - `name`, `rest`: its engine hash, as in a change.
    - `parts`: its parts that are stored, one bit each; 0 if it is not known, or not unambiguous.
    """

    name: int
    rest: bytes
    parts: int


class PoolSizes(NamedTuple):
    """Sizes of a pool's tables. `replaced` counts entries that made room for newer ones."""

    chain: int
    blocks: int
    bytes: int
    replaced: int


class PoolBlocks(ABC):
    """Blocks of one pool. Methods may be called from several threads.

    - `media`: media of workers' events that report the pool's blocks; empty if another source does.
    """

    media: frozenset[str]

    @abstractmethod
    def learn(self, prefix_hashes: array[int], names: Sequence[EngineHash]) -> None:
        """Record the engine hashes of blocks."""

    @abstractmethod
    def apply(self, changes: Iterable[Change]) -> None:
        """Apply changes in order."""

    @abstractmethod
    def clear(self) -> None:
        """Remove all objects. The chain stays."""

    @abstractmethod
    def match(self, hashes: array[int], reach: int, needed: int, allowed: int) -> tuple[list[tuple[int, int]], int]:
        """Return the ranges of blocks with all parts, up to the first missing block from `reach` on.

        - `hashes`: prefix hashes of consecutive blocks from the start of a prompt.
        - `needed`: parts that blocks of the model are known to have, one bit each.
        - `allowed`: parts that may belong to the model.

        The second result is `needed` with the parts found here: every block needs those too.
        """

    @abstractmethod
    def stored(self, hashes: array[int]) -> list[StoredBlock]:
        """Return what was reported of the blocks with these prefix hashes."""

    @abstractmethod
    def sizes(self) -> PoolSizes:
        """Return the sizes of the tables."""


@dataclass(slots=True)
class _Object:
    rest: bytes
    memory: int = 0
    disk: int = 0
    ambiguous: bool = False

    @property
    def parts(self) -> int:
        return self.memory | self.disk


class PythonPoolBlocks(PoolBlocks):
    """The specification of the native core's blocks, and their fallback. At most `limit` entries in each table."""

    def __init__(self, limit: int, media: Iterable[str] = ()) -> None:
        self.media = frozenset(media)
        self._limit = limit
        self._lock = Lock()
        self._chain: dict[int, int] = {}
        self._objects: dict[int, _Object] = {}
        self._replaced = 0

    def learn(self, prefix_hashes: array[int], names: Sequence[EngineHash]) -> None:
        with self._lock:
            for prefix_hash, name in zip(prefix_hashes, names, strict=True):
                self._make_room(self._chain, prefix_hash)
                self._chain[prefix_hash] = name_of(name)

    def apply(self, changes: Iterable[Change]) -> None:
        with self._lock:
            for change in changes:
                self._apply(change)

    def _apply(self, change: Change) -> None:
        bit = 1 << change.part
        known = self._objects.get(change.name)
        if change.stored:
            if known is None:
                self._make_room(self._objects, change.name)
                known = self._objects[change.name] = _Object(change.rest)
            known.ambiguous = known.ambiguous or known.rest != change.rest
            if change.on_disk:
                known.disk |= bit
            else:
                known.memory |= bit
        elif known is not None:
            if change.on_disk:
                known.disk &= ~bit
            else:
                known.memory &= ~bit
            if not known.parts:
                del self._objects[change.name]

    def hint(self, event: Event) -> None:
        """Apply an event of a worker about the pool's blocks."""
        if isinstance(event, AllBlocksCleared):
            self.clear()
        else:
            self.apply(hinted_changes(event.block_hashes, isinstance(event, BlockStored)))

    def clear(self) -> None:
        with self._lock:
            self._objects.clear()

    def match(self, hashes: array[int], reach: int, needed: int, allowed: int) -> tuple[list[tuple[int, int]], int]:
        found = []
        with self._lock:
            for block, prefix_hash in enumerate(hashes):
                known = self._objects.get(self._chain.get(prefix_hash, 0))
                parts = known.parts & allowed if known is not None and not known.ambiguous else 0
                if not parts and block >= reach:
                    break
                needed |= parts
                found.append(parts)
        ranges: list[tuple[int, int]] = []
        for block, parts in enumerate(found):
            if not parts or parts != needed:
                if block >= reach:
                    break
            elif ranges and ranges[-1][1] == block:
                ranges[-1] = ranges[-1][0], block + 1
            else:
                ranges.append((block, block + 1))
        return ranges, needed

    def stored(self, hashes: array[int]) -> list[StoredBlock]:
        with self._lock:
            return [self._stored(self._chain.get(prefix_hash, 0)) for prefix_hash in hashes]

    def _stored(self, name: int) -> StoredBlock:
        known = self._objects.get(name)
        if known is None or known.ambiguous:
            return StoredBlock(0, _NO_REST, 0)
        return StoredBlock(name, known.rest, known.parts)

    def sizes(self) -> PoolSizes:
        with self._lock:
            return PoolSizes(len(self._chain), len(self._objects), 0, self._replaced)

    def _make_room(self, table: dict[int, int] | dict[int, _Object], key: int) -> None:
        if key not in table and len(table) >= self._limit:
            del table[next(iter(table))]
            self._replaced += 1


class NativePoolBlocks(PoolBlocks):
    """The blocks of a pool in C++, which the native index writes to. `core` is the C++ object."""

    def __init__(self, limit: int, media: Iterable[str] = ()) -> None:
        self.media = frozenset(media)
        core = native_core()
        assert core is not None
        self.core = core.PoolBlocks(limit, sorted(self.media))

    def learn(self, prefix_hashes: array[int], names: Sequence[EngineHash]) -> None:
        self.core.learn(prefix_hashes, array("Q", map(name_of, names)))

    def apply(self, changes: Iterable[Change]) -> None:
        self.core.apply(b"".join([_CHANGE.pack(*change) for change in changes]))

    def clear(self) -> None:
        self.core.clear()

    def match(self, hashes: array[int], reach: int, needed: int, allowed: int) -> tuple[list[tuple[int, int]], int]:
        bounds, needed = self.core.match(hashes, reach, needed, allowed)
        return list(zip(bounds[::2], bounds[1::2], strict=True)), needed

    def stored(self, hashes: array[int]) -> list[StoredBlock]:
        return [StoredBlock(*each) for each in self.core.stored(hashes)]

    def sizes(self) -> PoolSizes:
        return PoolSizes(*self.core.sizes())


def blocks_in(memory: int) -> int:
    """Return the number of blocks whose tables have at most `memory` bytes, and at least a few blocks."""
    return max(memory // (_PYTHON_BYTES if native_core() is None else _NATIVE_BYTES), 1024)


def make_pool_blocks(limit: int, media: Iterable[str] = ()) -> PoolBlocks:
    """Return the empty blocks of a pool, of the implementation in use.

    - `limit`: maximum number of blocks in the chain, and of blocks with objects.
    - `media`: media of workers' events that report the pool's blocks.
    """
    return (PythonPoolBlocks if native_core() is None else NativePoolBlocks)(limit, media)


def name_of(engine_hash: EngineHash) -> int:
    """Return an engine hash as an unsigned number of 64 bits: the last ones of a longer hash."""
    if isinstance(engine_hash, bytes):
        return int.from_bytes(engine_hash[-8:], "big")
    return engine_hash & _HASH_MASK


def hinted_changes(engine_hashes: Iterable[EngineHash], stored: bool) -> Iterator[Change]:
    """Yield the changes of a worker's event about the pool's blocks."""
    for engine_hash in engine_hashes:
        yield Change(name_of(engine_hash), _NO_REST, 0, False, stored)
