"""The prefixes of prompts in one tree with the holders of each prefix: the interface of its two implementations.

`indexer.reference` implements it in Python, `indexer.native` in C++. A prompt is given by the hash of each of its
chunks, an `array("Q")`. Holders and edges are numbers, and the edge 0 is the root. An edge's number is valid while a
holder's prompt ends with it.
"""

from __future__ import annotations

from array import array
from typing import Protocol

from indexer.native import native_core
from indexer.reference.shared_prefixes import PythonSharedPrefixes


class SharedPrefixes(Protocol):
    """The prefixes of prompts, and their holders."""

    def add(self) -> int:
        """Return the number of a new holder."""

    def remove(self, holder: int) -> None:
        """Remove a holder without prompts. Raises ValueError if it has any."""

    def chunks(self, holder: int) -> int:
        """Return the number of chunks that a holder has."""

    def parent(self, edge: int) -> int:
        """Return the edge before an edge, which is not the root."""

    def end(self, edge: int) -> int:
        """Return the number of chunks from the root to the end of an edge."""

    def length(self, edge: int) -> int:
        """Return the number of chunks of an edge."""

    def count(self, edge: int, holder: int) -> int:
        """Return a holder's prompts that end with an edge and its edges that follow; 0 if it lacks the edge."""

    def hold(self, holder: int, hashes: array[int]) -> int:
        """Hold a prompt, and return the edge at its end, by which it is released."""

    def hold_edge(self, holder: int, edge: int) -> None:
        """Hold the prompt that ends with an edge, once more if it is already held."""

    def release(self, holder: int, edge: int) -> None:
        """Release the prompt that ends with an edge, as often as it was held."""

    def split(self, edge: int, chunks: int) -> int:
        """Split an edge before its last `chunks` chunks, and return the first part."""

    def longest(self, hashes: array[int]) -> dict[int, int]:
        """Return the chunks of a prompt's longest prefix that each holder has. Holders without any are left out."""

    def resumable(self, holder: int, hashes: array[int], window: int) -> int:
        """Return the chunks of a prompt that a holder can reuse, if it keeps only the last `window` chunks of prompts.

        It can resume where a prompt ends, where two of its prompts differ, and anywhere in prompts within the window.
        """

    def longest_of(self, holder: int, hashes: array[int]) -> int:
        """Return the last edge of a prompt that a holder has; 0 if it has none of them. The edge may be longer."""

    def size(self) -> int:
        """Return the number of edges."""

    def is_sound(self) -> bool:
        """Return whether the invariants of all edges hold (for tests)."""


def make_shared_prefixes() -> SharedPrefixes:
    """Return a tree without prompts, of the implementation in use."""
    native = native_core()
    made: SharedPrefixes = PythonSharedPrefixes() if native is None else native.SharedPrefixes()
    return made
