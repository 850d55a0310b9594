"""The order of one event stream: gaps, replays and restarts. A pure state machine; the session does all I/O.

A publisher numbers its batches from 0, and starts again at 0 after a restart. Live and replayed batches may get lost.
Some publishers number from 1: their replays begin there, or their target's answers show that nothing is missing.
The sequence returns every batch once and in order, or records that some are missing:

    connecting ──first contact──▶ replaying ──caught up──▶ live ──gap, idle, reconnected──▶ replaying
                                      └──replay has no more──▶ lost (live again, but batches are missing)

If a replay does not return the missing batches, the sequence asks the publisher for a snapshot of its whole cache. Few
publishers have one; the others answer at once that they have none.

One file, because it is one state machine: an action for every event in every state.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import NamedTuple

from sortedcontainers import SortedDict

from kvevents.batches import batch_time
from kvevents.frames import SNAPSHOT_START, StreamFrame


class StreamState(StrEnum):
    """State of a stream.

    - LOST: live batches are read, but batches are missing that no replay returned.
    - STALE: the publisher is disconnected, or the worker does not answer, so the index may be out of date.
    """

    CONNECTING = "connecting"
    REPLAYING = "replaying"
    LIVE = "live"
    LOST = "lost"
    STALE = "stale"

    @property
    def waits(self) -> bool:
        """True if the stream still waits for batches that its publisher sent before."""
        return self in (StreamState.CONNECTING, StreamState.REPLAYING)


class Apply(NamedTuple):
    """Action: apply this batch now."""

    frame: StreamFrame


@dataclass(frozen=True, slots=True)
class Clear:
    """Action: remove all blocks of the target, because earlier batches are no longer valid."""


@dataclass(frozen=True, slots=True)
class AskReplay:
    """Action: ask the publisher for every batch from `start` on. SNAPSHOT_START asks for a snapshot."""

    start: int


Action = Apply | Clear | AskReplay


@dataclass(frozen=True, slots=True)
class SequenceSettings:
    """Timeouts and limits of a sequence.

    - `replay_rounds`: number of further replays for the same gap, if none returns a new batch.
    - `idle_check`: seconds without a batch after which a stream is checked for lost batches at its end.
    - `pending_batches`, `pending_bytes`: maximum number and bytes of batches that wait for a replay.
    """

    replay_timeout: float = 1.0
    replay_rounds: int = 3
    idle_check: float = 30.0
    pending_batches: int = 20_000
    pending_bytes: int = 64 << 20
    snapshot_interval: float = 5.0


@dataclass(slots=True)
class SequenceCounters:
    """Counters of a stream since its registration. `idle_checks`, the replays that check an idle stream, are apart."""

    batches: int = 0
    duplicates: int = 0
    gaps: int = 0
    lost_batches: int = 0
    replays: int = 0
    idle_checks: int = 0
    replays_unanswered: int = 0
    restarts: int = 0
    resyncs: int = 0
    snapshots: int = 0


class _Pending:
    """Batches that wait for an earlier one, by sequence number. `bytes` is the size of their payloads."""

    def __init__(self) -> None:
        self._frames: SortedDict[int, StreamFrame] = SortedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._frames)

    def __contains__(self, seq: int) -> bool:
        return seq in self._frames

    @property
    def first(self) -> int:
        """Lowest sequence number."""
        return int(self._frames.peekitem(0)[0])

    @property
    def last(self) -> int:
        """Highest sequence number."""
        return int(self._frames.peekitem()[0])

    def add(self, frame: StreamFrame) -> None:
        """Add a batch, unless its number is there already."""
        if self._frames.setdefault(frame.seq, frame) is frame:
            self.bytes += len(frame.payload)

    def pop(self, seq: int) -> StreamFrame | None:
        """Remove and return the batch of a number; None if it is not there."""
        frame: StreamFrame | None = self._frames.pop(seq, None)
        if frame is not None:
            self.bytes -= len(frame.payload)
        return frame

    def clear(self) -> None:
        """Remove all batches."""
        self._frames.clear()
        self.bytes = 0


@dataclass(slots=True)
class _Replay:
    """State of a running replay.

    - `known`: the batch that the replay was asked to start from; None for a replay from the beginning.
    - `heard`: whether this round had any message.
    - `first`: the number of this round's first batch; None without one.
    - `progress`: whether this round had a new batch.
    - `parts`: number of applied parts of the snapshot.
    """

    known: StreamFrame | None
    heard_at: float
    rounds_left: int
    heard: bool = False
    first: int | None = None
    progress: bool = False
    snapshot: bool = False
    parts: int = 0


# Maximum of the counter of lost batches, because a publisher may skip any number of sequence numbers.
_MOST_LOST = 2**53

# Number of replays from the beginning that begin at batch 1, after which batch 0 does not exist. One may have lost it.
_REPLAYS_FROM_ONE = 2

# Seconds from a connection to the first check for lost batches, which are most likely then. Each further delay doubles.
_FIRST_CHECK = 1.0


class StreamSequence:
    """State machine of one stream. The methods return actions in order; times are monotonic seconds."""

    def __init__(self, can_replay: bool, settings: SequenceSettings | None = None) -> None:
        self.state = StreamState.CONNECTING
        self.counters = SequenceCounters()
        self.last_seq: int | None = None
        self.confirmed_at: float | None = None
        self._settings = settings or SequenceSettings()
        self._can_replay = can_replay
        self._replay_answers = True
        self._replay: _Replay | None = None
        self._unended = 0  # replay requests without an end marker yet; requests wait until the publisher connects
        self._last_frame: StreamFrame | None = None
        self._unconfirmed: StreamFrame | None = (
            None  # last batch before a reconnection, until a replay shows that the publisher did not restart
        )
        self._last_live_seq: int | None = None
        self._heard: StreamFrame | None = (
            None  # last live batch since the connection: the publisher has sent all up to it
        )
        self._pending = _Pending()
        self._missing: int | None = None  # last missing batch that no replay returned
        self._first = 0  # number of the publisher's first batch
        self._replays_from_one = 0
        self._check_after = _FIRST_CHECK
        self._check_at = 0.0
        self._snapshot_at = 0.0  # earliest time of the next snapshot

    @property
    def pending(self) -> int:
        """Number of batches that wait for an earlier one."""
        return len(self._pending)

    @property
    def last_frame(self) -> StreamFrame | None:
        """The last batch that was applied or skipped."""
        return self._last_frame

    @property
    def complete(self) -> bool:
        """True if no batch before the last one is known to be missing."""
        return self._missing is None and self._unconfirmed in (None, self._last_frame)

    @property
    def first_missing(self) -> bool:
        """True if batch 0 is missing and no other, so that the publisher may number its batches from 1."""
        return self._missing == 0

    def resume(self, last: StreamFrame, complete: bool = True) -> None:
        """Continue after a batch that a snapshot file has. The first contact checks that the publisher still has it."""
        self.last_seq = last.seq
        self._last_frame = last
        self._missing = None if complete else last.seq

    def on_cleared(self, seq: int) -> None:
        """Handle a batch that cleared the cache, which makes earlier missing batches irrelevant."""
        if self._missing is not None and self._missing < seq:
            self._missing = None
            if self.state is StreamState.LOST:
                self.state = StreamState.LIVE

    def on_agreement(self) -> None:
        """Handle that the target holds what its batches say. If only batch 0 is missing, it does not exist."""
        if self.first_missing:
            self._missing, self._first = None, 1
            if self.state is StreamState.LOST:
                self.state = StreamState.LIVE

    def on_resync(self, now: float) -> list[Action]:
        """Clear the target and ask for every batch again, if the publisher replays."""
        if not self._can_replay or self.state is StreamState.CONNECTING:
            return []
        self.counters.resyncs += 1
        self._heard = (
            self._heard or self._last_frame
        )  # the publisher has sent all up to it, whatever the replay returns
        self._begin_again()
        return [Clear(), *self._ask(now)]

    def on_connected(self, now: float) -> list[Action]:
        """Handle a connection of the live socket. Without replays, a later one may be that of a new process."""
        self._check_after = _FIRST_CHECK
        self._heard = None
        self._snapshot_at = 0.0
        if self._can_replay:
            actions = self._drop_snapshot()
            self._unconfirmed = self._unconfirmed or self._last_frame
            self._pending.clear()  # they may be from before a restart; if not, the replay has them again
            return actions + self._ask(now)
        cleared: list[Action] = [] if self.state is StreamState.CONNECTING else self._restart()
        self._settle(now)
        return cleared

    @property
    def expected(self) -> int | None:
        """Sequence number of the next live batch that `takes` accepts; None while a replay or a gap is open."""
        seq = self._next_seq
        return seq if self._goes_on(seq) else None

    def takes(self, first: int, last: StreamFrame, now: float) -> bool:
        """Accept live batches if they are the next ones and no replay runs. If not, pass each batch to `on_live`."""
        if not self._goes_on(first):
            return False
        self._check_at = now + self._check_after
        self._last_live_seq = self.last_seq = last.seq
        self._heard = self._last_frame = last
        self.counters.batches += last.seq - first + 1
        if self.state is StreamState.LIVE and self.complete:
            self.confirmed_at = now
        return True

    def on_live(self, frame: StreamFrame, now: float) -> list[Action]:
        """Handle a batch of the live socket."""
        if self.takes(frame.seq, frame, now):
            return [Apply(frame)]
        self._first = min(self._first, frame.seq)
        self._check_at = now + self._check_after
        actions: list[Action] = []
        self._heard = frame
        before, self._last_live_seq = self._last_live_seq, frame.seq
        if before is not None and frame.seq <= before:
            actions += self._restart()
            self._last_live_seq = frame.seq
        elif self.last_seq is not None and frame.seq <= self.last_seq:
            if not _newer(frame, self._last_frame):  # the replay was faster than the live socket
                self.counters.duplicates += 1
                return actions
            actions += self._restart()
            self._last_live_seq = frame.seq
        self._pending.add(frame)
        actions += self._drain()
        if not self._pending and self.complete and self.state is StreamState.LIVE:
            self.confirmed_at = now
        if self._replay is None:
            if self._pending:
                self.counters.gaps += 1
                if self._can_replay and self._replay_answers:
                    actions += self._ask(now)
                else:
                    actions += self._give_up(now)
            elif self.state is StreamState.CONNECTING:
                self._settle(now)
        elif self._too_much_pending:
            actions += self._give_up(now)
        return actions

    def on_replay(self, frame: StreamFrame | None, now: float) -> list[Action]:
        """Handle a replayed batch, or the end of a replay (None)."""
        self._replay_answers = True
        if frame is None:
            self._unended = max(self._unended - 1, 0)
        replay = self._replay
        if replay is None:
            return []  # it belongs to a replay that was cancelled
        replay.heard_at = now
        replay.heard = True
        if frame is None:
            return [] if self._unended else self._end_of_round(replay, now, ended=True)
        if replay.snapshot:  # the batch belongs to a replay that was cancelled
            self._pending.add(frame)
            return []
        if replay.first is None:
            replay.first = frame.seq
        self._first = min(self._first, frame.seq)
        if replay.known is not None and frame.seq == replay.known.seq:
            if _newer(frame, replay.known):
                return self._restart() + self._ask(now)
            self._unconfirmed = None
        if (self.last_seq is not None and frame.seq <= self.last_seq) or frame.seq in self._pending:
            return []
        replay.progress |= (
            not self._pending or frame.seq < self._pending.last
        )  # a batch behind all others closes no gap
        self._pending.add(frame)
        actions = self._drain()
        if self._too_much_pending:
            actions += self._give_up(now)
        return actions

    def on_snapshot(self, part: int, frame: StreamFrame, now: float) -> list[Action]:
        """Handle a part of a snapshot; the last one is empty. `frame.seq` is the last batch that it includes."""
        replay = self._replay
        if replay is None or not replay.snapshot or part != replay.parts:
            return []  # the part belongs to a snapshot that was cancelled, or an earlier part is missing
        replay.heard_at = now
        replay.heard = True
        if frame.payload:
            replay.parts += 1
            replay.known = frame
            return [Apply(frame)]
        self.counters.snapshots += 1
        self.last_seq, self._last_frame = frame.seq, replay.known
        self._unconfirmed = self._missing = self._replay = None
        while self._pending and self._pending.first <= frame.seq:
            self._pending.pop(self._pending.first)
        actions = self._drain()
        if self._behind:
            return actions + self._ask(now)
        self._settle(now)
        self.confirmed_at = now
        return actions

    @property
    def due(self) -> float:
        """Time from which `on_tick` has something to do, in the current state. Each accepted live batch delays it."""
        if self._replay is not None:
            return self._replay.heard_at + self._settings.replay_timeout
        if self._missing is None or not (self._can_replay and self._replay_answers):
            return self._idle_due
        return min(self._idle_due, self._snapshot_at)

    @property
    def _idle_due(self) -> float:
        return self._check_at if self._can_replay and self.state is not StreamState.CONNECTING else inf

    def on_tick(self, now: float) -> list[Action]:
        """Handle the passing of time: end an overdue replay, or check an idle stream."""
        if now < self.due:
            return []
        replay = self._replay
        if replay is not None:
            if replay.heard:
                self._unended = 0
                return self._end_of_round(replay, now, ended=False)
            if replay.snapshot:
                self._unended = 0
                return self._no_snapshot(replay, now)
            self.counters.replays_unanswered += 1
            self._replay_answers = False
            return self._give_up(now)
        if now >= self._idle_due:
            self._check_after = min(2 * self._check_after, self._settings.idle_check)
            return self._ask(now, idle=True)
        return self._ask_snapshot(now)

    def _may_ask_snapshot(self, now: float) -> bool:
        return self._can_replay and self._replay_answers and now >= self._snapshot_at

    def _ask_snapshot(self, now: float, rounds_left: int = 0) -> list[Action]:
        """Ask for a snapshot. If the publisher has no snapshot, `rounds_left` further replays are possible."""
        self._snapshot_at = now + self._settings.snapshot_interval
        if self._behind or self.state is StreamState.CONNECTING:
            self.state = StreamState.REPLAYING
        elif self._missing is not None:
            self.state = StreamState.LOST
        self._replay = _Replay(None, now, rounds_left, snapshot=True)
        self._unended += 1
        return [AskReplay(SNAPSHOT_START)]

    def _drop_snapshot(self) -> list[Action]:
        """Clear the blocks of a snapshot of which only a part was applied."""
        if self._replay is None or not self._replay.parts:
            return []
        self._begin_again()
        return [Clear()]

    def _ask(self, now: float, rounds_left: int | None = None, idle: bool = False) -> list[Action]:
        """Ask for a replay from the last batch on. Its repetition shows whether the publisher restarted."""
        if self._pending or self.state is StreamState.CONNECTING:
            self.state = StreamState.REPLAYING
        known = self._unconfirmed or self._last_frame
        rounds_left = self._settings.replay_rounds if rounds_left is None else rounds_left
        self._replay = _Replay(known, now, rounds_left)
        self._unended += 1
        self.counters.replays += not idle
        self.counters.idle_checks += idle
        return [AskReplay(known.seq if known else 0)]

    def _end_of_round(self, replay: _Replay, now: float, ended: bool) -> list[Action]:
        """Handle the end or the timeout of a replay. Ask again while batches are missing and rounds are left."""
        if replay.snapshot:
            return self._no_snapshot(replay, now)
        actions = self._begin_at_one(replay)
        rounds_left = self._settings.replay_rounds if replay.progress else replay.rounds_left - 1
        ignored = replay.known is not None and replay.first is None
        if ended and self._behind and self._unconfirmed is None and self._may_ask_snapshot(now):
            return actions + self._ask_snapshot(now, rounds_left)
        if rounds_left and (self._behind or self._unconfirmed or ignored):
            return actions + self._ask(now, rounds_left)
        reconnected, self._unconfirmed = self._unconfirmed is not None, None
        if ignored and reconnected:
            # The replay lacks even the last batch: the publisher keeps none, or has restarted and not reached it yet.
            return self._restart() + self._ask(now)
        if reconnected:
            self._missing = self.last_seq  # the replay has no last batch, so its batches may be from after a restart
        if (self._behind or self._missing is not None) and self._may_ask_snapshot(now):
            return actions + self._ask_snapshot(now)
        actions += self._give_up(now)
        if ended and not ignored and self.complete:
            self.confirmed_at = now
        return actions

    def _begin_at_one(self, replay: _Replay) -> list[Action]:
        """Apply the batches from 1 on after replays from the beginning that began there."""
        self._replays_from_one += replay.known is None and replay.first == 1
        if self.last_seq is not None or self._replays_from_one < _REPLAYS_FROM_ONE:
            return []
        self._first = 1
        return self._drain()

    def _no_snapshot(self, replay: _Replay, now: float) -> list[Action]:
        """Handle the absence of a snapshot, or one that broke off."""
        self._snapshot_at = now + (self._settings.snapshot_interval if replay.parts else self._settings.idle_check)
        if replay.rounds_left and not replay.parts and self._behind:
            return self._ask(now, replay.rounds_left)
        return self._give_up(now)

    def _give_up(self, now: float) -> list[Action]:
        """Skip the missing batches, and continue behind them."""
        broken = self._replay is not None and self._replay.parts > 0
        actions: list[Action] = [Clear()] if broken else []  # a part of a snapshot is not a valid state
        self._replay = None
        while self._pending:
            self._skip_to(self._pending.first)
            actions += self._drain()
        if self._heard is not None and self._behind:
            self._skip_to(self._heard.seq + 1)
            self._last_frame = self._heard
        if broken:
            self._missing = self.last_seq
        self._settle(now)
        return actions

    def _skip_to(self, seq: int) -> None:
        self.counters.lost_batches = min(self.counters.lost_batches + seq - self._next_seq, _MOST_LOST)
        self._missing = self.last_seq = seq - 1

    def _settle(self, now: float) -> None:
        self._replay = None
        self.state = StreamState.LIVE if self._missing is None else StreamState.LOST
        self._check_at = now + self._check_after

    def _restart(self) -> list[Action]:
        """Handle a restart of the publisher, which numbers its batches from 0 again."""
        known = self.last_seq is not None or (self._replay is not None and self._replay.parts > 0)
        self.counters.restarts += known
        self._begin_again()
        return [Clear()] if known else []

    def _begin_again(self) -> None:
        self.state = StreamState.CONNECTING
        self.last_seq = None
        self._last_frame = None
        self._unconfirmed = None
        self._last_live_seq = None
        self._pending.clear()
        self._replay = None
        self._missing = None
        self._replays_from_one = 0
        if self._can_replay:
            self._first = 0

    def _goes_on(self, seq: int) -> bool:
        """Return whether a live batch of this number is the next one, and no replay or gap is open."""
        return (
            seq == self._next_seq
            and (self._last_live_seq is None or self._last_live_seq < seq)
            and self._replay is None
            and self.state is not StreamState.CONNECTING
            and not self._pending
        )

    def _record(self, frame: StreamFrame) -> None:
        self.last_seq = frame.seq
        self._last_frame = frame
        self.counters.batches += 1

    def _drain(self) -> list[Action]:
        """Apply the pending batches that are next. While a snapshot is awaited, apply none: it may include them."""
        actions: list[Action] = []
        if self._replay is not None and self._replay.snapshot:
            return actions
        while (frame := self._pending.pop(self._next_seq)) is not None:
            self._record(frame)
            actions.append(Apply(frame))
        return actions

    @property
    def _too_much_pending(self) -> bool:
        pending, settings = self._pending, self._settings
        return len(pending) > settings.pending_batches or pending.bytes > settings.pending_bytes

    @property
    def _behind(self) -> bool:
        """True if the publisher has sent batches that are neither applied nor skipped."""
        return bool(self._pending) or (self._heard is not None and self._heard.seq >= self._next_seq)

    @property
    def _next_seq(self) -> int:
        return self._first if self.last_seq is None else self.last_seq + 1


def _newer(frame: StreamFrame, last: StreamFrame | None) -> bool:
    """Return whether a batch is newer than one with a number at least as high, which means a restart."""
    if last is None or frame.payload == last.payload:
        return False
    made, last_made = batch_time(frame.payload), batch_time(last.payload)
    return made is not None and last_made is not None and made > last_made
