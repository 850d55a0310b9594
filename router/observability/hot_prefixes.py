"""Hot prefixes: those that most requests share, and the targets that hold them. Only hashes and lengths are kept.

For each sampled prompt, prefixes of increasing lengths are counted. Each length is about a third more than the one
before, so that a prompt needs a few dozen counts. Counts halve every five minutes.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from indexer.targets import WorkerNames
from router.cache_state.in_flight_prefixes import CHUNK_TOKENS
from router.policies import Candidate

HALF_LIFE = 300.0  # seconds
MAX_PREFIXES = 4096
_HOLDERS = 16
_SHOWN = 12  # longer prefixes of one prefix
_LEAST_SHARE = 0.01  # of all requests
_SAME = 0.98  # share of a prefix's requests from which a longer prefix is shown instead
_RESCALE = 2.0**40


@dataclass(slots=True, eq=False)
class _Prefix:
    hash: int
    tokens: int
    weight: float = 0.0
    longer: dict[int, _Prefix] = field(default_factory=dict)
    holders: list[dict[str, Any]] = field(default_factory=list)
    held_by: int = 0


class HotPrefixes:
    """The counts of prefixes. `tree` returns the hot ones."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, names: WorkerNames | None = None) -> None:
        """Create empty counts; `names` has the names of workers."""
        self._names = names or WorkerNames()
        self._clock = clock
        self._began = clock()
        self._shortest: dict[int, _Prefix] = {}
        self._known = 0
        self._total = 0.0

    def seen(self, hashes: array[int], candidates: list[Candidate]) -> None:
        """Count a placed prompt, by the hashes of its chunks, and record which candidates hold its prefixes."""
        weight = self._weight()
        self._total += weight
        longer = self._shortest
        for chunks in lengths(len(hashes)):
            known = hashes[chunks - 1]
            prefix = longer.get(known)
            if prefix is None:
                prefix = longer[known] = _Prefix(known, chunks * CHUNK_TOKENS)
                self._known += 1
            prefix.weight += weight
            holders = [each for each in candidates if each.overlap >= prefix.tokens]
            prefix.held_by = len(holders)
            prefix.holders = [
                {"worker": self._names.get(each.target.worker), "dp_rank": each.target.dp_rank}
                for each in holders[:_HOLDERS]
            ]
            longer = prefix.longer
        if self._known > MAX_PREFIXES:
            self._prune()
        if weight > _RESCALE:
            self._rescale(weight)

    def tree(self) -> list[dict[str, Any]]:
        """Return the prefixes that at least a hundredth of the requests share, the most shared first, with longer ones
        inside."""
        return _shown(self._shortest, self._total, self._total * _LEAST_SHARE) if self._total else []

    def _weight(self) -> float:
        """Return the weight of a request now. It grows with time, so that earlier requests count less."""
        return float(2 ** ((self._clock() - self._began) / HALF_LIFE))

    def _prune(self) -> None:
        """Drop the half of the prefixes with the lowest weights, including the longer ones inside them."""
        weights = sorted((prefix.weight for prefix in _all(self._shortest)), reverse=True)
        least = weights[MAX_PREFIXES // 2]
        self._shortest = _heavier(self._shortest, least)
        self._known = sum(1 for _ in _all(self._shortest))

    def _rescale(self, weight: float) -> None:
        for prefix in _all(self._shortest):
            prefix.weight /= weight
        self._total /= weight
        self._began = self._clock()


def lengths(chunks: int) -> Iterator[int]:
    """Yield the counted lengths of a prompt of `chunks`, in chunks: 1, 2, 3, 4, 6, 8, 11, …"""
    length = 1
    while length <= chunks:
        yield length
        length = max(length + 1, length * 4 // 3)


def _all(prefixes: dict[int, _Prefix]) -> Iterator[_Prefix]:
    for prefix in prefixes.values():
        yield prefix
        yield from _all(prefix.longer)


def _heavier(prefixes: dict[int, _Prefix], least: float) -> dict[int, _Prefix]:
    kept = {known: prefix for known, prefix in prefixes.items() if prefix.weight > least}
    for prefix in kept.values():
        prefix.longer = _heavier(prefix.longer, least)
    return kept


def _shown(prefixes: dict[int, _Prefix], total: float, least: float) -> list[dict[str, Any]]:
    heaviest = sorted(prefixes.values(), key=lambda prefix: -prefix.weight)[:_SHOWN]
    return [_node(prefix, total, least) for prefix in heaviest if prefix.weight >= least]


def _node(prefix: _Prefix, total: float, least: float) -> dict[str, Any]:
    while same := next((each for each in prefix.longer.values() if each.weight >= prefix.weight * _SAME), None):
        prefix = same
    return {
        "hash": f"{prefix.hash:016x}",
        "tokens": prefix.tokens,
        "share": round(prefix.weight / total, 4),
        "held_by": prefix.held_by,
        "holders": prefix.holders,
        "longer": _shown(prefix.longer, total, least),
    }
