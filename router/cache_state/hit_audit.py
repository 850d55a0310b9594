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
from collections.abc import Callable, Collection
from typing import Final, Protocol

import structlog

from indexer import Registration, Target
from indexer.streams.sequence import StreamState
from indexer.streams.session import StreamSession
from indexer.targets import WorkerNames
from router.apis.usage import Usage
from router.cache_state.sent_prefixes import SentPrefixes
from router.cache_state.target_audit import Basis, CachePrediction, PredictionErrors, TargetAudit
from router.cache_state.target_cache import TargetCache, TargetCaches

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

    - `caches`: what is known of each target's cache.
    - `distrusted`: the targets whose events are known to be wrong.
    - `shortened`: the targets whose hits are one block shorter than what they hold.
    - `drafting`: the URLs of workers whose engines draft.
    - `pooled_workers`: the URLs of workers whose engines report that they use a pool.
    """

    def __init__(
        self,
        indexer: Streams,
        caches: TargetCaches,
        sent_prefixes: SentPrefixes,
        names: WorkerNames | None = None,
        clock: Callable[[], float] = time.monotonic,
        samples: int = _SAMPLES,
    ) -> None:
        self._clock = clock
        self.names = names or WorkerNames()
        self.caches = caches
        self._indexer = indexer
        self._stream = indexer.stream  # bound once: every request calls it
        self._sent_prefixes = sent_prefixes
        self._samples = samples
        self.distrusted: set[TargetCache] = set()
        self.shortened: set[TargetCache] = set()
        self.drafting: set[str] = set()
        self.pooled_workers: set[str] = set()

    def set_engine(self, url: str, drafts: bool, pooled: bool) -> None:
        """Set whether the engine of the worker at `url` drafts, and whether it reports that it uses a pool."""
        for urls, found in ((self.drafting, drafts), (self.pooled_workers, pooled)):
            (urls.add if found else urls.discard)(url)

    def remove(self, worker: str, kept: Collection[Target] = ()) -> None:
        """Remove the targets of the worker at a URL but those that are `kept`."""
        for cache in self.caches.remove(worker, kept):
            self._sent_prefixes.forget(cache)
            self.distrusted.discard(cache)
            self.shortened.discard(cache)

    def forget_sent(self, target: Target) -> None:
        """Forget the prompts that a target answered, because its cache was cleared."""
        cache = self.caches.find(target)
        if cache is not None:
            self._sent_prefixes.forget(cache)

    def answered(self, cache: TargetCache, prediction: CachePrediction, usage: Usage | None) -> None:
        """Compare an answer of a target with its prediction. `usage`: None if the worker reports no token counts."""
        if cache.removed:
            return
        stream = self._stream(cache.target)
        if prediction.comparable and usage is not None:
            self._compare(cache, prediction, usage, stream)
        if self._basis(cache, stream) is _EVENTS:
            if cache.sent is not None:
                self._sent_prefixes.forget(cache)
            return
        if prediction.comparable and usage is not None and usage.prompt and not prediction.windowed:
            self._learn_retention(cache, prediction, usage)
        for hashes in prediction.hashes:
            self._sent_prefixes.remember(cache, hashes, prediction.capacity)

    def cached_in(self, cache: TargetCache, usage: Usage) -> int | None:
        """Return the cached tokens of an answer; None if its target never reported any. vLLM omits them if 0."""
        audit = cache.audit
        return 0 if usage.cached is None and audit is not None and audit.reports_cached else usage.cached

    def basis(self, target: Target) -> Basis:
        """Return what a target's cached tokens are predicted from now."""
        return self._basis(self.caches.find(target), self._stream(target))

    def basis_and_completeness(self, cache: TargetCache, stream: StreamSession | None) -> tuple[Basis, bool]:
        """Return the basis of a target, and whether all available events of its `stream` were applied."""
        complete = stream is not None and (stream.state is _LIVE or stream.state is _LOST)
        return self._basis(cache, stream), complete

    def _basis(self, cache: TargetCache | None, stream: StreamSession | None) -> Basis:
        if stream is None or stream.state is _CONNECTING:
            return _SENT_PREFIXES
        return _EVENTS if cache is None or cache.audit is None else cache.audit.basis

    def audits(self) -> list[tuple[Target, TargetAudit]]:
        """Return all targets that were audited, with their figures."""
        return [(cache.target, cache.audit) for cache in self.caches if cache.audit is not None]

    def _compare(
        self, cache: TargetCache, prediction: CachePrediction, usage: Usage, stream: StreamSession | None
    ) -> None:
        """Compare an answer with its prediction. `stream`: the event stream of its target."""
        audit = cache.audit
        if audit is None:
            audit = cache.audit = self._new_audit()
        if not prediction.by_text and not prediction.media:
            self._compare_lengths(cache.target, audit, prediction, usage)
        audit.reports_cached |= usage.cached is not None
        if not audit.reports_cached:
            return
        cached, by_events = usage.cached or 0, prediction.by_events  # vLLM omits it if nothing was cached
        overlap = prediction.overlap
        if prediction.by_text:
            overlap = round(overlap * usage.prompt / (prediction.tokens or 1))
        overlap = min(overlap, usage.prompt)
        audit.answers += 1
        audit.prompt_tokens += usage.prompt
        audit.predicted_tokens += overlap + prediction.loadable
        audit.cached_tokens += cached
        pooled = prediction.pooled
        loads = pooled or prediction.loadable > 0
        error = overlap - (prediction.own_part(cached, overlap, pooled) if loads else cached)
        audit.wrong_tokens += abs(error)
        audit.errors.add(error, usage.prompt)
        # Earlier predictions do not reflect the events as they are read now.
        known_since = audit.judged_at if stream is None else max(stream.began_at, audit.judged_at)
        if by_events is not None and prediction.made_at > known_since:
            own = prediction.own_part(cached, by_events, pooled) if loads else cached
            if own == cached == by_events:
                cache.draft_block.record_whole(cached)
            elif own == cached and self._learn_draft_block(cache, by_events, cached):
                self._restart_judgement(audit)
                return
            drift = audit.add_event_error(by_events - own, usage.prompt, _TOLERANCE)
            if drift is not None:
                self._change_basis(cache, audit, drift)
        if loads:
            self._compare_loads(cache.target, audit, prediction, cached, overlap, usage.prompt)

    def _compare_loads(
        self, target: Target, audit: TargetAudit, prediction: CachePrediction, cached: int, own: int, prompt: int
    ) -> None:
        """Compare the loads of an answer with their prediction. `own`: the tokens that the target held itself."""
        loadable = prediction.loadable
        loaded = prediction.loaded(cached, own)
        audit.loadable_tokens += loadable
        audit.loaded_tokens += loaded
        if loadable and cached >= own:
            audit.load_errors.add(loadable - loaded, loadable)
            not_loading = audit.load_errors.enough and audit.load_errors.share > _NOT_LOADED
            if not_loading is not audit.not_loading:
                audit.not_loading = not_loading
                log.info(
                    "engine does not load pooled blocks" if not_loading else "engine loads pooled blocks again",
                    **self.names.about(target),
                )
        if prediction.pooled:
            unexplained = max(cached - own - loaded, 0)
            audit.unexplained_tokens += unexplained
            audit.unexplained_errors.add(unexplained, prompt)
            errors = audit.unexplained_errors
            audit.unexplained = errors.enough and errors.share > _TOLERANCE

    def _learn_retention(self, cache: TargetCache, prediction: CachePrediction, usage: Usage) -> None:
        """Learn from an answer how much its target keeps, and for how long."""
        if cache.audit is None or not cache.audit.reports_cached:
            return
        cached = prediction.own_part(usage.cached or 0, prediction.overlap, prediction.pooled)
        if prediction.by_text:
            cached = round(cached * prediction.tokens / usage.prompt)
        self._sent_prefixes.compare(cache, prediction.hashes[0], cached, prediction.made_at)

    def _change_basis(self, cache: TargetCache, audit: TargetAudit, drift: float) -> None:
        """Change the basis of a target's predictions if its answers require it. `drift`: the share of wrong tokens."""
        right, target = drift <= _TOLERANCE, cache.target
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
        (self.distrusted.add if cache.distrusted else self.distrusted.discard)(cache)
        log_change, change = (log.info, "are as predicted again") if right else (log.warning, "are not as predicted")
        log_change(
            f"cached tokens {change}",
            drift=round(drift, 3),
            predicted_from=audit.basis.value,
            **self.names.about(target),
        )

    def _learn_draft_block(self, cache: TargetCache, predicted: int, cached: int) -> bool:
        """Learn from a wrong prediction whether a block of each hit is computed again. Return whether that changed."""
        target, draft_block = cache.target, cache.draft_block
        block_size, drafts = self._indexer.block_size(target), target.worker in self.drafting
        if block_size is None or not draft_block.record(predicted, cached, block_size, drafts):
            return False
        corrected = draft_block.tokens
        log.info("the last tokens of each hit are computed again", tokens=corrected, **self.names.about(target))
        if not corrected:
            self.shortened.discard(cache)
            return True
        self.shortened.add(cache)
        for other in self._drafting_alike(target) if drafts else ():
            if not other.draft_block.tokens and not other.draft_block.whole:
                other.draft_block.tokens = corrected
                self.shortened.add(other)
                if other.audit is not None:
                    self._restart_judgement(other.audit)
        return True

    def _drafting_alike(self, target: Target) -> list[TargetCache]:
        """Return the registered targets of the same model whose engines draft."""
        registered = [registration.target for registration in self._indexer.registered()]
        alike = [each for each in registered if (each.model, each.tenant) == (target.model, target.tenant)]
        return [self.caches.of(each) for each in alike if each.worker in self.drafting]

    def _restart_judgement(self, audit: TargetAudit) -> None:
        audit.judged_at = self._clock()
        audit.event_errors.clear()
        audit.last_event_errors.clear()
        audit.errors.clear()

    def _compare_lengths(self, target: Target, audit: TargetAudit, prediction: CachePrediction, usage: Usage) -> None:
        differ = prediction.tokens != usage.prompt
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
                here=prediction.tokens,
                there=usage.prompt,
                **self.names.about(target),
            )
        else:
            log.info("prompts are as long as counted here again", share=share, **self.names.about(target))

    def _new_audit(self) -> TargetAudit:
        samples, few = self._samples, min(_FEW_ANSWERS, self._samples)
        return TargetAudit(
            PredictionErrors(samples),
            PredictionErrors(samples),
            PredictionErrors(samples),
            PredictionErrors(few),
            PredictionErrors(samples),
            PredictionErrors(samples),
        )
