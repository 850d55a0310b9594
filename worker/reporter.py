"""Reports of the blocks in an engine's KV cache, by three calls.

    reporter = Reporter.create('{"publisher": "zmq", "endpoint": "tcp://*:5557"}', ParallelRanks(dp=0, tp=0))
    reporter.stored([h1, h2], parent_block_hash=None, token_ids=tokens, block_size=16)
    reporter.removed([h2])
    reporter.cleared()
    reporter.step()  # sends the reports since the last step as one batch
    reporter.shutdown()

Each call only changes memory; a thread owns the sockets. If the thread falls behind, the oldest batches are dropped and
counted (see worker/zmq_publisher.py). A subscriber that missed batches, or that connects late, requests a snapshot.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import msgspec

from kvevents import AllBlocksCleared, BlockRemoved, BlockStored, EngineHash, Event, EventBatch
from kvevents.dialects import DIALECTS
from kvevents.events import is_identified
from worker.held_blocks import HeldBlocks
from worker.publisher import EventPublisher, NullEventPublisher, PublisherConfig, Snapshot
from worker.publisher_factory import EventPublisherFactory

logger = logging.getLogger(__name__)

MAX_EVENTS = 256  # events in a batch; a full batch is sent before the step
MAX_DELAY_S = 0.1  # seconds from a report to its batch when the engine calls no `step`

_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelRanks:
    """A process's rank in each kind of parallelism. All ranks of a DP rank hold equal blocks, so only one reports."""

    dp: int = 0
    tp: int = 0
    cp: int = 0
    pp: int = 0

    @property
    def reports(self) -> bool:
        return not (self.tp or self.cp or self.pp)


class Reporter:
    """A reporter of the changes in one DP rank's cache. Its methods may be called from any thread of its process.

    - `silent_because`: why nothing is reported; `None` if it reports.
    - `unreported`: blocks that the dialect cannot express.
    """

    def __init__(self, publisher: EventPublisher, silent_because: str | None = None) -> None:
        if silent_because is None and isinstance(publisher, NullEventPublisher):
            silent_because = "the publisher is the null publisher"
        self.publisher = publisher
        self.silent_because = silent_because
        self.unreported = 0
        self._form = publisher.wire_form
        self._dialect = DIALECTS[self._form]
        self._process = os.getpid()
        self._lock = threading.Lock()  # guards all attributes below
        self._held = HeldBlocks()
        self._hidden: set[tuple[int, EngineHash]] = set()  # blocks of a group that the dialect cannot express
        # Reports of a previous process of this engine are invalid.
        self._events: list[Event] = [AllBlocksCleared()]
        self._oldest_at = time.monotonic()
        self._last_ts = 0.0
        self._closed = False
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        if silent_because is not None:
            logger.info("KV events: DP rank %d reports nothing here: %s", publisher.dp_rank, silent_because)
            return
        publisher.offer_snapshots(self._take_snapshot)
        self._thread = threading.Thread(target=self._run, name=f"kv-reporter-dp{publisher.dp_rank}", daemon=True)
        self._thread.start()
        atexit.register(self.shutdown)

    @classmethod
    def create(cls, config: str | PublisherConfig | None, ranks: ParallelRanks | None = None) -> Reporter:
        """Create the reporter for a process of an engine.

        - `config`: the configuration, also as JSON, equal for all ranks; `None`: report nothing.
        - `ranks`: the position of this process; `None`: rank 0 of each kind.

        Raises ValueError, which names the field, for an invalid configuration, and OSError for an endpoint in use.
        """
        ranks = ranks or ParallelRanks()
        if isinstance(config, PublisherConfig):
            config = msgspec.json.encode(config).decode()
        publisher = EventPublisherFactory.create(config, ranks.dp, ranks.tp, ranks.cp, ranks.pp)
        because = None
        if not config or PublisherConfig.from_json(config).publisher == "null":
            because = "KV events are switched off"
        elif not ranks.reports:
            because = (
                f"this is TP rank {ranks.tp}, CP rank {ranks.cp}, PP rank {ranks.pp}; 0, 0, 0 reports for all ranks"
            )
        return cls(publisher, because)

    @property
    def publishes(self) -> bool:
        """True if this rank reports its cache."""
        return self.silent_because is None

    @property
    def dropped(self) -> int:
        return self.publisher.dropped

    @property
    def unknown_removed(self) -> int:
        return self._held.unknown_removed

    def stored(
        self,
        block_hashes: Sequence[EngineHash],
        parent_block_hash: EngineHash | None,
        token_ids: Sequence[int],
        block_size: int,
        *,
        medium: str | None = "GPU",
        lora_id: int | None = None,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        extra_keys: list[list[Any] | None] | None = None,
        group_idx: int | None = None,
        kv_cache_spec_kind: str | None = None,
        kv_cache_spec_sliding_window: int | None = None,
        session_id: str | None = None,
    ) -> None:
        """Report full blocks as cached, and count one more reference to each.

        A block that is stored twice has to be removed twice.

        - `block_hashes`: the engine's hashes of consecutive blocks (64-bit integers or bytes).
        - `parent_block_hash`: the block before the first one; `None` at the start of a prompt.
        - `token_ids`: `block_size` tokens for each block, or none for blocks that another medium already holds.
        - `extra_keys`: for each block further keys of its identity, for example the hash of an image.

        Raises ValueError, which names the field, and then reports nothing. Raises RuntimeError after `shutdown` and in
        a process that was forked from the reporter's own.
        """
        if not self._is_open():
            return
        if extra_keys is None and not is_identified(medium):
            extra_keys = [None] * len(block_hashes)  # the arguments are the whole identity
        event = BlockStored(
            list(block_hashes),
            parent_block_hash,
            token_ids.tolist() if hasattr(token_ids, "tolist") else list(token_ids),
            block_size,
            lora_id,
            medium,
            lora_name,
            extra_keys,
            group_idx,
            kv_cache_spec_kind,
            kv_cache_spec_sliding_window,
            cache_salt,
            session_id,
        )
        self._check_stored(event)
        with self._lock:
            self._store(event)

    def removed(
        self, block_hashes: Sequence[EngineHash], *, medium: str | None = "GPU", group_idx: int | None = None
    ) -> None:
        """Remove one reference to each block. Without references it is no longer cached there. Raises as `stored`."""
        if not self._is_open():
            return
        event = BlockRemoved(list(block_hashes), medium, group_idx)
        self._check_hashes("block_hashes", event.block_hashes)
        with self._lock:
            self._remove(event)

    def cleared(self, medium: str | None = None) -> None:
        """Report that one medium, or with None the whole cache, holds nothing. Raises RuntimeError after `shutdown`."""
        if not self._is_open():
            return
        with self._lock:
            self._clear(medium)

    def report(self, events: Iterable[Event]) -> None:
        """Report an engine's events, up to the first invalid one. Raises as `stored` does."""
        if not self._is_open():
            return
        for event in events:
            if isinstance(event, BlockStored):
                self._check_stored(event)
            elif isinstance(event, BlockRemoved):
                self._check_hashes("block_hashes", event.block_hashes)
            with self._lock:
                if isinstance(event, BlockStored):
                    self._store(event)
                elif isinstance(event, BlockRemoved):
                    self._remove(event)
                else:
                    self._clear(event.medium)

    def step(self) -> None:
        """Send the reports since the last step as one batch. A thread sends them after MAX_DELAY_S seconds."""
        if not self._is_open():
            return
        with self._lock:
            self._flush()

    def shutdown(self) -> None:
        """Send the remaining reports within a deadline, and end the threads. Repeated calls have no effect."""
        if os.getpid() != self._process:
            return
        with self._lock:
            if not self._closed and self.publishes:
                self._flush()
            self._closed = True
        self._ended.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            atexit.unregister(self.shutdown)
        self.publisher.shutdown()

    def __reduce__(self) -> str:
        raise TypeError("a Reporter cannot leave its process: pass the configuration and create one there")

    def _check_stored(self, event: BlockStored) -> None:
        hashes = event.block_hashes
        self._check_hashes("block_hashes", hashes)
        if event.parent_block_hash is not None:
            self._check_hashes("parent_block_hash", [event.parent_block_hash])
        if event.extra_keys is not None and len(event.extra_keys) != len(hashes):
            raise ValueError(f"extra_keys: {len(event.extra_keys)} entries for {len(hashes)} blocks")
        if event.extra_keys is not None:
            try:
                _encode(event.extra_keys)
            except (TypeError, OverflowError) as error:
                raise ValueError(f"extra_keys: {error}") from error
        whole = event.kv_cache_spec_kind in (None, "full_attention")
        if whole and event.token_ids and len(event.token_ids) != len(hashes) * event.block_size:
            raise ValueError(f"token_ids: {len(event.token_ids)} for {len(hashes)} blocks of {event.block_size} tokens")

    def _check_hashes(self, field: str, hashes: list[EngineHash]) -> None:
        if not self._dialect.hash_types.issuperset(map(type, hashes)):
            expected = " or ".join(sorted(each.__name__ for each in self._dialect.hash_types))
            raise ValueError(f"{field}: a block hash is {expected} in the {self._form.value} dialect")
        try:
            _encode(hashes)
        except OverflowError as error:
            raise ValueError(f"{field}: a hash has more than 64 bits") from error

    def _store(self, event: BlockStored) -> None:
        expressible = self._dialect.expressible(event)
        group = event.group_idx or 0
        if expressible is None or (self._hidden and (group, event.parent_block_hash) in self._hidden):
            if not self.unreported:
                logger.warning(
                    "KV events: dialect %s cannot express some blocks, which are not reported", self._form.value
                )
            self.unreported += len(event.block_hashes)
            self._hidden.update((group, block) for block in event.block_hashes)
            return
        self._add(self._held.store(expressible))

    def _remove(self, event: BlockRemoved) -> None:
        if self._hidden:
            group = event.group_idx or 0
            hidden = self._hidden.intersection((group, block) for block in event.block_hashes)
            self._hidden -= hidden
            left = [block for block in event.block_hashes if (group, block) not in hidden]
            event = BlockRemoved(left, event.medium, event.group_idx)
        self._add(self._held.remove(event))

    def _clear(self, medium: str | None) -> None:
        if medium is not None:
            self._add(self._held.clear_medium(medium))
            return
        self._held.clear()
        self._hidden.clear()
        self._add([AllBlocksCleared()])

    def _add(self, events: Sequence[Event]) -> None:
        if not self._events:
            self._oldest_at = time.monotonic()
        self._events += events
        if len(self._events) >= MAX_EVENTS:
            self._flush()

    def _flush(self) -> None:
        if self._events:
            events, self._events = self._events, []
            self.publisher.publish(EventBatch(self._time(), events))

    def _time(self) -> float:
        """Return unix time that never decreases, because readers detect a restart by it."""
        self._last_ts = max(time.time(), self._last_ts)
        return self._last_ts

    def _is_open(self) -> bool:
        if self.silent_because is not None:
            return False
        if os.getpid() != self._process:  # in a forked process the lock may be held forever
            raise RuntimeError(f"this reporter belongs to process {self._process}: create one after the fork")
        if self._closed:
            raise RuntimeError("this reporter was shut down")
        return True

    def _take_snapshot(self) -> Snapshot | None:
        with self._lock:
            if self._closed:
                return None
            self._flush()
            first: list[Event] = [AllBlocksCleared()]
            return Snapshot(self.publisher.last_seq, self._time(), chain([first], self._held.snapshot()))

    def _run(self) -> None:
        """Send reports that waited longer than MAX_DELAY_S for a step."""
        while not self._ended.wait(MAX_DELAY_S / 2):
            with self._lock:
                if self._events and not self._closed and time.monotonic() - self._oldest_at > MAX_DELAY_S / 2:
                    self._flush()
