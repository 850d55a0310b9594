"""Which prefixes of prompts are held, and by whom: a radix tree of prefix hashes.

An edge is a stretch of chunks that no prompt ends in and none leaves:

    root ── a b c ┬─ d e f     a prompt of six chunks
                  └─ x y       another that shares its first three

Equal hashes mean equal prefixes, so an edge's last hash shows whether a prompt goes all the way along it. A walk takes
one comparison an edge, however many chunks that has, and what is new of a prompt is copied once.

A holder of an edge holds those before it. So a holder's count at an edge is that of the prompts it holds that end
there, and of the edges after it that it holds: only what is new to a holder has to be counted, or what nothing else of
it needs any more.
"""

from __future__ import annotations

from array import array
from typing import Generic, TypeVar

from indexer.reference.tree import common_blocks

# The most that are looked at to find a short prompt.
_MOST_EDGES = 64


class PrefixHolder:
    """Who holds prefixes. `chunks`: how many."""

    __slots__ = ("chunks",)

    def __init__(self) -> None:
        self.chunks = 0


HolderT = TypeVar("HolderT", bound=PrefixHolder)


class Edge(Generic[HolderT]):
    """A stretch of chunks. `end`: how many chunks a prompt has that ends with it. `counts`: see above."""

    __slots__ = ("counts", "end", "hashes", "longer", "parent")

    def __init__(self, parent: Edge[HolderT] | None, hashes: array[int], end: int) -> None:
        self.parent = parent  # None for the root, and that alone
        self.hashes = hashes
        self.end = end
        self.counts: dict[HolderT, int] = {}
        self.longer: dict[int, Edge[HolderT]] = {}  # by their first hash


class SharedPrefixes(Generic[HolderT]):
    """Prefixes of prompts, each given by a hash for every chunk, and who holds them."""

    def __init__(self) -> None:
        self._root: Edge[HolderT] = Edge(None, array("Q"), 0)

    def hold(self, holder: HolderT, hashes: array[int]) -> Edge[HolderT]:
        """Hold a prompt. Returns where it ends, to let go of it there."""
        path, shared = self._walk(hashes)
        edge = path[-1] if path else self._root
        if edge.end > shared:
            edge = self.split(edge, edge.end - shared)
        if shared < len(hashes):
            new = Edge(edge, hashes[shared:], len(hashes))
            edge.longer[hashes[shared]] = new
            edge = new
        self.hold_edge(holder, edge)
        return edge

    def hold_edge(self, holder: HolderT, edge: Edge[HolderT]) -> None:
        """Hold once more the prompts that end with an edge."""
        while edge.parent is not None:
            count = edge.counts.get(holder, 0)
            edge.counts[holder] = count + 1
            if count:
                return
            holder.chunks += len(edge.hashes)
            edge = edge.parent

    def let_go(self, holder: HolderT, edge: Edge[HolderT]) -> None:
        """What `hold` or `hold_edge` did is undone."""
        while edge.parent is not None:
            parent, count = edge.parent, edge.counts[holder]
            if count > 1:
                edge.counts[holder] = count - 1
                self._join(edge)
                return
            del edge.counts[holder]
            holder.chunks -= len(edge.hashes)
            if edge.counts:
                self._join(edge)
            else:
                del parent.longer[edge.hashes[0]]
            edge = parent

    def split(self, edge: Edge[HolderT], chunks: int) -> Edge[HolderT]:
        """Make an edge of the last `chunks` of one, and another of those before, which is returned."""
        parent = edge.parent
        assert parent is not None
        first = Edge(parent, edge.hashes[:-chunks], edge.end - chunks)
        first.counts = dict.fromkeys(edge.counts, 1)
        parent.longer[first.hashes[0]] = first
        edge.parent, edge.hashes = first, edge.hashes[-chunks:]
        first.longer[edge.hashes[0]] = edge
        return first

    def longest(self, hashes: array[int]) -> dict[HolderT, int]:
        """How many chunks of a prompt, from its start on, each holder has that has any."""
        if not self._root.longer:
            return {}
        path, shared = self._walk(hashes)
        found: dict[HolderT, int] = {}
        for edge in reversed(path):
            if len(edge.counts) > len(found):  # else they are those of the edge after it
                found = dict.fromkeys(edge.counts, min(edge.end, shared)) | found
        return found

    def resumable(self, holder: HolderT, hashes: array[int], window: int) -> int:
        """How many chunks of a prompt a holder can resume at that keeps of each prompt only its last `window` chunks.

        That is where one of its prompts ends or two of them part; and anywhere in prompts within the window.
        """
        path, shared = self._walk(hashes)
        held = [edge for edge in path if holder in edge.counts]
        if held and shared <= window and self._has_end(holder, held[-1], window):
            return min(held[-1].end, shared)
        for edge in reversed(held):
            going_on = any(holder in longer.counts for longer in edge.longer.values())
            if edge.end <= shared and not (going_on and edge.counts[holder] == 1):
                return edge.end
        return 0

    def _has_end(self, holder: HolderT, edge: Edge[HolderT], most: int) -> bool:
        """Whether a prompt of a holder that goes along an edge has `most` chunks or fewer."""
        waiting = [edge]
        for _ in range(_MOST_EDGES):
            if not waiting:
                return False
            edge = waiting.pop()
            if edge.end > most:
                continue
            longer = [each for each in edge.longer.values() if holder in each.counts]
            if edge.counts[holder] > len(longer):
                return True
            waiting += longer
        return False

    def longest_of(self, holder: HolderT, hashes: array[int]) -> Edge[HolderT] | None:
        """The last edge on a prompt's way that a holder has; it may end behind the prompt."""
        path, _ = self._walk(hashes)
        return next((edge for edge in reversed(path) if holder in edge.counts), None)

    def _join(self, edge: Edge[HolderT]) -> None:
        """Make one edge of this and the one after it, if there is but one and no prompt ends between them."""
        if len(edge.longer) != 1 or edge.parent is None:
            return
        (after,) = edge.longer.values()
        if len(edge.counts) == len(after.counts) == sum(edge.counts.values()):
            after.hashes = edge.hashes + after.hashes
            after.parent = edge.parent
            edge.parent.longer[edge.hashes[0]] = after

    def _walk(self, hashes: array[int]) -> tuple[list[Edge[HolderT]], int]:
        """The edges that a prompt goes along, and how many of its chunks they have: of the last perhaps a part."""
        path: list[Edge[HolderT]] = []
        edge, shared, length = self._root, 0, len(hashes)
        while shared < length and (following := edge.longer.get(hashes[shared])) is not None:
            path.append(following)
            if following.end > length or following.hashes[-1] != hashes[following.end - 1]:
                return path, shared + common_blocks(following.hashes, 0, hashes, shared)
            edge, shared = following, following.end
        return path, shared
