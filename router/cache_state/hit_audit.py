"""The audit of predicted cache hits, and the choice of their basis.

An engine that reports `cached_tokens` shows with every answer how right the prediction was. The audit compares both,
and corrects the prediction of each target:

    by events ──wrong──▶ resynced (events replayed from the start) ──still wrong──▶ by sent prefixes
        ▲                          └──right──▶ by events                                  │
        └───────────────────────── events are right again ────────────────────────────────┘

A target without events is predicted from sent prefixes. Its answers show how much it keeps, and for how long.

Cached tokens of a target with a pool are its own and those that it loaded. Only fewer than its own are an error of its
events. More than its own and the loadable ones are unexplained: the router does not know all of the pool.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Protocol

import structlog

from indexer import Registration, Target
from indexer.streams.sequence import StreamState
from indexer.streams.session import StreamSession
from indexer.targets import WorkerNames
from router.apis.usage import Usage
from router.cache_state.sent_prefixes import Retention, SentPrefixes
from router.cache_state.target_audit import Basis, CachePrediction, DraftBlockCorrections, PredictionErrors, TargetAudit

log = structlog.get_logger()


# Constants, because each access to a member of an enumeration is a lookup.
_CONNECTING: Final = StreamState.CONNECTING
_LIVE: Final = StreamState.LIVE
_LOST: Final = StreamState.LOST
_EVENTS: Final = Basis.EVENTS
_SENT_PREFIXES: Final = Basis.SENT_PREFIXES


# Answers of a rank after which its predictions are judged, and the share of prompt tokens that may be predicted wrong
# before predictions are corrected.
_SAMPLES: Final = 32
_TOLERANCE: Final = 0.1
# This number of answers is enough to judge by, if their excess is far above the tolerance.
_FEW_ANSWERS = 8
# A target whose answers lack this share of the loadable tokens does not load.
_NOT_LOADED = 0.5


class Streams(Protocol):
    """The indexer, as far as the audit needs it."""

    def stream(self, target: Target) -> StreamSession | None:
        """Return a target's event stream; None if it has none."""

    def resync(self, target: Target) -> bool:
        """Replay a target's events from the start. Returns False if no publisher can replay them."""

    def agree(self, target: Target) -> None:
        """Record that a target holds what its events say."""

    def registered(self) -> list[Registration]:
        """Return every registration of a target."""

    def block_size(self, target: Target) -> int | None:
        """Return a target's block size in tokens; None if it is not known."""


class HitAudit:
    """Compares the answers of every target with their predictions, and chooses the basis of the next ones.

    - `distrusted`: the targets whose events are known to be wrong.
    - `draft_blocks`: the targets whose hits are one block shorter than what they hold.
    - `not_loading`: the targets that do not load what their pool or a peer has for them.
    - `pooled_workers`: the URLs of workers whose engines report that they use a pool.
    """

    def __init__(
        self,
        indexer: Streams,
        sent_prefixes: SentPrefixes,
        names: WorkerNames | None = None,
        clock: Callable[[], float] = time.monotonic,
        samples: int = _SAMPLES,
    ) -> None:
        self._clock = clock
        self.names = names or WorkerNames()
        self._indexer = indexer
        self._stream = indexer.stream  # bound once: every request calls it
        self._sent_prefixes = sent_prefixes
        self._samples = samples
        self._audits: dict[Target, TargetAudit] = {}
        self.distrusted: set[Target] = set()
        self.draft_blocks = DraftBlockCorrections()
        self.not_loading: set[Target] = set()
        self.pooled_workers: set[str] = set()

    def set_pooled(self, url: str, pooled: bool) -> None:
        """Set whether the engine of the worker at `url` reports that it uses a pool. Removed workers use none."""
        if pooled:
            self.pooled_workers.add(url)
        else:
            self.pooled_workers.discard(url)

    def forget(self, target: Target) -> None:
        """Forget a target that was removed."""
        self._audits.pop(target, None)
        self.distrusted.discard(target)
        self.not_loading.discard(target)
        self.draft_blocks.forget(target)

    def answered(self, cache_prediction: CachePrediction, usage: Usage | None) -> None:
        """Compare an answer with its prediction. `usage`: its token counts; None if the worker reports none."""
        stream = self._stream(cache_prediction.target)
        if cache_prediction.comparable and usage is not None:
            self._compare(cache_prediction, usage, stream)
        if self._basis(cache_prediction.target, stream) is _EVENTS:
            if self._sent_prefixes.sent:
                self._sent_prefixes.forget(cache_prediction.target)
            return
        if cache_prediction.comparable and usage is not None and usage.prompt and not cache_prediction.windowed:
            self._learn_retention(cache_prediction, usage)
        for hashes in cache_prediction.hashes:
            self._sent_prefixes.remember(cache_prediction.target, hashes, cache_prediction.capacity)

    def cached_in(self, cache_prediction: CachePrediction, usage: Usage) -> int | None:
        """Return the cached tokens of an answer; None if its target never reported any. vLLM omits them if 0."""
        audit = self._audits.get(cache_prediction.target)
        return 0 if usage.cached is None and audit is not None and audit.reports_cached else usage.cached

    def basis(self, target: Target) -> Basis:
        """Return what a target's cached tokens are predicted from now."""
        return self._basis(target, self._stream(target))

    def basis_and_completeness(self, target: Target, stream: StreamSession | None) -> tuple[Basis, bool]:
        """Return the basis of a target, and whether all available events of its `stream` were applied."""
        complete = stream is not None and (stream.state is _LIVE or stream.state is _LOST)
        return self._basis(target, stream), complete

    def _basis(self, target: Target, stream: StreamSession | None) -> Basis:
        if stream is None or stream.state is _CONNECTING:
            return _SENT_PREFIXES
        audit = self._audits.get(target)
        return _EVENTS if audit is None else audit.basis

    def retention(self, target: Target) -> Retention | None:
        """Return how much a target keeps, and for how long; None if its answers have not shown it."""
        return self._sent_prefixes.learned(target)

    def audits(self) -> list[tuple[Target, TargetAudit]]:
        """Return all targets that were audited, with their figures."""
        return list(self._audits.items())

    def _compare(self, cache_prediction: CachePrediction, usage: Usage, stream: StreamSession | None) -> None:
        """Compare an answer with its prediction. `stream`: the event stream of its target."""
        target = cache_prediction.target
        audit = self._audits.get(target) or self._add_audit(target)
        if not cache_prediction.by_text and not cache_prediction.media:
            self._compare_lengths(audit, cache_prediction, usage)
        audit.reports_cached |= usage.cached is not None
        if not audit.reports_cached:
            return
        cached, by_events = usage.cached or 0, cache_prediction.by_events  # vLLM omits it if nothing was cached
        overlap = cache_prediction.overlap
        if cache_prediction.by_text:
            overlap = round(overlap * usage.prompt / (cache_prediction.tokens or 1))
        overlap = min(overlap, usage.prompt)
        audit.answers += 1
        audit.prompt_tokens += usage.prompt
        audit.predicted_tokens += overlap + cache_prediction.loadable
        audit.cached_tokens += cached
        pooled = cache_prediction.pooled
        loads = pooled or cache_prediction.loadable > 0
        error = overlap - (cache_prediction.own_part(cached, overlap, pooled) if loads else cached)
        audit.wrong_tokens += abs(error)
        audit.errors.add(error, usage.prompt)
        # Earlier predictions do not reflect the events as they are read now.
        known_since = audit.judged_at if stream is None else max(stream.began_at, audit.judged_at)
        if by_events is not None and cache_prediction.made_at > known_since:
            own = cache_prediction.own_part(cached, by_events, pooled) if loads else cached
            if own == cached == by_events:
                self.draft_blocks.record_whole(target, cached)
            elif own == cached and self._learn_draft_blocks(target, by_events, cached):
                self._restart_judgement(audit)
                return
            drift = audit.add_event_error(by_events - own, usage.prompt, _TOLERANCE)
            if drift is not None:
                self._change_basis(target, audit, drift)
        if loads:
            self._compare_loads(audit, cache_prediction, cached, overlap, usage.prompt, pooled)

    def _compare_loads(
        self, audit: TargetAudit, cache_prediction: CachePrediction, cached: int, own: int, prompt: int, pooled: bool
    ) -> None:
        """Compare the loads of an answer with their prediction. `own`: the tokens that the target held itself."""
        target, loadable = cache_prediction.target, cache_prediction.loadable
        loaded = cache_prediction.loaded(cached, own)
        audit.loadable_tokens += loadable
        audit.loaded_tokens += loaded
        if loadable and cached >= own:
            audit.load_errors.add(loadable - loaded, loadable)
            not_loading = audit.load_errors.enough and audit.load_errors.share > _NOT_LOADED
            if not_loading is not audit.not_loading:
                audit.not_loading = not_loading
                (self.not_loading.add if not_loading else self.not_loading.discard)(target)
                log.info(
                    "engine does not load pooled blocks" if not_loading else "engine loads pooled blocks again",
                    **self.names.about(target),
                )
        if pooled:
            unexplained = max(cached - own - loaded, 0)
            audit.unexplained_tokens += unexplained
            audit.unexplained_errors.add(unexplained, prompt)
            errors = audit.unexplained_errors
            audit.unexplained = errors.enough and errors.share > _TOLERANCE

    def _learn_retention(self, cache_prediction: CachePrediction, usage: Usage) -> None:
        """Learn from an answer how much its target keeps, and for how long."""
        audit = self._audits.get(cache_prediction.target)
        if audit is None or not audit.reports_cached:
            return
        cached = cache_prediction.own_part(usage.cached or 0, cache_prediction.overlap, cache_prediction.pooled)
        if cache_prediction.by_text:
            cached = round(cached * cache_prediction.tokens / usage.prompt)
        self._sent_prefixes.compare(
            cache_prediction.target, cache_prediction.hashes[0], cached, cache_prediction.made_at
        )

    def _change_basis(self, target: Target, audit: TargetAudit, drift: float) -> None:
        """Change the basis of a target's predictions if its answers require it. `drift`: the share of wrong tokens."""
        right = drift <= _TOLERANCE
        if right and (stream := self._stream(target)) is not None and stream.first_missing:
            self._indexer.agree(target)
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
        corrected = self.draft_blocks.tokens.get(target, 0)
        log.info("the last tokens of each hit are computed again", tokens=corrected, **self.names.about(target))
        if corrected:
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
        if not audit.length_errors.enough or audit.lengths_differ == (audit.length_errors.share > _TOLERANCE):
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

    def _add_audit(self, target: Target) -> TargetAudit:
        known = {registration.target for registration in self._indexer.registered()} | {target}
        self._audits = {each: audit for each, audit in self._audits.items() if each in known}
        self.distrusted &= known
        self.not_loading &= known
        self.draft_blocks.keep(known)
        for each in self._sent_prefixes.targets():
            if each not in known:
                self._sent_prefixes.removed(each)
        samples, few = self._samples, min(_FEW_ANSWERS, self._samples)
        audit = TargetAudit(
            PredictionErrors(samples),
            PredictionErrors(samples),
            PredictionErrors(samples),
            PredictionErrors(few),
            PredictionErrors(samples),
            PredictionErrors(samples),
        )
        self._audits[target] = audit
        return audit
