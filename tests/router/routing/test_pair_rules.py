"""Which prefill and decode workers belong together: by their revisions, and by pairs whose first request failed."""

from __future__ import annotations

from collections import Counter
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from router.apis.identities import Identity
from router.apis.requests import RoutedRequest
from router.routing.disaggregation.pair_rules import Excluded, PairRules
from router.routing.state import RoutedFleet
from router.settings import DisaggregationSettings, Role

LABEL = "disaggregatedset.x-k8s.io/revision"


class FakeWorker:
    """A worker with labels."""

    def __init__(self, name: str, revision: str | None = None, label: str = LABEL) -> None:
        self.name = self.url = name
        self.starts = 1
        self.up = True
        self.role = Role.BOTH
        self.description: Any = None
        self.settings = SimpleNamespace(labels={} if revision is None else {label: revision})


def workers(*revisions: str | None) -> list[Any]:
    return [FakeWorker(f"{revision}{number}", revision) for number, revision in enumerate(revisions)]


class Rules:
    """The rules of a fleet of decode and prefill workers."""

    def __init__(self, decodes: list[Any], prefills: list[Any], **settings: Any) -> None:
        self.decodes, self.prefills = decodes, prefills
        for role, each in ((Role.DECODE, decodes), (Role.PREFILL, prefills)):
            for worker in each:
                worker.role = role
        fleet = SimpleNamespace(able=lambda _, prefill=False: prefills if prefill else decodes, version=1)
        self.rules = PairRules(DisaggregationSettings(**settings), cast(RoutedFleet, fleet), Random(1))

    def apply(self, session: str | None = None) -> Excluded:
        request = RoutedRequest("m", identity=None if session is None else Identity(session))
        others = self.rules.other_revisions(request, self.decodes, self.prefills)
        left = [[each for each in role if each not in others] for role in (self.decodes, self.prefills)]
        excluded = self.rules.excluded_among(*left)
        assert excluded.workers == set(others) or not left[1]
        return excluded


def test_workers_without_revisions_pair_freely() -> None:
    assert Rules(workers(None, None), workers(None)).apply() == Excluded()


def test_revisions_are_drawn_by_their_ready_workers_and_never_mixed() -> None:
    rules = Rules(workers("a", "a", "b"), workers("a", "b", "b", "b", "b", "b"))
    drawn: Counter[str | None] = Counter()
    for _ in range(2000):
        left = rules.apply()
        drawn[left.revision] += 1
        assert {each.name[0] for each in left.workers} == {"b" if left.revision == "a" else "a"}
    assert drawn["a"] / 2000 == pytest.approx(3 / 9, abs=0.04)
    assert rules.rules.excluded["revision"] == 2000


def test_sessions_keep_their_revision_until_the_share_passes_them() -> None:
    sessions = [f"s{number}" for number in range(50)]
    before: dict[str, str | None] = {}
    for ready in range(1, 6):  # b grows, a shrinks
        rules = Rules(workers(*"a" * (6 - ready), *"b" * ready), workers("a", "b"))
        now = {session: rules.apply(session).revision for session in sessions}
        assert now == {session: rules.apply(session).revision for session in sessions}
        assert all(revision == "b" for session, revision in now.items() if before.get(session) == "b")
        before = now
    assert Counter(before.values())["b"] > 25


@pytest.mark.parametrize(
    ("decodes", "prefills", "revision"),
    [("aab", "aa", "a"), ("aa", "ab", "a"), ("b", "aab", "b")],
)
def test_revisions_without_a_worker_of_each_role_are_not_drawn(decodes: str, prefills: str, revision: str) -> None:
    assert Rules(workers(*decodes), workers(*prefills)).apply().revision == revision


def test_without_a_complete_revision_only_strict_pairs_stay_apart() -> None:
    decodes, prefills = workers("a"), workers("b")
    assert Rules(decodes, prefills).apply() == Excluded()
    strict = Rules(decodes, prefills, revisions="strict").rules
    assert set(strict.other_revisions(RoutedRequest("m"), decodes, prefills)) == set(prefills)
    assert Rules(decodes, prefills, revisions="off").apply() == Excluded()


def test_workers_without_a_revision_are_a_revision_of_their_own() -> None:
    decodes, prefills = workers("a", None), workers("a")
    assert Rules(decodes, prefills).apply().workers == {decodes[1]}


def test_labels_of_ones_own_replace_the_default() -> None:
    decodes: list[Any] = [FakeWorker("d", "1", "example.com/version"), FakeWorker("e", "2", "example.com/version")]
    prefills: list[Any] = [FakeWorker("p", "1", "example.com/version")]
    assert Rules(decodes, prefills).apply() == Excluded()
    assert Rules(decodes, prefills, revision_labels=["example.com/version"]).apply().workers == {decodes[1]}


def test_pair_whose_first_request_fails_is_barred_until_a_restart() -> None:
    decodes, prefills = workers(None, None), workers(None)
    rules = Rules(decodes, prefills)
    rules.rules.failed(prefills[0], decodes[0], "status 500")
    assert rules.apply().barred == {(prefills[0], decodes[0])}
    assert rules.rules.barred == rules.rules.excluded["handshake"] == 1
    decodes[0].starts += 1
    assert rules.apply() == Excluded()


def test_pair_that_has_worked_is_not_barred() -> None:
    decodes, prefills = workers(None, None), workers(None)
    rules = Rules(decodes, prefills)
    rules.rules.worked(prefills[0], decodes[0])
    rules.rules.failed(prefills[0], decodes[0], "status 500")
    assert rules.apply() == Excluded()


def formatted(worker: Any, **settings: str) -> Any:
    worker.description = SimpleNamespace(kv_format=tuple(settings.items()))
    return worker


def test_pairs_whose_engines_report_other_kv_formats_are_barred() -> None:
    fp8, auto = ({"page_size": "64", "kv_cache_dtype": each} for each in ("fp8_e4m3", "auto"))
    decodes = [formatted(FakeWorker("d"), **fp8), formatted(FakeWorker("e"), **auto), FakeWorker("f")]
    prefills = [formatted(FakeWorker("p"), **auto), formatted(FakeWorker("q"), page_size="64")]
    rules = Rules(decodes, prefills)
    assert rules.apply().barred == {(prefills[0], decodes[0])}
    assert rules.rules.excluded == {"kv_format": 1, "handshake": 0}
    assert Rules(decodes[:1], prefills[:1]).apply() == Excluded()  # all pairs are unlike
    assert Rules(decodes[1:], prefills).apply() == Excluded()


def test_an_answer_ends_the_bar_and_the_last_pair_is_never_barred() -> None:
    decodes, prefills = workers(None), workers(None)
    rules = Rules(decodes, prefills)
    rules.rules.failed(prefills[0], decodes[0], "status 500")
    assert rules.rules.barred == 1
    assert rules.apply() == Excluded()
    rules.rules.worked(prefills[0], decodes[0])
    assert rules.rules.barred == 0


def test_removed_and_restarted_workers_are_forgotten() -> None:
    decodes, prefills = workers(None, None), workers(None)
    rules = Rules(decodes, prefills)
    rules.rules.failed(prefills[0], decodes[0], "status 500")
    rules.rules.forget(prefills[0])
    assert rules.rules.barred == 0
