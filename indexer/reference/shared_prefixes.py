"""The radix tree of prefix hashes in Python (`indexer.shared_prefixes`).

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

from indexer.reference.tree import common_blocks

# The most edges that are searched for a short prompt.
_MOST_EDGES = 64


class Edge:
    """A run of chunks in the tree.

    - `end`: the number of chunks from the root to its end.
    - `counts`: the count of each holder, as the module describes it.
    - `longer`: the edges that follow, by their first hash.
    """

    __slots__ = ("counts", "end", "hashes", "longer", "number", "parent")

    def __init__(self, number: int, parent: Edge | None, hashes: array[int], end: int) -> None:
        self.number = number
        self.parent = parent
        self.hashes = hashes
        self.end = end
        self.counts: dict[int, int] = {}
        self.longer: dict[int, Edge] = {}


class PythonSharedPrefixes:
    """The prefixes of prompts, and their holders, in Python."""

    def __init__(self) -> None:
        self._root = Edge(0, None, array("Q"), 0)
        self._edges = {0: self._root}
        self._made = 0
        self._chunks: dict[int, int] = {}
        self._holders = 0

    def add(self) -> int:
        self._holders += 1
        self._chunks[self._holders] = 0
        return self._holders

    def remove(self, holder: int) -> None:
        if self._chunks[holder]:
            raise ValueError("the holder has prompts")
        del self._chunks[holder]

    def chunks(self, holder: int) -> int:
        return self._chunks[holder]

    def parent(self, edge: int) -> int:
        parent = self._edges[edge].parent
        assert parent is not None
        return parent.number

    def end(self, edge: int) -> int:
        return self._edges[edge].end

    def length(self, edge: int) -> int:
        return len(self._edges[edge].hashes)

    def count(self, edge: int, holder: int) -> int:
        return self._edges[edge].counts.get(holder, 0)

    def hold(self, holder: int, hashes: array[int]) -> int:
        path, shared = self._walk(hashes)
        edge = path[-1] if path else self._root
        if edge.end > shared:
            edge = self._split(edge, edge.end - shared)
        if shared < len(hashes):
            longer = self._make(edge, hashes[shared:], len(hashes))
            edge.longer[hashes[shared]] = longer
            edge = longer
        self._hold(holder, edge)
        return edge.number

    def hold_edge(self, holder: int, edge: int) -> None:
        self._hold(holder, self._edges[edge])

    def release(self, holder: int, edge: int) -> None:
        released = self._edges[edge]
        while released.parent is not None:
            parent, count = released.parent, released.counts[holder]
            if count > 1:
                released.counts[holder] = count - 1
                self._join(released)
                return
            del released.counts[holder]
            self._chunks[holder] -= len(released.hashes)
            if released.counts:
                self._join(released)
            else:
                del parent.longer[released.hashes[0]]
                del self._edges[released.number]
            released = parent

    def split(self, edge: int, chunks: int) -> int:
        return self._split(self._edges[edge], chunks).number

    def longest(self, hashes: array[int]) -> dict[int, int]:
        if not self._root.longer:
            return {}
        path, shared = self._walk(hashes)
        found: dict[int, int] = {}
        for edge in reversed(path):
            if len(edge.counts) > len(found):  # otherwise its holders are those of the next edge
                found = dict.fromkeys(edge.counts, min(edge.end, shared)) | found
        return found

    def resumable(self, holder: int, hashes: array[int], window: int) -> int:
        path, shared = self._walk(hashes)
        held = [edge for edge in path if holder in edge.counts]
        if held and shared <= window and self._has_end(holder, held[-1], window):
            return min(held[-1].end, shared)
        for edge in reversed(held):
            continues = any(holder in longer.counts for longer in edge.longer.values())
            if edge.end <= shared and not (continues and edge.counts[holder] == 1):
                return edge.end
        return 0

    def longest_of(self, holder: int, hashes: array[int]) -> int:
        path, _ = self._walk(hashes)
        return next((edge.number for edge in reversed(path) if holder in edge.counts), 0)

    def size(self) -> int:
        return len(self._edges) - 1

    def is_sound(self) -> bool:
        stack, seen = [self._root], 0
        while stack:
            edge = stack.pop()
            for first, longer in edge.longer.items():
                joined = edge.parent is not None and len(edge.longer) == 1
                joined = joined and all(edge.counts[each] == 1 and each in longer.counts for each in edge.counts)
                counted = bool(longer.counts) and all(count > 0 for count in longer.counts.values())
                counted = counted and (edge.parent is None or longer.counts.keys() <= edge.counts.keys())
                placed = longer.parent is edge and longer.end == edge.end + len(longer.hashes)
                if joined or not counted or not placed or longer.hashes[0] != first:
                    return False
                stack.append(longer)
                seen += 1
        return seen == self.size()

    def _make(self, parent: Edge, hashes: array[int], end: int) -> Edge:
        self._made += 1
        edge = self._edges[self._made] = Edge(self._made, parent, hashes, end)
        return edge

    def _hold(self, holder: int, edge: Edge) -> None:
        while edge.parent is not None:
            count = edge.counts.get(holder, 0)
            edge.counts[holder] = count + 1
            if count:
                return
            self._chunks[holder] += len(edge.hashes)
            edge = edge.parent

    def _split(self, edge: Edge, chunks: int) -> Edge:
        parent = edge.parent
        assert parent is not None
        first = self._make(parent, edge.hashes[:-chunks], edge.end - chunks)
        first.counts = dict.fromkeys(edge.counts, 1)
        parent.longer[first.hashes[0]] = first
        edge.parent, edge.hashes = first, edge.hashes[-chunks:]
        first.longer[edge.hashes[0]] = edge
        return first

    def _has_end(self, holder: int, edge: Edge, most: int) -> bool:
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

    def _join(self, edge: Edge) -> None:
        """Join an edge with the next one, if only one follows and no prompt ends between them."""
        if len(edge.longer) != 1 or edge.parent is None:
            return
        (after,) = edge.longer.values()
        if len(edge.counts) == len(after.counts) == sum(edge.counts.values()):
            after.hashes = edge.hashes + after.hashes
            after.parent = edge.parent
            edge.parent.longer[edge.hashes[0]] = after
            del self._edges[edge.number]

    def _walk(self, hashes: array[int]) -> tuple[list[Edge], int]:
        """Return the edges of a prompt, and how many of its chunks they contain. The last may match in part."""
        path: list[Edge] = []
        edge, shared, length = self._root, 0, len(hashes)
        while shared < length and (following := edge.longer.get(hashes[shared])) is not None:
            path.append(following)
            if following.end > length or following.hashes[-1] != hashes[following.end - 1]:
                return path, shared + common_blocks(following.hashes, 0, hashes, shared)
            edge, shared = following, following.end
        return path, shared
