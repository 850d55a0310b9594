"""The index: which target holds which prefix. What both of its cores do, the native one and its twin in Python.

A few verbs: apply a batch of events to a target, clear a target, drop a target, match a prompt. Safe to call from
several threads; nobody waits for longer than a few events or one match take.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from indexer.dump import DumpedHolder, DumpedRun, TargetDump
from indexer.hashing import Namespace, PackedPrompt, namespace_hash
from indexer.holdings import HoldingsCounters, Target
from indexer.matching import Match, RowMatches, TargetRows
from kvevents import EventBatch, RejectedEvent, Tier

Place = TypeVar("Place")

# Blocks of a target that may wait for their parent.
ORPHAN_BLOCKS = 65_536
# Blocks that any target may hold: more than an engine's memory has, even in pages of one token beside a large CPU tier.
MOST_BLOCKS = 4_194_304


@dataclass(frozen=True, slots=True)
class TargetStatus:
    """What the index knows of one target: blocks by tier, block sizes seen in tokens, orphaned blocks, and counters.

    `window`: the fewest last blocks that any of its cache groups keeps, None where all keep a prefix whole.
    """

    blocks: dict[Tier, int]
    block_sizes: frozenset[int]
    orphans: int
    counters: HoldingsCounters
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Applied:
    """What became of a batch: its events that could not be read or made no sense, and whether it cleared all."""

    rejected: list[RejectedEvent]
    cleared: bool


class Index(ABC):
    """Prefix holdings of all targets. `secret` makes prefix hashes unpredictable for those who don't know it.

    `block_size_changes` counts how often the block sizes of any target may have changed. `cleared`: the targets that
    hold nothing any more, by an event or by `clear`; who takes note of one takes it out.
    """

    def __init__(self, secret: str) -> None:
        self.secret = secret
        self.block_size_changes = 0
        self.cleared: set[Target] = set()

    @abstractmethod
    def add(self, target: Target, adapter: str | None = None, capacity: int | None = None) -> None:
        """Make a target known; it holds nothing yet. Does nothing when it is known.

        Events that name no adapter are taken to be about `adapter`. `capacity`: how many blocks its engine's own
        memory has, None if that is not known.
        """

    @abstractmethod
    def apply_payload(self, target: Target, payload: bytes) -> Applied:
        """Apply the payload of a stream frame, event by event. Raises MalformedBatchError for one that is no batch."""

    @abstractmethod
    def apply(self, target: Target, batch: EventBatch) -> list[RejectedEvent]:
        """Apply a batch in order. Returns the events that made no sense; the others are applied."""

    @abstractmethod
    def clear(self, target: Target) -> None:
        """Forget what a target holds."""

    @abstractmethod
    def drop(self, target: Target) -> None:
        """Forget a target."""

    def match(self, namespace: Namespace, prompt: PackedPrompt, blocks: int | None = None) -> list[Match]:
        """What each target holds of a prompt's first `blocks` blocks (None: all full ones).

        Targets that hold nothing of it are left out. The prompt is hashed no further than one of them holds it, give
        or take what a run of the tree has.
        """
        block_size = namespace.block_size
        limit = len(prompt) // block_size if blocks is None else blocks
        return self.match_from(namespace_hash(namespace, self.secret), block_size, prompt, limit)

    @abstractmethod
    def match_from(self, root: int, block_size: int, prompt: PackedPrompt, blocks: int) -> list[Match]:
        """The same in the namespace whose hash is `root`. `block_size` in tokens."""

    @abstractmethod
    def match_hashes(self, hashes: array[int], block_size: int) -> list[Match]:
        """The same for a prompt whose prefix hashes are known. `block_size` in tokens."""

    def match_rows(
        self, root: int, block_size: int, prompt: PackedPrompt, blocks: int, rows: TargetRows, found: RowMatches
    ) -> None:
        """The same as `match_from`, added to what was found in the rows of some targets."""
        for match in self.match_from(root, block_size, prompt, blocks):
            row = rows.row_of.get(match.target)
            if row is not None:
                tiers = match.tiers
                found.better(row, match.matched_tokens, tiers[Tier.CPU], tiers[Tier.DISK] + tiers[Tier.UNKNOWN])

    @abstractmethod
    def dump(self, target: Target) -> tuple[list[DumpedRun], list[DumpedHolder]]:
        """What a target holds; nothing when it is not known."""

    @abstractmethod
    def restore(self, target: Target, dump: TargetDump) -> None:
        """Let a target that holds nothing yet hold what a dump says. Raises DumpError; it then holds nothing."""

    @abstractmethod
    def status(self, target: Target) -> TargetStatus | None:
        """What a target holds now; None when it is not known."""

    @abstractmethod
    def block_sizes(self, targets: Iterable[Target]) -> set[int]:
        """The block sizes, in tokens, of the blocks these targets ever stored."""

    @abstractmethod
    def sweep(self) -> None:
        """Free a part of what was cleared or dropped."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Assert what must always be true of the tree (for tests)."""

    @property
    @abstractmethod
    def runs(self) -> int:
        """The size of the tree in runs of blocks."""


def tell(told: list[tuple[Place, Applied | Exception]], place: Place, apply: Callable[[], Applied]) -> None:
    """Apply a payload, and take note by its place if there is something to tell of it: of an event that was left out,
    of a clear, or why it could not be applied."""
    try:
        applied = apply()
    except Exception as error:  # whatever one of them brings, the others are applied
        told.append((place, error))
    else:
        if applied.rejected or applied.cleared:
            told.append((place, applied))
