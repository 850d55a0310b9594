"""A radix tree of prefix hashes, with the holders of each prefix.

An edge is a run of chunks within which no prompt ends and no two prompts differ:

    root ── a b c ┬─ d e f     a prompt of six chunks
                  └─ x y       another that shares its first three

Equal hashes mean equal prefixes. So an edge's last hash shows whether a prompt contains the whole edge. A walk makes
one comparison per edge, however long the edge is, and copies only the new part of a prompt.

A holder of an edge holds all edges before it. Its count at an edge is the sum of two numbers: its prompts that end
there, and its edges that follow directly. So holding a prompt counts only its new part. Releasing it counts only the
part that no other prompt of the holder needs.
"""

from __future__ import annotations

from array import array
from typing import Generic, TypeVar

from indexer.reference.tree import common_blocks

# The most edges that are searched for a short prompt.
_MOST_EDGES = 64


class PrefixHolder:
    """A holder of prefixes. `chunks`: the number of chunks that it holds."""

    __slots__ = ("chunks",)

    def __init__(self) -> None:
        self.chunks = 0


HolderT = TypeVar("HolderT", bound=PrefixHolder)


class Edge(Generic[HolderT]):
    """A run of chunks in the tree.

    - `end`: the number of chunks from the root to its end.
    - `counts`: the count of each holder, as the module describes it.
    - `longer`: the edges that follow, by their first hash.
    """

    __slots__ = ("counts", "end", "hashes", "longer", "parent")

    def __init__(self, parent: Edge[HolderT] | None, hashes: array[int], end: int) -> None:
        self.parent = parent
        self.hashes = hashes
        self.end = end
        self.counts: dict[HolderT, int] = {}
        self.longer: dict[int, Edge[HolderT]] = {}


class SharedPrefixes(Generic[HolderT]):
    """The prefixes of prompts, given by the hash of each chunk, and their holders."""

    def __init__(self) -> None:
        self._root: Edge[HolderT] = Edge(None, array("Q"), 0)

    def hold(self, holder: HolderT, hashes: array[int]) -> Edge[HolderT]:
        """Hold a prompt, and return the edge at its end, by which it is released."""
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
        """Hold the prompt that ends with an edge, once more if it is already held."""
        while edge.parent is not None:
            count = edge.counts.get(holder, 0)
            edge.counts[holder] = count + 1
            if count:
                return
            holder.chunks += len(edge.hashes)
            edge = edge.parent

    def release(self, holder: HolderT, edge: Edge[HolderT]) -> None:
        """Release the prompt that ends with an edge, as often as it was held."""
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
        """Split an edge before its last `chunks` chunks, and return the first part."""
        parent = edge.parent
        assert parent is not None
        first = Edge(parent, edge.hashes[:-chunks], edge.end - chunks)
        first.counts = dict.fromkeys(edge.counts, 1)
        parent.longer[first.hashes[0]] = first
        edge.parent, edge.hashes = first, edge.hashes[-chunks:]
        first.longer[edge.hashes[0]] = edge
        return first

    def longest(self, hashes: array[int]) -> dict[HolderT, int]:
        """Return the chunks of a prompt's longest prefix that each holder has. Holders without any are left out."""
        if not self._root.longer:
            return {}
        path, shared = self._walk(hashes)
        found: dict[HolderT, int] = {}
        for edge in reversed(path):
            if len(edge.counts) > len(found):  # otherwise its holders are those of the next edge
                found = dict.fromkeys(edge.counts, min(edge.end, shared)) | found
        return found

    def resumable(self, holder: HolderT, hashes: array[int], window: int) -> int:
        """Return the chunks of a prompt that a holder can reuse, if it keeps only the last `window` chunks of prompts.

        It can resume where a prompt ends, where two of its prompts differ, and anywhere in prompts within the window.
        """
        path, shared = self._walk(hashes)
        held = [edge for edge in path if holder in edge.counts]
        if held and shared <= window and self._has_end(holder, held[-1], window):
            return min(held[-1].end, shared)
        for edge in reversed(held):
            continues = any(holder in longer.counts for longer in edge.longer.values())
            if edge.end <= shared and not (continues and edge.counts[holder] == 1):
                return edge.end
        return 0

    def _has_end(self, holder: HolderT, edge: Edge[HolderT], most: int) -> bool:
        """Return whether a holder has a prompt through an edge that ends within `most` chunks."""
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
        """Return the last edge of a prompt that a holder has; None if it has none of them. The edge may be longer."""
        path, _ = self._walk(hashes)
        return next((edge for edge in reversed(path) if holder in edge.counts), None)

    def _join(self, edge: Edge[HolderT]) -> None:
        """Join an edge with the next one, if only one follows and no prompt ends between them."""
        if len(edge.longer) != 1 or edge.parent is None:
            return
        (after,) = edge.longer.values()
        if len(edge.counts) == len(after.counts) == sum(edge.counts.values()):
            after.hashes = edge.hashes + after.hashes
            after.parent = edge.parent
            edge.parent.longer[edge.hashes[0]] = after

    def _walk(self, hashes: array[int]) -> tuple[list[Edge[HolderT]], int]:
        """Return the edges of a prompt, and how many of its chunks they contain. The last may match in part."""
        path: list[Edge[HolderT]] = []
        edge, shared, length = self._root, 0, len(hashes)
        while shared < length and (following := edge.longer.get(hashes[shared])) is not None:
            path.append(following)
            if following.end > length or following.hashes[-1] != hashes[following.end - 1]:
                return path, shared + common_blocks(following.hashes, 0, hashes, shared)
            edge, shared = following, following.end
        return path, shared
