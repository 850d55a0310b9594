"""What is wrong with the fleet as the router sees it, in words for its operators."""

from __future__ import annotations

from typing import Any

from indexer import Indexer, Target
from indexer.streams.sequence import StreamState
from indexer.targets import WorkerNames
from router.cache_state.hit_audit import Basis, HitAudit
from router.fleet.circuit import CircuitState
from router.fleet.fleet import Fleet
from router.fleet.worker import WorkerState


def findings(fleet: Fleet, indexer: Indexer, audit: HitAudit) -> list[dict[str, Any]]:
    """Everything found; docs/troubleshooting.md says what each means and what to do."""
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
            "detail": "its /v1/models is empty, so nothing can be asked of it: set model: for it, under workers:",
        }
        for worker in fleet.workers
        if worker.up and worker.description is not None and not worker.description.models
    ]
    found += [
        {"finding": "model_changed", "worker": worker.name, "model": name, "detail": f"it was {before}, and is {now}"}
        for worker in fleet.workers
        for name, (before, now) in worker.recent_changes().items()
    ]
    found += [
        {"finding": "worker_left_out", "worker": worker.name, "detail": worker.reason}
        for worker in fleet.workers
        if worker.state in (WorkerState.EJECTED, WorkerState.HALF_OPEN)
    ]
    found += [
        {"finding": "rank_left_out", "worker": worker.name, "dp_rank": dp_rank, "detail": health.circuit.reason}
        for worker in fleet.workers
        for dp_rank, health in worker.health.ranks.items()
        if health.circuit.state is not CircuitState.CLOSED
    ]
    up = {worker.url for worker in fleet.workers if worker.up}
    for registration in indexer.registered():
        stream = indexer.stream_status(registration.target)
        if registration.source is None or registration.target.worker not in up:
            continue
        if stream is None or stream.state is StreamState.CONNECTING:
            detail = f"nothing has come from {registration.source.endpoint}"
            found.append(_about(indexer.names, registration.target, "events_missing", detail))
        elif stream.state is StreamState.STALE:
            detail = (
                f"nobody publishes at {registration.source.endpoint} any more: what came from there may hold no longer"
            )
            found.append(_about(indexer.names, registration.target, "events_missing", detail))
        elif stream.state is StreamState.LOST:
            detail = f"{stream.sequence.lost_batches} event batches could not be had"
            found.append(_about(indexer.names, registration.target, "events_lost", detail))
    for target, audited in audit.audits():
        if audited.basis is not Basis.EVENTS:
            detail = f"cached tokens were not as predicted by events: predicted from {_BASES[audited.basis]}"
            found.append(_about(indexer.names, target, "drift", detail))
        if audited.lengths_differ:
            detail = f"{audited.length_errors.share:.0%} of the prompts have another length than counted here"
            found.append(_about(indexer.names, target, "prompt_length", detail))
    return found


_BASES = {Basis.RESYNCED: "events read again from the start", Basis.HISTORY: "what was sent there"}


def _about(names: WorkerNames, target: Target, finding: str, detail: str) -> dict[str, Any]:
    return {"finding": finding, **names.about(target), "detail": detail}
