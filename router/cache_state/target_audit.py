"""The records of the hit audit: one prediction, the errors of the last predictions, and the figures of one target."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import StrEnum

from indexer import Target


class Basis(StrEnum):
    """The source from which a target's cached tokens are predicted.

    - `EVENTS`: its events.
    - `RESYNCED`: its events, which were replayed from the start because they were wrong.
    - `SENT_PREFIXES`: the prompts that were sent to it.
    """

    EVENTS = "events"
    RESYNCED = "resynced"
    SENT_PREFIXES = "history"


@dataclass(slots=True)
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
    """

    target: Target
    hashes: list[array[int]]
    tokens: int
    overlap: int
    by_events: int | None
    comparable: bool
    capacity: int | None
    made_at: float
    most: int = 0
    by_text: bool = False
    windowed: bool = False
    media: bool = False


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
    """

    errors: PredictionErrors
    event_errors: PredictionErrors
    length_errors: PredictionErrors
    last_event_errors: PredictionErrors
    basis: Basis = Basis.EVENTS
    lengths_differ: bool = False
    reports_cached: bool = False
    judged_at: float = 0.0
    answers: int = 0
    prompt_tokens: int = 0
    predicted_tokens: int = 0
    cached_tokens: int = 0
    wrong_tokens: int = 0
    lengths_wrong: int = 0
