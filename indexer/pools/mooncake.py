"""The content of a Mooncake Store: its master's stream of events, checked against the master's HTTP API.

The stream reports each object that is stored or removed by request. It reports no eviction and no segment of a lost
client. So counters of the master's metrics are polled. After one of them changes, all keys are listed again.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

import msgspec
import structlog

from indexer.pools.pool import SharedPool
from kvevents.decoding import json_reader, msgpack_reader

log = structlog.get_logger()

_MOVED: Final = (
    b"master_evicted_key_count",
    b"master_active_clients",
    b"master_client_liveness_offline_transitions_total",
)
_KEY: Final = re.compile(rb"\S+")
_METRIC: Final = re.compile(rb"^(master_\w+)(?:\{[^}]*\})? ([0-9.eE+]+)", re.MULTILINE)


class _MasterEvent(msgspec.Struct):
    event_type: Literal["stored", "removed", "cleared"]
    object_key: str | None = None
    medium: str | None = None


class _MasterBatch(msgspec.Struct, array_like=True):
    at_ms: float
    events: list[_MasterEvent]


class _KeyAnswer(msgspec.Struct):
    ok: bool


class _KeyAnswers(msgspec.Struct):
    data: dict[str, _KeyAnswer]


_decode = msgpack_reader(_MasterBatch)
_decode_answers = json_reader(_KeyAnswers)


@dataclass(frozen=True, slots=True)
class MooncakeMaster:
    """Addresses of a master, and the rate of questions to it. Times are in seconds.

    - `url`: its HTTP API (`--metrics_port`).
    - `events`: its stream (`--kv_events_bind_endpoint`).
    - `most_keys`: the most keys that are listed. Above it, evictions leave the content unknown, and the keys of each
      prompt are asked for.
    - `interval`: between polls of the metrics. A listing follows the last one after five intervals at the earliest.
    """

    url: str
    events: str
    most_keys: int = 100_000
    interval: float = 1.0
    timeout: float = 2.0


def stored_keys(answer: bytes) -> set[str]:
    """Return the keys that an answer of `/batch_query_keys` shows as stored. Raises msgspec.DecodeError."""
    return {key for key, found in _decode_answers(answer).data.items() if found.ok}


class MasterContent:
    """Keeps a pool's content equal to that of its master. Not thread-safe."""

    def __init__(self, pool: SharedPool, master: MooncakeMaster, fetch: Callable[[str], bytes]) -> None:
        """Create a reader of a master. `fetch` returns the body of a path within limits; raises OSError, ValueError."""
        self._pool = pool
        self._master = master
        self._fetch = fetch
        self._seq: int | None = None
        self._counters: tuple[float, ...] = ()
        self._keys = 0  # expected number of keys
        self._listed_at = float("-inf")

    def receive(self, seq: int, payload: bytes) -> None:
        """Apply a batch of the stream. After a gap or a restart, the content is unknown."""
        if self._seq is not None and seq != self._seq + 1:
            self._pool.lose("batches of the stream are missing" if seq > self._seq else "the master started again")
        self._seq = seq
        try:
            events = _decode(payload).events
        except msgspec.DecodeError as error:
            self._pool.lose(f"a batch is unreadable: {error}")
            return
        changes: list[tuple[str, bool, bool]] = []
        for event in events:
            if event.event_type == "cleared":
                changes.clear()
                self._pool.blocks.clear()
                self._keys = 0
            elif event.object_key is not None:
                stored = event.event_type == "stored"
                changes.append((event.object_key, (event.medium or "cpu").lower() != "cpu", stored))
                self._keys += 1 if stored else -1
        self._pool.store(changes)

    def check(self, now: float) -> None:
        """Poll the master's counters, and list its keys if they show a loss that the stream does not report."""
        try:
            metrics = {name: float(value) for name, value in _METRIC.findall(self._fetch("/metrics"))}
            keys = int(metrics.get(b"master_key_count", 0))
            counters = tuple(metrics.get(name, 0.0) for name in _MOVED)
            self._pool.answers = True
            if counters != self._counters or keys < self._keys:
                self._pool.lose("the master evicted objects or lost a client")
            if self._pool.known:
                return
            if keys > self._master.most_keys:
                self._pool.lose(f"{keys} keys are more than most_keys ({self._master.most_keys})")
            elif now - self._listed_at >= 5 * self._master.interval:
                self._list(now, counters)
        except (OSError, ValueError, OverflowError) as error:
            self._pool.answers = False
            self._pool.lose(f"the master does not answer: {error}")

    def _list(self, now: float, counters: tuple[float, ...]) -> None:
        """Replace the content by the master's keys. Batches received meanwhile are applied after it."""
        self._listed_at = now
        listing = self._fetch("/get_all_keys")
        keys = sum(1 for _ in _KEY.finditer(listing))
        if keys > self._master.most_keys:
            raise ValueError(f"it lists {keys} keys, more than most_keys ({self._master.most_keys})")
        self._pool.replace((match[0].decode(), False) for match in _KEY.finditer(listing))
        self._keys, self._counters = keys, counters
        log.info("content of a pool listed", pool=self._pool.config.name, keys=keys)
