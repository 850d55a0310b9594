"""Readiness for requests: a worker answers, and the index has the workers' cached blocks."""

from __future__ import annotations

import time

from indexer import Indexer
from router.fleet.fleet import Fleet

# Longest wait at the start until the index knows the workers' caches.
CATCH_UP_SECONDS = 5.0


class Readiness:
    """The readiness of the router. It depends on the workers, and at first also on the index.

    The index counts as complete once it has all events of the workers that answer, or after `patience` seconds, because
    a stream may be unreachable. A router that may be ready without workers waits as long for its first one, because it
    refuses models that it does not know yet. `stopping` is set when the router is asked to stop. It still serves
    requests then, but should receive no new ones.
    """

    def __init__(self, fleet: Fleet, indexer: Indexer, patience: float, without_workers: bool = False) -> None:
        """Create the readiness of a fleet. `without_workers`: requests wait for the first worker, so none is needed."""
        self._fleet = fleet
        self._indexer = indexer
        self._patience = patience
        self._without_workers = without_workers
        self._waiting_since: float | None = None
        self._caught_up = False
        self.stopping = False

    def problem(self) -> str | None:
        """Return why the router is not ready; None if it is ready."""
        if self.stopping:
            return "shutting down"
        up = {worker.url for worker in self._fleet.generating if worker.up}
        if not up:
            return None if self._without_workers and self._has_waited() else "no worker answers"
        if not self._caught_up:
            self._caught_up = self._has_waited() or self._index_caught_up(up)
        return None if self._caught_up else "the index is catching up"

    def _has_waited(self) -> bool:
        """Return whether the first question of what is missing is `patience` seconds old."""
        if self._waiting_since is None:
            self._waiting_since = time.monotonic()
        return time.monotonic() - self._waiting_since >= self._patience

    def _index_caught_up(self, workers: set[str]) -> bool:
        followed = (
            self._indexer.stream_status(registration.target)
            for registration in self._indexer.registered()
            if registration.source is not None and registration.target.worker in workers
        )
        return all(stream and not stream.state.waits for stream in followed)
