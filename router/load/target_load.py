"""The load that this router has in flight on each target: reserved with the choice, released exactly once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from router.fleet.engine_metrics import NOTHING_KNOWN, EngineView
from router.load.peer_load import NOTHING, PeerTargetLoad

# Maximum number of remembered changes. A reader that is further behind reads all loads again.
_JOURNAL_LENGTH = 8192


class LoadJournal:
    """The changes of a table's loads, by slot, so that readers of thousands of loads read only the changed ones.

    - `end`: the number of all changes so far.
    - `slots`: the slots of the last of them.
    """

    def __init__(self) -> None:
        self.slots: list[int] = []
        self.end = 0

    def add(self, slot: int) -> None:
        """Add a change of the load in a slot."""
        if len(self.slots) >= _JOURNAL_LENGTH:
            self.slots.clear()
        self.slots.append(slot)
        self.end += 1


@dataclass(slots=True)
class TargetLoad:
    """The load on a DP rank: the requests that this router has in flight there, and beside them those of others.

    - `pending`: the uncached prompt tokens of requests without a first byte.
    - `context`: the tokens of all requests in flight.
    - `loads`: the requests without a first byte that load tokens from a pool or a peer.
    - `streamed`: the part of `pending` with streamed answers. Only their first byte shows the end of the prefill.
    - `slot`: the number of this load in its table and its `journal`, which records every change.
    - `prefills`: the requests without a first byte, the oldest first, with their predicted seconds.
    - `head_since`: when the oldest prefill became the oldest, by `clock`.
    - `prompts`: the number of prompts sent to it so far that it computes.
    - `peers`: the load of other routers. `LoadTable.peers_changed` sets it.
    - `engine`: the load beyond all routers' requests, by the last scrape. `LoadView` and `LoadTable.scraped` set it.
    """

    requests: int = 0
    pending: int = 0
    context: int = 0
    loads: int = 0
    streamed: int = 0
    slot: int = field(default=0, compare=False)
    journal: LoadJournal | None = field(default=None, compare=False, repr=False)
    worker: str = field(default="", compare=False)
    dp_rank: int = field(default=0, compare=False)
    on_first_byte: list[Callable[[], None]] = field(default_factory=list, compare=False, repr=False)
    on_ended: list[Callable[[], None]] = field(default_factory=list, compare=False, repr=False)
    on_change: list[Callable[[str, int], None]] = field(default_factory=list, compare=False, repr=False)
    clock: Callable[[], float] = field(default=time.monotonic, compare=False, repr=False)
    prefills: dict[Reservation, float] = field(default_factory=dict, compare=False, repr=False)
    head_since: float = field(default=0.0, compare=False, repr=False)
    prompts: int = field(default=0, compare=False, repr=False)
    peers: PeerTargetLoad = field(default_factory=PeerTargetLoad, compare=False, repr=False)
    engine: EngineView = field(default=NOTHING_KNOWN, compare=False, repr=False)

    @property
    def waiting(self) -> int:
        """The number of requests without a first byte."""
        return len(self.prefills)

    @property
    def backlog(self) -> float:
        """The predicted seconds until all prefills are done."""
        if not self.prefills:
            return 0.0
        return max(sum(self.prefills.values()) - (self.clock() - self.head_since), 0.0)

    @property
    def under_way(self) -> tuple[int, float, float]:
        """The oldest prefill: its part of `streamed`, the seconds since it became the oldest, its predicted seconds."""
        oldest = next(iter(self.prefills), None)
        if oldest is None:
            return 0, 0.0, 0.0
        return oldest.streamed, self.clock() - self.head_since, self.prefills[oldest]

    def changed(self) -> None:
        """Notify the journal and the listeners of a change."""
        if self.journal is not None:
            self.journal.add(self.slot)
        for on_change in self.on_change:
            on_change(self.worker, self.dp_rank)


class Reservation:
    """One request's share of a target's load: its uncached tokens until the first byte, its tokens until the end.

    - `streamed`: its uncached tokens, if its first byte shows the end of the prefill; otherwise 0.
    """

    __slots__ = ("_context", "_held", "_load", "_loads", "_number", "_pending", "streamed")

    def __init__(
        self,
        load: TargetLoad,
        uncached: int,
        context: int,
        prefill_seconds: float = 0.0,
        *,
        streamed: bool = False,
        loads: bool = False,
        now: float | None = None,
    ) -> None:
        """Reserve a share of a load.

        - `uncached`: the tokens that the target has to compute.
        - `prefill_seconds`: the predicted seconds of the prefill; 0 if rates are not known.
        - `loads`: whether the target loads a part of the prompt from a pool or a peer.
        - `now`: the load's clock, if it was just read. The same holds for all methods.
        """
        self._load = load
        self._pending = uncached
        self.streamed = uncached if streamed else 0
        self._context = context
        self._loads = int(loads)
        self._held = True
        if uncached:
            load.prompts += 1
        self._number = load.prompts
        load.requests += 1
        load.pending += uncached
        load.streamed += self.streamed
        load.context += context
        load.loads += self._loads
        if not load.prefills:
            load.head_since = load.clock() if now is None else now
        load.prefills[self] = prefill_seconds
        load.changed()

    @property
    def backlog(self) -> float:
        """The predicted seconds until all prefills of its target are done, its own included."""
        return self._load.backlog

    @property
    def is_latest(self) -> bool:
        """True if this router sent no other prompt to the target since."""
        return self._load.prompts == self._number

    def first_byte(self, now: float | None = None) -> None:
        """Release the share of the prefill, because it is done."""
        load = self._load
        if self in load.prefills:
            self._end_prefill(load, now)
            load.changed()
            for on_first_byte in load.on_first_byte:
                on_first_byte()

    def release(self, now: float | None = None) -> None:
        """Release the whole share, because the request ended. Only the first call counts."""
        if not self._held:
            return
        self._held = False
        load = self._load
        if self in load.prefills:
            self._end_prefill(load, now)
        load.requests -= 1
        load.context -= self._context
        load.changed()
        for on_ended in load.on_ended:
            on_ended()

    def _end_prefill(self, load: TargetLoad, now: float | None) -> None:
        prefills = load.prefills
        load.pending -= self._pending
        load.streamed -= self.streamed
        load.loads -= self._loads
        was_head = next(iter(prefills)) is self
        del prefills[self]
        if was_head and prefills:
            load.head_since = load.clock() if now is None else now


def _no_peers(_: str, __: int) -> PeerTargetLoad:
    return NOTHING


class LoadTable:
    """The load of every DP rank of every worker, for all models together.

    - `peers_of`: returns the load of other routers on a DP rank.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.on_first_byte: list[Callable[[], None]] = []
        self.on_ended: list[Callable[[], None]] = []
        self.on_change: list[Callable[[str, int], None]] = []
        self.journal = LoadJournal()
        self.peers_of: Callable[[str, int], PeerTargetLoad] = _no_peers
        self._slots = 0
        self._loads: dict[tuple[str, int], TargetLoad] = {}

    def of(self, worker: str, dp_rank: int) -> TargetLoad:
        """Return the load of a DP rank, which is added if it is new."""
        load = self._loads.get((worker, dp_rank))
        if load is None:
            self._slots += 1
            load = self._loads[worker, dp_rank] = TargetLoad(
                slot=self._slots,
                journal=self.journal,
                worker=worker,
                dp_rank=dp_rank,
                on_first_byte=self.on_first_byte,
                on_ended=self.on_ended,
                on_change=self.on_change,
                clock=self._clock,
                peers=self.peers_of(worker, dp_rank),
            )
        return load

    def peers_changed(self, worker: str, dp_rank: int) -> None:
        """Read the load of other routers on a DP rank, because it changed."""
        load = self._loads.get((worker, dp_rank))
        if load is not None:
            load.peers = self.peers_of(worker, dp_rank)
            self.journal.add(load.slot)

    def scraped(self, worker: str, dp_rank: int, engine: EngineView) -> None:
        """Set the load that the engine of a DP rank reports."""
        load = self._loads.get((worker, dp_rank))
        if load is not None:
            load.engine = engine
            self.journal.add(load.slot)

    def in_flight(self) -> list[tuple[str, int]]:
        """Return the DP ranks that have requests in flight."""
        return [rank for rank, load in self._loads.items() if load.requests]

    def forget(self, worker: str) -> None:
        """Forget a worker that was removed. Its requests in flight may still be released."""
        for known in [known for known in self._loads if known[0] == worker]:
            self._loads.pop(known).on_change = []
