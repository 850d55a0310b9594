"""A shared pool as the index sees it: its blocks, whose targets load from it, and whether its content is known."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

import structlog

from indexer.dump import DumpedHolder, DumpedRun, read_hash
from indexer.hashing import PackedPrompt
from indexer.pools.blocks import MOST_PARTS, StoredBlock, blocks_in, make_pool_blocks
from indexer.pools.holdings import PoolHoldings
from indexer.pools.keys import ObjectKeys
from indexer.pools.layout import PoolLayout
from indexer.pools.samples import PoolSample, sampled_positions
from indexer.targets import Registration, Target

log = structlog.get_logger()

_ALL_PARTS: Final = 2**64 - 1
_AT_ONCE: Final = 1024  # changes that are applied at once, so that other threads have their turn between them
_UNKNOWN_LAYOUT: Final = PoolLayout()
_FIRST_BLOCKS: Final = 64  # hashed blocks of a prompt before the pool is asked for the first time


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """Configuration of a pool.

    - `name`: its name in logs.
    - `workers`: URLs of the workers that load from it; empty: all workers of `models`.
    - `models`: models whose workers load from it, each with a text that its objects' keys contain; empty: all models.
    - `media`: media of workers' events that report its blocks; empty if the pool reports them itself.
    - `master`: URL of the HTTP API that answers questions about single keys; empty without one.
    - `objects`: the fewest objects of a block: ranks times cache groups, twice if keys and values are apart.
    - `memory`: bound of the tables in bytes.
    """

    name: str
    workers: frozenset[str] = frozenset()
    models: dict[str, str] = field(default_factory=dict)
    media: frozenset[str] = frozenset()
    objects: int = 1
    memory: int = 256 * 2**20
    master: str = ""


class SharedPool:
    """A pool that holds blocks and is never a target.

    - `unknown_because`: why the recorded objects may not be those in the pool; None while they are. Until then the pool
      holds nothing.
    - `unknown_since`: the monotonic time at which they became unknown.
    - `answers`: whether its master answers, so that it can be asked about single keys meanwhile.
    """

    def __init__(self, config: PoolConfig) -> None:
        self.config = config
        self.blocks = make_pool_blocks(blocks_in(config.memory), config.media)
        self.keys = ObjectKeys()
        self.unknown_because = None if config.media else "the pool was not asked yet"
        self.unknown_since = time.monotonic()
        self.answers = False
        self._needed: dict[tuple[str, str], int] = {}  # parts of a block, by tenant and model
        self._layouts: dict[tuple[str, str], PoolLayout] = {}  # by tenant and model

    @property
    def known(self) -> bool:
        """True while the recorded objects are those in the pool."""
        return self.unknown_because is None

    def lose(self, reason: str) -> None:
        """Hold nothing until the objects are known again, because of `reason`."""
        if self.unknown_because is None:
            self.unknown_since = time.monotonic()
            log.info("content of a pool unknown", pool=self.config.name, reason=reason)
        self.unknown_because = reason

    def serves(self, target: Target) -> bool:
        """Return whether a target loads from this pool."""
        config = self.config
        return (not config.workers or target.worker in config.workers) and (
            not config.models or target.model in config.models
        )

    def use_engine(self, registration: Registration) -> None:
        """Read keys as the engine of a registered target writes them."""
        self.keys.leading = registration.engine.lower().startswith("sglang")
        if registration.pool_layout is not None:
            self._layouts[registration.target.tenant, registration.target.model] = registration.pool_layout

    def learn(self, runs: Sequence[DumpedRun], holders: Iterable[DumpedHolder]) -> None:
        """Learn the chain from the blocks of a restored target, in the form of a dump."""
        for holder in holders:
            hashes = array("Q", [runs[run].hashes[offset] for _, run, offset in holder.blocks])
            self.blocks.learn(hashes, [read_hash(name) for name, _, _ in holder.blocks])

    def store(self, objects: Iterable[tuple[str, bool, bool]]) -> None:
        """Apply changes of objects: the key, whether it is on disk, and whether it was stored or removed."""
        found = (self.keys.change(key, on_disk, stored) for key, on_disk, stored in objects)
        changes = (change for change in found if change is not None)
        while some := list(islice(changes, _AT_ONCE)):
            self.blocks.apply(some)

    def replace(self, objects: Iterable[tuple[str, bool]]) -> None:
        """Replace all objects by those of a listing, so that they are known: the key, and whether it is on disk."""
        self.blocks.clear()
        self.store((key, on_disk, True) for key, on_disk in objects)
        self.unknown_because = None

    def holdings(
        self, model: str, tenant: str, root: int, block_size: int, prompt: PackedPrompt, blocks: int, reach: int
    ) -> PoolHoldings | None:
        """Return what the pool holds of a prompt's first `blocks` blocks; None for nothing.

        - `root`: hash of the prompt's namespace.
        - `reach`: blocks after which the first missing block ends the search: the most that any target holds.
        """
        return self._reported(model, tenant, root, block_size, prompt, blocks, reach) if self.known else None

    def sample(
        self, model: str, tenant: str, root: int, block_size: int, prompt: PackedPrompt, blocks: int, reach: int
    ) -> PoolSample | None:
        """Return the question whether the pool still has what it reported of a prompt. Parameters as in `holdings`.

        None if it reported nothing, if its content is known, or if its master does not answer. Layouts with trailing
        objects are not asked for: a sample does not show where a load can end.
        """
        if self.known or not self.answers or self._layout(tenant, model).trailing:
            return None
        reported = self._reported(model, tenant, root, block_size, prompt, blocks, reach)
        if reported is None:
            return None
        needed = self._needed[tenant, model]
        parts = [part for part in range(MOST_PARTS) if needed >> part & 1]
        numbers = [
            number // block_size for start, end in reported.intervals for number in range(start, end, block_size)
        ]
        positions = sampled_positions(len(numbers), len(parts))
        hashes = prompt.hashes(root, block_size, numbers[-1] + 1)
        stored = self.blocks.stored(array("Q", [hashes[numbers[position]] for position in positions]))
        sampled = [
            (position, [self.keys.key(part, each.name, each.rest) for part in parts])
            for position, each in zip(positions, stored, strict=True)
        ]
        return PoolSample(reported, numbers, sampled)

    def _reported(
        self, model: str, tenant: str, root: int, block_size: int, prompt: PackedPrompt, blocks: int, reach: int
    ) -> PoolHoldings | None:
        if blocks <= 0:
            return None
        layout = self._layout(tenant, model)
        allowed = self._parts_of(model, layout)
        trailing = allowed & self.keys.parts_before(layout.trailing) if layout.trailing else 0
        allowed &= ~trailing
        needed = self._needed.get((tenant, model), 0) & allowed
        asked = min(blocks, max(reach + 1, _FIRST_BLOCKS))
        while True:
            hashes = prompt.hashes(root, block_size, asked)[:asked]
            ranges, needed = self.blocks.match(hashes, reach, needed, allowed)
            if asked == blocks or not ranges or ranges[-1][1] < asked:
                break
            asked = min(blocks, 4 * asked)
        self._needed[tenant, model] = needed
        if layout.trailing:
            stops = [(start, self._last_stop(hashes, start, end, trailing, layout)) for start, end in ranges]
            ranges = [(start, end) for start, end in stops if end > start]
        if not ranges or needed.bit_count() < max(self.config.objects, layout.objects):
            return None
        bounds = tuple((start * block_size, end * block_size) for start, end in ranges)
        return PoolHoldings(self.config.name, block_size, bounds, layout.least_tokens)

    def _layout(self, tenant: str, model: str) -> PoolLayout:
        return self._layouts.get((tenant, model), _UNKNOWN_LAYOUT)

    def _parts_of(self, model: str, layout: PoolLayout) -> int:
        """Return the parts that may belong to a model, by the text of the settings or the reported prefix."""
        text = self.config.models.get(model, "")
        if text:
            return self.keys.parts_with(text)
        return self.keys.parts_after(layout.prefix) if layout.prefix else _ALL_PARTS

    def _last_stop(self, hashes: array[int], start: int, end: int, trailing: int, layout: PoolLayout) -> int:
        """Return where the longest load of a range ends: the blocks before its end have all trailing parts."""
        stop, complete, stored = end, 0, list[StoredBlock]()
        for block in range(end - 1, -1, -1):
            if stop <= start or not trailing:
                break
            if not stored:
                stored = self.blocks.stored(hashes[max(block + 1 - _FIRST_BLOCKS, 0) : block + 1])
            if stored.pop().parts & trailing == trailing:
                complete += 1
                if complete >= layout.trailing_blocks or block == 0:
                    return stop
            else:
                stop, complete = block, 0
        return start
