"""The load that this router has in flight on each target: reserved with the choice, released exactly once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from router.fleet.engine_metrics import NOTHING_KNOWN, EngineView
from router.load.peer_load import NOTHING, PeerTargetLoad
from router.load.target_limit import TargetLimit, late_seconds, peak_tokens

# The seconds for which a target has no memory for requests that need as much as one that did not fit, or more, unless
# its load changes.
_REFUSED_SECONDS = 0.25
# The share of the time in which a paced target computes prompts. With a larger share, a queue ends sooner, but each
# token of an answer takes longer: 1 / (1 - share) times as long as without prompts. By `make bench-overload`, 0.65 lets
# the highest priority wait longer at a load of 0.9. With 0.75, most answers of a single worker are slow at a load of 2.
PREFILL_SHARE = 0.68
# The multiple of its expected length up to which an answer is assumed to have grown.
_LONGEST = 4
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
    - `unshared`: the part of `context` that is not in `shared`.
    - `shared`: the tokens of their known prompts, of which each shared prefix counts once (`RunningPrompts`).
    - `outputs`: the expected tokens of their answers.
    - `limit`: what its engine can run at once.
    - `running`: the requests.
    - `paced_until`: the time until which a paced target receives no further prompt.
    - `peers_prefill`: `peers.prefill`, as it was read last.
    - `refused`: the prompt and the output that do not fit, and until when that is known.
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
    unshared: int = 0
    shared: int = 0
    outputs: int = 0
    slot: int = field(default=0, compare=False)
    journal: LoadJournal | None = field(default=None, compare=False, repr=False)
    worker: str = field(default="", compare=False)
    dp_rank: int = field(default=0, compare=False)
    on_first_byte: list[Callable[[], None]] = field(default_factory=list, compare=False, repr=False)
    on_ended: list[Callable[[], None]] = field(default_factory=list, compare=False, repr=False)
    on_change: list[Callable[[str, int], None]] = field(default_factory=list, compare=False, repr=False)
    clock: Callable[[], float] = field(default=time.monotonic, compare=False, repr=False)
    prefills: dict[ReservedLoad, float] = field(default_factory=dict, compare=False, repr=False)
    head_since: float = field(default=0.0, compare=False, repr=False)
    prompts: int = field(default=0, compare=False, repr=False)
    peers: PeerTargetLoad = field(default_factory=PeerTargetLoad, compare=False, repr=False)
    engine: EngineView = field(default=NOTHING_KNOWN, compare=False, repr=False)
    limit: TargetLimit = field(default_factory=TargetLimit, compare=False, repr=False)
    running: dict[ReservedLoad, None] = field(default_factory=dict, compare=False, repr=False)
    paced_until: float = field(default=0.0, compare=False, repr=False)
    peers_prefill: int = field(default=0, compare=False, repr=False)
    refused: tuple[float, int, int] | None = field(default=None, compare=False, repr=False)

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
    def prefill(self) -> int:
        """The predicted milliseconds of this router's prefills without a first byte."""
        return int(1000 * sum(self.prefills.values()))

    @property
    def held(self) -> int:
        """The tokens of KV memory that this router's prompts need, and all requests of other routers."""
        return self.unshared + self.shared + self.peers.memory

    @property
    def hides_limit(self) -> bool:
        """True if its engine reports neither its queue nor its slots, so that only latency shows its limit."""
        return self.engine.queue is None and self.limit.slots is None

    @property
    def queues(self) -> bool:
        """True if several requests wait in its engine, as far as first bytes or its metrics show it."""
        if self.hides_limit and self.streamed:
            oldest = next(iter(self.prefills))
            if oldest.streamed and (oldest.is_late or len(self.prefills) >= self.limit.unanswered):
                return True
        if self.pending == self.streamed and self.peers.pending == self.peers.streamed:
            return False
        return (self.engine.queue or 0) - self.engine.waiting > 1

    def is_paced(self, now: float) -> bool:
        """Return whether running answers need the time until `paced_until`, which a further prompt would take."""
        return now < self.paced_until and self.requests + self.peers.requests > 1

    def fits(self, requests: float, prompt: int, output: int) -> bool:
        """Return whether one more request can run beside a number of others.

        - `prompt`, `output`: the tokens of memory that its prompt and its answer need. Both are 0 if it may wait in the
          engine for memory, as the first one.
        """
        limit = self.limit
        if not limit.has_slot(requests) or self.queues:
            return False
        if limit.memory is None or self.held + self.outputs + prompt + output <= limit.memory:
            return True
        if self.held + prompt > limit.memory:
            return False
        now, refused = self.clock(), self.refused
        if refused is not None and now < refused[0] and prompt >= refused[1] and output >= refused[2]:
            return False
        if self._peak((float(output), float(prompt))) + self.peers.memory <= limit.memory:
            return True
        self.refused = now + _REFUSED_SECONDS, prompt, output
        return False

    @property
    def memory(self) -> int:
        """The tokens of KV memory that this router's requests will need at once."""
        if self.limit.memory is None:
            return self.context
        return self._peak()

    def _peak(self, *further: tuple[float, float]) -> int:
        """Return the tokens that this router's requests will need at once. `further`: requests beside them."""
        share = (self.unshared + self.shared) / self.context if self.context else 1.0
        now, running = self.clock(), list(further)
        for each in self.running:
            running.append(each.expected(now, share))
        return peak_tokens(running)

    @property
    def under_way(self) -> tuple[int, float, float]:
        """The oldest prefill: its part of `streamed`, the seconds since it became the oldest, its predicted seconds."""
        oldest = next(iter(self.prefills), None)
        if oldest is None:
            return 0, 0.0, 0.0
        return oldest.streamed, self.clock() - self.head_since, self.prefills[oldest]

    def changed(self) -> None:
        """Notify the journal and the listeners of a change."""
        self.refused = None
        if self.journal is not None:
            self.journal.add(self.slot)
        for on_change in self.on_change:
            on_change(self.worker, self.dp_rank)


class ReservedLoad:
    """One request's share of a target's load: its uncached tokens until the first byte, its tokens until the end.

    - `streamed`: its uncached tokens, if its first byte shows the end of the prefill; otherwise 0.
    """

    __slots__ = (
        "_begun",
        "_context",
        "_held",
        "_late_at",
        "_load",
        "_loads",
        "_number",
        "_output",
        "_pending",
        "_unshared",
        "streamed",
    )

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
        output: float = 0.0,
    ) -> None:
        """Reserve a share of a load.

        - `uncached`: the tokens that the target has to compute.
        - `prefill_seconds`: the predicted seconds of the prefill; 0 if rates are not known.
        - `loads`: whether the target loads a part of the prompt from a pool or a peer.
        - `now`: the load's clock, if it was just read. The same holds for all methods.
        - `output`: the expected tokens of its answer.
        """
        self._load = load
        self._pending = uncached
        self.streamed = uncached if streamed else 0
        self._context = context
        self._loads = int(loads)
        self._unshared = context
        self._output = int(output)
        self._held = True
        if now is None:
            now = load.clock()
        # Without a visible first byte, the answer counts from the start.
        self._begun: float | None = None if streamed else now
        if uncached:
            load.prompts += 1
        self._number = load.prompts
        load.requests += 1
        load.pending += uncached
        load.streamed += self.streamed
        load.context += context
        load.unshared += context
        load.outputs += self._output
        load.running[self] = None
        load.loads += self._loads
        if not load.prefills:
            load.head_since = now
        load.prefills[self] = prefill_seconds
        self._late_at = now + late_seconds(sum(load.prefills.values()))
        load.paced_until = now + load.limit.delay * prefill_seconds / PREFILL_SHARE
        load.changed()

    @property
    def backlog(self) -> float:
        """The predicted seconds until all prefills of its target are done, its own included."""
        return self._load.backlog

    @property
    def is_late(self) -> bool:
        """True if its first byte is late, so that it waits in the engine for a place."""
        load = self._load
        return load.hides_limit and load.clock() > self._late_at

    @property
    def is_latest(self) -> bool:
        """True if this router sent no other prompt to the target since."""
        return self._load.prompts == self._number

    def counts_elsewhere(self, tokens: int) -> None:
        """Take tokens of its prompt out of `unshared`, because they count in `shared` until its release."""
        if self._held:
            self._unshared -= tokens
            self._load.unshared -= tokens

    def expected(self, now: float, share: float) -> tuple[float, float]:
        """Return the tokens that are left of its answer, and those that it holds. `share`: of its prompt, that counts.

        An answer that exceeds its expected length is expected to generate a quarter of it again.
        """
        seconds = self._load.limit.token_seconds
        done = 0.0
        if seconds and self._begun is not None:
            done = min((now - self._begun) / seconds, float(_LONGEST * self._output))
        return max(self._output - done, self._output / 4), share * self._context + done

    def answered(self, output: int, seconds: float) -> None:
        """Learn the speed of the target's answers from one of `output` tokens, generated in a number of seconds."""
        if output > 1:
            self._load.limit.generated(seconds / (output - 1))

    def first_byte(self, now: float | None = None) -> None:
        """Release the share of the prefill, because it is done."""
        load = self._load
        if self in load.prefills:
            load.limit.first_byte(late=self.streamed > 0 and self.is_late)
            self._begun = load.clock() if now is None else now
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
        load.unshared -= self._unshared
        load.outputs -= self._output
        del load.running[self]
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


def _no_sessions(_: str, __: int) -> float:
    return 0.0


class LoadTable:
    """The load of every DP rank of every worker, for all models together.

    - `peers_of`: returns the load of other routers on a DP rank.
    - `live_of`: returns the tokens that live sessions need on a DP rank.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.on_first_byte: list[Callable[[], None]] = []
        self.on_ended: list[Callable[[], None]] = []
        self.on_change: list[Callable[[str, int], None]] = []
        self.journal = LoadJournal()
        self.peers_of: Callable[[str, int], PeerTargetLoad] = _no_peers
        self.live_of: Callable[[str, int], float] = _no_sessions
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
            load.peers = peers = self.peers_of(worker, dp_rank)
            if peers.prefill > load.peers_prefill:
                load.paced_until = max(
                    load.paced_until, self._clock() + 0.001 * (load.prefill + peers.prefill) / PREFILL_SHARE
                )
            load.peers_prefill = peers.prefill
            self.journal.add(load.slot)

    def scraped(self, worker: str, dp_rank: int, engine: EngineView, capacity: int | None = None) -> None:
        """Set the load that the engine of a DP rank reports. `capacity`: the tokens that its KV cache holds."""
        load = self._loads.get((worker, dp_rank))
        if load is not None:
            load.engine = engine
            load.limit.delayed(load.queues)
            load.limit.read(engine, capacity, load.held + load.outputs, self._clock())
            self.journal.add(load.slot)

    def in_use(self) -> list[tuple[str, int]]:
        """Return the DP ranks that have requests in flight, or that live sessions need."""
        return [rank for rank, load in self._loads.items() if load.requests or self.live_of(*rank)]

    def forget(self, worker: str) -> None:
        """Forget a worker that was removed. Its requests in flight may still be released."""
        for known in [known for known in self._loads if known[0] == worker]:
            self._loads.pop(known).on_change = []
