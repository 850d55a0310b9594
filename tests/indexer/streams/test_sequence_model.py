"""A model of a lossy stream: no batch is applied twice, and after the faults no recoverable batch is missing."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from indexer.streams.sequence import Action, Apply, AskReplay, Clear, SequenceSettings, StreamSequence, StreamState
from kvevents.frames import StreamFrame

TIMEOUT = 1.0
TICK = 0.125


@dataclass
class Answer:
    """A replay's message in transit: a batch, or the end."""

    life: int
    frame: StreamFrame | None


class LossyStream(RuleBasedStateMachine):
    """A publisher that may lose batches, restart, or answer replay requests late or never."""

    @initialize(connected=st.booleans())
    def begin(self, connected: bool) -> None:
        self.now = 0.0
        self.clock = 0
        self.life = 0
        self.sent: list[StreamFrame] = []
        self.connected = False
        self.replay_answers = True
        self.answers: deque[Answer] = deque()
        self.applied: list[StreamFrame] = []
        self.begins_at_one = False  # two replays lost batch 0, so the sequence takes 1 for the first
        self.lost_before = 0
        self.gave_up = 0
        self.waiting_since: float | None = None
        self.sequence = StreamSequence(True, SequenceSettings(replay_timeout=TIMEOUT, idle_check=8.0))
        if connected:
            self.connect()

    @rule(lost=st.booleans(), count=st.integers(1, 4))
    def publish(self, lost: bool, count: int) -> None:
        for _ in range(count):
            self.clock += 1
            frame = StreamFrame(len(self.sent), msgspec.msgpack.encode([float(self.clock), [], self.life]))
            self.sent.append(frame)
            if self.connected and not lost:
                self.act(self.sequence.on_live(frame, self.now))

    @rule(count=st.integers(1, 30), lost=st.sets(st.integers(0, 30), max_size=5))
    def answer(self, count: int, lost: set[int]) -> None:
        for number in range(min(count, len(self.answers))):
            answer = self.answers.popleft()
            if number not in lost:
                self.receive(answer)
            if not self.answers:
                break

    @rule(ticks=st.sampled_from([1, 6, 10, 50]))
    def wait(self, ticks: int) -> None:
        for _ in range(ticks):
            self.now += TICK
            self.act(self.sequence.on_tick(self.now))
            if self.waiting_since is not None:
                # A second round is requested after an incomplete one.
                assert self.now - self.waiting_since < 2 * (TIMEOUT + TICK)

    @rule()
    def restart(self) -> None:
        self.life += 1
        self.sent = []
        self.connected = False

    @rule()
    def connect(self) -> None:
        self.connected = True
        self.discard_answers()
        self.waiting_since = self.now
        self.act(self.sequence.on_connected(self.now))

    @rule(answers=st.booleans())
    def silence(self, answers: bool) -> None:
        self.replay_answers = answers

    @invariant()
    def batches_are_applied_in_order_and_once(self) -> None:
        seqs = [frame.seq for frame in self.applied]
        assert seqs == sorted(set(seqs))
        if self.applied:
            assert self.sequence.last_seq == seqs[-1]

    @invariant()
    def only_lost_batches_are_missing(self) -> None:
        missing = self.applied[-1].seq + 1 - len(self.applied) if self.applied else 0
        assert missing - self.begins_at_one == self.sequence.counters.lost_batches - self.gave_up
        assert (self.sequence.state is StreamState.LOST) <= (missing > 0)

    def teardown(self) -> None:
        """End all faults, and check that each batch is applied or known to be lost."""
        self.replay_answers = True
        if not self.connected:
            self.connect()
        for _ in range(12):
            while self.answers:
                self.receive(self.answers.popleft())
            self.now += 8.0
            self.act(self.sequence.on_tick(self.now))
        assert self.sequence.pending == 0
        lives = {msgspec.msgpack.decode(frame.payload)[2] for frame in self.applied}
        assert lives <= {self.life}, "blocks from before the restart are cleared"
        assert self.sequence.last_seq == (self.sent[-1].seq if self.sent else None)
        if self.sequence.state is StreamState.LIVE:
            assert self.applied == self.sent[self.begins_at_one :]

    def receive(self, answer: Answer) -> None:
        self.waiting_since = self.now
        self.act(self.sequence.on_replay(answer.frame, self.now))

    def discard_answers(self) -> None:
        """Discard the answers of the publisher before its restart."""
        self.answers = deque(answer for answer in self.answers if answer.life == self.life)

    def act(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Apply(frame):
                    if not self.applied:
                        lost = self.sequence.counters.lost_batches - self.lost_before
                        self.begins_at_one = frame.seq == 1 and lost == 0
                    self.applied.append(frame)
                case Clear():
                    self.applied.clear()
                    self.begins_at_one = False
                    self.gave_up = self.lost_before
                    self.discard_answers()
                case AskReplay(start):
                    if self.replay_answers:
                        frames = [frame for frame in self.sent if frame.seq >= start]
                        self.answers.extend(Answer(self.life, frame) for frame in [*frames, None])
        self.lost_before = self.sequence.counters.lost_batches
        if not self.sequence.pending:
            self.waiting_since = None
        elif self.waiting_since is None:
            self.waiting_since = self.now


TestLossyStream = LossyStream.TestCase
TestLossyStream.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
