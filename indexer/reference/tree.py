"""The radix tree of prefix hashes, which all targets share.

A run is an edge of the tree: consecutive blocks with one prefix hash each. A prefix hash identifies the whole prompt up
to its block. So a branch can start at any block of a run, and runs are never split:

    root ── a b c d e f        a prompt of six blocks
                 └── x y       a prompt that shares its first three blocks

`run.held[holder]` has one bit per block. If a block is evicted before its children, its bit is cleared. The children
stay in the tree, so they match again as soon as the block is stored again.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeAlias, TypeVar

# Limits the cost of one bit operation, and how far a prompt is hashed beyond its last match.
RUN_BLOCKS = 1024
_OFFSET_BITS = RUN_BLOCKS.bit_length() - 1
_OFFSET_MASK = RUN_BLOCKS - 1

HolderT = TypeVar("HolderT")


class Run(Generic[HolderT]):
    """At most RUN_BLOCKS consecutive blocks of one prefix. `depth` is the number of blocks before the first one."""

    __slots__ = ("children", "depth", "hashes", "held", "number", "parent")

    def __init__(self, number: int, parent: Run[HolderT] | None, depth: int) -> None:
        self.number = number
        self.parent = parent
        self.depth = depth
        self.hashes: array[int] = array("Q")
        self.children: dict[int, Run[HolderT]] = {}  # by the first prefix hash of the child
        self.held: dict[HolderT, int] = {}  # one bit per block, by holder

    def position(self, offset: int) -> int:
        """Return the number that identifies a block of this run while any target holds it."""
        return self.number << _OFFSET_BITS | offset


def split_position(position: int) -> tuple[int, int]:
    """Return the run number and the offset in the run of a position."""
    return position >> _OFFSET_BITS, position & _OFFSET_MASK


# A run, the offset of the first block in it, and the number of blocks.
Span: TypeAlias = tuple[Run[HolderT], int, int]


class PrefixTree(Generic[HolderT]):
    """Runs of prefix hashes under one root."""

    def __init__(self) -> None:
        self._root: Run[HolderT] = Run(0, None, 0)
        self._runs: dict[int, Run[HolderT]] = {}
        self._last_number = 0

    def __len__(self) -> int:
        return len(self._runs)

    def begins_with(self, first_hash: int) -> bool:
        """Return whether any target holds the first block of a prompt. Safe without the lock."""
        return first_hash in self._root.children

    def find(self, position: int) -> tuple[Run[HolderT], int] | None:
        """Return the run and the offset of a position; None if the block was freed."""
        run = self._runs.get(position >> _OFFSET_BITS)
        return None if run is None else (run, position & _OFFSET_MASK)

    def growing(self, position: int) -> Run[HolderT] | None:
        """Return the run that ends with this block if a block can be appended; None if other blocks may follow it."""
        run = self._runs.get(position >> _OFFSET_BITS)
        length = (position & _OFFSET_MASK) + 1
        return run if run is not None and length == len(run.hashes) < RUN_BLOCKS and not run.children else None

    def insert(self, after: tuple[Run[HolderT], int] | None, hashes: array[int]) -> list[Span[HolderT]]:
        """Find or add consecutive blocks after a block (None: at the start), and return their spans, not yet held."""
        spans: list[Span[HolderT]] = []
        run, offset = after or (self._root, -1)
        done = 0
        while done < len(hashes):
            start = offset + 1
            if start < len(run.hashes) and run.hashes[start] == hashes[done]:
                count = common_blocks(run.hashes, start, hashes, done)
            elif child := run.children.get(hashes[done]):
                run, offset = child, -1
                continue
            else:
                if run is self._root or start < len(run.hashes) or start == RUN_BLOCKS:
                    run, start = self._branch(run, start, hashes[done]), 0
                count = min(len(hashes) - done, RUN_BLOCKS - start)
                run.hashes.extend(hashes[done : done + count])
            spans.append((run, start, count))
            done += count
            offset = start + count - 1
        return spans

    def walk(self, hashes: array[int], limit: int, extend: Callable[[int], array[int]]) -> Iterator[Span[HolderT]]:
        """Yield the spans of a prompt's first `limit` blocks, up to the first block that is not in the tree.

        - `extend`: computes more of them; `extend(n)` makes the array at least n long.

        A prompt is hashed only as far as it matches, and only as far as the caller takes spans.
        """
        run, done = self._root, 0
        while done < limit:
            if len(hashes) <= done:
                extend(done + 1)
            child = run.children.get(hashes[done])
            if child is None:
                return
            run, count = child, 1
            whole = min(len(run.hashes), limit - done)
            while count < whole:
                reach = min(whole, max(4 * count, len(hashes) - done))
                if len(hashes) < done + reach:
                    extend(done + reach)
                if run.hashes[reach - 1] != hashes[done + reach - 1]:
                    count = common_blocks(run.hashes, 0, hashes, done)
                    break
                count = reach
            yield run, 0, count
            done += count

    def lineage(self, positions: Iterable[int]) -> list[Run[HolderT]]:
        """Return the runs of these blocks and all runs before them, parents first."""
        found: dict[int, Run[HolderT]] = {}
        for number in {position >> _OFFSET_BITS for position in positions}:
            run: Run[HolderT] | None = self._runs[number]
            while run is not None and run.parent is not None and run.number not in found:
                found[run.number] = run
                run = run.parent
        return sorted(found.values(), key=lambda run: run.depth)

    def release(self, run: Run[HolderT]) -> None:
        """Free the blocks at the end of a run that no target holds. If none is left, free the run and its parents."""
        while run.parent is not None and run.number in self._runs:
            needed = max((bits.bit_length() for bits in run.held.values()), default=0)
            for child in run.children.values():
                needed = max(needed, child.depth - run.depth)
            if needed:
                del run.hashes[needed:]
                return
            del run.parent.children[run.hashes[0]]
            del self._runs[run.number]
            run = run.parent

    def check_integrity(self) -> None:
        """Assert the invariants of the tree (for tests; visits every run)."""
        seen = 0
        stack = [self._root]
        while stack:
            run = stack.pop()
            for first, child in run.children.items():
                assert child.parent is run
                assert child.hashes[0] == first
                assert run.depth <= child.depth <= run.depth + len(run.hashes)
                assert 0 < len(child.hashes) <= RUN_BLOCKS
                assert child.held or child.children, "a run without holders and children"
                assert all(0 < bits < 1 << len(child.hashes) for bits in child.held.values())
                assert self._runs[child.number] is child
                stack.append(child)
                seen += 1
        assert seen == len(self._runs)

    def _branch(self, parent: Run[HolderT], start: int, first_hash: int) -> Run[HolderT]:
        self._last_number += 1
        run = Run(self._last_number, parent, parent.depth + start)
        self._runs[run.number] = run
        parent.children[first_hash] = run
        return run


def common_blocks(ours: array[int], start: int, theirs: array[int], done: int) -> int:
    """Return the number of blocks that two paths share from these offsets on: at least one, found by bisection."""
    low, high = 1, min(len(ours) - start, len(theirs) - done)
    while low < high:
        middle = (low + high + 1) // 2
        if ours[start + middle - 1] == theirs[done + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
