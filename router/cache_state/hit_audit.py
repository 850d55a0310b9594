"""Do workers find in their caches what was predicted? If not, the prediction is mended.

An engine that reports `cached_tokens` shows with every answer how right the prediction was. For each rank:

    by events ──wrong──▶ resynced (events read again from the start) ──still wrong──▶ by history
        ▲                          └──right──▶ by events                                  │
        └───────────────────────── events are right again ────────────────────────────────┘

A rank without events is predicted by history from the start, whose bounds are learned from its answers.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

import structlog

from indexer import Registration, Target
from indexer.streams.sequence import StreamState
from indexer.streams.session import StreamSession
from indexer.targets import WorkerNames
from router.apis.usage import Usage
from router.cache_state.draft_blocks import DraftBlockCorrections
from router.cache_state.sent_prefixes import Retention, SentPrefixes
from router.settings import AuditSettings

log = structlog.get_logger()


class Basis(StrEnum):
    """What a rank's holdings are predicted from. RESYNCED: from events that were read again, and are on trial."""

    EVENTS = "events"
    RESYNCED = "resynced"
    SENT_PREFIXES = "history"


# Members of an enumeration are looked up in it each time.
_CONNECTING: Final = StreamState.CONNECTING
_LIVE: Final = StreamState.LIVE
_LOST: Final = StreamState.LOST
_EVENTS: Final = Basis.EVENTS


# So many answers are enough when they are wrong by so many times the tolerance.
_FEW = 8
_FAR = 2


@dataclass(slots=True)
class CachePrediction:
    """The cached tokens that a target is expected to report for a prompt. Amounts are in tokens.

    - `overlap`: the overlap that the decision was made with.
    - `by_events`: the overlap by events and prompts in flight; None while events are missing.
    - `comparable`: whether the reported count can be compared: the tokens are known, for one prompt with one answer.
    - `capacity`: the tokens that the target can hold; None if that is not known.
    - `made_at`: when the prediction was made, by the audit's clock.
    - `most`: the highest overlap of all targets.
    - `by_text`: whether tokens are estimated from text, so that only shares can be compared.
    - `windowed`: whether the target keeps only the end of prompts, so that misses reveal no capacity.
    - `media`: whether some tokens stand for media, which are compared where prompts are tokenized.
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


class Errors:
    """How wrong the last predictions were, as shares of what they were about."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._errors: list[int] = []
        self._totals: list[int] = []
        self._oldest = 0  # its place, once there are as many as are kept
        self._high = self._low = self._total = 0  # the sums of what is recent

    def add(self, error: int, total: int) -> None:
        """`error` is above 0 for a prediction that was too high."""
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
        """Start over."""
        self._errors.clear()
        self._totals.clear()
        self._oldest = self._high = self._low = self._total = 0

    @property
    def enough(self) -> bool:
        """Whether there are enough to judge by."""
        return len(self._errors) == self._samples

    @property
    def share(self) -> float:
        """The errors, high or low."""
        return (self._high + self._low) / (self._total or 1)

    @property
    def excess(self) -> float:
        """The errors of predictions that were too high."""
        return self._high / (self._total or 1)


@dataclass(slots=True)
class TargetAudit:
    """Predicted against actual of one target.

    The counters are in tokens, but `answers` and `lengths_wrong`. `errors` are those of what decisions were made with,
    `event_errors` those of the events, whether or not they were used; `last_event_errors` the last few of them.
    """

    errors: Errors
    event_errors: Errors
    length_errors: Errors
    last_event_errors: Errors
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


class Streams(Protocol):
    """What is asked of the indexer."""

    def stream(self, target: Target) -> StreamSession | None:
        """A target's event stream; None when it has none."""

    def resync(self, target: Target) -> bool:
        """Learn a target's holdings again from its events. False when no publisher can replay them."""

    def registered(self) -> list[Registration]:
        """All that is known of."""

    def block_size(self, target: Target) -> int | None:
        """A target's block size in tokens, if it is known."""


class HitAudit:
    """Judges every target by its answers, and chooses what it is predicted from."""

    def __init__(
        self,
        indexer: Streams,
        sent_prefixes: SentPrefixes,
        settings: AuditSettings,
        names: WorkerNames | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create an audit.

        - `names`: the names of workers in the log.
        - `clock`: the clock that predictions are made by.
        """
        self._clock = clock
        self.names = names or WorkerNames()
        self._indexer = indexer
        self._stream = indexer.stream  # asked some times a request
        self._sent_prefixes = sent_prefixes
        self._samples = settings.samples
        self._tolerance = settings.tolerance
        self._audits: dict[Target, TargetAudit] = {}
        self.distrusted: set[Target] = set()  # targets whose events are known to mislead
        self.draft_blocks = DraftBlockCorrections()

    def forget(self, target: Target) -> None:
        """A target was removed."""
        self._audits.pop(target, None)
        self.distrusted.discard(target)
        self.draft_blocks.forget(target)

    def events_complete(self, target: Target) -> bool:
        """Whether a target's events so far were read, as far as they can be had."""
        stream = self._stream(target)
        return stream is not None and (stream.state is _LIVE or stream.state is _LOST)

    def answered(self, cache_prediction: CachePrediction, usage: Usage | None) -> None:
        """A worker answered a prompt; `usage` is what it says of its tokens."""
        if cache_prediction.comparable and usage is not None:
            self._compare(cache_prediction, usage)
        if self.basis(cache_prediction.target) is _EVENTS:
            self._sent_prefixes.forget(cache_prediction.target)
            return
        if cache_prediction.comparable and usage is not None and usage.prompt and not cache_prediction.windowed:
            self._learn_retention(cache_prediction, usage)
        for hashes in cache_prediction.hashes:
            self._sent_prefixes.remember(cache_prediction.target, hashes, cache_prediction.capacity)

    def basis(self, target: Target) -> Basis:
        """What a target's holdings are predicted from now."""
        stream = self._stream(target)
        if stream is None or stream.state is _CONNECTING:
            return Basis.SENT_PREFIXES
        audit = self._audits.get(target)
        return audit.basis if audit is not None else _EVENTS

    def retention(self, target: Target) -> Retention | None:
        """How much and how long a target was seen to keep what it was sent; None while nothing was learned."""
        return self._sent_prefixes.learned(target)

    def audits(self) -> list[tuple[Target, TargetAudit]]:
        """All targets that were audited."""
        return list(self._audits.items())

    def _compare(self, cache_prediction: CachePrediction, usage: Usage) -> None:
        target = cache_prediction.target
        audit = self._audits.get(target) or self._begin(target)
        if not cache_prediction.by_text and not cache_prediction.media:
            self._compare_lengths(audit, cache_prediction, usage)
        audit.reports_cached |= usage.cached is not None
        if not audit.reports_cached:
            return
        cached = usage.cached or 0  # vLLM leaves it out when nothing was cached
        overlap = cache_prediction.overlap
        if cache_prediction.by_text:
            overlap = round(overlap * usage.prompt / (cache_prediction.tokens or 1))
        audit.answers += 1
        audit.prompt_tokens += usage.prompt
        audit.predicted_tokens += overlap
        audit.cached_tokens += cached
        audit.wrong_tokens += abs(overlap - cached)
        audit.errors.add(overlap - cached, usage.prompt)
        if cache_prediction.by_events is not None and cache_prediction.made_at > self._known_since(target, audit):
            if self._learn_draft_blocks(target, cache_prediction.by_events, cached):
                self._restart_judgement(audit)
                return
            audit.event_errors.add(cache_prediction.by_events - cached, usage.prompt)
            audit.last_event_errors.add(cache_prediction.by_events - cached, usage.prompt)
            self._choose_basis(target, audit)

    def _learn_retention(self, cache_prediction: CachePrediction, usage: Usage) -> None:
        """Let an answer tell how much and how long its target keeps what it was sent."""
        audit = self._audits.get(cache_prediction.target)
        if audit is None or not audit.reports_cached:
            return
        cached = usage.cached or 0
        if cache_prediction.by_text:
            cached = round(cached * cache_prediction.tokens / usage.prompt)
        self._sent_prefixes.compare(
            cache_prediction.target, cache_prediction.hashes[0], cached, cache_prediction.made_at
        )

    def _known_since(self, target: Target, audit: TargetAudit) -> float:
        """Predictions made before this say nothing of the events as they are read now."""
        stream = self._stream(target)
        return max(stream.began_at if stream else 0.0, audit.judged_at)

    def _choose_basis(self, target: Target, audit: TargetAudit) -> None:
        """Choose what a target is predicted from, once enough is known of its events.

        A few answers are enough when they found far less than was promised, which is the worse error; and to go back to
        events, once these are right.
        """
        errors = audit.event_errors
        if not errors.enough:
            errors = audit.last_event_errors
            overpredicted = errors.excess > _FAR * self._tolerance
            if not errors.enough or (audit.basis is _EVENTS and not overpredicted):
                return
        drift = errors.share
        right = drift <= self._tolerance
        match audit.basis:
            case Basis.EVENTS if not right:
                audit.basis = Basis.RESYNCED if self._indexer.resync(target) else Basis.SENT_PREFIXES
            case Basis.RESYNCED:
                audit.basis = Basis.EVENTS if right else Basis.SENT_PREFIXES
            case Basis.SENT_PREFIXES if right:
                audit.basis = Basis.EVENTS
            case _:
                return
        self._restart_judgement(audit)
        if audit.basis is Basis.SENT_PREFIXES:
            self.distrusted.add(target)
        else:
            self.distrusted.discard(target)
        log_change, change = (log.info, "are as predicted again") if right else (log.warning, "are not as predicted")
        log_change(
            f"cached tokens {change}",
            drift=round(drift, 3),
            predicted_from=audit.basis.value,
            **self.names.about(target),
        )

    def _learn_draft_blocks(self, target: Target, predicted: int, cached: int) -> bool:
        block_size = self._indexer.block_size(target)
        if block_size is None or not self.draft_blocks.record(target, predicted, cached, block_size):
            return False
        left_out = self.draft_blocks.tokens.get(target, 0)
        log.info("the last tokens of each hit are computed again", tokens=left_out, **self.names.about(target))
        if left_out:
            registered = (registration.target for registration in self._indexer.registered())
            same_model = [each for each in registered if (each.model, each.tenant) == (target.model, target.tenant)]
            for each in self.draft_blocks.extend(target, same_model):
                if (audit := self._audits.get(each)) is not None:
                    self._restart_judgement(audit)
        return True

    def _restart_judgement(self, audit: TargetAudit) -> None:
        audit.judged_at = self._clock()
        audit.event_errors.clear()
        audit.last_event_errors.clear()
        audit.errors.clear()

    def _compare_lengths(self, audit: TargetAudit, cache_prediction: CachePrediction, usage: Usage) -> None:
        differ = cache_prediction.tokens != usage.prompt
        audit.lengths_wrong += differ
        audit.length_errors.add(differ, 1)
        if not audit.length_errors.enough or audit.lengths_differ == (audit.length_errors.share > self._tolerance):
            return
        audit.lengths_differ = not audit.lengths_differ
        share = round(audit.length_errors.share, 3)
        if audit.lengths_differ:
            log.warning(
                "prompts are longer or shorter than counted here: another tokenizer or chat template",
                share=share,
                here=cache_prediction.tokens,
                there=usage.prompt,
                **self.names.about(cache_prediction.target),
            )
        else:
            log.info(
                "prompts are as long as counted here again", share=share, **self.names.about(cache_prediction.target)
            )

    def _begin(self, target: Target) -> TargetAudit:
        """Begin to audit a target; those that are gone are forgotten."""
        known = {registration.target for registration in self._indexer.registered()} | {target}
        self._audits = {each: audit for each, audit in self._audits.items() if each in known}
        self.distrusted &= known
        self.draft_blocks.keep(known)
        for each in self._sent_prefixes.targets():
            if each not in known:
                self._sent_prefixes.removed(each)
        samples, few = self._samples, min(_FEW, self._samples)
        audit = TargetAudit(Errors(samples), Errors(samples), Errors(samples), Errors(few))
        self._audits[target] = audit
        return audit
