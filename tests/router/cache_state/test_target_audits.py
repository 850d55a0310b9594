"""Audits of ranks by their reported cache hits, and the consequences."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from indexer import Indexer, Registration, Target
from indexer.streams.sequence import StreamState
from router.apis.usage import Usage
from router.cache_state.hit_audit import HitAudit
from router.cache_state.in_flight_prefixes import prompt_hashes
from router.cache_state.sent_prefixes import SentPrefixes
from router.cache_state.target_audit import Basis, CachePrediction, PredictionErrors
from router.cache_state.target_cache import TargetCaches

TARGET = Target("http://w", 0, "m")
SAMPLES = 4
TOKENS = list(range(100))
HASHES = [prompt_hashes("m", None, None, TOKENS)]


@dataclass
class Stream:
    state: StreamState = StreamState.LIVE
    began_at: float = 0.0
    first_missing: bool = False


@dataclass
class Streams:
    """The part of an indexer that the audit uses."""

    known: Stream | None = field(default_factory=Stream)
    replays: bool = True
    resyncs: int = 0
    registrations: list[Registration] = field(default_factory=list)

    def stream(self, target: Target) -> Stream | None:  # noqa: ARG002
        return self.known

    def resync(self, target: Target) -> bool:  # noqa: ARG002
        self.resyncs += self.replays
        self.known.began_at = time.monotonic()
        return self.replays

    def agree(self, target: Target) -> None:  # noqa: ARG002
        self.known.first_missing = False

    def registered(self) -> list[Registration]:
        return self.registrations

    def block_size(self, target: Target) -> int | None:  # noqa: ARG002
        return 16


@pytest.fixture
def streams() -> Streams:
    return Streams()


@pytest.fixture
def sent_prefixes() -> SentPrefixes:
    return SentPrefixes()


@pytest.fixture
def audit(streams: Streams, sent_prefixes: SentPrefixes) -> HitAudit:
    return HitAudit(cast(Indexer, streams), TargetCaches(), sent_prefixes, samples=SAMPLES)


def predicted(overlap: int, by_events: int | None, **more: Any) -> CachePrediction:
    made = {"comparable": True, "capacity": None, "made_at": time.monotonic()} | more
    return CachePrediction(HASHES, len(TOKENS), overlap, by_events, **made)


def answered(audit: HitAudit, prediction: CachePrediction, usage: Usage | None, target: Target = TARGET) -> None:
    audit.answered(audit.caches.of(target), prediction, usage)


def distrusted(audit: HitAudit) -> list[Target]:
    assert all(cache.distrusted == (cache in audit.distrusted) for cache in audit.caches)
    return [cache.target for cache in audit.distrusted]


def draft_blocks(audit: HitAudit) -> dict[Target, int]:
    """Return the correction of each target that has one."""
    found = {cache.target: cache.draft_block.tokens for cache in audit.caches if cache.draft_block.tokens}
    assert {cache.target for cache in audit.shortened} == found.keys()
    return found


def answers(audit: HitAudit, times: int, predict: int, cached: int | None, length: int = 100) -> None:
    for _ in range(times):
        answered(audit, predicted(predict, predict), Usage(length, 1, cached))


def test_prompts_with_media_tell_nothing_of_the_tokenizer(audit: HitAudit) -> None:
    for _ in range(20):
        answered(audit, predicted(48, 48, media=True), Usage(90, 1, 48))
    ((_, report),) = audit.audits()
    assert (report.lengths_wrong, report.lengths_differ, report.answers) == (0, False, 20)


def test_right_predictions_change_nothing(audit: HitAudit, streams: Streams, sent_prefixes: SentPrefixes) -> None:
    with capture_logs() as logs:
        answers(audit, 20, 48, 48)
    ((target, report),) = audit.audits()
    assert (target, audit.basis(TARGET), streams.resyncs, logs) == (TARGET, Basis.EVENTS, 0, [])
    assert (report.answers, report.prompt_tokens, report.predicted_tokens, report.cached_tokens) == (20, 2000, 960, 960)
    assert (report.wrong_tokens, report.errors.share, len(sent_prefixes)) == (0, 0.0, 0)


def test_right_predictions_show_that_no_first_batch_is_missing(audit: HitAudit, streams: Streams) -> None:
    streams.known = Stream(StreamState.LOST, first_missing=True)
    answers(audit, SAMPLES, 48, 0)
    answers(audit, SAMPLES - 1, 48, 48)
    assert streams.known.first_missing
    answers(audit, SAMPLES, 48, 48)
    assert not streams.known.first_missing


@pytest.mark.parametrize(("predict", "cached"), [(64, 0), (0, 64)])
def test_wrong_predictions_lead_to_a_resync_and_then_to_history(
    audit: HitAudit, streams: Streams, sent_prefixes: SentPrefixes, predict: int, cached: int
) -> None:
    with capture_logs() as logs:
        answers(audit, SAMPLES - 1, predict, cached)
        assert (audit.basis(TARGET), streams.resyncs) == (Basis.EVENTS, 0)
        answers(audit, 1, predict, cached)
        assert (audit.basis(TARGET), streams.resyncs, distrusted(audit)) == (Basis.RESYNCED, 1, [])
        answers(audit, SAMPLES, predict, cached)
        assert (audit.basis(TARGET), streams.resyncs, distrusted(audit)) == (Basis.SENT_PREFIXES, 1, [TARGET])
    # Sent prefixes that are repeatedly not cached are not predicted.
    assert sent_prefixes.overlaps(HASHES[0]).get(TARGET, 0) == (96 if cached else 0)
    assert [(line["log_level"], line["drift"], line["predicted_from"]) for line in logs] == [
        ("warning", 0.64, "resynced"),
        ("warning", 0.64, "sent_prefixes"),
    ]


def test_constant_missing_block_is_excluded_from_predictions(audit: HitAudit, streams: Streams) -> None:
    answers(audit, 1, 64, 48, 400)
    answers(audit, 2, 0, 0, 400)  # there was nothing to leave out
    assert not draft_blocks(audit)
    answers(audit, 1, 80, 64, 400)
    assert draft_blocks(audit) == {TARGET: 16}
    answers(audit, SAMPLES, 48, 48, 400)
    assert (audit.basis(TARGET), streams.resyncs, audit.audits()[0][1].errors.share) == (Basis.EVENTS, 0, 0.0)
    answers(audit, 2, 48, 64, 400)  # started again without it
    assert not draft_blocks(audit)


def test_draft_blocks_of_one_engine_apply_to_all(audit: HitAudit, streams: Streams) -> None:
    ranks = [Target(f"http://{name}", 0, "m") for name in ("w", "drafts", "has hit whole", "does not draft")]
    streams.registrations = [Registration(rank, None) for rank in [*ranks, Target("http://drafts", 0, "another")]]
    for rank in ranks[:3]:
        audit.set_engine(rank.worker, drafts=True, pooled=False)
    answered(audit, predicted(64, 64), Usage(100, 1, 64), ranks[2])
    answers(audit, 1, 64, 48, 400)
    assert draft_blocks(audit) == dict.fromkeys(ranks[:2], 16)
    answered(audit, predicted(64, 64), Usage(100, 1, 48), ranks[2])
    assert ranks[2] not in draft_blocks(audit)
    for rank in ranks:
        audit.remove(rank.worker)
        audit.set_engine(rank.worker, drafts=False, pooled=False)
    answers(audit, 1, 64, 48, 400)
    assert not draft_blocks(audit)


def test_other_misses_leave_nothing_out(audit: HitAudit) -> None:
    for _ in range(3):
        answers(audit, 1, 96, 80, 400)
        answers(audit, 1, 96, 96, 400)
    assert not draft_blocks(audit)


def test_sent_prefixes_replace_events_that_cannot_be_replayed(audit: HitAudit, streams: Streams) -> None:
    streams.replays = False
    answers(audit, SAMPLES, 64, 0)
    assert audit.basis(TARGET) is Basis.SENT_PREFIXES


def test_successful_resync_ends_suspicion(audit: HitAudit, sent_prefixes: SentPrefixes) -> None:
    answers(audit, SAMPLES, 64, 0)
    with capture_logs() as logs:
        answers(audit, SAMPLES, 64, 64)
    assert (audit.basis(TARGET), len(sent_prefixes)) == (Basis.EVENTS, 0)
    assert [(line["log_level"], line["predicted_from"]) for line in logs] == [("info", "events")]


def test_correct_events_restore_trust(audit: HitAudit) -> None:
    answers(audit, 2 * SAMPLES, 0, 64)
    for _ in range(SAMPLES):  # what decisions were made with by then says nothing of the events
        assert distrusted(audit) == [TARGET]
        answered(audit, predicted(96, 48), Usage(100, 1, 48))
    assert (audit.basis(TARGET), distrusted(audit)) == (Basis.EVENTS, [])


def test_predictions_before_a_resync_are_ignored_after_it(audit: HitAudit) -> None:
    before = [predicted(64, 64) for _ in range(2 * SAMPLES)]
    answers(audit, SAMPLES, 64, 0)
    for cache_prediction in before:
        answered(audit, cache_prediction, Usage(100, 1, 0))
    assert audit.basis(TARGET) is Basis.RESYNCED


def test_predictions_while_events_are_missing_do_not_count(audit: HitAudit, streams: Streams) -> None:
    cache = audit.caches.of(TARGET)
    assert audit.basis_and_completeness(cache, streams.stream(TARGET)) == (Basis.EVENTS, True)
    streams.known = Stream(StreamState.REPLAYING)
    assert not audit.basis_and_completeness(cache, streams.stream(TARGET))[1]
    for _ in range(3 * SAMPLES):
        answered(audit, predicted(0, None), Usage(100, 1, 64))
    assert audit.basis(TARGET) is Basis.EVENTS


def test_target_without_events_is_predicted_by_sent_prefixes(
    audit: HitAudit, streams: Streams, sent_prefixes: SentPrefixes
) -> None:
    streams.known = None
    answered(audit, predicted(0, None, comparable=False), None)
    assert (audit.basis(TARGET), sent_prefixes.overlaps(HASHES[0]).get(TARGET, 0)) == (Basis.SENT_PREFIXES, 96)
    streams.known = Stream(StreamState.CONNECTING)
    assert audit.basis(TARGET) is Basis.SENT_PREFIXES
    streams.known = Stream()
    answered(audit, predicted(0, 0), None)
    assert (audit.basis(TARGET), len(sent_prefixes)) == (Basis.EVENTS, 0)


def test_wrong_sent_prefixes_are_dropped(audit: HitAudit, streams: Streams, sent_prefixes: SentPrefixes) -> None:
    streams.known = None
    other = prompt_hashes("m", None, None, [7] * 160)
    cache = audit.caches.of(TARGET)
    sent_prefixes.remember(cache, other, None)
    sent_prefixes.remember(cache, HASHES[0], None)
    assert sent_prefixes.overlaps(other).get(TARGET, 0) == 160
    answered(audit, predicted(96, None), Usage(100, 1, 0))
    assert sent_prefixes.overlaps(other).get(TARGET, 0) == 0


def test_nothing_said_means_nothing_cached_once_something_was_said(audit: HitAudit) -> None:
    answers(audit, 2 * SAMPLES, 64, None)
    assert [report.answers for _, report in audit.audits()] == [0]
    answers(audit, 1, 64, 64)
    answers(audit, SAMPLES, 64, None)
    assert audit.basis(TARGET) is Basis.RESYNCED


def test_incomparable_answers_are_ignored(audit: HitAudit) -> None:
    for _ in range(SAMPLES):
        answered(audit, predicted(64, 64, comparable=False), Usage(100, 1, 0))
        answered(audit, predicted(64, 64), None)
    assert audit.audits() == []


def test_prompts_of_another_length_are_a_finding_of_their_own(audit: HitAudit) -> None:
    with capture_logs() as logs:
        answers(audit, SAMPLES + 3, 0, None, length=103)
        ((_, report),) = audit.audits()
        assert (report.lengths_differ, report.lengths_wrong, audit.basis(TARGET)) == (True, 7, Basis.EVENTS)
        answers(audit, SAMPLES, 0, None)
        assert not report.lengths_differ
    assert [(line["log_level"], line.get("here"), line.get("there")) for line in logs] == [
        ("warning", 100, 103),
        ("info", None, None),
    ]


def test_removed_targets_are_dropped_and_teach_nothing_more(
    audit: HitAudit, streams: Streams, sent_prefixes: SentPrefixes
) -> None:
    streams.known = None
    for number in range(50):
        target = Target(f"http://w{number}", 0, "m")
        cache = audit.caches.of(target)
        audit.answered(cache, predicted(0, None), Usage(100, 1, 0))
        assert sent_prefixes.holders
        audit.remove(target.worker)
        audit.answered(cache, predicted(0, None), Usage(100, 1, 0))
        assert (audit.audits(), list(audit.caches), sent_prefixes.holders) == ([], [], {})


def test_targets_of_models_that_a_worker_still_serves_are_kept(audit: HitAudit) -> None:
    kept, removed = TARGET, Target(TARGET.worker, 0, "another")
    caches = [audit.caches.of(target) for target in (kept, removed)]
    audit.remove(TARGET.worker, kept=[kept])
    assert ([cache.removed for cache in caches], list(audit.caches)) == ([False, True], caches[:1])


@given(st.lists(st.tuples(st.integers(-50, 50), st.integers(0, 100)), max_size=20), st.integers(1, 6))
def test_errors_cover_the_latest_predictions(seen: list[tuple[int, int]], samples: int) -> None:
    errors = PredictionErrors(samples)
    for error, total in seen:
        errors.add(error, total)
    last = seen[-samples:]
    whole = sum(total for _, total in last) or 1
    assert errors.share == sum(abs(error) for error, _ in last) / whole
    assert errors.excess == sum(max(error, 0) for error, _ in last) / whole
    assert errors.enough == (len(seen) >= samples)


@pytest.mark.parametrize(
    ("cached", "loaded", "unexplained"), [(48, 0, 0), (64, 16, 0), (80, 32, 0), (96, 32, 16), (16, 0, 0)]
)
def test_loads_of_a_target_with_a_pool_are_no_error_of_its_events(
    audit: HitAudit, streams: Streams, cached: int, loaded: int, unexplained: int
) -> None:
    for _ in range(2 * SAMPLES):
        answered(audit, predicted(48, 48, loadable=32, pooled=True), Usage(100, 1, cached))
    ((_, report),) = audit.audits()
    assert (streams.resyncs > 0) == (cached < 48)
    assert report.loaded_tokens == 2 * SAMPLES * loaded
    assert report.unexplained_tokens == 2 * SAMPLES * unexplained
    assert report.unexplained == (unexplained > 10)
    assert report.cached_tokens == 2 * SAMPLES * cached


def test_target_that_does_not_load_is_found_until_it_does(audit: HitAudit) -> None:
    def answer(cached: int) -> bool:
        for _ in range(SAMPLES):
            answered(audit, predicted(16, 16, loadable=64, pooled=True), Usage(100, 1, cached))
        ((_, report),) = audit.audits()
        return report.not_loading

    assert [answer(cached) for cached in (80, 32, 48, 16)] == [False, True, False, True]
