"""Causes of low hits that a running router sees itself, without sending any prompt.

- Prompts that a worker was sent are not found in its events (`router/cache_state/stored_prompts.py`).
- Prompts return after their blocks were evicted.
- Sessions continue on other workers.
- One worker has most of the requests in flight.
- Turns of sessions differ early (`router/cache_state/prompt_noise.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import exp
from typing import Any, Final

from router.cache_state.prompt_noise import PromptNoise
from router.cache_state.stored_prompts import StoredPrompts
from router.fleet.fleet import Fleet
from router.fleet.worker import Worker, WorkerState
from router.load.peer_load import PeerLoad
from router.load.target_load import LoadTable
from router.prediction.learned import EvictionPressure

# The share of prompt tokens that were evicted before they were asked for again.
_LOST_SHARE: Final = 0.1
# Next turns of sessions, and the share of them that was computed on another worker.
_TURNS: Final = 30
_MOVED_SHARE: Final = 0.3
# Load is averaged over `_SECONDS`, and judged after `_KNOWN_SECONDS`.
_SECONDS: Final = 60.0
_KNOWN_SECONDS: Final = 15.0
# The mean requests in flight of a worker that counts as hot, and the least multiple of the mean of all.
_BUSY: Final = 4.0
_MULTIPLE: Final = 3.0


class MeanLoad:
    """The mean requests in flight of each worker over the last minute."""

    def __init__(
        self, fleet: Fleet, load: LoadTable, peers: PeerLoad, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._fleet = fleet
        self._load = load
        self._peers = peers
        self._clock = clock
        self._means: dict[str, tuple[float, float]] = {}  # by URL: the sum of requests times seconds, and of seconds
        self._at = clock()

    def sample(self) -> None:
        """Add the present load."""
        now = self._clock()
        seconds = now - self._at
        self._at, kept = now, exp(-seconds / _SECONDS)
        means = {}
        for worker in self._fleet.workers:
            requests, known = self._means.get(worker.url, (0.0, 0.0))
            means[worker.url] = (requests * kept + self._requests(worker) * seconds, known * kept + seconds)
        self._means = means

    def hot(self) -> list[tuple[Worker, float, float, int]]:
        """Return workers that have most of the load: with their mean requests, their share, and the number of peers."""
        found = []
        for workers in self._peers_of_models().values():
            means = {
                worker: requests / seconds
                for worker in workers
                if (known := self._means.get(worker.url))
                for requests, seconds in (known,)
                if seconds >= _KNOWN_SECONDS
            }
            total, count = sum(means.values()), len(means)
            if count < 2 or not total:
                continue
            worker = max(means, key=lambda each: means[each] / each.settings.weight)
            share = means[worker] / total
            if means[worker] >= _BUSY and share >= max(0.5, min(0.9, _MULTIPLE / count)):
                found.append((worker, means[worker], share, count))
        return found

    def _requests(self, worker: Worker) -> int:
        return sum(
            self._load.of(worker.url, rank).requests
            + self._peers.of(worker.url, rank).requests
            + worker.metrics.get(rank).unseen
            for rank in worker.ranks()
        )

    def _peers_of_models(self) -> dict[object, list[Worker]]:
        """Return the ready workers that serve the same models in the same role."""
        groups: dict[object, list[Worker]] = {}
        for worker in self._fleet.workers:
            if worker.state is WorkerState.READY:
                groups.setdefault((worker.role, frozenset(worker.models())), []).append(worker)
        return groups


class LowHits:
    """The causes of low hits. `sample` reads what they depend on, about once a second."""

    def __init__(self, stored: StoredPrompts, pressure: EvictionPressure, load: MeanLoad, noise: PromptNoise) -> None:
        self._stored = stored
        self._pressure = pressure
        self._load = load
        self._noise = noise

    def sample(self) -> None:
        """Look up sent prompts that are due, compare turns of sessions, and add the present load."""
        self._stored.check()
        self._noise.check()
        self._load.sample()

    def findings(self, about: Callable[[Any], dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the causes that apply now. `about`: returns the fields that identify a target."""
        found: list[dict[str, Any]] = [
            {"finding": name, **about(target), "detail": detail} for name, target, detail in self._stored.findings()
        ]
        if (share := self._pressure.lost_share()) >= _LOST_SHARE:
            detail = f"{share:.0%} of the prompt tokens of the last minutes were cached once and evicted since"
            found.append({"finding": "cache_too_small", "detail": detail})
        turns, moved = self._pressure.moved_turns()
        if turns >= _TURNS and moved >= _MOVED_SHARE * turns:
            detail = f"{moved / turns:.0%} of the next turns of sessions were computed on another worker than before"
            found.append({"finding": "sessions_move", "detail": detail})
        for worker, requests, share, count in self._load.hot():
            detail = f"{share:.0%} of the requests in flight of {count} workers, {requests:.0f} on average"
            found.append({"finding": "hot_worker", "worker": worker.name, "detail": detail})
        return found + self._noise.findings()
