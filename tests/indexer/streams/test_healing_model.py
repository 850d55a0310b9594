"""A model of an engine and a lossy channel: the index agrees with the engine's cache, or reports the stream as lost.

A random engine numbers its batches. Live and replayed batches travel on separate channels, each in order, and any of
them may be lost. The engine may restart, keep few or no batches for replay, or not answer.
"""

from __future__ import annotations

from collections import deque
from enum import Enum

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from random_engine import Engine, Prompt
from state_machines import case_of

from indexer import Target
from indexer.dump import DumpedStream, TargetDump, read_dump, write_dump
from indexer.hashing import Namespace, PackedPrompt
from indexer.native import CORES
from indexer.streams.sequence import Action, Apply, AskReplay, Clear, SequenceSettings, StreamSequence, StreamState
from kvevents import AllBlocksCleared, BlockStored, Event, EventBatch, Tier, decode_batch, encode_batch
from kvevents.batches import batch_time
from kvevents.frames import StreamFrame

TARGET = Target("w", 0, "m")
NAMESPACE = Namespace("m", "default", None, None, 1)
SETTINGS = SequenceSettings(replay_timeout=1.0, idle_check=8.0)
TICK = 0.25

prompts = st.lists(st.integers(0, 1), min_size=2, max_size=4).map(tuple)
kept = st.sampled_from([None, None, 0, 3])


class Fate(Enum):
    """The fate of a live batch."""

    ARRIVES = 0  # with all batches that were sent before it
    WAITS = 1
    LOST = 2


fates = st.sampled_from([Fate.ARRIVES, Fate.ARRIVES, Fate.WAITS, Fate.LOST])


class PublishingEngine(Engine):
    """An engine between two restarts, with its published batches. `keeps` of them can be replayed (`None`: all)."""

    def __init__(self, life: int, seed: int, keeps: int | None) -> None:
        super().__init__(seed)
        self.life = life
        self.keeps = keeps
        self.sent: list[StreamFrame] = []

    def publish(self, time: int, events: list[Event]) -> StreamFrame:
        frame = StreamFrame(len(self.sent), encode_batch(EventBatch(float(time), events, self.life)))
        self.sent.append(frame)
        return frame

    def replay(self, start: int) -> list[StreamFrame]:
        oldest = 0 if self.keeps is None else len(self.sent) - self.keeps
        return [frame for frame in self.sent if frame.seq >= max(start, oldest)]


class Healing(RuleBasedStateMachine):
    """An engine, a lossy channel, and an index that follows the engine."""

    @initialize(keeps=kept, ends_with_restart=st.booleans())
    def begin(self, keeps: int | None, ends_with_restart: bool) -> None:
        self.now = 0.0
        self.clock = 0
        self.ends_with_restart = ends_with_restart
        self.engine = PublishingEngine(0, 0, keeps)
        self.blocks: dict[int, Prompt] = {}  # by engine hash, of all engines
        self.saved: TargetDump | None = None
        self.replay_works = True
        self.recoverable = keeps is None
        self.start_reading()
        self.connect()

    # Rules of the engine.

    @rule(prompt=prompts, fate=fates)
    def serve(self, prompt: Prompt, fate: Fate) -> None:
        self.publish([self.engine.serve(self.remember(prompt))], fate)

    @rule(prompt=prompts, fate=fates)
    def announce_again(self, prompt: Prompt, fate: Fate) -> None:
        """Publish again the blocks that a request found in the cache, as some engines do."""
        if found := self.engine.hit(prompt):
            self.publish([self.engine.stored(prompt[:found], 0)], fate)

    @rule(data=st.data(), count=st.integers(1, 4), leaves_first=st.booleans(), fate=fates)
    def evict(self, data: st.DataObject, count: int, leaves_first: bool, fate: Fate) -> None:
        events = []
        for _ in range(count):
            if held := sorted(self.engine.copies):
                longest = max(map(len, held))
                leaves = [block for block in held if len(block) == longest]
                events.append(self.engine.evict(data.draw(st.sampled_from(leaves if leaves_first else held))))
        self.publish(events, fate)

    @rule(prompt=prompts, before=st.booleans(), fate=fates)
    def clear(self, prompt: Prompt, before: bool, fate: Fate) -> None:
        """Clear the cache between other events of one batch."""
        events = [self.engine.serve(self.remember(prompt))] if before else []
        self.publish([*events, self.engine.clear(), self.engine.serve(self.remember(prompt))], fate)

    @rule(keeps=kept, same_seed=st.booleans(), arrive=st.integers(0, 3), unseen=st.integers(-3, 3), back=st.booleans())
    def restart(self, keeps: int | None, same_seed: bool, arrive: int, unseen: int, back: bool) -> None:
        """Restart. `arrive` batches still arrive; the new engine may reach the old sequence number unnoticed."""
        self.disconnect(arrive)
        engine = self.engine
        self.engine = PublishingEngine(engine.life + 1, engine.seed + (not same_seed), keeps)
        self.recoverable &= keeps is None
        for number in range(len(engine.sent) + unseen):
            self.serve((number % 2, 1), Fate.LOST)
        if back:
            self.connect()

    # Rules of the channel.

    @precondition(lambda self: not self.connected)
    @rule()
    def connect(self) -> None:
        """Connect to the engine, which also answers the requests that waited for it."""
        self.connected = True
        self.answers.clear()
        while self.waiting:
            self.answers.extend([*self.engine.replay(self.waiting.popleft()), None])
        self.act(self.sequence.on_connected(self.now))

    @rule(arrive=st.integers(0, 3))
    def disconnect(self, arrive: int) -> None:
        self.deliver(arrive)
        self.recoverable &= not self.answers  # the index does not know that they are lost
        self.connected = False
        self.live.clear()
        self.answers.clear()

    @precondition(lambda self: self.live)
    @rule(count=st.integers(1, 6))
    def deliver(self, count: int) -> None:
        for _ in range(min(count, len(self.live))):
            self.act(self.sequence.on_live(self.live.popleft(), self.now))

    @precondition(lambda self: self.answers)
    @rule(count=st.integers(1, 20), lost=st.just(set[int]()) | st.sets(st.integers(0, 9), max_size=4))
    def answer(self, count: int, lost: set[int]) -> None:
        for number in range(count):
            if not self.answers:
                break
            answer = self.answers.popleft()
            if number in lost:
                self.recoverable = False
            else:
                self.act(self.sequence.on_replay(answer, self.now))

    @rule(works=st.booleans())
    def replay_socket(self, works: bool) -> None:
        self.replay_works = works
        self.recoverable &= works

    @rule(ticks=st.sampled_from([1, 6, 40]))
    def wait(self, ticks: int) -> None:
        """Wait without messages. An answer that is later than its timeout counts as lost."""
        for _ in range(ticks):
            self.tick()
            self.recoverable &= ticks == 1 or not self.answers

    @rule()
    def arrive_all(self) -> None:
        """Deliver all messages on both channels."""
        for _ in range(8):
            self.deliver(len(self.live))
            self.answer(len(self.answers), set())
            self.tick()

    # Rules of the index.

    @rule()
    def save(self) -> None:
        """Save a snapshot, unless the stream has no batch yet."""
        last = self.sequence.last_frame
        if last is None:
            return
        runs, holders = self.index.dump(TARGET)
        stream = DumpedStream(last.seq, batch_time(last.payload) or 0.0, self.sequence.complete)
        dump = TargetDump("w", 0, "m", "default", "", "", "", "", 1, None, None, [1], stream, runs, holders)
        (saved,) = read_dump(write_dump([dump], ""), "")
        self.saved = saved.whole()
        self.saved_claimable = self.claimable.copy()

    @precondition(lambda self: self.saved is not None)
    @rule()
    def resume(self) -> None:
        """Restart the index with the last snapshot."""
        assert self.saved is not None
        self.start_reading()
        self.index.restore(TARGET, self.saved)
        self.claimable = self.saved_claimable.copy()
        self.recoverable &= self.saved.stream.complete
        last = self.saved.stream
        self.sequence.resume(StreamFrame(last.last_seq, encode_batch(EventBatch(last.last_time, [], 0))), last.complete)

    # Invariants and checks.

    @invariant()
    def nothing_is_claimed_that_was_not_stored(self) -> None:
        """Check that all matched blocks were stored since the last clear."""
        self.index.check_integrity()
        for prompt in self.blocks.values():
            claimed = self.claimed(prompt)
            assert {prompt[: end + 1] for end in range(claimed)} <= self.claimable

    def teardown(self) -> None:
        self.recover()
        state = self.sequence.state
        assert state is StreamState.LIVE or not self.recoverable
        if state is StreamState.LIVE:
            self.check_agreement()
        else:
            assert state is StreamState.LOST
            if self.ends_with_restart:
                self.restart(None, same_seed=True, arrive=0, unseen=0, back=True)
            else:
                self.clear((0, 1), before=True, fate=Fate.ARRIVES)
            self.serve((0, 1, 1), Fate.ARRIVES)
            self.recover()
            assert self.sequence.state is StreamState.LIVE
            self.check_agreement()
        self.evict_and_drop()

    def recover(self) -> None:
        """End all faults. If batches cannot be replayed, a further batch shows that they are missing."""
        self.replay_works = True
        if not self.connected:
            self.connect()
        if not self.recoverable:
            self.publish([], Fate.ARRIVES)
        for _ in range(20):
            self.arrive_all()
        assert self.sequence.pending == 0
        assert self.sequence.last_seq == (self.engine.sent[-1].seq if self.engine.sent else None)

    def check_agreement(self) -> None:
        for prompt in self.blocks.values():
            assert self.claimed(prompt) == self.engine.hit(prompt)
        assert self.held() == len(self.engine.copies)

    def evict_and_drop(self) -> None:
        """Evict all copies but one, then drop the target: the index counts each copy and frees all memory."""
        if self.sequence.state is StreamState.LIVE and self.saved is None:
            copies = list(self.engine.copies.elements())
            for block in copies[1:]:
                self.publish([self.engine.evict(block)], Fate.ARRIVES)
            self.deliver(len(self.live))
            assert self.held() == min(len(copies), 1)
        self.index.drop(TARGET)
        for _ in range(20):
            self.index.sweep()
        self.index.check_integrity()
        assert self.index.runs == 0

    def remember(self, prompt: Prompt) -> Prompt:
        blocks = [prompt[: end + 1] for end in range(len(prompt))]
        self.blocks.update((self.engine.name(block), block) for block in blocks)
        return prompt

    def claimed(self, prompt: Prompt) -> int:
        matches = self.index.match(NAMESPACE, PackedPrompt.of(list(prompt)))
        return matches[0].matched_tokens if matches else 0

    def held(self) -> int:
        status = self.index.status(TARGET)
        assert status is not None
        return status.blocks[Tier.GPU]

    # The part of the stream reader.

    def start_reading(self) -> None:
        self.index = self.make_index()
        self.index.add(TARGET)
        self.sequence = StreamSequence(True, SETTINGS)
        self.connected = False
        self.live: deque[StreamFrame] = deque()
        self.answers: deque[StreamFrame | None] = deque()
        self.waiting: deque[int] = deque()
        self.claimable: set[Prompt] = set()

    def publish(self, events: list[Event], fate: Fate) -> None:
        self.clock += 1
        frame = self.engine.publish(self.clock, events)
        if self.connected and fate is not Fate.LOST:
            self.live.append(frame)
        if fate is Fate.ARRIVES:
            self.deliver(len(self.live))

    def tick(self) -> None:
        self.now += TICK
        self.act(self.sequence.on_tick(self.now))

    def act(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Apply(frame):
                    self.apply(frame)
                case Clear():
                    self.index.clear(TARGET)
                    self.answers.clear()
                    self.claimable.clear()
                case AskReplay(start):
                    if self.connected and self.replay_works:
                        self.answers.extend([*self.engine.replay(start), None])
                    elif self.replay_works:
                        self.waiting.append(start)

    def apply(self, frame: StreamFrame) -> None:
        batch = decode_batch(frame.payload)
        assert self.index.apply(TARGET, batch) == []
        if any(isinstance(event, AllBlocksCleared) for event in batch.events):
            self.sequence.on_cleared(frame.seq)
        for each in batch.events:
            if isinstance(each, AllBlocksCleared):
                self.claimable.clear()
            elif isinstance(each, BlockStored):
                self.claimable |= {self.blocks[name] for name in each.block_hashes}


for core in CORES:
    globals()[f"TestHealing{core.title()}"] = case_of(Healing, core, 250 if core == "native" else 60, 30)
