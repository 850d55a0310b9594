"""The data of the live page, kept current while it has viewers, and sent as changes.

One task reads the state of the fleet once a second, in steps, so that requests never wait long. Every viewer receives
what changed since its last update. A slow viewer misses only intermediate states.

Time series are computed from the router's own metrics: of the last quarter of an hour, and coarser ones of an hour and
of a day.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from indexer import Indexer
from indexer.indexer import TargetReport
from kvevents import Tier
from router.admission.admission import Admission
from router.cache_state.hit_audit import HitAudit
from router.fleet.fleet import Fleet
from router.fleet.worker import Worker
from router.load.peer_load import PeerLoad
from router.load.target_load import LoadTable
from router.observability.fleet_report import About
from router.observability.metrics import RequestMetrics
from router.observability.role_load import role_loads
from router.observability.seen_requests import SampledTraffic

SECONDS = 2.0  # between points
KEPT = 450
# Coarser series: the seconds between their points, of which `_COARSE_KEPT` are kept.
COARSE = {"hour": 10.0, "day": 240.0}
_COARSE_KEPT = 360
# Values of which a coarser point has the maximum; it has the mean of all others.
_GREATEST = ("ttft_p90",)
# Values that are shown as rates per second.
_A_SECOND = ("requests", "errors", "refused", "retried", "prompt", "overlap", "generated")
LOOK_SECONDS = 1.0
MAX_VIEWERS = 32
_AT_A_TIME = 64  # targets to read before requests are served
_SELDOM_SECONDS = 3.0  # between updates of prefixes, findings and models
Row = dict[str, Any]


class Series:
    """The time series. Each point covers the time between two calls of `sample`."""

    def __init__(
        self,
        metrics: RequestMetrics,
        audit: HitAudit,
        waiting: Callable[[], Mapping[Any, int]],
        seconds_per_token: Callable[[], float],
    ) -> None:
        """Create a series. `waiting`: by reason; `seconds_per_token`: the learned one of a prefill."""
        self.points: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self.coarse = {name: deque[dict[str, Any]](maxlen=_COARSE_KEPT) for name in COARSE}
        self._parts: dict[str, list[dict[str, Any]]] = {name: [] for name in COARSE}
        self._metrics = metrics
        self._audit = audit
        self._waiting = waiting
        self._seconds_per_token = seconds_per_token
        self._before = self._totals()
        self._buckets_before = metrics.first_byte.at_most()
        self._at = time.monotonic()

    def sample(self) -> None:
        """Add a point if one is due."""
        now = time.monotonic()
        if now - self._at < SECONDS:
            return
        totals, buckets = self._totals(), self._metrics.first_byte.at_most()
        # A total can fall when the series of a removed worker are dropped.
        passed = {name: max(totals[name] - self._before[name], 0.0) for name in totals}
        seconds = now - self._at
        rates = {name: round(passed[name] / seconds, 2) for name in _A_SECOND}
        times = {bound: float(buckets[bound] - self._buckets_before.get(bound, 0)) for bound in buckets}
        self.points.append(
            {
                "time": round(time.time(), 1),
                **rates,
                "saved": round(rates["overlap"] * self._seconds_per_token(), 3),
                "waiting": {str(reason): count for reason, count in self._waiting().items()},
                "predicted": _ratio(passed["overlap"], passed["prompt"]),
                "cached": _ratio(passed["cached"], passed["audited"]),
                "ttft_p50": percentile(times, 0.5),
                "ttft_p90": percentile(times, 0.9),
            }
        )
        self._before, self._buckets_before, self._at = totals, buckets, now
        for name, seconds in COARSE.items():
            parts = self._parts[name]
            parts.append(self.points[-1])
            if parts[-1]["time"] - parts[0]["time"] >= seconds - SECONDS:
                self.coarse[name].append(joined_points(parts))
                parts.clear()

    def since(self, unix_time: float) -> list[dict[str, Any]]:
        """Return the points after a time."""
        return [point for point in self.points if point["time"] > unix_time]

    def coarse_since(self, since: dict[str, float]) -> dict[str, list[dict[str, Any]]]:
        """Return the points of the coarser series after the times in `since`, and advance these times."""
        found = {}
        for name, points in self.coarse.items():
            found[name] = [point for point in points if point["time"] > since.get(name, 0.0)]
            if points:
                since[name] = points[-1]["time"]
        return found

    def _totals(self) -> dict[str, float]:
        audits = [audit for _, audit in self._audit.audits()]
        return {
            **self._metrics.failures(),
            "requests": self._metrics.decisions.total,
            "generated": self._metrics.completion_tokens.total,
            "prompt": self._metrics.prompt_tokens.total,
            "overlap": self._metrics.overlap_tokens.total,
            "audited": float(sum(audit.prompt_tokens for audit in audits)),
            "cached": float(sum(audit.cached_tokens for audit in audits)),
        }


def joined_points(points: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one point for several: the means of their values, the greatest of `_GREATEST` and of waiting requests."""
    joined: dict[str, Any] = {"time": points[-1]["time"], "waiting": {}}
    for name in points[0].keys() - joined.keys():
        values = [point[name] for point in points if point[name] is not None]
        joined[name] = None if not values else max(values) if name in _GREATEST else round(sum(values) / len(values), 4)
    for point in points:
        for reason, count in point["waiting"].items():
            joined["waiting"][reason] = max(joined["waiting"].get(reason, 0), count)
    return joined


def percentile(buckets: dict[float, float], share: float) -> float | None:
    """Return a percentile in seconds, between a histogram's bounds and their cumulative counts; None without values."""
    bounds = sorted(buckets)
    wanted = share * buckets[bounds[-1]] if bounds else 0.0
    if not wanted:
        return None
    below, before = 0.0, 0.0
    for bound in bounds:
        if buckets[bound] >= wanted:
            if bound == float("inf"):
                return below
            return round(below + (bound - below) * (wanted - before) / (buckets[bound] - before), 4)
        below, before = bound, buckets[bound]
    return below


def _ratio(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None


class FleetSnapshot:
    """The state of the fleet. `run` keeps it current; `updates` sends it to a viewer."""

    def __init__(
        self,
        fleet: Fleet,
        indexer: Indexer,
        load: LoadTable,
        peer_load: PeerLoad,
        admission: Admission,
        audit: HitAudit,
        sampled: SampledTraffic,
        series: Series,
        about: About,
        findings: Callable[[], list[dict[str, Any]]],
        predictions: Callable[[], list[dict[str, Any]]],
        on_look: Callable[[], None] = lambda: None,
        sessions: Callable[[], dict[str, dict[str, int | None]]] = dict,
        saturation: Callable[[], list[dict[str, Any]]] = list,
    ) -> None:
        """Create a snapshot.

        - `on_look`: is called once a second, with or without viewers.
        - `sessions`: returns the sessions of agents by model.
        - `saturation`: returns the saturation of each model's stages.
        """
        self._fleet = fleet
        self._on_look = on_look
        self._sessions = sessions
        self._saturation = saturation
        self._indexer = indexer
        self._load = load
        self._peer_load = peer_load
        self._admission = admission
        self._audit = audit
        self._series = series
        self._about = about
        self._findings = findings
        self._predictions = predictions
        self._sampled = sampled
        self._viewers = 0
        self._wanted = asyncio.Event()  # set when a viewer connects
        self._looked = asyncio.Condition()
        self._rows: dict[str, Row] = {}
        self._looks = 0
        self._ended = False

    async def run(self) -> None:
        """Read the state while there are viewers, and sample the series always. Runs until it is cancelled."""
        try:
            while True:
                self._series.sample()
                self._sampled.read()
                self._on_look()
                if self._viewers:
                    await self._look()
                    async with self._looked:
                        self._looked.notify_all()
                self._wanted.clear()
                try:
                    async with asyncio.timeout(LOOK_SECONDS):
                        await self._wanted.wait()
                except TimeoutError:
                    continue
        finally:
            await self.end()

    async def end(self) -> None:
        """Disconnect all viewers."""
        self._ended = True
        async with self._looked:
            self._looked.notify_all()

    @property
    def full(self) -> bool:
        """True if the maximum number of viewers is reached."""
        return self._viewers >= MAX_VIEWERS

    async def updates(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the changes once a second, beginning with everything."""
        sent: dict[str, Row] = {}
        change, since, seldom_at = 0, 0.0, 0.0
        coarse_since: dict[str, float] = {}
        with self._viewing():
            looks = self._looks
            while not self._ended:
                async with self._looked:
                    while self._looks <= looks and not self._ended:
                        await self._looked.wait()
                looks = self._looks
                requests, points = self._sampled.requests.since(change), self._series.since(since)
                change = max([change, *(seen.changed for seen in requests)])
                since = points[-1]["time"] if points else since
                update = {
                    "time": time.time(),
                    # A row is created again only when it changes, so comparing identities is enough.
                    "ranks": {key: row for key, row in self._rows.items() if sent.get(key) is not row},
                    "gone": [key for key in sent if key not in self._rows],
                    "totals": self._totals(),
                    "series": points,
                    "coarse": self._series.coarse_since(coarse_since),
                    "requests": [seen.as_json() for seen in requests],
                }
                sent = dict(self._rows)
                if time.monotonic() - seldom_at >= _SELDOM_SECONDS:
                    seldom_at = time.monotonic()
                    update["prefixes"] = self._sampled.prefixes.tree()
                    update["findings"] = self._findings()
                    update["forecasts"] = self._predictions()
                    update["roles"] = [asdict(each) for each in role_loads(self._fleet.workers, self._load)]
                    update["about"] = {**self._about.identity, "models": self._about.models()}
                yield update

    @contextmanager
    def _viewing(self) -> Iterator[None]:
        self._viewers += 1
        self._wanted.set()
        try:
            yield
        finally:
            self._viewers -= 1

    async def _look(self) -> None:
        workers = {worker.url: worker for worker in self._fleet.workers}
        audits = dict(self._audit.audits())
        rows: dict[str, Row] = {}
        registered = self._indexer.registered()
        for number, registration in enumerate(registered):
            if number % _AT_A_TIME == 0:
                await asyncio.sleep(0)
            target = registration.target
            worker, report = workers.get(target.worker), self._indexer.report(target)
            if worker is None or report is None:
                continue
            audit = audits.get(target)
            row = self._status(worker, target.dp_rank, target.model) | self._stream(worker, report)
            row["basis"] = self._audit.basis(target)
            if audit is not None:
                row |= {"prompt": audit.prompt_tokens, "predicted": audit.predicted_tokens}
                row |= {"hit": audit.cached_tokens, "wrong": round(audit.errors.share, 4)}
            rows[f"{worker.name} {target.dp_rank} {target.model}"] = row
        known = {row["worker"] for row in rows.values()}
        for worker in workers.values():
            if worker.name not in known:
                rows[f"{worker.name} 0"] = self._status(worker, 0, "")
        self._rows = {key: old if (old := self._rows.get(key)) == row else row for key, row in rows.items()}
        self._looks += 1

    def _status(self, worker: Worker, dp_rank: int, model: str) -> Row:
        load, engine = self._load.of(worker.url, dp_rank), worker.metrics.get(dp_rank)
        others = self._peer_load.of(worker.url, dp_rank)
        return {
            "worker": worker.name,
            "dp_rank": dp_rank,
            "model": model,
            "state": worker.state,
            "reason": worker.reason,
            "role": worker.role,
            "requests": load.requests + others.requests,
            "pending": load.pending + others.pending,
            "context": load.context + others.context,
            "others": engine.unseen,
            "kv_usage": None if engine.kv_usage is None else round(engine.kv_usage, 3),
        }

    def _stream(self, worker: Worker, report: TargetReport) -> Row:
        stream, holdings = report.stream, report.holdings
        block_size = max(holdings.block_sizes, default=report.registration.block_size or 0)
        row: Row = {
            "stream": stream.state if stream else ("connecting" if report.registration.source else "no stream"),
            "held": {tier.name.lower(): holdings.blocks[tier] * block_size for tier in Tier},
            "capacity": worker.capacity_tokens,
        }
        if stream is not None:
            counters = stream.sequence
            row |= {"lag_ms": None if stream.lag is None else round(stream.lag * 1000), "seq": stream.last_seq}
            row |= {"gaps": counters.gaps, "replays": counters.replays, "lost": counters.lost_batches}
        return row

    def _totals(self) -> dict[str, Any]:
        return {
            "workers": len(self._fleet.workers),
            "up": sum(worker.up for worker in self._fleet.workers),
            "requests": sum(row["requests"] for row in self._rows.values()),
            "queued": len(self._admission.queue),
            "waiting": {reason.value: count for reason, count in self._admission.waiting_for().items()},
            "sessions": self._sessions(),
            "saturation": self._saturation(),
        }
