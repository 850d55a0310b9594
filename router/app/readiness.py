"""Whether to send requests here: a worker answers, and the index knows what the workers hold."""

from __future__ import annotations

import time
from collections.abc import Callable

from indexer import Indexer
from router.fleet.fleet import Fleet


class Readiness:
    """Not ready at first; once the index has caught up it stays so, and only the workers matter.

    A stream that cannot be reached would keep it from that for ever: it is waited for `patience` seconds. `stopping` is
    set when the router is asked to stop: it still serves, but should get nothing more.
    """

    def __init__(
        self,
        fleet: Fleet,
        indexer: Indexer,
        patience: float,
        without_workers: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`without_workers`: requests are taken in, and wait for the first."""
        self._fleet = fleet
        self._indexer = indexer
        self._patience = patience
        self._without_workers = without_workers
        self._clock = clock
        self._waiting_since: float | None = None
        self._caught_up = False
        self.stopping = False

    def problem(self) -> str | None:
        """Why this is not ready; None when it is."""
        if self.stopping:
            return "shutting down"
        up = {worker.url for worker in self._fleet.workers if worker.up}
        if not up:
            return None if self._without_workers else "no worker answers"
        if not self._caught_up:
            if self._waiting_since is None:
                self._waiting_since = self._clock()
            waited = self._clock() - self._waiting_since
            self._caught_up = waited >= self._patience or self._index_caught_up(up)
        return None if self._caught_up else "the index is catching up"

    def _index_caught_up(self, workers: set[str]) -> bool:
        """Whether all events so far of these workers are known."""
        followed = (
            self._indexer.stream_status(registration.target)
            for registration in self._indexer.registered()
            if registration.source is not None and registration.target.worker in workers
        )
        return all(stream and not stream.state.waits for stream in followed)
