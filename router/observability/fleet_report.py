"""The router's report on itself and its fleet: version, policy, models, and findings for operators."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from indexer import Indexer, Registration, Target
from indexer.api.metrics import build_info
from indexer.streams.sequence import StreamState
from indexer.targets import WorkerNames
from router.cache_state.hit_audit import HitAudit
from router.cache_state.target_audit import Basis
from router.fleet.circuit import CircuitState
from router.fleet.discovery import Engine, WorkerDescription
from router.fleet.event_streams import listens_elsewhere
from router.fleet.fleet import Fleet
from router.fleet.worker import WorkerState
from router.tokens.permission import ids_sent_to
from router.tokens.tokenizer_source import TokenizerSource

_ROUTES = {
    "local": "equal to the engine's",
    "untried": "not compared, because the engine returns no token ids",
    "guessed": "different from the engine's, which cannot be asked",
}
# A pool's content is unknown for a moment after each eviction.
_UNKNOWN_SECONDS = 30.0
_SILENT_SECONDS = 3.0  # for the first answer of its master
_BASES = {Basis.RESYNCED: "events replayed from the start", Basis.SENT_PREFIXES: "sent prefixes"}


class About:
    """The router's identity, in its first log line, in `/health` and on the page."""

    def __init__(self, policy: str, fleet: Fleet, source: TokenizerSource) -> None:
        self.identity = {**build_info(), "policy": str(policy)}
        self._fleet = fleet
        self._source = source

    def models(self) -> dict[str, dict[str, Any]]:
        """Return the number of workers for each base model, and how its prompts are tokenized."""
        serving = Counter(model for worker in self._fleet.workers if worker.up for model in worker.models())
        report = self._source.report()
        return {
            model: {"workers": count, "tokens": _tokens(report.get(model))} for model, count in sorted(serving.items())
        }


def _tokens(report: dict[str, Any] | None) -> str:
    """Describe in a few words how prompts are tokenized."""
    if report is None:
        return "prompts are not tokenized"
    if report["source"] == "text":
        return "unknown: prompts are routed by their text only"
    if report["reading"] is None:
        return "by asking the engine"
    shapes = Counter(report["probes"].values())
    text = f"by {report['reading']} in the router"
    if shapes:
        route = shapes.most_common(1)[0][0]
        text += f", {_ROUTES.get(route, route)}"
        if asked := shapes["engine"]:
            text += f"; the engine is asked for {asked} of {sum(shapes.values())} kinds of prompts"
    if (reasons := report.get("ids_not_sent")) is not None:
        text += f"; {ids_sent_to(reasons)}"
    return text


def findings(fleet: Fleet, indexer: Indexer, audit: HitAudit) -> list[dict[str, Any]]:
    """Return all problems of the workers and their events, with their consequences."""
    found: list[dict[str, Any]] = [
        {"finding": "worker_down", "worker": worker.name, "detail": worker.problem}
        for worker in fleet.workers
        if not worker.up
    ]
    found += [
        {"finding": "worker_key", "worker": worker.name, "detail": worker.key.problem}
        for worker in fleet.workers
        if worker.key.refused
    ]
    found += [
        {"finding": "worker_description", "worker": worker.name, "detail": "; ".join(worker.description.refused)}
        for worker in fleet.workers
        if worker.description is not None and worker.description.refused
    ]
    found += [
        {
            "finding": "no_models",
            "worker": worker.name,
            "detail": "its /v1/models is empty, so it gets no requests: set `model` for it under `workers`",
        }
        for worker in fleet.generating
        if worker.up and worker.description is not None and not worker.description.models
    ]
    found += [
        {"finding": "model_changed", "worker": worker.name, "model": name, "detail": f"it was {before}, and is {now}"}
        for worker in fleet.workers
        for name, (before, now) in worker.recent_changes().items()
    ]
    found += [
        {"finding": "worker_ejected", "worker": worker.name, "detail": worker.reason}
        for worker in fleet.workers
        if worker.state in (WorkerState.EJECTED, WorkerState.HALF_OPEN)
    ]
    found += [
        {"finding": "rank_ejected", "worker": worker.name, "dp_rank": dp_rank, "detail": health.circuit.reason}
        for worker in fleet.workers
        for dp_rank, health in worker.health.ranks.items()
        if health.circuit.state is not CircuitState.CLOSED
    ]
    found += [
        {"finding": "prefix_caching_off", "worker": worker.name, "detail": "its /metrics say so"}
        for worker in fleet.generating
        if worker.up and not worker.metrics.caches_prefixes
    ]
    found += [
        {
            "finding": "events_off",
            "worker": worker.name,
            "detail": f"{worker.description.engine} reports that it publishes no events",
        }
        for worker in fleet.generating
        if worker.up and worker.description is not None and _lacks_events(worker.description)
    ]
    up = {worker.url for worker in fleet.workers if worker.up}
    for registration in indexer.registered():
        if registration.target.worker in up:
            found += _of_stream(fleet, indexer, registration)
    found += [
        {
            "finding": "publisher_unknown",
            "detail": f"the publisher {publisher.topic!r} at {publisher.address}: {publisher.problem}",
        }
        for publisher in indexer.publishers()
        if publisher.problem is not None and not publisher.silent
    ]
    for target, audited in audit.audits():
        if audited.basis is not Basis.EVENTS:
            detail = f"cached tokens differ from the prediction by events: now predicted from {_BASES[audited.basis]}"
            found.append(_finding(indexer.names, target, "drift", detail))
        if audited.unexplained:
            detail = f"{audited.unexplained_errors.share:.0%} of the prompt tokens came from an unknown pool"
            found.append(_finding(indexer.names, target, "unexplained_pool", detail))
        if audited.not_loading:
            detail = f"{audited.load_errors.share:.0%} of the tokens that its pool holds for it were not loaded"
            found.append(_finding(indexer.names, target, "pool_not_loaded", detail))
        if audited.lengths_differ:
            detail = f"{audited.length_errors.share:.0%} of the prompts have another length than the router counted"
            found.append(_finding(indexer.names, target, "prompt_length", detail))
    now = time.monotonic()
    found += [
        {"finding": "pool_unknown", "pool": pool.config.name, "detail": pool.unknown_because}
        for pool in indexer.pools
        if not pool.known and now - pool.unknown_since > (_UNKNOWN_SECONDS if pool.answers else _SILENT_SECONDS)
    ]
    return found


def _of_stream(fleet: Fleet, indexer: Indexer, registration: Registration) -> Iterator[dict[str, Any]]:
    """Yield the problems of a target's stream. A target without a source has one once its publisher connects."""
    target, names = registration.target, indexer.names
    session, stream = indexer.stream(target), indexer.stream_status(target)
    source = session.source if session is not None else registration.source
    if source is None:
        return
    if (detail := _other_block_size(fleet, indexer, registration)) is not None:
        yield _finding(names, target, "block_size", detail)
    if stream is None or stream.state is StreamState.CONNECTING:
        detail = f"no event was received from {source.endpoint}{listens_elsewhere(target.worker, source.endpoint)}"
        yield _finding(names, target, "events_missing", detail)
    elif stream.state is StreamState.STALE:
        detail = f"no publisher answers at {source.endpoint} any more: its index may be stale"
        yield _finding(names, target, "events_missing", detail)
    elif stream.state is StreamState.LOST:
        detail = f"{stream.sequence.lost_batches} event batches were lost and not replayed"
        if stream.first_missing:
            detail = "batch 0 was lost, unless the publisher numbers its batches from 1, which the answers will show"
        yield _finding(names, target, "events_lost", detail)
    report = indexer.report(target)
    if report is not None and stream is not None and not stream.state.waits:
        held = report.holdings
        if held.orphans and not any(held.blocks.values()):
            detail = f"{held.orphans} blocks wait for a parent that no event named, and no other block is known"
            yield _finding(names, target, "parents_unknown", detail)
    if source.replay_endpoint is None:
        yield _finding(names, target, "replay_missing", f"the stream at {source.endpoint} has no replay endpoint")


def _lacks_events(description: WorkerDescription) -> bool:
    """Return whether an engine that can publish events publishes none."""
    return description.engine is not Engine.OTHER and bool(description.models) and not description.streams


def _other_block_size(fleet: Fleet, indexer: Indexer, registration: Registration) -> str | None:
    """Return in words how the block size of the settings differs from that of a target's events; `None` if not."""
    worker = fleet.at(registration.target.worker)
    configured = worker.settings.block_size if worker is not None else None
    report = indexer.report(registration.target) if configured is not None else None
    sizes = report.holdings.block_sizes if report is not None else ()
    if configured is None or not sizes or configured in sizes:
        return None
    return f"the settings have {configured} tokens, the engine's events {', '.join(map(str, sorted(sizes)))}"


def _finding(names: WorkerNames, target: Target, finding: str, detail: str) -> dict[str, Any]:
    return {"finding": finding, **names.about(target), "detail": detail}
