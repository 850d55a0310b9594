"""The records of the hit audit: one prediction, the errors of the last predictions, and the figures of one target.

Draft-block corrections are for targets whose engine computes the last block of every hit again. vLLM does so when a
draft model reads hidden states (EAGLE, MTP, DFlash): see `use_eagle_block_drop` in its config, and
`find_longest_cache_hit`. No event reports it, but the cached tokens of every answer show it. An engine's /metrics
reports that it drafts, but not by which method: drafts of n-grams leave hits whole.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Basis(StrEnum):
    """The source from which a target's cached tokens are predicted.

    - `EVENTS`: its events.
    - `RESYNCED`: its events, which were replayed from the start because they were wrong.
    - `SENT_PREFIXES`: the prompts that were sent to it.
    """

    EVENTS = "events"
    RESYNCED = "resynced"
    SENT_PREFIXES = "sent_prefixes"


_EVENTS: Final = Basis.EVENTS  # each access to a member of an enumeration is a lookup
# The last few answers are enough to judge by, if their excess is this factor above the tolerance.
_FAR_FACTOR: Final = 2


@dataclass(slots=True, init=False)
class CachePrediction:
    """The cached tokens that a target is expected to report for a prompt. Amounts are in tokens.

    - `overlap`: the overlap that the decision was made with.
    - `by_events`: the overlap by events and prompts in flight; None while events are missing.
    - `comparable`: whether the reported count can be compared: the tokens are known, for one prompt with one answer.
    - `capacity`: the tokens that the target can hold; None if that is not known.
    - `most`: the highest overlap of all targets.
    - `by_text`: whether tokens are estimated from text, so that only shares can be compared.
    - `windowed`: whether the target keeps only the end of prompts, so that misses reveal no capacity.
    - `media`: whether some tokens represent media, which are compared where prompts are tokenized.
    - `loadable`: the tokens behind its own ones that the target can load from its source.
    - `pooled`: whether the target loads from a pool, which the router may not follow.
    """

    hashes: list[array[int]]
    tokens: int
    overlap: int
    by_events: int | None
    comparable: bool
    capacity: int | None
    made_at: float
    most: int
    by_text: bool
    windowed: bool
    media: bool
    loadable: int
    pooled: bool

    def __init__(
        self,
        hashes: list[array[int]],
        tokens: int,
        overlap: int,
        by_events: int | None,
        comparable: bool,
        capacity: int | None,
        made_at: float,
        most: int = 0,
        by_text: bool = False,
        windowed: bool = False,
        media: bool = False,
        loadable: int = 0,
        pooled: bool = False,
    ) -> None:
        self.hashes = hashes
        self.tokens = tokens
        self.overlap = overlap
        self.by_events = by_events
        self.comparable = comparable
        self.capacity = capacity
        self.made_at = made_at
        self.most = most
        self.by_text = by_text
        self.windowed = windowed
        self.media = media
        self.loadable = loadable
        self.pooled = pooled

    def loaded(self, cached: int, own: int) -> int:
        """Return the tokens of an answer that the target loaded as predicted, behind `own` tokens of its own."""
        return min(max(cached - own, 0), max(self.overlap + self.loadable - own, 0)) if self.loadable else 0

    def own_part(self, cached: int, own: int, pooled: bool) -> int:
        """Return the cached tokens of an answer that the target held itself, of which `own` were expected.

        `pooled`: the target may have loaded more than expected.
        """
        return min(cached, own) if pooled else cached - self.loaded(cached, own)


class PredictionErrors:
    """The errors of the last `samples` predictions, as shares of their prompts."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._errors: list[int] = []
        self._totals: list[int] = []
        self._oldest = 0  # the position of the oldest error, once the lists are full
        self._high = self._low = self._total = 0  # sums over the lists

    def add(self, error: int, total: int) -> None:
        """Add an error: predicted minus actual tokens of a prompt of `total` tokens. The oldest error is dropped."""
        if self.enough:
            oldest = self._oldest
            self._count(-self._errors[oldest], -self._totals[oldest], self._errors[oldest] > 0)
            self._errors[oldest], self._totals[oldest] = error, total
            self._oldest = oldest + 1 if oldest + 1 < self._samples else 0
        else:
            self._errors.append(error)
            self._totals.append(total)
        self._count(error, total, error > 0)

    def _count(self, error: int, total: int, high: bool) -> None:
        self._total += total
        if high:
            self._high += error
        else:
            self._low -= error

    def clear(self) -> None:
        """Drop all errors."""
        self._errors.clear()
        self._totals.clear()
        self._oldest = self._high = self._low = self._total = 0

    @property
    def enough(self) -> bool:
        """True if there are `samples` errors, enough to judge by."""
        return len(self._errors) == self._samples

    @property
    def share(self) -> float:
        """The tokens predicted wrongly, too many or too few, as a share of all tokens."""
        return (self._high + self._low) / (self._total or 1)

    @property
    def excess(self) -> float:
        """The tokens predicted as cached that were not, as a share of all tokens."""
        return self._high / (self._total or 1)


@dataclass(slots=True)
class TargetAudit:
    """The predicted and the actual cached tokens of one target.

    All counters are in tokens except `answers` and `lengths_wrong`, which count answers.

    - `event_errors`: errors of the overlaps by events, whether or not decisions used them.
    - `length_errors`: prompts whose length differs from the reported one.
    - `last_event_errors`: the last few of `event_errors`.
    - `lengths_differ`: whether the worker counts other prompt lengths than the router.
    - `reports_cached`: whether any answer reported cached tokens.
    - `load_errors`: tokens that should have been loaded and were not, as shares of the loadable ones.
    - `unexplained_errors`: cached tokens beyond the target's own and the loadable ones.
    - `not_loading`, `unexplained`: whether most of `load_errors`, or more than the tolerance of `unexplained_errors`,
      are wrong.
    """

    errors: PredictionErrors
    event_errors: PredictionErrors
    length_errors: PredictionErrors
    last_event_errors: PredictionErrors
    load_errors: PredictionErrors
    unexplained_errors: PredictionErrors
    basis: Basis = Basis.EVENTS
    lengths_differ: bool = False
    reports_cached: bool = False
    judged_at: float = 0.0
    answers: int = 0
    prompt_tokens: int = 0
    predicted_tokens: int = 0
    cached_tokens: int = 0
    wrong_tokens: int = 0
    loadable_tokens: int = 0
    loaded_tokens: int = 0
    unexplained_tokens: int = 0
    not_loading: bool = False
    unexplained: bool = False
    lengths_wrong: int = 0

    def add_event_error(self, error: int, prompt: int, tolerance: float) -> float | None:
        """Add the error of an overlap by events, in a prompt of `prompt` tokens.

        Return the share of wrong tokens once there are enough errors to judge by and the basis may have to change.
        """
        self.event_errors.add(error, prompt)
        self.last_event_errors.add(error, prompt)
        errors, by_events = self.event_errors, self.basis is _EVENTS
        if not errors.enough:
            errors = self.last_event_errors
            if not errors.enough or (by_events and errors.excess <= _FAR_FACTOR * tolerance):
                return None
        share = errors.share
        return None if by_events and share <= tolerance else share


# The answers in a row that must be off by exactly one block. A wrong correction costs one block of a few answers.
_ANSWERS = 2


class DraftBlock:
    """The block of each hit that a target's engine computes again.

    - `tokens`: the tokens to subtract from each hit; 0 without a correction.
    - `whole`: whether its answers showed whole hits.
    """

    __slots__ = ("_in_a_row", "tokens", "whole")

    def __init__(self) -> None:
        self.tokens = 0
        self.whole = False
        self._in_a_row = 0

    def record_whole(self, cached: int) -> None:
        """Record an answer that is as predicted: a whole hit, unless the target has a correction or no hit."""
        if cached:  # without a hit there is no block to subtract
            self._in_a_row = 0
            if not self.tokens:
                self.whole = True

    def record(self, predicted: int, cached: int, block_size: int, drafts: bool) -> bool:
        """Compare a wrong prediction with its answer, and return whether the correction changed.

        After a change, earlier predictions of the target are no longer comparable.

        - `predicted`: the predicted cached tokens, with the present correction.
        - `block_size`: the target's block size in tokens.
        - `drafts`: whether the engine drafts. Then a single answer is enough, unless it showed whole hits.
        """
        if predicted - cached != (-block_size if self.tokens else block_size):
            self._in_a_row = 0
            return False
        self._in_a_row += 1
        if self._in_a_row < (1 if not self.tokens and drafts and not self.whole else _ANSWERS):
            return False
        self._in_a_row = 0
        if self.tokens:
            self.tokens, self.whole = 0, True
        else:
            self.tokens = block_size
        return True
