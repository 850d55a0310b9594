"""Report what an engine's KV cache holds, in three calls.

    reporter = Reporter.create('{"publisher": "zmq", "endpoint": "tcp://*:5557"}', ParallelRanks(dp=0, tp=0))
    reporter.stored([h1, h2], parent_block_hash=None, token_ids=tokens, block_size=16)
    reporter.removed([h2])
    reporter.cleared()
    reporter.step()  # what was reported since the last step goes out as one batch
    reporter.shutdown()

Each call is bookkeeping in memory: sockets are a thread's business, and when it cannot keep up, the oldest batches are
dropped and counted (see worker/zmq_publisher.py). A subscriber that missed them, or came late, asks for a snapshot.
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
from worker.held_blocks import HeldBlocks
from worker.publisher import EventPublisher, NullEventPublisher, PublisherConfig, Snapshot
from worker.publisher_factory import EventPublisherFactory

logger = logging.getLogger(__name__)

MAX_EVENTS = 256  # in a batch; the next one goes out without waiting for the step
MAX_DELAY_S = 0.1  # that an event waits for its step

_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelRanks:
    """Which part of an engine this process is: its rank in each kind of parallelism.

    The ranks of one DP rank hold the same blocks (shards or layers of them): the first of them reports for all.
    """

    dp: int = 0
    tp: int = 0
    cp: int = 0
    pp: int = 0

    @property
    def reports(self) -> bool:
        return not (self.tp or self.cp or self.pp)


class Reporter:
    """Tells `publisher` what changes in one DP rank's cache. Calls may come from any thread of its process.

    `silent_because` says why nothing is reported, and is None when it is. Counters: `untold`, blocks that the dialect
    has no words for; `unknown_removed`, removals of blocks that were not held; `dropped`, batches that never went out.
    """

    def __init__(self, publisher: EventPublisher, silent_because: str | None = None) -> None:
        if silent_because is None and isinstance(publisher, NullEventPublisher):
            silent_because = "the publisher is the null publisher"
        self.publisher = publisher
        self.silent_because = silent_because
        self.untold = 0
        self._form = publisher.wire_form
        self._dialect = DIALECTS[self._form]
        self._process = os.getpid()
        self._lock = threading.Lock()  # guards all below
        self._held = HeldBlocks()
        self._hidden: set[tuple[int, EngineHash]] = set()  # blocks of a group that the dialect has no words for
        # What an earlier life of this engine told is no longer true.
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
        """The reporter for a process of an engine; `config` as JSON (None: report nothing) is the same for all.

        Raises ValueError, naming the field, for a configuration that cannot be used, and OSError for an endpoint in
        use.
        """
        ranks = ranks or ParallelRanks()
        if isinstance(config, PublisherConfig):
            config = msgspec.json.encode(config).decode()
        publisher = EventPublisherFactory.create(config, ranks.dp, ranks.tp, ranks.cp, ranks.pp)
        because = None
        if not config or PublisherConfig.from_json(config).publisher == "null":
            because = "KV events are switched off"
        elif not ranks.reports:
            because = f"this is TP rank {ranks.tp}, CP rank {ranks.cp}, PP rank {ranks.pp}; 0, 0, 0 reports for all"
        return cls(publisher, because)

    @property
    def publishes(self) -> bool:
        """Whether this rank reports anything."""
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
        """Consecutive full blocks are cached now, or one reference more to them: a block that is stored twice must be
        removed twice.

        `block_hashes` are the engine's own names for them (64-bit ints or bytes); `parent_block_hash` is the block
        before the first one, None at the start of a prompt. `token_ids`: `block_size` for each block, or none for
        blocks known from another medium. `extra_keys`: for each block what else tells it apart, an image's hash, say.
        Raises ValueError, naming the field, and then nothing is reported; RuntimeError after `shutdown` and in a
        process that was forked off the reporter's own.
        """
        if not self._is_open():
            return
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
        """One reference less to each of these blocks; a block whose last one goes is no longer cached there.

        Raises as `stored` does.
        """
        if not self._is_open():
            return
        event = BlockRemoved(list(block_hashes), medium, group_idx)
        self._check_hashes("block_hashes", event.block_hashes)
        with self._lock:
            self._remove(event)

    def cleared(self, medium: str | None = None) -> None:
        """Nothing is cached any longer: in one medium, or at all. Raises RuntimeError after `shutdown`."""
        if not self._is_open():
            return
        with self._lock:
            self._clear(medium)

    def report(self, events: Iterable[Event]) -> None:
        """The same three, for an engine that has its changes as events. Raises as they do; those before the bad one
        are reported."""
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
        """Send what was reported since the last step, as one batch. An engine calls it after each of its steps; one
        that never does is sent for every MAX_DELAY_S."""
        if not self._is_open():
            return
        with self._lock:
            self._flush()

    def shutdown(self) -> None:
        """Send what is left, with a deadline, and end the threads; may be called again."""
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
        raise TypeError("a Reporter belongs to its process: hand the configuration over and create one there")

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
            raise ValueError(f"{field}: a hash takes more than 64 bits") from error

    def _store(self, event: BlockStored) -> None:
        told = self._dialect.expressible(event)
        group = event.group_idx or 0
        if told is None or (self._hidden and (group, event.parent_block_hash) in self._hidden):
            if not self.untold:
                logger.warning("KV events: %s has no words for some blocks, which are not reported", self._form.value)
            self.untold += len(event.block_hashes)
            self._hidden.update((group, block) for block in event.block_hashes)
            return
        self._add(self._held.store(told))

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
        """Unix time that never runs back: readers tell a restart by it."""
        self._last_ts = max(time.time(), self._last_ts)
        return self._last_ts

    def _is_open(self) -> bool:
        """Whether there is anything to do; raises RuntimeError where there no longer can be."""
        if self.silent_because is not None:
            return False
        if os.getpid() != self._process:  # its lock may be held for ever here
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
        """Send what waits too long for a step."""
        while not self._ended.wait(MAX_DELAY_S / 2):
            with self._lock:
                if self._events and not self._closed and time.monotonic() - self._oldest_at > MAX_DELAY_S / 2:
                    self._flush()
