"""Which prefill and decode workers belong together: those of one revision, except pairs that cannot connect.

During a rollout, engines of two revisions run at once. KV caches of different versions, models or layouts do not fit: a
mixed pair fails in the engine, or answers wrongly. The revision of a request is drawn by the number of its ready
workers. All turns of a session draw alike. A pair whose first request fails is barred until one of its workers starts
again. So is a pair whose engines report that their KV formats differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

import structlog
import xxhash

from indexer.targets import WorkerNames
from router.apis.requests import RoutedRequest
from router.fleet.discovery import KvFormat
from router.fleet.worker import Worker
from router.routing.state import RoutedFleet
from router.settings import DisaggregationSettings, PairRevisions, Role

log = structlog.get_logger()

REVISION: Final = "revision"
HANDSHAKE: Final = "handshake"
FORMAT: Final = "kv_format"
_Pair = tuple[Worker, Worker]  # the prefill worker, the decode worker


@dataclass(slots=True)
class Excluded:
    """The workers and pairs that a request is not sent to.

    - `revision`: the drawn revision; None if workers of all revisions are allowed. "" is that of workers without one.
    - `workers`: the workers of other revisions.
    - `barred`: the barred pairs among the others.
    """

    revision: str | None = None
    workers: set[Worker] = field(default_factory=set)
    barred: set[_Pair] = field(default_factory=set)

    def as_json(self, names: WorkerNames) -> dict[str, Any]:
        """Return it as a part of an explained decision."""
        return {
            "revision": self.revision,
            "other_revisions": sorted(names.get(worker.url) for worker in self.workers),
            "barred": sorted([names.get(each.url) for each in pair] for pair in self.barred),
        }


_NOTHING: Final = Excluded()


class PairRules:
    """The rules of all pairs.

    - `excluded`: the choices for which pairs were excluded, by the reason.
    """

    def __init__(self, settings: DisaggregationSettings, fleet: RoutedFleet, random: Random) -> None:
        self._labels = settings.revision_labels
        self._mode = settings.revisions
        self._fleet = fleet
        self._random = random
        self._version = -1  # of the fleet, when `_revisions` was computed
        self._revisions: dict[Worker, str] = {}
        self._formats_version = -1  # of the fleet, when `_formats` was computed
        self._formats: dict[Worker, KvFormat] = {}
        self._barred: dict[_Pair, tuple[int, int]] = {}  # the starts of both workers then
        self._worked: dict[_Pair, tuple[int, int]] = {}
        self.excluded: Counter[str] = Counter()

    # The choice

    @property
    def has_revisions(self) -> bool:
        """True if a worker has a revision, and pairs depend on it."""
        return bool(self._of_revisions())

    def other_revisions(
        self, prompt: RoutedRequest, decodes: Collection[Worker], prefills: Collection[Worker]
    ) -> Collection[Worker]:
        """Return the workers that a request may not be sent to, because they have another revision than the drawn one.

        `decodes` and `prefills` are the workers that are ready and that the request was not sent to before.
        """
        revisions = self._of_revisions()
        if not revisions:
            return ()
        drawn = self._drawn(prompt, decodes, prefills, revisions)
        if drawn is not None:
            others = {each for each in (*decodes, *prefills) if revisions.get(each, "") != drawn}
        elif self._mode is PairRevisions.STRICT:
            others = set(prefills)  # no prefill worker belongs to any of the decode workers
        else:
            return ()
        self.excluded[REVISION] += bool(others)
        return others

    def excluded_among(self, decodes: Collection[Worker], prefills: Collection[Worker]) -> Excluded:
        """Return what is excluded beside the candidates of both roles, and which of their pairs are barred."""
        revisions, formats = self._of_revisions(), self._different_formats()
        if not revisions and not self._barred and not formats:
            return _NOTHING
        left = Excluded()
        found = {revisions.get(each, "") for each in (*decodes, *prefills)}
        if revisions and len(found) == 1:
            left.revision = found.pop()
            left.workers = {each for each in self._paired() if revisions.get(each, "") != left.revision}
        failed = self._failed_of(decodes, prefills) if self._barred else set()
        unlike = _unlike(decodes, prefills, formats) if formats else set()
        barred = failed | unlike
        # If all pairs are barred, each of them may be tried.
        if len(barred) < len(set(decodes)) * len(set(prefills)):
            left.barred = barred
            self.excluded[HANDSHAKE] += bool(failed)
            self.excluded[FORMAT] += bool(unlike)
        return left

    def _different_formats(self) -> dict[Worker, KvFormat]:
        """Return the KV formats that workers of pairs report; none if all are equal."""
        if self._formats_version != self._fleet.version:
            self._formats_version = self._fleet.version
            found = ((worker, worker.description) for worker in self._paired())
            formats = {worker: each.kv_format for worker, each in found if each is not None and each.kv_format}
            self._formats = formats if len(set(formats.values())) > 1 else {}
        return self._formats

    def _of_revisions(self) -> dict[Worker, str]:
        """Return the revisions of the workers that have one."""
        if self._mode is PairRevisions.OFF:
            return {}
        if self._version != self._fleet.version:
            self._version = self._fleet.version
            found = ((worker, self.revision(worker)) for worker in self._paired())
            self._revisions = {worker: revision for worker, revision in found if revision}
        return self._revisions

    def _paired(self) -> set[Worker]:
        """Return the workers that may receive requests and are parts of pairs."""
        able = (*self._fleet.able(None), *self._fleet.able(None, prefill=True))
        return {worker for worker in able if worker.role is not Role.BOTH}

    def revision(self, worker: Worker) -> str:
        """Return the revision of a worker by its labels; "" without one."""
        labels = worker.settings.labels
        return next((labels[name] for name in self._labels if labels.get(name)), "")

    def _drawn(
        self,
        prompt: RoutedRequest,
        decodes: Collection[Worker],
        prefills: Collection[Worker],
        revisions: dict[Worker, str],
    ) -> str | None:
        """Return a revision with workers of both roles, by their number; None without one."""
        both = {revisions.get(each, "") for each in decodes} & {revisions.get(each, "") for each in prefills}
        if not both:
            return None
        ready = Counter(revisions.get(each, "") for each in {*decodes, *prefills})
        drawn = _place(prompt.session, self._random) * sum(ready[revision] for revision in both)
        for revision in sorted(both):
            drawn -= ready[revision]
            if drawn < 0:
                return revision
        return max(both)

    # Pairs that failed to connect

    def _failed_of(self, decodes: Collection[Worker], prefills: Collection[Worker]) -> set[_Pair]:
        """Return the pairs whose first request failed."""
        return {
            pair
            for pair, starts in self._barred.items()
            if starts == _starts(pair) and pair[0] in prefills and pair[1] in decodes
        }

    def failed(self, prefill: Worker, decode: Worker, problem: str) -> None:
        """Record that a pair failed where both were reached. If it never worked, its handshake failed: it is barred."""
        pair = prefill, decode
        starts = _starts(pair)
        if self._worked.get(pair) == starts or self._barred.get(pair) == starts:
            return
        self._barred[pair] = starts
        log.warning(
            "a pair of workers is barred until one of them restarts, because its first request failed",
            prefill=prefill.name,
            decode=decode.name,
            problem=problem,
        )

    def worked(self, prefill: Worker, decode: Worker) -> None:
        """Record an answer of a pair."""
        pair = prefill, decode
        self._worked[pair] = _starts(pair)
        self._barred.pop(pair, None)

    @property
    def barred(self) -> int:
        """The number of barred pairs."""
        return sum(starts == _starts(pair) for pair, starts in self._barred.items())

    def forget(self, worker: Worker) -> None:
        """Forget the failures of a worker that has a new process or was removed."""
        for pairs in (self._barred, self._worked):
            for pair in [pair for pair in pairs if worker in pair]:
                del pairs[pair]


def _unlike(decodes: Collection[Worker], prefills: Collection[Worker], formats: dict[Worker, KvFormat]) -> set[_Pair]:
    """Return the pairs whose workers report different values of a setting."""
    return {
        (prefill, decode)
        for prefill in prefills
        for decode in decodes
        if _differ(formats.get(prefill, ()), formats.get(decode, ()))
    }


def _differ(one: KvFormat, other: KvFormat) -> bool:
    values = dict(other)
    return any(values.get(name, value) != value for name, value in one)


def _starts(pair: _Pair) -> tuple[int, int]:
    return pair[0].starts, pair[1].starts


def _place(session: str | None, random: Random) -> float:
    """Return a number from 0 to 1: the same one for all requests of a session."""
    if session is None:
        return random.random()
    return xxhash.xxh3_64_intdigest(session.encode(errors="replace")) / 2**64
