"""Prometheus metrics of the index, which are computed at each scrape, and of the process and its build."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Info, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from indexer import hashing
from indexer.indexer import Indexer
from indexer.native import core_name
from indexer.streams.sequence import StreamState
from kvevents import Tier

_LABELS = ["worker", "dp_rank", "model", "tenant"]


class IndexCollector(Collector):
    """Blocks, streams and stream errors of every registered target."""

    def __init__(self, indexer: Indexer) -> None:
        self._indexer = indexer

    def collect(self) -> Iterator[Metric]:
        blocks = GaugeMetricFamily(
            "kvrouter_index_blocks", "Cached blocks of the target, by tier", labels=[*_LABELS, "tier"]
        )
        orphans = GaugeMetricFamily(
            "kvrouter_index_orphan_blocks", "Blocks that wait for their parent block", labels=_LABELS
        )
        state = GaugeMetricFamily(
            "kvrouter_stream_state", "1 for the current state of the event stream, else 0", labels=[*_LABELS, "state"]
        )
        lag = GaugeMetricFamily(
            "kvrouter_stream_lag_seconds", "Time from the engine's last event batch to the index", labels=_LABELS
        )
        confirmed = GaugeMetricFamily(
            "kvrouter_stream_seconds_since_confirmed",
            "Time since the index was last known to have every event batch",
            labels=_LABELS,
        )
        replays = CounterMetricFamily("kvrouter_stream_replays", "Replay requests sent", labels=_LABELS)
        idle_checks = CounterMetricFamily(
            "kvrouter_stream_idle_checks", "Idle event streams that were checked for lost batches", labels=_LABELS
        )
        batches = CounterMetricFamily("kvrouter_stream_batches", "Event batches applied", labels=_LABELS)
        gaps = CounterMetricFamily("kvrouter_stream_gaps", "Gaps in the sequence numbers of batches", labels=_LABELS)
        lost = CounterMetricFamily(
            "kvrouter_stream_lost_batches", "Missing batches that no replay returned", labels=_LABELS
        )
        restarts = CounterMetricFamily("kvrouter_stream_restarts", "Restarts of the publisher", labels=_LABELS)
        resyncs = CounterMetricFamily(
            "kvrouter_stream_resyncs",
            "Streams read again from the start, because the index was wrong",
            labels=_LABELS,
        )
        snapshots = CounterMetricFamily(
            "kvrouter_stream_snapshots", "Snapshots of the whole cache, received on request", labels=_LABELS
        )
        changes = CounterMetricFamily(
            "kvrouter_index_block_events",
            "Blocks in events, by what the index did",
            labels=[*_LABELS, "what"],
        )
        bad = CounterMetricFamily(
            "kvrouter_stream_unreadable", "Stream messages and events that could not be read", labels=[*_LABELS, "what"]
        )
        known = GaugeMetricFamily("kvrouter_pool_known", "1 while the pool's content is known, else 0", labels=["pool"])
        pooled = GaugeMetricFamily("kvrouter_pool_blocks", "Blocks in the pool", labels=["pool"])
        memory = GaugeMetricFamily("kvrouter_pool_memory_bytes", "Memory of the pool's tables", labels=["pool"])
        for pool in self._indexer.pools:
            name, sizes = [pool.config.name], pool.blocks.sizes()
            known.add_metric(name, float(pool.known))
            pooled.add_metric(name, sizes.blocks)
            memory.add_metric(name, sizes.bytes)
        for registration in self._indexer.registered():
            target = registration.target
            report = self._indexer.report(target)
            if report is None:
                continue
            labels = [self._indexer.names.get(target.worker), str(target.dp_rank), target.model, target.tenant]
            for tier in Tier:
                blocks.add_metric([*labels, tier.name.lower()], report.holdings.blocks[tier])
            orphans.add_metric(labels, report.holdings.orphans)
            for change in fields(report.holdings.counters):
                changes.add_metric([*labels, change.name], getattr(report.holdings.counters, change.name))
            stream = report.stream
            if stream is None:
                continue
            for each in StreamState:
                state.add_metric([*labels, each.value], float(stream.state is each))
            if stream.lag is not None:
                lag.add_metric(labels, stream.lag)
            if stream.confirmed is not None:
                confirmed.add_metric(labels, stream.confirmed)
            replays.add_metric(labels, stream.sequence.replays)
            idle_checks.add_metric(labels, stream.sequence.idle_checks)
            batches.add_metric(labels, stream.sequence.batches)
            gaps.add_metric(labels, stream.sequence.gaps)
            lost.add_metric(labels, stream.sequence.lost_batches)
            restarts.add_metric(labels, stream.sequence.restarts)
            resyncs.add_metric(labels, stream.sequence.resyncs)
            snapshots.add_metric(labels, stream.sequence.snapshots)
            bad.add_metric([*labels, "frame"], stream.unreadable.bad_frames)
            bad.add_metric([*labels, "event"], stream.unreadable.bad_events)
        yield from (blocks, orphans, state, lag, confirmed, batches, gaps, replays, lost, restarts, resyncs)
        yield from (idle_checks, snapshots, bad, changes, known, pooled, memory)


@cache
def build_info() -> dict[str, str]:
    """Return the version, the build, the index implementation and Python's version.

    - `build`: `compiled` if mypyc compiled the modules of the request path, else `interpreted`.
    - `core`: `native` or `python`.
    """
    build = "interpreted" if (hashing.__file__ or "").endswith(".py") else "compiled"
    return {"version": version("kvrouter"), "build": build, "core": core_name(), "python": platform.python_version()}


def add_process_metrics(registry: CollectorRegistry) -> None:
    """Register metrics of the build and the process: version, CPU seconds, memory, open files, start time."""
    Info("kvrouter_build", "Version, build, index and Python version", registry=registry).info(build_info())
    ProcessCollector(registry=registry)
