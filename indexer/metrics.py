"""The index's figures for Prometheus, read when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from indexer.indexer import Indexer
from indexer.sequence import StreamState
from kvevents import Tier

_LABELS = ["worker", "dp_rank", "model", "tenant"]


class IndexCollector(Collector):
    """Blocks, streams and what went wrong on them, by target."""

    def __init__(self, indexer: Indexer) -> None:
        self._indexer = indexer

    def collect(self) -> Iterator[Metric]:
        blocks = GaugeMetricFamily("kvrouter_index_blocks", "Blocks held", labels=[*_LABELS, "tier"])
        orphans = GaugeMetricFamily("kvrouter_index_orphan_blocks", "Blocks without their parent", labels=_LABELS)
        state = GaugeMetricFamily("kvrouter_stream_state", "1 for the stream's state", labels=[*_LABELS, "state"])
        lag = GaugeMetricFamily("kvrouter_stream_lag_seconds", "From an event to the index", labels=_LABELS)
        confirmed = GaugeMetricFamily(
            "kvrouter_stream_seconds_since_confirmed", "Since nothing was known to be missing", labels=_LABELS
        )
        replays = CounterMetricFamily("kvrouter_stream_replays", "Replays asked for", labels=_LABELS)
        idle_checks = CounterMetricFamily("kvrouter_stream_idle_checks", "Silences looked into", labels=_LABELS)
        batches = CounterMetricFamily("kvrouter_stream_batches", "Event batches applied", labels=_LABELS)
        gaps = CounterMetricFamily("kvrouter_stream_gaps", "Gaps noticed", labels=_LABELS)
        lost = CounterMetricFamily("kvrouter_stream_lost_batches", "Batches nobody could replay", labels=_LABELS)
        restarts = CounterMetricFamily("kvrouter_stream_restarts", "Restarts of the publisher", labels=_LABELS)
        resyncs = CounterMetricFamily("kvrouter_stream_resyncs", "Streams read anew on suspicion", labels=_LABELS)
        snapshots = CounterMetricFamily("kvrouter_stream_snapshots", "Caches told whole, on request", labels=_LABELS)
        happened = CounterMetricFamily(
            "kvrouter_index_block_events", "What became of blocks told of", labels=[*_LABELS, "what"]
        )
        bad = CounterMetricFamily("kvrouter_stream_unreadable", "Unreadable input", labels=[*_LABELS, "what"])
        for registration in self._indexer.registered():
            target = registration.target
            report = self._indexer.report(target)
            if report is None:
                continue
            labels = [self._indexer.names.of(target.worker), str(target.dp_rank), target.model, target.tenant]
            for tier in Tier:
                blocks.add_metric([*labels, tier.name.lower()], report.holdings.blocks[tier])
            orphans.add_metric(labels, report.holdings.orphans)
            for what in fields(report.holdings.counters):
                happened.add_metric([*labels, what.name], getattr(report.holdings.counters, what.name))
            stream = report.stream
            if stream is None:
                continue
            for known in StreamState:
                state.add_metric([*labels, known.value], float(stream.state is known))
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
        yield from (idle_checks, snapshots, bad, happened)
