"""A sample of the placed requests with their decisions, and their hot prefixes, for the live page.

Hot prefixes are those that most requests share. For each sampled prompt, prefixes of increasing lengths are counted by
their hashes. Each length is about a third more than the one before, so that a prompt needs a few dozen counts. Counts
halve every five minutes.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from indexer.targets import WorkerNames
from router.apis.usage import Usage
from router.cache_state.in_flight_prefixes import CHUNK_TOKENS
from router.cache_state.stored_prompts import StoredPrompts
from router.policies import Candidate, Decision
from router.routing.assignment import Assignment
from router.routing.prompt_reader import RoutedPrompt

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
        """Return the prefixes that at least a hundredth of the requests share, as a tree, the most shared first."""
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


PER_SECOND = 20
KEPT = 256


@dataclass(slots=True, eq=False)
class SeenRequest:
    """One sampled request. `changed` is the number of its last change; times are in seconds of `clock`."""

    number: int
    model: str
    tokens: int
    decision: dict[str, Any]
    placed_at: float
    unix_time: float
    clock: Callable[[], float]
    changes: count[int]
    changed: int = 0
    first_byte_ms: float | None = None
    whole_ms: float | None = None
    usage: Usage | None = None

    def first_byte(self) -> None:
        """Record the first byte of the response."""
        if self.first_byte_ms is None:
            self.first_byte_ms = self._passed()
            self.changed = next(self.changes)

    def answered(self, usage: Usage | None) -> None:
        """Record the usage of a complete response."""
        self.usage = usage

    def ended(self, failed: bool = False) -> None:  # noqa: ARG002 - a `ReleaseCallback`
        """Record the end of the request, whatever its outcome."""
        self.whole_ms = self._passed()
        self.changed = next(self.changes)

    def as_json(self) -> dict[str, Any]:
        """Return the request's record."""
        return {
            "number": self.number,
            "time": self.unix_time,
            "model": self.model,
            "tokens": self.tokens,
            **self.decision,
            "first_byte_ms": self.first_byte_ms,
            "whole_ms": self.whole_ms,
            "cached": self.usage.cached if self.usage else None,
            "completion": self.usage.completion if self.usage else None,
        }

    def _passed(self) -> float:
        return round((self.clock() - self.placed_at) * 1000, 1)


@dataclass(slots=True)
class SeenRequests:
    """The last `KEPT` sampled requests, at most `PER_SECOND` per second; `names` has the names of workers."""

    clock: Callable[[], float] = time.monotonic
    names: WorkerNames = field(default_factory=WorkerNames)
    _seen: deque[SeenRequest] = field(default_factory=lambda: deque(maxlen=KEPT))
    _changes: count[int] = field(default_factory=lambda: count(1))
    _numbers: count[int] = field(default_factory=lambda: count(1))
    due: float = 0.0  # requests before this time are not sampled

    def placed(self, model: str | None, tokens: int, decision: Decision) -> SeenRequest | None:
        """Return the record of a placed request; None if it is not sampled."""
        now = self.clock()
        if now < self.due:
            return None
        self.due = now + 1 / PER_SECOND
        costs = _costs_of(decision, self.names)
        seen = SeenRequest(next(self._numbers), model or "", tokens, costs, now, time.time(), self.clock, self._changes)
        seen.changed = next(self._changes)
        self._seen.append(seen)
        return seen

    def since(self, change: int) -> list[SeenRequest]:
        """Return the requests that changed after a change number, the oldest first."""
        return [seen for seen in self._seen if seen.changed > change]


class SampledTraffic:
    """A sample of the placed requests, and the prefixes that they share: a `RequestSampler`."""

    def __init__(self, names: WorkerNames, stored: StoredPrompts | None = None) -> None:
        """Create an empty sample. `stored`: checks that workers store the sampled prompts."""
        self.requests = SeenRequests(names=names)
        self.prefixes = HotPrefixes(names=names)
        self.stored = stored

    @property
    def due(self) -> float:
        """The time from which the next placed request is sampled, in seconds of `time.monotonic`."""
        return self.requests.due

    def placed(self, prompt: RoutedPrompt, assignment: Assignment) -> SeenRequest | None:
        """Return the record of a request that was just placed; None if it is not sampled."""
        seen = self.requests.placed(prompt.name, prompt.tokens, assignment.decision)
        if seen is not None:
            assignment.when_released(seen.ended)
            hashes = assignment.cache_prediction.hashes if assignment.cache_prediction else []
            if hashes and hashes[0]:
                self.prefixes.seen(hashes[0], [each for each in assignment.decision.candidates if each.overlap])
            if self.stored is not None and prompt.exact and not prompt.by_text and len(prompt.token_ids) == 1:
                self._check_later(self.stored, prompt, assignment.prefill or assignment)
        return seen

    def _check_later(self, stored: StoredPrompts, prompt: RoutedPrompt, assignment: Assignment) -> None:
        """Look up a prompt after its answer, on the worker that computes it."""
        served, target = assignment.selection.rank.served, assignment.target
        if served.replacement is None:
            sent = stored.sent(target, served.model, prompt.token_ids[0], served.adapter, prompt.cache_salt)
            if sent is not None:
                assignment.when_released(sent)


def _costs_of(decision: Decision, names: WorkerNames) -> dict[str, Any]:
    chosen = decision.chosen
    return {
        "worker": names.get(chosen.target.worker),
        "dp_rank": chosen.target.dp_rank,
        "overlap": chosen.overlap,
        "loadable": 0 if chosen.source is None else chosen.source.tokens,
        "best_overlap": max(candidate.overlap for candidate in decision.candidates),
        "candidates": decision.count,
        "unit": decision.unit,
        "terms": {name: float(f"{amount:.4g}") for name, amount in decision.terms(chosen).items()},
    }
