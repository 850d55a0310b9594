"""Keeping one event stream in order: gaps, replays, restarts. Pure bookkeeping; the reader does the talking.

A publisher numbers its batches from 0 and starts again at 0 when it restarts. Live batches may get lost on the way, and
so may replayed ones. What comes out here is every batch once, in order, or the knowledge that some are gone:

    connecting ──first contact──▶ replaying ──caught up──▶ live ──gap, idle, reconnected──▶ replaying
                                      └──nothing more to be had──▶ lost (live again, but batches are missing)

Where a replay does not bring what is missing, the publisher is asked for a snapshot of all it holds. Few have one; the
others say at once that they have not.

One file, because it is one state machine: an action for every event in every state.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import NamedTuple

from sortedcontainers import SortedDict

from kvevents.decode import batch_time
from kvevents.frames import SNAPSHOT_START, StreamFrame


class StreamState(StrEnum):
    """How a stream stands. LOST: reading live, but batches are missing that nobody could replay. STALE: its publisher
    was reached and is gone, or its worker is: what it told may hold no longer."""

    CONNECTING = "connecting"
    REPLAYING = "replaying"
    LIVE = "live"
    LOST = "lost"
    STALE = "stale"

    @property
    def waits(self) -> bool:
        """Whether what its publisher has told so far is not known yet, but will be."""
        return self in (StreamState.CONNECTING, StreamState.REPLAYING)


class Apply(NamedTuple):
    """Apply this batch now."""

    frame: StreamFrame


@dataclass(frozen=True, slots=True)
class Clear:
    """What was read before no longer counts."""


@dataclass(frozen=True, slots=True)
class AskReplay:
    """Ask the publisher for every batch from `start` on, or for a snapshot: from SNAPSHOT_START on."""

    start: int


Action = Apply | Clear | AskReplay


@dataclass(frozen=True, slots=True)
class SequenceSettings:
    """Deadlines in seconds, and bounds.

    `replay_timeout`: silence after which a replay is given up. `replay_rounds`: how often a hole is asked for again
    when nothing new came. `idle_check`: the longest silence of a stream before it is checked for a lost tail.
    `pending_batches`, `pending_bytes`: how many batches may wait for a replay, and what they may take.
    `snapshot_interval`: the shortest time between two snapshots, however much gets lost.
    """

    replay_timeout: float = 1.0
    replay_rounds: int = 3
    idle_check: float = 30.0
    pending_batches: int = 20_000
    pending_bytes: int = 64 << 20
    snapshot_interval: float = 5.0


@dataclass(slots=True)
class SequenceCounters:
    """What happened on a stream since it was registered. `idle_checks`: questions after a silence whether there was
    something to hear; `replays`: all others."""

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
    """Batches that wait for an earlier one, by sequence number, and their bytes."""

    def __init__(self) -> None:
        self._frames: SortedDict[int, StreamFrame] = SortedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._frames)

    def __contains__(self, seq: int) -> bool:
        return seq in self._frames

    @property
    def first(self) -> int:
        """The lowest sequence number."""
        return int(self._frames.peekitem(0)[0])

    @property
    def last(self) -> int:
        """The highest sequence number."""
        return int(self._frames.peekitem()[0])

    def add(self, frame: StreamFrame) -> None:
        """Keep a batch, if there is none of its number."""
        if self._frames.setdefault(frame.seq, frame) is frame:
            self.bytes += len(frame.payload)

    def take(self, seq: int) -> StreamFrame | None:
        """The batch of a number, which waits no longer."""
        frame: StreamFrame | None = self._frames.pop(seq, None)
        if frame is not None:
            self.bytes -= len(frame.payload)
        return frame

    def clear(self) -> None:
        """Forget them."""
        self._frames.clear()
        self.bytes = 0


@dataclass(slots=True)
class _Replay:
    """A replay under way."""

    known: StreamFrame | None  # what it starts from, and must still begin with
    heard_at: float
    rounds_left: int
    heard: bool = False  # anything came at all, in this round
    answered: bool = False  # a batch came, in this round
    progress: bool = False  # something new came, in this round
    snapshot: bool = False  # of all that is held; live batches wait for it
    parts: int = 0  # of the snapshot that were applied


# What a stream says of its numbers may add up to anything; more is not counted.
_MOST_LOST = 2**53

# After a connection a lost tail is most likely, so the first check comes this soon; each further one twice as late.
_FIRST_CHECK = 1.0


class StreamSequence:
    """The order of one stream. Each method returns what to do, in order; times are monotonic seconds."""

    def __init__(self, can_replay: bool, settings: SequenceSettings | None = None) -> None:
        self.state = StreamState.CONNECTING
        self.counters = SequenceCounters()
        self.last_seq: int | None = None
        self.confirmed_at: float | None = None  # when every batch until then was known to be applied
        self._settings = settings or SequenceSettings()
        self._can_replay = can_replay
        self._replay_answers = True
        self._replay: _Replay | None = None
        self._unended = 0  # replays asked for whose end has not come: requests may wait until somebody is there
        self._last_frame: StreamFrame | None = None
        self._unconfirmed: StreamFrame | None = None  # the last one before a reconnection: same publisher still?
        self._last_live_seq: int | None = None
        self._heard: StreamFrame | None = None  # the last live one since the connection: so much there is
        self._pending = _Pending()
        self._missing: int | None = None  # the last batch that nobody could replay
        self._check_after = _FIRST_CHECK
        self._check_at = 0.0
        self._snapshot_at = 0.0  # not before

    @property
    def pending(self) -> int:
        """Batches that wait for an earlier one."""
        return len(self._pending)

    @property
    def last_frame(self) -> StreamFrame | None:
        """The last batch that was applied, or given up."""
        return self._last_frame

    @property
    def complete(self) -> bool:
        """Whether everything up to the last batch was applied, as far as can be known."""
        return self._missing is None and self._unconfirmed in (None, self._last_frame)

    def resume(self, last: StreamFrame, complete: bool = True) -> None:
        """Go on after a batch that was applied before this stream was opened; first contact checks that it is so."""
        self.last_seq = last.seq
        self._last_frame = last
        self._missing = None if complete else last.seq

    def on_cleared(self, seq: int) -> None:
        """The publisher's cache was empty in this batch: what was missed before no longer counts."""
        if self._missing is not None and self._missing < seq:
            self._missing = None
            if self.state is StreamState.LOST:
                self.state = StreamState.LIVE

    def on_resync(self, now: float) -> list[Action]:
        """What was applied is doubted: forget it and ask for everything again, if the publisher replays."""
        if not self._can_replay or self.state is StreamState.CONNECTING:
            return []
        self.counters.resyncs += 1
        self._heard = self._heard or self._last_frame  # so much there is, whatever comes of the replay
        self._begin_again()
        return [Clear(), *self._ask(now)]

    def on_connected(self, now: float) -> list[Action]:
        """The live socket reached the publisher, for the first time or again."""
        self._check_after = _FIRST_CHECK
        self._heard = None
        self._snapshot_at = 0.0
        if self._can_replay:
            actions = self._drop_snapshot()
            self._unconfirmed = self._unconfirmed or self._last_frame
            self._pending.clear()  # maybe of an earlier life; otherwise they come again
            return actions + self._ask(now)
        if self.state is StreamState.CONNECTING:
            self._settle(now)
        return []

    @property
    def expected(self) -> int | None:
        """The live batch from which on `takes` takes them; None while something else is under way."""
        seq = self._next_seq
        return seq if self._goes_on(seq) else None

    def takes(self, first: int, last: StreamFrame, now: float) -> bool:
        """Whether the batches from `first` to `last`, which came on the live socket one after another, are the next
        ones, and nothing else is under way, as nearly always. Then they are to be applied; else nothing happened, and
        `on_live` says what to do of each."""
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
        """A batch came on the live socket."""
        if self.takes(frame.seq, frame, now):
            return [Apply(frame)]
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
        """A replayed batch came, or the end of a replay (None)."""
        self._replay_answers = True
        if frame is None:
            self._unended = max(self._unended - 1, 0)
        replay = self._replay
        if replay is None:
            return []  # what is left of a replay that was given up
        replay.heard_at = now
        replay.heard = True
        if frame is None:
            return [] if self._unended else self._end_of_round(replay, now, ended=True)
        if replay.snapshot:  # what is left of a replay that was given up
            self._pending.add(frame)
            return []
        replay.answered = True
        if replay.known is not None and frame.seq == replay.known.seq:
            if _newer(frame, replay.known):
                return self._restart() + self._ask(now)
            self._unconfirmed = None
        if (self.last_seq is not None and frame.seq <= self.last_seq) or frame.seq in self._pending:
            return []
        replay.progress |= not self._pending or frame.seq < self._pending.last  # a new tail fills no hole
        self._pending.add(frame)
        actions = self._drain()
        if self._too_much_pending:
            actions += self._give_up(now)
        return actions

    def on_snapshot(self, part: int, frame: StreamFrame, now: float) -> list[Action]:
        """A part of a snapshot came; the last one is empty. `frame.seq`: the last batch it takes into account."""
        replay = self._replay
        if replay is None or not replay.snapshot or part != replay.parts:
            return []  # what is left of one that was given up, or one with a hole
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
            self._pending.take(self._pending.first)
        actions = self._drain()
        if self._behind:
            return actions + self._ask(now)
        self._settle(now)
        self.confirmed_at = now
        return actions

    @property
    def due(self) -> float:
        """The time from which on `on_tick` has something to do, as things stand. Batches that `takes` takes put it
        off."""
        if self._replay is not None:
            return self._replay.heard_at + self._settings.replay_timeout
        if self._missing is None or not (self._can_replay and self._replay_answers):
            return self._idle_due
        return min(self._idle_due, self._snapshot_at)

    @property
    def _idle_due(self) -> float:
        return self._check_at if self._can_replay and self.state is not StreamState.CONNECTING else inf

    def on_tick(self, now: float) -> list[Action]:
        """Time has passed: a replay may be overdue, an idle stream may need a check."""
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
        """Ask for all that is held; if there is no such thing, there are rounds left to ask for the batches again."""
        self._snapshot_at = now + self._settings.snapshot_interval
        if self._behind or self.state is StreamState.CONNECTING:
            self.state = StreamState.REPLAYING
        elif self._missing is not None:
            self.state = StreamState.LOST
        self._replay = _Replay(None, now, rounds_left, snapshot=True)
        self._unended += 1
        return [AskReplay(SNAPSHOT_START)]

    def _drop_snapshot(self) -> list[Action]:
        """Forget a snapshot that was applied in part: half of it is worth nothing."""
        if self._replay is None or not self._replay.parts:
            return []
        self._begin_again()
        return [Clear()]

    def _ask(self, now: float, rounds_left: int | None = None, idle: bool = False) -> list[Action]:
        """Ask for everything from the last batch on: that one again, to see that it is still the same."""
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
        """A replay ended, or fell silent. Ask again while something is missing and there is hope."""
        if replay.snapshot:
            return self._no_snapshot(replay, now)
        rounds_left = self._settings.replay_rounds if replay.progress else replay.rounds_left - 1
        ignored = replay.known is not None and not replay.answered
        if ended and self._behind and self._unconfirmed is None and self._may_ask_snapshot(now):
            return self._ask_snapshot(now, rounds_left)
        if rounds_left and (self._behind or self._unconfirmed or ignored):
            return self._ask(now, rounds_left)
        reconnected, self._unconfirmed = self._unconfirmed is not None, None
        if ignored and reconnected:
            # Not even our last batch: the publisher keeps none for replay, or has not sent it in its present life.
            return self._restart() + self._ask(now)
        if reconnected:
            self._missing = self.last_seq  # others, but not our last batch: who knows of which life they are
        if (self._behind or self._missing is not None) and self._may_ask_snapshot(now):
            return self._ask_snapshot(now)
        actions = self._give_up(now)
        if ended and not ignored and self.complete:
            self.confirmed_at = now
        return actions

    def _no_snapshot(self, replay: _Replay, now: float) -> list[Action]:
        """There is none, or it broke off."""
        self._snapshot_at = now + (self._settings.snapshot_interval if replay.parts else self._settings.idle_check)
        if replay.rounds_left and not replay.parts and self._behind:
            return self._ask(now, replay.rounds_left)
        return self._give_up(now)

    def _give_up(self, now: float) -> list[Action]:
        """Go on without the batches that are missing."""
        broken = self._replay is not None and self._replay.parts > 0
        actions: list[Action] = [Clear()] if broken else []  # half of a snapshot is worth nothing
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
        """The publisher began again at 0."""
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

    def _goes_on(self, seq: int) -> bool:
        """Whether a live batch of this number is the next one, and nothing else is under way."""
        return (
            seq == self._next_seq
            and (self._last_live_seq is None or self._last_live_seq < seq)
            and self._replay is None
            and self.state is not StreamState.CONNECTING
            and not self._pending
        )

    def _took(self, frame: StreamFrame) -> None:
        self.last_seq = frame.seq
        self._last_frame = frame
        self.counters.batches += 1

    def _drain(self) -> list[Action]:
        """Apply what is next, as far as it is there; nothing while a snapshot may come, which knows it already."""
        actions: list[Action] = []
        if self._replay is not None and self._replay.snapshot:
            return actions
        while (frame := self._pending.take(self._next_seq)) is not None:
            self._took(frame)
            actions.append(Apply(frame))
        return actions

    @property
    def _too_much_pending(self) -> bool:
        pending, settings = self._pending, self._settings
        return len(pending) > settings.pending_batches or pending.bytes > settings.pending_bytes

    @property
    def _behind(self) -> bool:
        """Whether there are batches that were not applied."""
        return bool(self._pending) or (self._heard is not None and self._heard.seq >= self._next_seq)

    @property
    def _next_seq(self) -> int:
        return 0 if self.last_seq is None else self.last_seq + 1


def _newer(frame: StreamFrame, last: StreamFrame | None) -> bool:
    """Whether a batch was made after one already applied, although its number is not higher: a restart."""
    if last is None or frame.payload == last.payload:
        return False
    made, last_made = batch_time(frame.payload), batch_time(last.payload)
    return made is not None and last_made is not None and made > last_made
