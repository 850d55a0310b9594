"""Random engines that report to a real indexer over real sockets: in the end the index knows what the engines hold.

Queues overflow, replay buffers are short, engines restart, indexers come late.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TypeAlias

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from indexer import Indexer, MatchQuery, Registration, Target
from indexer.streams.sequence import SequenceSettings, StreamState
from kvevents import EventSource, WireForm
from worker import Reporter, ZmqEventPublisher

LOOPBACK = "tcp://127.0.0.1:0"
DEADLINE_S = 60.0
RANKS = (0, 1)
SETTINGS = SequenceSettings(replay_timeout=0.5, idle_check=0.3, snapshot_interval=0.1)

# One token a block.
Prompt: TypeAlias = tuple[int, ...]
Kind: TypeAlias = tuple[str | None, str | None]  # adapter and salt

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple)
kinds = st.sampled_from([(None, None), (None, None), ("sql", None), (None, "tenant"), ("sql", "tenant")])
media = st.sampled_from(["GPU", "GPU", "CPU"])
ranks = st.sampled_from(RANKS)


class ReportingEngine:
    """One DP rank of an engine, which restarts at the same endpoints, and what it really holds."""

    def __init__(self, rank: int, form: WireForm, buffer_steps: int, max_queue_size: int) -> None:
        self.rank = rank
        self.life = 0
        self._fields = {"buffer_steps": buffer_steps, "max_queue_size": max_queue_size, "wire_form": form}
        self._start(LOOPBACK, LOOPBACK)

    def _start(self, endpoint: str, replay_endpoint: str | None) -> None:
        self.held: dict[str, Counter[tuple[Kind, Prompt]]] = {"GPU": Counter(), "CPU": Counter()}
        self.publisher = ZmqEventPublisher(0, endpoint, replay_endpoint, bind=True, **self._fields)
        self.reporter = Reporter(self.publisher)

    def restart(self) -> None:
        self.reporter.shutdown()
        self.life += 1
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                return self._start(self.publisher.endpoint, self.publisher.replay_endpoint)
            except OSError:  # the port is not free yet
                assert time.monotonic() < deadline
                time.sleep(0.01)

    def holds(self, kind: Kind, block: Prompt) -> bool:
        return any(counts[kind, block] for counts in self.held.values())

    def hit(self, kind: Kind, prompt: Prompt) -> int:
        return next((end for end in range(len(prompt)) if not self.holds(kind, prompt[: end + 1])), len(prompt))

    def name(self, kind: Kind, block: Prompt) -> int:
        return hash((self.rank, self.life, kind, block))

    def store(self, kind: Kind, prompt: Prompt, start: int, medium: str) -> None:
        start = start if 0 < start < len(prompt) and self.holds(kind, prompt[:start]) else 0
        blocks = [prompt[: end + 1] for end in range(start, len(prompt))]
        self.held[medium].update((kind, block) for block in blocks)
        self.reporter.stored(
            [self.name(kind, block) for block in blocks],
            self.name(kind, prompt[:start]) if start else None,
            prompt[start:],
            1,
            medium=medium,
            lora_name=kind[0],
            cache_salt=kind[1],
        )

    def remove(self, medium: str, chosen: list[tuple[Kind, Prompt]]) -> None:
        self.held[medium] -= Counter(chosen)
        self.reporter.removed([self.name(*each) for each in chosen], medium=medium)

    def clear(self, medium: str | None) -> None:
        for name, counts in self.held.items():
            if medium in (None, name):
                counts.clear()
        self.reporter.cleared(medium)


class ReportedFleet(RuleBasedStateMachine):
    @initialize(
        form=st.sampled_from(WireForm), buffer_steps=st.sampled_from([1, 4, 1000]), queue=st.sampled_from([1, 3, 1000])
    )
    def begin(self, form: WireForm, buffer_steps: int, queue: int) -> None:
        self.form = form
        self.engines = [ReportingEngine(rank, form, buffer_steps, queue) for rank in RANKS]
        self.prompts: set[tuple[Kind, Prompt]] = set()
        self.indexer: Indexer | None = None

    @rule(rank=ranks, kind=kinds, prompt=prompts, start=st.integers(0, 4), medium=media)
    def store(self, rank: int, kind: Kind, prompt: Prompt, start: int, medium: str) -> None:
        if self.form is WireForm.SGLANG_ARRAYS:  # has no word for adapters
            kind = (None, kind[1])
        self.prompts.add((kind, prompt))
        self.engines[rank].store(kind, prompt, start, medium)

    @rule(rank=ranks, medium=media, data=st.data())
    def remove(self, rank: int, medium: str, data: st.DataObject) -> None:
        held = sorted(self.engines[rank].held[medium].elements(), key=repr)
        if held:
            chosen = data.draw(st.lists(st.sampled_from(range(len(held))), unique=True, min_size=1, max_size=4))
            self.engines[rank].remove(medium, [held[each] for each in chosen])

    @rule(rank=ranks, medium=st.sampled_from([None, "GPU", "CPU"]))
    def clear(self, rank: int, medium: str | None) -> None:
        self.engines[rank].clear(medium)

    @rule(rank=ranks)
    def step(self, rank: int) -> None:
        self.engines[rank].reporter.step()

    @rule(rank=ranks, prompt=prompts)
    def hurry(self, rank: int, prompt: Prompt) -> None:
        """More steps than a short queue takes."""
        self.prompts.add(((None, None), prompt))
        engine = self.engines[rank]
        for _ in range(50):
            engine.store((None, None), prompt, 0, "GPU")
            engine.reporter.step()
            engine.remove("GPU", [((None, None), prompt)])
            engine.reporter.step()

    @rule(rank=ranks)
    def restart(self, rank: int) -> None:
        self.engines[rank].restart()

    @precondition(lambda self: self.indexer is None)
    @rule()
    def join(self) -> None:
        self.indexer = Indexer(sequence=SETTINGS)
        self.indexer.start()
        for engine in self.engines:
            source = EventSource(engine.rank, engine.publisher.endpoint, engine.publisher.replay_endpoint)
            self.indexer.register(Registration(Target("w", engine.rank, "m"), source, block_size=1))

    @precondition(lambda self: self.indexer is not None)
    @rule()
    def leave(self) -> None:
        assert self.indexer is not None
        self.indexer.stop()
        self.indexer = None

    def teardown(self) -> None:
        try:
            if self.indexer is None:
                self.join()
            for engine in self.engines:
                engine.reporter.step()
            self.agree()
            for engine in self.engines:  # each reference was counted
                for medium, counts in engine.held.items():
                    engine.remove(medium, list(counts.elements()))
                engine.reporter.step()
            self.agree()
        finally:
            if self.indexer is not None:
                self.indexer.stop()
            for engine in self.engines:
                engine.reporter.shutdown()

    def agree(self) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while (wrong := self.disagreements()) and time.monotonic() < deadline:
            time.sleep(0.005)
        assert not wrong

    def disagreements(self) -> list[str]:
        assert self.indexer is not None
        wrong = []
        for (adapter, salt), prompt in self.prompts:
            query = MatchQuery("m", list(prompt), adapter, salt)
            told = {match.target.dp_rank: match.matched_tokens for match in self.indexer.longest(query)}
            hits = {engine.rank: engine.hit((adapter, salt), prompt) for engine in self.engines}
            true = {rank: hit for rank, hit in hits.items() if hit}
            if told != true:
                wrong.append(f"{adapter}, {salt}, {prompt}: {told}, truly {true}")
        for engine in self.engines:
            report = self.indexer.report(Target("w", engine.rank, "m"))
            assert report is not None
            if report.stream is None or report.stream.state is not StreamState.LIVE:
                wrong.append(f"rank {engine.rank} is not known to be complete")
            if not any(engine.held.values()) and any(report.holdings.blocks.values()):
                wrong.append(f"rank {engine.rank} holds nothing, not {report.holdings.blocks}")
        return wrong


TestReportedFleet = ReportedFleet.TestCase
TestReportedFleet.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
