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
from router.apis.requests import RoutedRequest
from router.cache_state.in_flight_prefixes import CHUNK_TOKENS
from router.cache_state.prompt_noise import PromptNoise
from router.cache_state.stored_prompts import StoredPrompts
from router.policies import Candidate, Decision
from router.routing.assignment import Assignment, Sample, Samples

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


KEPT = 256


@dataclass(slots=True, eq=False)
class SeenRequest:
    """One sampled request. `changed`: the number of its last change."""

    number: int
    model: str
    tokens: int
    decision: dict[str, Any]
    unix_time: float
    sample: Sample
    changed: int
    _seen: tuple[float | None, float | None] = (None, None)

    def has_changed(self) -> bool:
        """Return whether its first byte or its end was recorded since the last call."""
        before, self._seen = self._seen, (self.sample.first_byte_at, self.sample.ended_at)
        return self._seen != before

    def as_json(self) -> dict[str, Any]:
        """Return the request's record."""
        usage = self.sample.usage
        return {
            "number": self.number,
            "time": self.unix_time,
            "model": self.model,
            "tokens": self.tokens,
            **self.decision,
            "first_byte_ms": self._passed(self.sample.first_byte_at),
            "whole_ms": self._passed(self.sample.ended_at),
            "cached": usage.cached if usage else None,
            "completion": usage.completion if usage else None,
        }

    def _passed(self, at: float | None) -> float | None:
        return None if at is None else round((at - self.sample.placed_at) * 1000, 1)


class SeenRequests:
    """The last `KEPT` sampled requests; `names` has the names of workers."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, names: WorkerNames | None = None) -> None:
        self._clock = clock
        self._names = names or WorkerNames()
        self._seen: deque[SeenRequest] = deque(maxlen=KEPT)
        self._changes = count(1)
        self._numbers = count(1)

    def add(self, model: str | None, tokens: int, decision: Decision, sample: Sample) -> None:
        """Add the record of a sampled request."""
        placed_at, costs = time.time() - (self._clock() - sample.placed_at), _costs_of(decision, self._names)
        number, change = next(self._numbers), next(self._changes)
        self._seen.append(SeenRequest(number, model or "", tokens, costs, placed_at, sample, change))

    def look(self) -> None:
        """Look which answers began or ended since the last call."""
        for seen in self._seen:
            if seen.has_changed():
                seen.changed = next(self._changes)

    def since(self, change: int) -> list[SeenRequest]:
        """Return the requests that changed after a change number, the oldest first."""
        return [seen for seen in self._seen if seen.changed > change]


class SampledTraffic:
    """A sample of the placed requests, and the prefixes that they share.

    - `kept`: what the placement of requests samples. `read` reads it about once a second, off the path of requests.
    """

    def __init__(
        self, names: WorkerNames, stored: StoredPrompts | None = None, noise: PromptNoise | None = None
    ) -> None:
        """Create an empty sample.

        - `stored`: checks that workers store the sampled prompts.
        - `noise`: compares the turns of sessions.
        """
        self.kept = Samples(noise=noise)
        self.requests = SeenRequests(names=names)
        self.prefixes = HotPrefixes(names=names)
        self.stored = stored

    def read(self) -> None:
        """Record the requests that were sampled since the last call, and the answers of earlier ones."""
        for sample in self.kept.take():
            if sample.placed is not None:
                self._read(sample, *sample.placed)
                sample.placed = None
        self.requests.look()

    def _read(self, sample: Sample, prompt: RoutedRequest, assignment: Assignment) -> None:
        self.requests.add(prompt.name, prompt.tokens, assignment.decision, sample)
        hashes = assignment.cache_prediction.hashes if assignment.cache_prediction else []
        if hashes and hashes[0]:
            self.prefixes.seen(hashes[0], [each for each in assignment.decision.candidates if each.overlap])
        if self.stored is not None and prompt.exact and not prompt.by_text and len(prompt.token_ids) == 1:
            self._check_later(self.stored, sample, prompt, assignment)

    def _check_later(self, stored: StoredPrompts, sample: Sample, prompt: RoutedRequest, whole: Assignment) -> None:
        """Look up a prompt after its answer, on the worker that computes it."""
        computes = whole.prefill or whole
        rank = computes.selection.rank
        served = rank.served
        if served.replacement is None:
            sent = stored.sent(rank.cache, served.model, prompt.token_ids[0], served.adapter, prompt.cache_salt)
            if sent is not None and sample.ended_at is not None:
                sent(sample.failed)
            elif sent is not None:
                computes.on_release.append(sent)


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
