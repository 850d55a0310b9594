"""From an engine's cache, over a channel that loses, doubles, delays or falls silent, to the index: it heals, or tells.

A random engine numbers its batches; live ones and replayed ones travel apart, each in order, and any may get lost on
the way. The engine may restart, keep little or nothing for replay, or not answer.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from random_engine import Engine, Prompt

from indexer import Index, Target
from indexer.dump import DumpedStream, TargetDump, read_dump, write_dump
from indexer.hashing import Namespace, pack_tokens
from indexer.sequence import Action, Apply, AskReplay, Clear, SequenceSettings, StreamSequence, StreamState
from kvevents import AllBlocksCleared, BlockStored, Event, EventBatch, Tier, decode_batch, encode_batch
from kvevents.decode import batch_time
from kvevents.frames import StreamFrame

TARGET = Target("w", 0, "m")
NAMESPACE = Namespace("m", "default", None, None, 1)
SETTINGS = SequenceSettings(replay_timeout=1.0, idle_check=8.0)
TICK = 0.25

prompts = st.lists(st.integers(0, 2), min_size=2, max_size=5).map(tuple)


class PublishingEngine(Engine):
    """One life of an engine, and what it published. `keeps` batches can be replayed (None: all)."""

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
    """An engine, a lossy channel, and the index that follows."""

    @initialize(keeps=st.sampled_from([None, None, 0, 3]), ends_with_restart=st.booleans())
    def begin(self, keeps: int | None, ends_with_restart: bool) -> None:
        self.now = 0.0
        self.clock = 0
        self.ends_with_restart = ends_with_restart
        self.engine = PublishingEngine(0, 0, keeps)
        self.blocks: dict[int, Prompt] = {}  # of all lives
        self.saved: TargetDump | None = None
        self.replay_works = True
        self.recoverable = keeps is None
        self.start_reading()

    # The engine.

    @rule(prompt=prompts, lost=st.booleans())
    def serve(self, prompt: Prompt, lost: bool) -> None:
        self.publish([self.engine.serve(self.remember(prompt))], lost)

    @rule(prompt=prompts)
    def tell_again(self, prompt: Prompt) -> None:
        """Some engines announce again what a request found in the cache."""
        if found := self.engine.hit(prompt):
            self.publish([self.engine.stored(prompt[:found], 0)], lost=False)

    @rule(data=st.data(), count=st.integers(1, 4), leaves_first=st.booleans(), lost=st.booleans())
    def evict(self, data: st.DataObject, count: int, leaves_first: bool, lost: bool) -> None:
        events = []
        for _ in range(count):
            held = sorted(self.engine.copies, key=len)
            if held:
                longest = [block for block in held if len(block) == len(held[-1])]
                block = data.draw(st.sampled_from(sorted(longest) if leaves_first else sorted(held)))
                events.append(self.engine.evict(block))
        if events:
            self.publish(events, lost)

    @rule(prompt=prompts, before=st.booleans(), lost=st.booleans())
    def clear(self, prompt: Prompt, before: bool, lost: bool) -> None:
        """A clear between other events of its batch."""
        events = [self.engine.serve(self.remember(prompt))] if before else []
        self.publish([*events, self.engine.clear(), self.engine.serve(self.remember(prompt))], lost)

    @rule(keeps=st.sampled_from([None, None, 0, 3]), same_seed=st.booleans(), arrive=st.integers(0, 3))
    def restart(self, keeps: int | None, same_seed: bool, arrive: int) -> None:
        """Some of what is under way still arrives; the replay endpoint goes with the process."""
        self.disconnect(arrive)
        engine = self.engine
        self.engine = PublishingEngine(engine.life + 1, engine.seed if same_seed else engine.seed + 1, keeps)
        self.recoverable &= keeps is None

    # The channel.

    @precondition(lambda self: not self.connected)
    @rule()
    def connect(self) -> None:
        self.connected = True
        self.answers.clear()
        self.act(self.sequence.on_connected(self.now))

    @rule(arrive=st.integers(0, 3))
    def disconnect(self, arrive: int) -> None:
        self.deliver(arrive)
        self.connected = False
        self.live.clear()
        self.answers.clear()

    @precondition(lambda self: self.live)
    @rule(count=st.integers(1, 6))
    def deliver(self, count: int) -> None:
        for _ in range(min(count, len(self.live))):
            self.act(self.sequence.on_live(self.live.popleft(), self.now))

    @precondition(lambda self: self.answers)
    @rule(count=st.integers(1, 20), lost=st.sets(st.integers(0, 20), max_size=6))
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

    @rule(ticks=st.sampled_from([1, 4, 6, 40]))
    def wait(self, ticks: int) -> None:
        for _ in range(ticks):
            self.now += TICK
            self.act(self.sequence.on_tick(self.now))
            if ticks > 4 and self.answers:  # an answer so late is none
                self.recoverable = False

    # The index.

    @rule()
    def save(self) -> None:
        """A snapshot; there is none of a stream that said nothing yet."""
        last = self.sequence.last_frame
        if last is None:
            return
        runs, holders = self.index.dump(TARGET)
        stream = DumpedStream(last.seq, batch_time(last.payload) or 0.0, self.sequence.complete)
        dump = TargetDump("w", 0, "m", "default", "", "", "", "", 1, None, None, [1], stream, runs, holders)
        (self.saved,) = read_dump(write_dump([dump], ""), "")
        self.saved_claimable = self.claimable.copy()

    @precondition(lambda self: self.saved is not None)
    @rule()
    def resume(self) -> None:
        """The index starts anew with the last snapshot."""
        assert self.saved is not None
        self.start_reading()
        self.index.restore(TARGET, self.saved)
        self.claimable = self.saved_claimable.copy()
        last = self.saved.stream
        self.sequence.resume(StreamFrame(last.last_seq, encode_batch(EventBatch(last.last_time, [], 0))), last.complete)

    # What must hold.

    @invariant()
    def nothing_is_claimed_that_was_not_stored(self) -> None:
        """In no life at all, or, since a restart was noticed, not in the present one."""
        self.index.check_integrity()
        for prompt in self.blocks.values():
            claimed = self.claimed(prompt)
            assert {prompt[: end + 1] for end in range(claimed)} <= self.claimable

    def teardown(self) -> None:
        self.heal()
        state = self.sequence.state
        event(f"{state}, {self.sequence.counters.restarts > 0=}, {self.recoverable=}")
        assert state is StreamState.LIVE or not self.recoverable
        if state is StreamState.LIVE:
            self.agree()
        else:
            assert state is StreamState.LOST
            self.restart(None, same_seed=True, arrive=0) if self.ends_with_restart else self.clear((0, 1), True, False)
            self.serve((0, 1, 2), lost=False)
            self.heal()
            assert self.sequence.state is StreamState.LIVE
            self.agree()
        self.forget_everything()

    def heal(self) -> None:
        """All is well again, and the engine says one more thing."""
        self.replay_works = True
        if not self.connected:
            self.connect()
        self.publish([], lost=False)
        for _ in range(80):
            self.now += 0.5
            while self.live or self.answers:
                self.deliver(len(self.live))
                self.answer(len(self.answers), set())
            self.act(self.sequence.on_tick(self.now))
        assert self.sequence.pending == 0
        assert self.sequence.last_seq == len(self.engine.sent) - 1

    def agree(self) -> None:
        for prompt in self.blocks.values():
            assert self.claimed(prompt) == self.engine.hit(prompt)
        assert self.held() == len(self.engine.copies)

    def forget_everything(self) -> None:
        """Every copy is counted: the last one gone, nothing is left."""
        if self.sequence.state is StreamState.LIVE and self.saved is None:
            copies = list(self.engine.copies.elements())
            for block in copies[1:]:
                self.publish([self.engine.evict(block)], lost=False)
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
        matches = self.index.match(NAMESPACE, pack_tokens(list(prompt)))
        return matches[0].matched_tokens if matches else 0

    def held(self) -> int:
        status = self.index.status(TARGET)
        assert status is not None
        return status.blocks[Tier.GPU]

    # What the reader of the streams does.

    def start_reading(self) -> None:
        self.index = Index()
        self.index.add(TARGET)
        self.sequence = StreamSequence(True, SETTINGS)
        self.connected = False
        self.live: deque[StreamFrame] = deque()
        self.answers: deque[StreamFrame | None] = deque()
        self.claimable: set[Prompt] = set()

    def publish(self, events: list[Event], lost: bool) -> None:
        self.clock += 1
        frame = self.engine.publish(self.clock, events)
        if self.connected and not lost:
            self.live.append(frame)

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
                    if self.replay_works and self.connected:
                        self.answers.extend([*self.engine.replay(start), None])

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


def case_of(machine: Any, examples: int, steps: int) -> Any:
    machine.TestCase.settings = settings(max_examples=examples, stateful_step_count=steps, deadline=None)
    return machine.TestCase


TestHealing = case_of(Healing, 200, 50)
